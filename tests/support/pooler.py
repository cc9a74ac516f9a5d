"""A real PgBouncer in transaction mode in front of a test database, as people put one in front of theirs.

with Pooler(database_url, folder) as pooler:
    database = Database(pooler.url("unix"))
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

BINARY: Final = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
SERVER_CONNECTIONS: Final = 4
_CONFIGURATION: Final = """
[databases]
* = host={server_folder} port={server_port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir = {folder}
auth_type = scram-sha-256
auth_file = {folder}/users
pool_mode = transaction
default_pool_size = {size}
max_client_conn = 200
"""


def why_not() -> str | None:
    """Why no pooler can be started here; None if one can."""
    if BINARY is None:
        return "there is no pgbouncer here (Debian's package of that name has it)"
    if os.geteuid() == 0 and subprocess.run([*_AS_NOBODY, "true"], capture_output=True, check=False).returncode:
        return "pgbouncer does not run as root, and there are no user namespaces here"
    return None


# Root inside its own namespace is nobody there, and still may enter the folder of the server's socket.
_AS_NOBODY: Final = ("unshare", "--user", "--map-user=65534", "--map-group=65534")


class Pooler:
    """A running PgBouncer; ``url`` is the database's address through it."""

    def __init__(self, database_url: str, folder: Path) -> None:
        self._folder = folder
        self._database_url = database_url
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        parts = urlsplit(database_url)
        query = parse_qs(parts.query)
        configuration = _CONFIGURATION.format(
            server_folder=query["host"][0],
            server_port=query["port"][0],
            port=self.port,
            folder=folder,
            size=SERVER_CONNECTIONS,
        )
        (folder / "pgbouncer.ini").write_text(configuration)
        (folder / "users").write_text(f'"{parts.username}" "{unquote(parts.password or "")}"\n')
        prefix = _AS_NOBODY if os.geteuid() == 0 else ()
        with (folder / "pgbouncer.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*prefix, str(BINARY), str(folder / "pgbouncer.ini")], stdout=log, stderr=log
            )
        self._wait()

    def url(self, kind: Literal["unix", "tcp"]) -> str:
        """The address through a Unix socket or over TCP."""
        parts = urlsplit(self._database_url)
        host = quote(str(self._folder), safe="") if kind == "unix" else "127.0.0.1"
        return f"{parts.scheme}://{parts.username}:{parts.password}@{parts.path}?host={host}&port={self.port}"

    @property
    def log(self) -> str:
        """What it has said so far."""
        return (self._folder / "pgbouncer.log").read_text()

    def _wait(self) -> None:
        end = time.monotonic() + 10
        while not (self._folder / f".s.PGSQL.{self.port}").exists():
            assert self._process.poll() is None, self.log
            assert time.monotonic() < end, self.log
            time.sleep(0.02)

    def stop(self) -> None:
        """Ends it and waits for its end."""
        self._process.terminate()
        self._process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
