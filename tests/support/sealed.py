"""Databases whose texts are sealed, for tests of encryption and erasure."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from uuid import UUID

from engine.keystore import Keyring
from engine.keystore.files import FileKeyStore
from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.erasing import Copies, ErasureOrder
from engine.store.erasure_scope import Target
from engine.store.settling import Settlement, settle_run
from tests.support.stored import answered, opening, stored_run

BASIS = "GDPR Art. 17(1)(b), ticket 4711"


def sealed_database(url: str, keys: Path) -> Database:
    """The database with the key store in this folder."""
    return Database(url, pool_size=4, keys=Keyring(FileKeyStore(keys)))


async def finished_run(database: Database, texts: Iterable[str], *, task: str = "What is gravity?") -> UUID:
    """A run whose steps read all steps before them and gave these outputs."""
    outputs = list(texts)
    run_id = await stored_run(database, [list(range(number)) for number in range(len(outputs))], task=task)
    for position, output in enumerate(outputs):
        opened = opening(run_id, position)
        await open_attempt(database, opened)
        last = position == len(outputs) - 1
        await close_step_attempt(database, answered(opened, output, ends_run=last))
    return run_id


async def failed_run(database: Database, output: str, *, task: str = "What is gravity?") -> UUID:
    """A run of two steps that failed after the first."""
    run_id = await stored_run(database, [[], [0]], task=task)
    opened = opening(run_id, 0)
    await open_attempt(database, opened)
    await close_step_attempt(database, answered(opened, output))
    await settle_run(database, Settlement(run_id, 1, "failed", "test"))
    return run_id


def order_for(run_id: UUID, *, copies: Copies = "refuse", actor: str = "officer", **where: object) -> ErasureOrder:
    """An order to erase."""
    return ErasureOrder(Target(run_id, **where), actor, None, BASIS, copies=copies)  # type: ignore[arg-type]  # passed on
