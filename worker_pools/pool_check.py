"""What can be said about a pool before it is used: `podium pool check`.

Makes no request to a provider and never shows a secret. litellm is imported only for a pool that has litellm models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import UnavailableError
from engine.settings import INSTALL_EXTRAS
from worker_pools.adapters.litellm_library import is_installed, knows_model
from worker_pools.local_model import weights_path
from worker_pools.pool import Pool, required_secrets
from worker_pools.secrets import SecretRef, SecretStore

# Below this a key file is readable by its owner only.
PERMISSIONS_OF_OTHERS = 0o077


@dataclass(frozen=True)
class PoolFinding:
    """One remark on a pool. An error means that the pool cannot be used; a warning that something may be missing."""

    level: Literal["error", "warning"]
    code: str
    text: str
    hint: str | None = None


def check_pool(pool: Pool, environ: Mapping[str, str], *, keys_required: bool = False) -> list[PoolFinding]:
    """All findings: errors first, then warnings. A missing key is an error only with `keys_required`."""
    findings = [
        *missing_keys(pool, environ, "error" if keys_required else "warning"),
        *_key_files(pool),
        *_litellm_models(pool),
        *_local_model(pool),
        *_policy(pool),
    ]
    return sorted(findings, key=lambda finding: finding.level)


def missing_keys(
    pool: Pool, environ: Mapping[str, str], level: Literal["error", "warning"] = "warning"
) -> Iterator[PoolFinding]:
    """A finding `key-missing` for each secret that the pool names and that is not here; looks at nothing else."""
    for ref in SecretStore(environ).missing(required_secrets(pool)):
        users = ", ".join(model.name for model in pool.models if model.api_key == ref)
        hint = f"export {ref.env}=..." if ref.env else "Write the key into this file."
        yield PoolFinding(level, "key-missing", f"{_spell(ref)} has no key for {users}", hint)


def _key_files(pool: Pool) -> Iterator[PoolFinding]:
    for ref in required_secrets(pool):
        if ref.file is None or sys.platform == "win32":
            continue
        try:
            mode = Path(ref.file).stat().st_mode
        except OSError:
            continue
        if mode & PERMISSIONS_OF_OTHERS:
            yield PoolFinding(
                "warning", "key-file-open", f"{ref.file} can be read by other users", f"chmod 600 {ref.file}"
            )


def _litellm_models(pool: Pool) -> Iterator[PoolFinding]:
    models = [model for model in pool.models if model.adapter == "litellm"]
    if not models:
        return
    if not is_installed():
        names = ", ".join(model.name for model in models)
        hint = f"Install it with: {INSTALL_EXTRAS}"
        yield PoolFinding("error", "adapter-unavailable", f"litellm is not installed; {names} need it", hint)
        return
    for model in models:
        if not knows_model(model.model):
            hint = "Write the provider in front, for example anthropic/claude-sonnet-4-20250514."
            yield PoolFinding("error", "model-unknown", f"{model.name}: litellm does not know {model.model!r}", hint)


def _local_model(pool: Pool) -> Iterator[PoolFinding]:
    if not pool.needs_local_model:
        return
    try:
        weights_path()
    except UnavailableError as error:
        yield PoolFinding("error", error.code, error.message, error.hint)


def _policy(pool: Pool) -> Iterator[PoolFinding]:
    if pool.policy.on_failed_step == "fallback" and not any(worker.fallbacks for worker in pool.workers):
        hint = "Give workers `fallbacks`, or set `on_failed_step: fail`."
        yield PoolFinding("warning", "fallbacks-missing", "on_failed_step is fallback, but no worker has any", hint)


def _spell(ref: SecretRef) -> str:
    return f"The variable {ref.env}" if ref.env else f"The file {ref.file}"
