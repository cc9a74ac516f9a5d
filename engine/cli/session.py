"""The way from a command to the servers: settings, keeper or remote services, database, Temporal, keys.

A command must check all its input before it opens a session: opening one may start servers and make a home.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from engine.cli import terminal
from engine.errors import BugError, InputError, PodiumError, UnavailableError
from engine.settings import Settings, load_settings

if TYPE_CHECKING:
    from uuid import UUID

    from temporalio.client import Client

    from engine.keeper.client import Needs, Services
    from engine.store.database import Database
    from worker_pools.pool import Pool
    from worker_pools.secrets import SecretRef

Result = TypeVar("Result")
# What the store would log is for workers; a command says itself what its user has to know.
logging.getLogger("engine.store").addHandler(logging.NullHandler())
CONNECTIONS_MAX = 3


@dataclass(slots=True)
class Session:
    """Open services. ``handed_over`` are the names of the secrets that this command gave to the keeper.

    ``run_id`` is the run that the command is about, as soon as it is known to be on record, and ``unconfirmed`` says
    that one may be: for whoever has to be told that the servers went away.
    """

    settings: Settings
    services: Services
    database: Database
    handed_over: frozenset[str] = frozenset()
    run_id: UUID | None = None
    unconfirmed: bool = False
    _client: Client | None = field(default=None)

    async def shortage(self) -> UnavailableError | None:
        """`disk-full` if the embedded servers lack space."""
        from engine.cli.outage import shortage

        return await shortage(self.services.home)

    async def client(self) -> Client:
        """Temporal, connected when first asked for."""
        if self._client is None:
            from engine.temporal_client import connect_temporal

            self._client = await connect_temporal(self.services.temporal)
        return self._client


@asynccontextmanager
async def open_session(
    settings: Settings, needs: Needs, *, on_status: Callable[[str], None] | None = None
) -> AsyncIterator[Session]:
    """Opens the servers that the settings name, or starts the embedded ones.

    In the embedded mode the keeper also gets what this environment holds of the keys that live runs wait for: after
    a kill of everything any command brings the runs to their end. Raises what `open_services` does, and
    UnavailableError for servers that went away meanwhile, with what becomes of the run.
    """
    from engine.cli.outage import explained
    from engine.keeper.client import Needs, open_services
    from engine.store.database import Database

    say = on_status or quiet_status()
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(open_services(settings, needs, on_status=say))
        database = Database(services.database_url, pool_size=CONNECTIONS_MAX)
        stack.push_async_callback(database.close)
        session = Session(settings, services, database)
        try:
            handed = dict(needs.secrets)
            if services.embedded:
                here = values_here(await live_references(database))
                found = {name: value for name, value in here.items() if name not in handed}
                if found:
                    handed |= found
                    more = Needs(secrets=found)
                    await stack.enter_async_context(open_services(settings, more, on_status=say))
            session.handed_over = frozenset(handed)
            yield session
        except UnavailableError as error:
            raise await explained(error, session) from None


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs a command's coroutine; Ctrl-C and SIGTERM cancel it and come back as KeyboardInterrupt.

    So a command that is told to end leaves the terminal as it found it. A coroutine may set handlers of its own.
    """

    async def cancellable() -> Result:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def settings_for_reading(reference: str | None = None) -> Settings | None:
    """The settings, or None where no home exists, so that looking at nothing starts no servers and makes no folder.

    With a `reference` to a run InputError `run-unknown` is raised instead.
    """
    settings = load_settings()
    if not settings.embedded or (settings.home / "version").exists():
        return settings
    _refuse_impossible(settings.home)
    if reference is None:
        return None
    raise InputError(
        "run-unknown",
        f"there are no runs yet: {settings.home} does not exist",
        hint="`podium run` makes it; PODIUM_HOME names another one",
    )


async def pinned_pool(database: Database, digest: str) -> Pool | None:
    """The pool that a run is pinned to; None if this version cannot read it, which must not keep a run from view."""
    from engine.store.inputs import read_pool_document
    from worker_pools.pool import pool_from_document

    try:
        return pool_from_document(await read_pool_document(database, digest))
    except BugError:
        return None


def _refuse_impossible(home: Path) -> None:
    """Raises the error that making the home would, as far as that can be seen without touching anything."""
    from engine.keeper.home import explained

    with explained(home):
        if os.path.lexists(home):
            if not home.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "not a folder")
            return
        above = next(folder for folder in home.parents if os.path.lexists(folder))
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder")
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "permission denied")


def quiet_status() -> Callable[[str], None]:
    """Tells what the servers do to somebody who sits before a terminal, and to nobody else."""
    return terminal.err if terminal.err_is_terminal() else _say_nothing


def _say_nothing(_: str) -> None:
    return


def secrets_here(pool: Pool) -> Mapping[str, str]:
    """The keys that a pool names by variable, as far as this environment holds them; the keeper reads files itself."""
    from worker_pools.pool import required_secrets

    return values_here(required_secrets(pool))


def values_here(references: Iterable[SecretRef]) -> dict[str, str]:
    """Values by name of the given secrets that are variables and set."""
    from worker_pools.secrets import SecretStore

    store = SecretStore()
    found = ((reference.name, store.get(reference)) for reference in references if reference.env is not None)
    return {name: value for name, value in found if value is not None}


async def live_references(database: Database) -> list[SecretRef]:
    """The keys that the pools of all live runs name, each once."""
    from engine.store.watching import live_pool_documents
    from worker_pools.pool import pool_from_document, required_secrets

    found: list[SecretRef] = []
    for document in await live_pool_documents(database):
        try:
            found += required_secrets(pool_from_document(document))
        except PodiumError:
            # A pool of another version's run must not keep this command from its work.
            continue
    return list(dict.fromkeys(found))
