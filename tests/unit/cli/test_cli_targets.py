"""What a command is asked to write to, and in whose name, is judged before anything is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cli.targets import checked_target
from engine.errors import InputError
from engine.settings import ENGINE_PREFIX, load_settings
from engine.store.run_writer import ENGINE_ACTOR
from tests.support.command import podium


@pytest.mark.parametrize("name", ["", "missing/bundle.zip", "."])
def test_a_place_where_no_file_can_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="cannot be written"):
        checked_target(Path(name))


def test_a_device_is_not_replaced_by_a_file() -> None:
    with pytest.raises(InputError, match="not a file"):
        checked_target(Path("/dev/null"))


def test_a_new_file_and_one_that_is_there_are_fine(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_bytes(b"")
    checked_target(there)
    checked_target(tmp_path / "new")
    checked_target(None)


def test_a_key_is_not_rotated_when_it_could_not_be_written_down(tmp_path: Path) -> None:
    done = podium("audit", "key", "--rotate", "-o", str(tmp_path / "missing" / "key"), home=tmp_path / "home")
    assert (done.code, "cannot be written" in done.err) == (2, True)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("name", ["PODIUM_ACTOR", "PODIUM_ON_BEHALF_OF"])
def test_nobody_acts_as_podium_itself(name: str) -> None:
    assert ENGINE_ACTOR.startswith(ENGINE_PREFIX)
    with pytest.raises(InputError, match="stands for Podium itself"):
        load_settings({name: ENGINE_ACTOR})


def test_questions_to_a_bundle_are_not_dropped_when_the_database_is_checked(tmp_path: Path) -> None:
    done = podium("audit", "verify", "--database", "--who-saw", "last", "0", home=tmp_path / "home")
    assert (done.code, "ask a bundle" in done.err) == (2, True)
