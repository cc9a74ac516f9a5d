"""Helpers for tests of the store alone: runs on record, openings and closings made by hand, everything read back."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from engine.contracts import attempt_id
from engine.ledger.commitment import PROMPT_DOMAIN, commitment
from engine.ledger.entry import chain_faults, entry_hash
from engine.service import Submission, prepare
from engine.store.artifacts import JSON, ArtifactDraft, read_run_artifacts, text_draft
from engine.store.attempts import Fence, Opening, Place
from engine.store.closing import Closing
from engine.store.database import Database
from engine.store.run_writer import AttemptResult
from engine.store.runs import NewRun, create_run
from tests.support.ledger_page import check_entry
from tests.support.runs import WORKERS, lists_plan, make_pool

COST = Decimal("0.0000001234")
LOST = AttemptResult("unknown", "worker-shutdown")


def new_run(access: Sequence[Any] | None, *, task: str = "What is gravity?", key: str | None = None) -> NewRun:
    """A run about to be written: a plan with this access list, or (None) one that the Conductor plans."""
    with tempfile.TemporaryDirectory() as folder:
        pool = make_pool(Path(folder), "http://127.0.0.1:9")
    plan = None if access is None else lists_plan([f"Do {number}." for number in range(len(access))], list(access))
    return prepare(Submission(task=task, pool=pool, actor_id="tester", plan_text=plan, idempotency_key=key))


async def stored_run(database: Database, access: Sequence[Any] | None, **options: Any) -> UUID:
    """A run on record; see `new_run`."""
    return (await create_run(database, new_run(access, **options))).id


def opening(
    run_id: UUID,
    position: int | None = 0,
    fence: tuple[int, int, int] = (1, 0, 1),
    *,
    attempts_max: int = 3,
    process_id: UUID | None = None,
    **changes: Any,
) -> Opening:
    """An Open for a step (or, with None, for planning) by the try with this fence."""
    execution, dispatch, attempt = fence
    own = attempt_id(run_id, round=0, position=position, execution=execution, dispatch=dispatch, attempt=attempt)
    manifest = ArtifactDraft(own, "prompt_manifest", b'{"canary":"manifest"}', role="manifest", media_type=JSON)
    return Opening(
        place=Place(run_id, 0, position),
        fence=Fence(*fence),
        attempt_id=own,
        worker=changes.pop("worker", "conductor" if position is None else WORKERS[position % len(WORKERS)]),
        model="plain",
        manifest=manifest,
        prompt_commitment=commitment(manifest.salt, PROMPT_DOMAIN, str(own), b"the prompt"),
        attempts_max=attempts_max,
        process_id=process_id,
        **changes,
    )


def answered(opened: Opening, text: str = "An answer.", *, cost_usd: Decimal | None = COST, **changes: Any) -> Closing:
    """A Close with an output."""
    result = AttemptResult("succeeded", finish_reason="stop", input_tokens=10, output_tokens=5, cost_usd=cost_usd)
    drafts = (text_draft(opened.attempt_id, "output", text),)
    return Closing(opened.place, opened.attempt_id, result, drafts, attempts_max=opened.attempts_max, **changes)


def ended_with(opened: Opening, result: AttemptResult, *, retry: bool = False, **changes: Any) -> Closing:
    """A Close without an output."""
    return Closing(opened.place, opened.attempt_id, result, retry=retry, attempts_max=opened.attempts_max, **changes)


def plain_url(url: str) -> str:
    """The address as psycopg wants it."""
    return url.replace("postgresql+psycopg://", "postgresql://", 1)


async def rows(url: str, query: str, *params: Any) -> list[dict[str, Any]]:
    """The rows of a query over a connection of its own."""
    async with await psycopg.AsyncConnection.connect(plain_url(url), autocommit=True, row_factory=dict_row) as link:
        cursor = await link.execute(query.encode(), params)
        return await cursor.fetchall()


async def texts_of(database: Database, run_id: UUID, kind: str) -> list[bytes]:
    """The stored texts of a kind, opened, in the order of their ids."""
    found = await database.query(lambda connection: read_run_artifacts(connection, run_id))
    return [one.content for one in found if one.kind == kind and one.content is not None]


async def execute(url: str, statement: str, *params: Any) -> None:
    """Carries out a statement over a connection of its own."""
    async with await psycopg.AsyncConnection.connect(plain_url(url), autocommit=True) as link:
        await link.execute(statement.encode(), params)


async def dump(url: str, *, without: Sequence[str] = ()) -> str:
    """Every table of the database as text, except those named; bytes as they are and in hexadecimal."""
    pieces = []
    async with await psycopg.AsyncConnection.connect(plain_url(url), autocommit=True) as link:
        names = await (
            await link.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")
        ).fetchall()
        for (name,) in names:
            if name in without:
                continue
            cursor = await link.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(name)))
            for row in await cursor.fetchall():
                for value in row:
                    text = value.decode("utf-8", "replace") + value.hex() if isinstance(value, bytes) else str(value)
                    pieces.append(f"{name}: {text}")
    return "\n".join(pieces)


@dataclass(frozen=True, slots=True)
class Record:
    """All rows of one run, read at one moment."""

    run: dict[str, Any]
    steps: list[dict[str, Any]]
    attempts: list[dict[str, Any]]
    artifacts: list[dict[str, Any]]
    bodies: list[bytes]
    head: dict[str, Any]

    def entries(self, type_: str | None = None) -> list[dict[str, Any]]:
        """The ledger's entries, decoded, all or those of a type."""
        documents = [json.loads(body) for body in self.bodies]
        return [document for document in documents if type_ in {None, document["type"]}]

    def attempt(self, opened: Opening) -> dict[str, Any]:
        """The row of an attempt."""
        (found,) = [row for row in self.attempts if row["id"] == opened.attempt_id]
        return found

    def kept_texts(self, opened: Opening, kind: str = "output") -> list[bytes]:
        """What is stored of an attempt."""
        return [row["content"] for row in self.artifacts if (row["owner_id"], row["kind"]) == (opened.attempt_id, kind)]


