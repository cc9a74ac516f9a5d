"""`podium fork`: which edits belong to which step, and what is refused before any server is started."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from engine.cli.fork import fork, grouped
from engine.errors import InputError
from tests.support.command import Done, podium


def groups(*arguments: str) -> dict[int, dict[str, str]]:
    """The edits as the command reads them from a command line."""
    context = fork.make_context("fork", list(arguments))
    order = next(value for key, value in context.meta.items() if key.endswith(".order"))
    return grouped(order, {name: context.params[name] for name in ("step", "worker", "subtask", "access")})


def test_options_belong_to_the_step_before_them() -> None:
    found = groups("last", "--step", "2", "--worker", "x", "--step=0", "--subtask", "b", "--access", "all", "--step", "1",
                   "--worker=y", "--task", "t")  # fmt: skip
    assert found == {2: {"worker": "x"}, 0: {"subtask": "b", "access": "all"}, 1: {"worker": "y"}}
    assert groups("--step", "1", "--json", "--subtask", "--worker", "last") == {1: {"subtask": "--worker"}}
    assert groups("last") == {}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--worker", "x", "--step", "1"], "edit-without-step"),
        (["--step", "1"], "edit-missing"),
        (["--step", "1", "--worker", "x", "--step", "2"], "edit-missing"),
        (["--step", "1", "--worker", "x", "--step", "1", "--subtask", "y"], "step-twice"),
        (["--step", "1", "--worker", "x", "--worker", "y"], "edit-twice"),
    ],
)
def test_an_edit_that_names_no_step_and_a_step_that_names_no_edit_are_refused(arguments: list[str], code: str) -> None:
    with pytest.raises(InputError) as refused:
        groups("last", *arguments)
    assert refused.value.code == code
    assert refused.value.hint


def test_a_position_is_a_number_from_0() -> None:
    for text in ("-1", "x", "1.5"):
        with pytest.raises(click.UsageError):
            groups("last", "--step", text, "--worker", "x")


def refused(tmp_path: Path, *arguments: str | bytes, stdin: bytes = b"") -> Done:
    """Runs `podium fork` with input that is wrong, and sees that it left nothing behind."""
    before = sorted(tmp_path.rglob("*"))
    done = podium("fork", *arguments, "--json", home=tmp_path / "home", stdin=stdin)
    assert sorted(tmp_path.rglob("*")) == before
    assert "Traceback" not in done.err
    assert done.code == 2
    assert done.json["error"]["hint"]
    return done


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["last", "--step", "1", "--access", "0;1"], "access-invalid"),
        (["last", "--step", "1", "--access", "-1"], "access-invalid"),
        (["last", "--step", "1", "--access", ""], "access-invalid"),
        (["last", "--step", "1", "--access", "٣"], "access-invalid"),
        (["last", "--step", "1", "--subtask", " "], "subtask-empty"),
        (["last", "--step", "1", "--subtask", "@absent.txt"], "file-unreadable"),
        (["last", "--step", "1", "--subtask", "@-"], "subtask-empty"),
        (["last", "--step", "1", "--subtask", b"caf\xe9"], "subtask-binary"),
        (["last", "--step", "1", "--subtask", "@-", "--task", "@-"], "stdin-twice"),
        (["last", "--task", ""], "task-empty"),
        (["last", "--step", "1", "--worker", "x", "--pool", "absent"], "pool-not-found"),
        (["last", "--step", "1", "--worker", "x"], "run-unknown"),
        ([], "usage"),
    ],
)
def test_what_is_wrong_with_the_words_is_said_before_anything_is_started(
    arguments: list[str | bytes], code: str, tmp_path: Path
) -> None:
    assert refused(tmp_path, *arguments).error_code == code


def test_a_subtask_that_is_too_long_is_refused(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_bytes(b"x" * (1 << 21))
    assert refused(tmp_path, "last", "--step", "0", "--subtask", "@long.txt").error_code == "subtask-too-long"
