"""Runs full of one word, for the tests that search Temporal for it."""

from __future__ import annotations

import getpass
import hashlib
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from engine import contracts
from engine.service import Submission, submit
from engine.store.snapshots import RunSnapshot
from tests.support.nested import family_of
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan
from tests.support.workflows import handle_of, pool_of, spellings, temporal_record, until, workflow_record
from worker_pools.pool import Pool
from worker_pools.process import WorkerProcess

KEY_VARIABLE = "PODIUM_TEST_CANARY"


@dataclass
class Aviary:
    """A word that no other test knows, and the runs that are full of it."""

    process: WorkerProcess
    provider: Provider
    folder: Path
    word: str = field(default_factory=lambda: f"kanarie{secrets.token_hex(10)}")
    runs: list[UUID] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.process.secrets.put(KEY_VARIABLE, f"sk-{self.word}")

    def pool(self, *models: str, worker: dict[str, object] | None = None, **changes: Any) -> Pool:
        template = self.folder / "worker.txt"
        template.write_text(f"{self.word} {{{{nonce}}}} {{{{task}}}} {{{{steps}}}} {{{{subtask}}}} {{{{final}}}}")
        each = {"api_key": {"env": KEY_VARIABLE}, "attempts_max": 2, **(worker or {})}
        return pool_of(
            self.folder, self.provider.base_url, *models, worker=each, worker_prompt=template.name, **changes
        )

    async def start(
        self, pool: Pool, *, access: list[list[int]] | None = None, conductor: bool = False, plan: str | None = None
    ) -> UUID:
        shape = access or [[], [0]]
        plan = plan or lists_plan(
            [f"{self.word} subtask {n}" for n in range(len(shape))], shape, list(range(len(shape)))
        )
        submission = Submission(
            task=f"task {self.word}",
            pool=pool,
            actor_id=f"actor-{self.word}",
            on_behalf_of=f"someone-{self.word}",
            plan_text=None if conductor else plan,
        )
        run_id = (await submit(self.process.database, self.process.client, submission)).id
        self.runs.append(run_id)
        return run_id

    async def run(self, pool: Pool, **options: object) -> RunSnapshot:
        return await ended(self.process.database, await self.start(pool, **options))  # type: ignore[arg-type]  # passed on

    async def search(self) -> None:
        """Fails if Temporal tells anything of the word, of source code, of this host or of its user."""
        hashes = {hashlib.sha256(f"{text}{self.word}".encode()).hexdigest() for text in ("", "task ")}
        asked = {*hashes, self.word, self.word[7:], "Traceback", 'File "', ".py", socket.gethostname(), "sk-"}
        if len(getpass.getuser()) > 4:
            asked.add(getpass.getuser())
        needles = [needle for word in asked for needle in ([word.encode()] if len(word) < 12 else spellings(word))]
        for workflow_id in await self.workflows():
            record = await workflow_record(self.process.client, workflow_id)
            assert b"RunWorkflow" in record
            assert [needle for needle in needles if needle in record] == []

    async def workflows(self) -> list[str]:
        """The workflows of all executions and later rounds of the runs and of everything below them."""
        found = []
        for run_id in self.runs:
            for run in await family_of(self.process.database, run_id):
                for execution in range(1, run["execution"] + 1):
                    own = str(run["id"])
                    found.append(contracts.workflow_id(own, execution))
                    rounds = range(1, run["round"] + 1) if execution == 1 else ()
                    found += [contracts.round_workflow_id(own, execution, number) for number in rounds]
        return found


async def fail_a_workflow_task(process: WorkerProcess, provider: Provider, folder: Path) -> bytes:
    """The record of a workflow whose signal handler raises: its workflow task fails until somebody ends it."""
    pool = pool_of(folder, provider.base_url, "sleep-1000ms")
    run_id = await submit_plan(process, pool, lists_plan(["Go."], [[]], [0]))
    handle = handle_of(process.client, run_id)
    await handle.signal(contracts.WAKE_SIGNAL)

    async def failed() -> bool:
        return b"ValueError" in (record := await temporal_record(process.client, run_id)) or b"bug-value" in record

    await until(failed)
    record = await temporal_record(process.client, run_id)
    await handle.terminate("test")
    return record
