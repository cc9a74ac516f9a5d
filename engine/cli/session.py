"""The way from a command to the servers: settings, keeper or remote services, database, Temporal, keys.

A command must check all its input before it opens a session: opening one may start servers and make a home.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
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
    """Open services. ``live_keys`` are the keys that live runs name, for the embedded servers only.

    ``keys_given`` says that the keeper got keys from this command: waiting steps find them only a little later.
    ``run_id`` is the run that the command is about, as soon as it is known to be on record, and ``unconfirmed`` says
    that one may be: for whoever has to be told that the servers went away.
    """

    settings: Settings
    services: Services
    database: Database
    live_keys: Sequence[SecretRef] = ()
    keys_given: bool = False
    run_id: UUID | None = None
    unconfirmed: bool = False
    _client: Client | None = field(default=None)
    # What `need` asked for stays there until the session is closed.
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

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

    async def need(self, pool: Pool, *, on_status: Callable[[str], None] | None = None) -> None:
        """Makes the embedded servers ready for a pool's models, with the keys that are set here.

        Keys that were handed over before are replaced. Servers of one's own are as they are. Raises what
        `open_services` does.
        """
        if self.services.embedded:
            await self._hand_over(needs_of(pool), on_status or quiet_status())

    async def _hand_over(self, needs: Needs, say: Callable[[str], None]) -> None:
        from engine.keeper.client import open_services

        await self._stack.enter_async_context(open_services(self.settings, needs, on_status=say))
        self.keys_given = self.keys_given or bool(needs.secrets)

    async def _serve_live_runs(self, given: Mapping[str, str], say: Callable[[str], None]) -> None:
        """Hands over what this environment holds of the keys of live runs, but for those that were ``given``."""
        from engine.keeper.client import Needs

        self.live_keys = await _live_references(self.database)
        found = {name: value for name, value in values_here(self.live_keys).items() if name not in given}
        if found:
            await self._hand_over(Needs(secrets=found), say)


@asynccontextmanager
async def open_session(
    settings: Settings, needs: Needs, *, on_status: Callable[[str], None] | None = None, checks_keys: bool = True
) -> AsyncIterator[Session]:
    """Opens the servers that the settings name, or starts the embedded ones, and the key store.

    Erasures that are not finished, or that a restored database forgot, are carried out first. Whoever wants to find out
    what is wrong with the key store leaves that out.

    In the embedded mode the keeper also gets what this environment holds of the keys that live runs wait for: after
    a kill of everything any command brings the runs to their end. Raises what `open_services` does, and
    UnavailableError for servers that went away meanwhile, with what becomes of the run.
    """
    from engine.cli.outage import explained
    from engine.keeper.client import open_services
    from engine.keystore import open_keyring
    from engine.store.database import Database
    from engine.store.erasure_journal import ready

    keys = open_keyring(settings.key_store_url())
    say = on_status or quiet_status()
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(open_services(settings, needs, on_status=say))
        database = Database(services.database_url, pool_size=CONNECTIONS_MAX, keys=keys)
        stack.push_async_callback(database.close)
        session = Session(settings, services, database, _stack=stack)
        try:
            if checks_keys:
                await ready(database)
            if services.embedded:
                session.keys_given = bool(needs.secrets)
                await session._serve_live_runs(needs.secrets, say)  # noqa: SLF001  # a part of opening it
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


def settings_for_reading() -> Settings | None:
    """The settings, or None where no home exists, so that looking at nothing starts no servers and makes no folder."""
    settings = load_settings()
    if not settings.embedded or (settings.home / "version").exists():
        return settings
    _refuse_impossible(settings.home)
    return None


def settings_for_run() -> Settings:
    """The settings, for a command about a run that exists; raises InputError `run-unknown` where no home does."""
    settings = settings_for_reading()
    if settings is None:
        raise InputError(
            "run-unknown",
            f"there are no runs yet: {load_settings().home} does not exist",
            hint="`podium run` makes it; PODIUM_HOME names another one",
        )
    return settings


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


def needs_of(pool: Pool) -> Needs:
    """What a pool's models need: queues, the local model, and the keys that it names by variable and that are set here.

    The keeper reads keys in files itself.
    """
    from engine.keeper.client import Needs
    from worker_pools.pool import required_secrets

    return Needs(pool.queues, values_here(required_secrets(pool)), pool.needs_local_model)


def values_here(references: Iterable[SecretRef]) -> dict[str, str]:
    """Values by name of the given secrets that are variables and set."""
    from worker_pools.secrets import SecretStore

    store = SecretStore()
    found = ((reference.name, store.get(reference)) for reference in references if reference.env is not None)
    return {name: value for name, value in found if value is not None}


async def _live_references(database: Database) -> list[SecretRef]:
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
