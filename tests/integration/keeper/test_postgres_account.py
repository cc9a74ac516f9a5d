"""PostgreSQL for root where user namespaces are forbidden: the account of its own.

The kernel really forbids them here (it does to a process in a chroot), and the machine stays as it is: the program sees
copies of /etc and /var/lib, mounted for it alone.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import psycopg
import pytest

from engine.keeper.account import ACCOUNT
from engine.keeper.cluster import find_programs
from engine.keeper.home import open_home
from tests.support.processes import (
    IS_ROOT,
    OTHER_UID,
    Holder,
    as_other,
    environment,
    is_dead,
    kill_hard,
    permissions,
    public_folder,
    until,
)

SCRIPT = """
mount --rbind / "$1/root" && mount --bind "$1/etc" "$1/root/etc" && mount --bind "$1/lib" "$1/root/var/lib" || exit 99
shift
exec "$@"
"""


# What useradd and the look-up of names need. The loader's cache too, or libraries in unusual places are not found.
ACCOUNT_FILES = ("passwd", "group", "shadow", "gshadow", "login.defs", "nsswitch.conf", "ld.so.cache")


@dataclass
class Cage:
    """A view of this machine with an /etc and a /var/lib of its own and without user namespaces."""

    folder: Path

    def enter(self) -> list[str]:
        script = ["sh", "-c", SCRIPT, "sh", str(self.folder)]
        return ["unshare", "--mount", "--propagation", "private", *script, "chroot", str(self.folder / "root")]

    def uid(self) -> int:
        lines = (self.folder / "etc" / "passwd").read_text().splitlines()
        return int(next(line.split(":")[2] for line in lines if line.startswith(f"{ACCOUNT}:")))

    def outside(self, url: str) -> Path:
        """Where the socket's folder in the cage lies for us."""
        inside = Path(parse_qs(urlsplit(url).query)["host"][0])
        return self.folder / "lib" / inside.relative_to("/var/lib")


def usable() -> bool:
    if not IS_ROOT or any(shutil.which(name) is None for name in ("unshare", "chroot", "useradd")):
        return False
    probe = ["unshare", "--mount", "sh", "-c", "mount --bind /etc /etc"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not usable(), reason="only a root that can mount can build the cage"),
]


@pytest.fixture
def cage() -> Iterator[Cage]:
    # Not in tmp_path: a socket's path must be short. Nothing stays mounted here, the mounts are the program's own.
    with public_folder() as folder:
        for part in ("root", "lib", "etc"):
            (folder / part).mkdir(mode=0o755)
        for file in ACCOUNT_FILES:
            if Path("/etc", file).exists():
                shutil.copy2(Path("/etc", file), folder / "etc")
        yield Cage(folder)


def one(cage: Cage, facts: dict[str, Any], query: str) -> object:
    parts = urlsplit(facts["postgres"]["url"])
    with psycopg.connect(
        host=str(cage.outside(facts["postgres"]["url"])),
        port=5432,
        user=str(parts.username),
        password=str(parts.password),
        dbname="podium",
    ) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def test_without_namespaces_root_runs_it_as_an_account_of_its_own(cage: Cage, tmp_path: Path) -> None:
    watched = (find_programs(), Path(sys.executable).resolve(), Path.home(), tmp_path, Path("/var/lib"))
    before = permissions(*watched)
    root = tmp_path / "home"
    with Holder(root, "postgres", prefix=cage.enter()) as holder:
        facts = holder.facts()
        assert "postgres" in facts, facts
        assert one(cage, facts, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") is False
        process = psutil.Process(facts["postgres"]["pid"])
        assert set(process.uids()) == {cage.uid()}
        assert cage.uid() not in {0, OTHER_UID}
        assert process.net_connections(kind="inet") == []
        socket_folder = cage.outside(facts["postgres"]["url"])
        # Others are kept out twice: by the base folder and by cluster and socket folder themselves.
        base = socket_folder.parent
        assert (base.stat().st_mode & 0o777, base.stat().st_uid) == (0o750, 0)
        for folder in (socket_folder, base / "cluster", base / "cluster" / "data"):
            assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, cage.uid())
        psql = [str(find_programs() / "psql"), "-w", "-h", str(socket_folder), "-U", "podium", "-c", "SELECT 1"]
        secret = environment() | {"PGPASSWORD": str(urlsplit(facts["postgres"]["url"]).password), "LC_ALL": "C"}
        assert subprocess.run(psql, env=secret, capture_output=True, check=False).returncode == 0
        refused = subprocess.run(as_other(psql), env=secret, cwd="/", capture_output=True, text=True, check=False)
        assert refused.returncode != 0
        assert "Permission denied" in refused.stderr
        assert holder.end() == 0
    assert permissions(*watched) == before
    with pytest.raises(KeyError):
        pwd.getpwnam(ACCOUNT)


