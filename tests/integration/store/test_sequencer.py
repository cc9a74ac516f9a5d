"""The sequencer: every entry gets its leaf once, whoever else is at work and whenever it is killed (attacks 19, 20)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import psycopg
import pytest
from psycopg.pq.abc import PGconn

from activities import sequencing
from activities.sequencing import keep_log
from engine.errors import UnavailableError
from engine.signing import AuditFolder, LogKeeper, Signer
from engine.signing import signer as signer_module
from engine.store import database as database_module
from engine.store import exchange as exchange_module
from engine.store import log, queries
from engine.store import system_chain as system_module
from engine.store.database import Database
from engine.store.exchange import Connection, Params, Row, exchange
from engine.store.run_writer import lock_run
from engine.store.tables import DEFAULT_TENANT
from engine.verifier import checkpoint as formats
from engine.verifier.merkle import root_of
from tests.integration.store.test_log import check_log, runs_on_record
from tests.integration.store.test_signer import ORIGIN, keys_of, sealed
from tests.support.servers import superuser_url
from tests.support.stored import check_invariants, execute, plain_url, record, rows, stored_run

TENANT = UUID(DEFAULT_TENANT)
RUNS = 200
LATE_S = 0.4
Moment = Literal["before", "sent", "answered"]


@pytest.fixture
def database_url(own_database_url: str) -> str:
    """Each test looks at the whole log."""
    return own_database_url


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(url: str, folder: Path, number: int, moment: Moment) -> bool:
    """Seals the log in a process that is killed at its n-th exchange with the server; whether it came that far."""
    child = os.fork()
    if child == 0:
        try:
            _count_exchanges(number, moment)
            asyncio.run(_seal(url, folder))
            os._exit(0)
        finally:
            os._exit(9)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed otherwise"
    return os.WIFSIGNALED(status)


async def _seal(url: str, folder: Path) -> None:
    database = Database(url)
    await sealed(database, Signer(AuditFolder(folder)))


def _count_exchanges(number: int, moment: Moment) -> None:
    seen = 0
    true_exchange, true_answers = exchange_module.exchange, exchange_module._answers

    async def counted(connection: Connection, statements: Sequence[tuple[str, Params]]) -> list[list[Row]]:
        nonlocal seen
        seen += 1
        if seen == number and moment == "before":
            die()
        found = await true_exchange(connection, statements)
        if seen == number and moment == "answered":
            die()
        return found

    def answers(pgconn: PGconn) -> Generator[Any, Any, Any]:
        if seen == number and moment == "sent":
            # What was said is on its way; nobody will read the answer.
            while pgconn.flush():
                pass
            die()
        return true_answers(pgconn)

    exchange_module._answers = answers
    for module in (exchange_module, log, signer_module, database_module, system_module):
        vars(module)["exchange"] = counted


@pytest.mark.parametrize("moment", ["before", "sent", "answered"])
async def test_killed_at_every_exchange_nothing_is_lost_or_doubled(
    database: Database, tmp_path: Path, moment: Moment
) -> None:
    """Attack 19. After each death the next one goes on, and two checkpoints never contradict each other."""
    folder = tmp_path / "audit"
    deaths = 0
    for number in range(1, 60):
        await runs_on_record(database)
        if not await asyncio.to_thread(killed_at, database.url, folder, number, moment):
            break
        deaths += 1
    else:
        pytest.fail("it never came to its end")
    assert deaths >= 8
    checkpoint = await sealed(database, Signer(AuditFolder(folder)))
    assert await check_log(database.url) == checkpoint.size
    keys = await keys_of(database)
    assert len(keys) == 1
    hashes = [row["leaf_hash"] for row in await rows(database.url, "SELECT leaf_hash FROM log_leaves ORDER BY index")]
    stored = await rows(database.url, "SELECT * FROM log_checkpoints ORDER BY size")
    for row in stored:
        opened = formats.open_checkpoint(row["note"], keys, origin=ORIGIN).checkpoint
        assert (opened.size, opened.root) == (row["size"], root_of(hashes[: row["size"]]))


async def test_killed_at_any_moment_within_its_statement_it_has_done_nothing(database: Database) -> None:
    """The server aborts the sequencer's one statement after ever longer times: leaves, nodes and queue stay as one."""
    await execute(
        superuser_url(database.url),
        "INSERT INTO ledger_entries SELECT %s, n, %s, '', sha256(n::text::bytea), n::text::bytea, 'x', now()"
        " FROM generate_series(1, 6000) AS n",
        UUID(int=77),
        TENANT,
    )
    waiting = (await rows(database.url, "SELECT count(*) AS n FROM ledger_pending"))[0]["n"]
    aborted, timeout_ms = 0, 1.0
    async with await psycopg.AsyncConnection.connect(plain_url(database.url), autocommit=True) as link:
        while True:
            await link.execute(f"SET statement_timeout = {int(timeout_ms)}".encode())
            try:
                await link.execute("SELECT log_extend(%s, 10000)", (TENANT,))
            except psycopg.errors.QueryCanceled:
                aborted += 1
                timeout_ms *= 1.3
                left = await rows(database.url, "SELECT count(*) AS n FROM ledger_pending")
                leaves = await rows(database.url, "SELECT count(*) AS n FROM log_leaves")
                assert (left[0]["n"], leaves[0]["n"]) == (waiting, 0)
            else:
                break
    assert aborted > 5
    assert await check_log(database.url) == waiting


