"""What is committed can be read anywhere: it names no package registry, no place on our machines, and no secret."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
THIS = Path(__file__).relative_to(CHECKOUT)
# The names are put together here, so that not even this file, which is not checked, holds them whole.
REGISTRIES = tuple(
    f"{host}.{domain}"
    for host, domain in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("crates", "io"),
        ("proxy.golang", "org"),
        ("deb.debian", "org"),
        ("docker", "io"),
        ("hub.docker", "com"),
        ("ghcr", "io"),
        ("quay", "io"),
    )
)
FOLDERS = "work|root|home/[a-z]+|Users/[A-Za-z]+"
# A path begins where a word does not go on, so `network/` and `homework/` are none; `/work` inside a URL is none either.
MACHINE_PATH = re.compile(rf"(?<![\w.:~$}}/-])/(?:{FOLDERS})(?=/|[\s\"'`,;)]|$)")
KEY = re.compile(
    r"\b(?:sk-(?!canary)(?:ant-|proj-)?[A-Za-z0-9_-]{32,}|AIza[A-Za-z0-9_-]{35}|ghp_[A-Za-z0-9]{36}|hf_[A-Za-z]{34})"
)


def tracked() -> list[Path]:
    """All files that git has or would take; all files of the folder where there is no git (an unpacked archive)."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=CHECKOUT, capture_output=True, check=False
    )
    if listing.returncode == 0:
        names = [Path(name.decode()) for name in listing.stdout.split(b"\0") if name]
    else:
        skipped = {".venv", ".podium", ".git", "build", "__pycache__"}
        every = (path.relative_to(CHECKOUT) for path in CHECKOUT.rglob("*"))
        names = [path for path in every if not skipped & set(path.parts)]
    return sorted(name for name in names if (CHECKOUT / name).is_file() and name != THIS)


def faults(text: str) -> list[tuple[int, str]]:
    """Line and finding of everything that must not be committed."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        lowered = line.lower()
        found += [(number, registry) for registry in REGISTRIES if registry in lowered]
        found += [(number, match.group()) for match in MACHINE_PATH.finditer(line)]
        found += [(number, "a key") for _ in KEY.finditer(line)]
    return found


def test_committed_files_name_no_registry_no_machine_and_no_key() -> None:
    names = tracked()
    assert len(names) > 50
    found = [
        f"{name}:{line}: {what}"
        for name in names
        for line, what in faults((CHECKOUT / name).read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        f"pip install --index-url https://{REGISTRIES[0]}/simple podium",
        f"FROM {REGISTRIES[7]}/library/python:3.11",
        "cd /" + "work/main",
        'HOME = "/root"',
        "see /home/anna/notes.txt",
        "OPENAI_API_KEY=" + "sk-" + "a1" * 20,
    ],
)
def test_the_check_can_fail(line: str) -> None:
    assert faults(line)


@pytest.mark.parametrize(
    "line", ["the homework/ of a network/work/unit", "https://example.com/work/home/root", "a run of root causes"]
)
def test_the_check_leaves_ordinary_text_alone(line: str) -> None:
    assert faults(line) == []