async def record(url: str, run_id: UUID) -> Record:
    """Reads everything about a run in one snapshot."""
    async with await psycopg.AsyncConnection.connect(plain_url(url), row_factory=dict_row) as link:
        await link.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)

        async def all_of(query: str) -> list[dict[str, Any]]:
            return await (await link.execute(query.encode(), (run_id,))).fetchall()

        (run,) = await all_of("SELECT * FROM runs WHERE id = %s")
        (head,) = await all_of("SELECT * FROM ledger_heads WHERE run_id = %s")
        return Record(
            run=run,
            steps=await all_of("SELECT * FROM steps WHERE run_id = %s ORDER BY position"),
            attempts=await all_of("SELECT * FROM attempts WHERE run_id = %s ORDER BY position, number"),
            artifacts=await all_of("SELECT * FROM artifacts WHERE run_id = %s ORDER BY id"),
            bodies=[
                row["body"] for row in await all_of("SELECT body FROM ledger_entries WHERE run_id = %s ORDER BY seq")
            ],
            head=head,
        )


def check_invariants(kept: Record) -> None:
    """What must hold for every run at every moment."""
    assert chain_faults(kept.bodies) == []
    assert (kept.head["seq"], kept.head["hash"]) == (len(kept.bodies), entry_hash(kept.bodies[-1]))
    attempts = kept.attempts
    assert kept.run["attempts_count"] == len(attempts)
    assert kept.run["cost_usd"] == sum((row["cost_usd"] or Decimal(0) for row in attempts), Decimal(0))
    assert kept.run["input_tokens"] == sum(row["input_tokens"] or 0 for row in attempts)
    assert kept.run["output_tokens"] == sum(row["output_tokens"] or 0 for row in attempts)
    unpriced = [row for row in attempts if row["state"] != "sent" and row["cost_usd"] is None]
    assert kept.run["attempts_unpriced"] == len(unpriced)
    for step in kept.steps:
        place = (step["round"], step["position"])
        own = [row for row in attempts if (row["round"], row["position"]) == place]
        assert [row["number"] for row in own] == list(range(1, len(own) + 1))
        accepted = [row["id"] for row in own if row["accepted"]]
        # The output of a delegated or reused step, and of no other, is an attempt of another run.
        delegated = any(
            (entry["data"]["round"], entry["data"]["step"]) == place for entry in kept.entries("child.begun")
        )
        elsewhere = (step["state"] == "reused" or delegated) and not accepted
        assert accepted == ([step["accepted_attempt_id"]] if step["accepted_attempt_id"] and not elsewhere else [])
        assert (step["state"] in {"succeeded", "reused"}) == (step["accepted_attempt_id"] is not None)
        assert sum(row["state"] == "sent" for row in own) <= 1
    # The last word of the ledger about every run, step and attempt is the state in its row.
    said: dict[Any, str] = {("run",): "created"}
    for step in kept.steps:
        said["step", step["round"], step["position"]] = "skipped" if step["reason"] == "unread" else "pending"
    for entry in kept.entries():
        check_entry(entry)
        data = entry["data"]
        if entry["type"] in {"run.changed", "run.closed"}:
            said["run",] = data["state"]
        elif entry["type"] == "step.changed":
            said["step", data["round"], data["step"]] = data["state"]
        if data.get("moved"):
            # An attempt's own entry also says how its step moved: one entry, one state.
            assert data["moved"]["old"] == said["step", data["round"], data["step"]]
            said["step", data["round"], data["step"]] = data["moved"]["state"]
        if entry["type"] == "attempt.sent":
            said["attempt", data["attempt"]] = "sent"
        elif entry["type"] == "attempt.closed":
            said["attempt", data["attempt"]] = data["state"]
    true: dict[Any, str] = {("run",): kept.run["state"]}
    true |= {("step", step["round"], step["position"]): step["state"] for step in kept.steps}
    true |= {("attempt", str(row["id"])): row["state"] for row in attempts}
    assert said == true