async def test_several_sequencers_at_once_share_the_work(database: Database) -> None:
    """Attack 19: two (here six) at once."""
    others = [Database(database.url, pool_size=2) for _ in range(6)]
    done = asyncio.Event()

    async def extend(own: Database) -> int:
        count = 0
        while not done.is_set():
            count += sum((await log.extend_log(own, batch_max=random.choice((1, 3, 50)))).values())
            await asyncio.sleep(0)
        return count

    tasks = [asyncio.create_task(extend(one)) for one in others]
    for _ in range(10):
        await runs_on_record(database, 2)
    done.set()
    added = sum(await asyncio.gather(*tasks))
    added += sum((await log.extend_log(database)).values())
    assert await check_log(database.url) == added
    for one in others:
        await one.close()


@pytest.mark.parametrize(
    ("count", "connections", "late_s"), [(24, 12, 0.15), pytest.param(RUNS, 60, LATE_S, marks=pytest.mark.slow)]
)
async def test_runs_append_at_once_with_late_commits_and_every_entry_is_sequenced_once(
    database: Database, count: int, connections: int, late_s: float
) -> None:
    """Attack 20: entries that commit long after later ones; a cursor that only goes forward would pass them over."""
    writers = Database(database.url, pool_size=connections)
    runs = await asyncio.gather(*(stored_run(writers, [[]]) for _ in range(count)))
    done = asyncio.Event()

    async def sequence() -> None:
        while not done.is_set():
            await log.extend_log(database, batch_max=37)
            await asyncio.sleep(0)

    async def append(run_id: UUID, number: int) -> None:
        async def work(connection: Connection) -> None:
            writer, _ = await lock_run(connection, run_id)
            writer.set_run_state("waiting", f"reason-{number}")
            await exchange(connection, await writer.packet())
            # The entry is written and not committed: nobody else sees it yet.
            await asyncio.sleep(random.uniform(0, late_s) if number % 3 else 0)
            await exchange(connection, [(queries.COMMIT, ())])

        await writers.write(work)

    async def life(run_id: UUID) -> None:
        for number in range(4):
            await append(run_id, number)

    sequencers = [asyncio.create_task(sequence()) for _ in range(2)]
    await asyncio.gather(*(life(run_id) for run_id in runs))
    done.set()
    await asyncio.gather(*sequencers)
    await log.extend_log(database)
    assert await check_log(database.url) == count * (2 + 4)
    for run_id in runs[:5]:
        check_invariants(await record(database.url, run_id))
    await writers.close()


async def test_the_loop_goes_on_after_whatever_went_wrong(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sequencing, "FAILED_PAUSE_S", 0.01)
    keeper = LogKeeper(database, Signer(AuditFolder(tmp_path / "audit")))
    true_turn, turns = LogKeeper.turn, []

    async def turn(self: LogKeeper) -> bool:
        turns.append(1)
        if len(turns) == 1:
            raise ZeroDivisionError
        if len(turns) == 2:
            raise UnavailableError("database-unreachable", "away", hint="wait")
        return await true_turn(self)

    monkeypatch.setattr(LogKeeper, "turn", turn)
    await runs_on_record(database)
    task = asyncio.create_task(keep_log(keeper))
    async with asyncio.timeout(10):
        while not await rows(database.url, "SELECT 1 FROM log_checkpoints"):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    messages = [record.message for record in caplog.records]
    assert any("the sequencer failed" in message for message in messages)
    assert any("database-unreachable" in message for message in messages)
    # Its own first entry, which says the key, came before the checkpoint and is under it.
    assert await check_log(database.url) == (await rows(database.url, "SELECT size FROM log_checkpoints"))[0]["size"]


async def test_a_worker_without_an_audit_directory_gives_leaves_and_signs_nothing(database: Database) -> None:
    keeper = LogKeeper(database, None)
    await runs_on_record(database)
    assert await keeper.turn()
    assert not await keeper.turn()
    assert await check_log(database.url) > 0
    assert await keeper.seal(TENANT) is None
    assert await rows(database.url, "SELECT * FROM log_checkpoints") == []
