"""`pool check`: what is missing is said before anything is called, and no secret is shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from worker_pools.pool import load_pool
from worker_pools.pool.file import parse_pool
from worker_pools.pool_check import check_pool


def codes(pool, environ, **options) -> list[tuple[str, str]]:
    return [(finding.level, finding.code) for finding in check_pool(pool, environ, **options)]


def test_a_missing_key_is_a_warning_unless_keys_are_required():
    pool = load_pool("openai-compatible")
    assert codes(pool, {}) == [("warning", "key-missing")]
    assert codes(pool, {}, keys_required=True) == [("error", "key-missing")]
    assert codes(pool, {"OPENAI_API_KEY": "canary"}) == []


def test_a_key_file_that_others_can_read_is_a_warning(tmp_path: Path):
    key = tmp_path / "key"
    key.write_text("canary")
    key.chmod(0o644)
    fields = f"base_url: 'http://127.0.0.1:1/v1', model: m, api_key: {{file: {key}}}"
    text = f"name: x\nconductor: {{{fields}}}\nworkers: [{{name: a, description: d, {fields}}}]\n"
    pool = parse_pool(text, label="x")
    (finding,) = check_pool(pool, {})
    assert finding.code == "key-file-open"
    assert "canary" not in repr(finding)
    key.chmod(0o600)
    assert check_pool(pool, {}) == []


def test_a_pool_without_litellm_never_imports_it():
    program = (
        "import sys\n"
        "from worker_pools.pool import load_pool\n"
        "from worker_pools.pool_check import check_pool\n"
        "check_pool(load_pool('openai-compatible'), {})\n"
        "sys.exit('litellm' in sys.modules or 'xllamacpp' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