def test_it_is_found_again_and_survives_kills_there_too(cage: Cage, tmp_path: Path) -> None:
    root = tmp_path / "home"
    url = ""
    for number in range(3):
        with Holder(root, "postgres", prefix=cage.enter()) as holder:
            facts = holder.facts()
            assert "postgres" in facts, facts
            assert url in {"", facts["postgres"]["url"]}
            url = facts["postgres"]["url"]
            holder.kill()
            if number == 1:
                kill_hard(facts["postgres"]["pid"])
    until(lambda: is_dead(facts["postgres"]["pid"]), within_s=3)
    assert len(list((cage.folder / "lib").iterdir())) == 1


def test_a_server_that_hangs_is_replaced_even_where_root_may_not_look_into_it(cage: Cage, tmp_path: Path) -> None:
    root = tmp_path / "home"
    # As in a container: root without the power to look into the processes of others.
    blind = [*cage.enter(), "setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"]
    with Holder(root, "postgres", prefix=blind) as holder:
        hanging = holder.facts()["postgres"]["pid"]
        os.kill(hanging, signal.SIGSTOP)
        holder.kill()
    assert not is_dead(hanging)
    with Holder(root, "postgres", prefix=blind) as holder:
        assert one(cage, holder.facts(), "SELECT 1") == 1
        assert is_dead(hanging)
        assert holder.end() == 0


def test_a_first_set_up_that_was_killed_is_done_again_there_too(cage: Cage, tmp_path: Path) -> None:
    root = tmp_path / "home"
    with Holder(root, "postgres", prefix=cage.enter()) as holder:
        until(lambda: any((cage.folder / "lib").glob("*/programs-*")), within_s=10)
        holder.kill()
    with Holder(root, "postgres", prefix=cage.enter()) as holder:
        assert one(cage, holder.facts(), "SELECT 1") == 1
        assert holder.end() == 0
    base = next((cage.folder / "lib").iterdir())
    assert sorted(path.name.split("-")[0] for path in base.iterdir()) == ["cluster", "home", "programs", "run"]
    assert not any(path.name.endswith(".new") for path in base.iterdir())


def test_a_database_made_with_namespaces_is_never_silently_replaced(cage: Cage, tmp_path: Path) -> None:
    root = tmp_path / "home"
    with Holder(root, "postgres") as holder:
        holder.facts()
        assert holder.end() == 0
    with Holder(root, "postgres", prefix=cage.enter()) as holder:
        assert holder.facts()["code"] == "postgres-not-as-root"
        assert holder.end() == 5
    assert list((cage.folder / "lib").iterdir()) == []


def test_a_copy_of_a_home_is_refused_and_a_moved_home_keeps_its_database(cage: Cage, tmp_path: Path) -> None:
    root, copy = tmp_path / "home", tmp_path / "copy"
    with Holder(root, "postgres", prefix=cage.enter()) as holder:
        first = holder.facts()
        base = cage.outside(first["postgres"]["url"])
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns("run", "lock"))
        with Holder(copy, "postgres", prefix=cage.enter()) as second:
            facts = second.facts()
            assert facts["code"] == "home-copied", facts
            assert second.end() == 5
        # The one that it came from did not notice.
        assert one(cage, first, "SELECT 1") == 1
        assert holder.end() == 0
    shutil.rmtree(root)
    with Holder(copy, "postgres", prefix=cage.enter()) as holder:
        facts = holder.facts()
        assert cage.outside(facts["postgres"]["url"]) == base
        assert one(cage, facts, "SELECT 1") == 1
        assert holder.end() == 0


@pytest.mark.parametrize("text", ["", ".", "/etc", "/var/lib", "/var/lib/podium-x/../../../etc", "/var/lib/dpkg"])
def test_a_damaged_note_of_the_folder_leads_nowhere(cage: Cage, tmp_path: Path, text: str) -> None:
    before = permissions(Path("/etc"), Path("/var/lib"), cage.folder / "etc", cage.folder / "lib")
    root = tmp_path / "home"
    (open_home(root).postgres_dir / "base").write_text(text)
    with Holder(root, "postgres", prefix=cage.enter()) as holder:
        assert holder.facts()["code"] == "home-damaged"
        assert holder.end() == 5
    assert permissions(Path("/etc"), Path("/var/lib"), cage.folder / "etc", cage.folder / "lib") == before


def test_an_account_of_a_person_is_not_used(cage: Cage, tmp_path: Path) -> None:
    with (cage.folder / "etc" / "passwd").open("a") as passwd:
        passwd.write(f"{ACCOUNT}:x:1234:1234::/home/somebody:/bin/sh\n")
    with Holder(tmp_path / "home", "postgres", prefix=cage.enter()) as holder:
        assert holder.facts()["code"] == "no-account"
        assert holder.end() == 5
    assert list((cage.folder / "lib").iterdir()) == []
