"""The one module through which a run changes: every change of state writes its row and its ledger entry together.

A ``RunWriter`` lives inside one transaction. It locks the run's row first (the lock order everywhere is run, step,
attempt, budgets, ledger head), reads the end of the run's chain after the lock, collects statements and entries, and
sends them with the COMMIT in one packet, so that a transaction takes two round trips.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import Any
from uuid import UUID

from engine.errors import BugError
from engine.keystore import RunKeys
from engine.ledger.after_closing import CLOSING, REOPENING, may_follow_closing
from engine.ledger.entry import GENESIS, EntryPlace, Event, entry_bytes, entry_hash
from engine.store import queries
from engine.store.artifacts import INSERT as INSERT_ARTIFACT
from engine.store.artifacts import ArtifactDraft
from engine.store.budgets import LOCK_BUDGETS, WAKE_OTHERS, Used, charged, settlement
from engine.store.exchange import Connection, Params, Row, exchange
from engine.store.sealing import writing_keys
from engine.store.states import RUN_ENDED, AttemptState, RunState, StepState

# Who acts when no person does: the engine, on behalf of whoever submitted the run.
ENGINE_ACTOR = "podium-engine"
# The columns hold dollars to ten decimals, and counts of a call below 2^31.
_USD_STEP = Decimal("1E-10")
_USD_MAX = Decimal("1E+10")
_COUNT_MAX = 2**31 - 1


@dataclass(slots=True)
class RunWriter:
    """A locked run, with what its transaction is going to write."""

    connection: Connection
    run_id: UUID
    tenant_id: UUID
    actor_id: str
    on_behalf_of: str | None
    run: dict[str, Any]
    now: datetime
    seq: int
    head: bytes
    # The budgets of this run and its ancestors, locked, root first.
    budgets: Sequence[Row] = ()
    # Whether a step of the run has failed for good, so that the run is about to.
    failing: bool = False
    closed_attempts: list[UUID] = field(default_factory=list)
    _statements: list[tuple[str, Params | ArtifactDraft]] = field(default_factory=list)
    _bodies: list[bytes] = field(default_factory=list)
    _next_hash: bytes = b""
    _run_change: dict[str, Any] = field(default_factory=dict)
    # Whether the chain stands behind its closing entry; None as long as the run's row says it.
    _is_closed: bool | None = None

    def statement(self, sql: str, params: Params) -> None:
        """Adds a statement; it is sent by ``commit``, in order."""
        self._statements.append((sql, params))

    def entry(self, type_: str, **fields: Any) -> None:
        """Adds a ledger entry behind those added before.

        Raises BugError ``ledger-closed`` for one that may not stand behind the run's closing entry.
        """
        closed = self.run["state"] in RUN_ENDED if self._is_closed is None else self._is_closed
        if closed and not may_follow_closing(type_):
            raise BugError("ledger-closed", f"the run has ended, and {type_} may not follow its closing entry")
        self._is_closed = type_ == CLOSING or (closed and type_ != REOPENING)
        if not self._bodies:
            self._next_hash = self.head
        place = EntryPlace(self.tenant_id, self.run_id, self.seq + len(self._bodies) + 1, self._next_hash)
        body = entry_bytes(place, Event(type_, self.actor_id, self.on_behalf_of, fields), self.now)
        self._bodies.append(body)
        self._next_hash = entry_hash(body)

    @property
    def next_seq(self) -> int:
        """The number that the next entry will have in the run's chain."""
        return self.seq + len(self._bodies) + 1

    def artifacts(self, drafts: Iterable[ArtifactDraft]) -> list[dict[str, Any]]:
        """Stores artifacts; returns what the ledger entry says of them."""
        committed = []
        for draft in drafts:
            # It is sealed when it is sent: reading the run's keys may have to wait.
            self._statements.append((INSERT_ARTIFACT, draft))
            committed.append(draft.committed())
        return committed

    def set_run_state(self, state: RunState, reason: str | None = None) -> None:
        """Moves the run; an end also gets its closing entry, which commits to the number of entries before it."""
        old = self.run["state"]
        if (old, self.run["reason"]) == (state, reason):
            return
        ended = state in RUN_ENDED
        self._run_change.update(moved=True, ended=ended)
        if ended:
            before, totals = self.seq + len(self._bodies), self._totals()
            self.entry(CLOSING, state=state, reason=reason, old=old, entries_before=before, totals=totals)
        else:
            self.entry("run.changed", state=state, reason=reason, old=old)
        self.run["state"], self.run["reason"] = state, reason

    def _totals(self) -> dict[str, Any]:
        """What the run has used up to here, for its closing entry; calls that report later add to it."""

        def total(column: str) -> Any:
            return self.run.get(column, 0) + self._run_change.get(column, 0)

        return {
            "attempts": total("attempts_count"),
            "input_tokens": total("input_tokens"),
            "output_tokens": total("output_tokens"),
            "cost_usd": said_usd(usd(total("cost_usd"))),
            "unpriced": total("attempts_unpriced"),
        }

    def mark_seen(self, execution: int) -> None:
        """Remembers that this execution has shown a sign of life."""
        if self.run["execution_seen"] < execution:
            self._run_change["execution_seen"] = execution

    def add_to_totals(self, **more: int | Decimal) -> None:
        """Adds to the run's totals; the names are its columns."""
        for column, value in more.items():
            self._run_change[column] = self._run_change.get(column, 0) + value

    def set_step_state(
        self, row: Mapping[str, Any], state: StepState, reason: str | None = None, *, accepted: UUID | None = None
    ) -> None:
        """Moves a step. ``row`` needs ``round``, ``position``, ``state`` and ``reason``."""
        change = self.move_step(row, state, reason, accepted=accepted)
        if change:
            # Outside of an attempt's entries an output can only come from another run.
            source = {} if accepted is None else {"attempt": str(accepted)}
            self.entry("step.changed", round=row["round"], step=row["position"], **change, **source)

    def move_step(
        self, row: Mapping[str, Any], state: StepState, reason: str | None = None, *, accepted: UUID | None = None
    ) -> dict[str, Any]:
        """Moves a step and returns what the ledger says of it; empty if the step is there already."""
        if (row["state"], row["reason"]) == (state, reason):
            return {}
        self.statement(
            queries.SET_STEP_STATE,
            {
                "run_id": self.run_id,
                "round": row["round"],
                "position": row["position"],
                "state": state,
                "reason": reason,
                "accepted": accepted,
                "now": self.now,
            },
        )
        return {"state": state, "reason": reason, "old": row["state"]}

    def accept_reviewed(self, step: Mapping[str, Any], attempt_id: UUID, *, own: bool, reused: bool) -> None:
        """Accepts an output that waited for its reviews; not ``own`` is one that another run's attempt made."""
        place = {"run_id": self.run_id, "round": step["round"], "position": step["position"]}
        self.statement(queries.CLEAR_CANDIDATE, place)
        if own:
            self.statement(queries.ACCEPT_ATTEMPT, (attempt_id,))
        self.set_step_state(step, "reused" if reused else "succeeded", accepted=attempt_id)

    def close_attempt(
        self,
        attempt: Mapping[str, Any],
        result: AttemptResult,
        committed: list[dict[str, Any]],
        *,
        step: Mapping[str, Any] | None = None,
        step_state: StepState | None = None,
        step_reason: str | None = None,
    ) -> None:
        """Ends an attempt and adds what it used to the run's totals and budgets, whatever became of it.

        With ``step`` and ``step_state`` the step moves by the same entry.

        ``result`` holds what can be stored, see `storable`. An attempt that was given up as unknown is in the totals
        already; when it reports after all, only the difference is added. A call of unknown cost whose worst case is 0
        dollars cost 0.
        """
        self.closed_attempts.append(attempt["id"])
        # Not put into the result: how many tokens it used stays unknown, and budgets tell that by it.
        cost_usd = cost_of(attempt, result.cost_usd)
        said = result.said()
        before: dict[str, Any] = {"input_tokens": 0, "output_tokens": 0, "cost_usd": Decimal(0)}
        unpriced_before = False
        if attempt["state"] == "unknown":
            before = {column: attempt[column] or 0 for column in before}
            unpriced_before = attempt["cost_usd"] is None
        self.statement(
            queries.CLOSE_ATTEMPT,
            {**said, "id": attempt["id"], "now": self.now, "error_code": result.error_code, "cost_usd": cost_usd},
        )
        self.add_to_totals(
            input_tokens=(result.input_tokens or 0) - before["input_tokens"],
            output_tokens=(result.output_tokens or 0) - before["output_tokens"],
            cost_usd=(cost_usd or Decimal(0)) - before["cost_usd"],
            attempts_unpriced=int(cost_usd is None) - int(unpriced_before),
        )
        moved: dict[str, Any] = {}
        if step is not None and step_state is not None:
            accepted = attempt["id"] if result.accepted else None
            moved = self.move_step(step, step_state, step_reason, accepted=accepted)
        settled = self._settle(attempt, result) if self.budgets else None
        self.entry(
            "attempt.closed",
            attempt=str(attempt["id"]),
            round=attempt["round"],
            step=attempt["position"],
            code=result.error_code,
            cost_usd=said_usd(cost_usd),
            **said,
            settled=settled,
            artifacts=committed,
            moved=moved or None,
        )

    def _settle(self, attempt: Mapping[str, Any], result: AttemptResult) -> dict[str, Any]:
        """Charges the budgets for a call and wakes who waits for them; returns what the ledger says of it."""
        used = None if result.state == "unknown" else _used(result)
        self.statement(*settlement(self.budgets, attempt, used))
        self.statement(WAKE_OTHERS, {"root": self.budgets[0]["run_id"], "own": self.run_id, "now": self.now})
        return charged(attempt, used)

    async def commit(self, *others: RunWriter) -> None:
        """Sends everything and the COMMIT in one packet, the ledger last. The writer is used up.

        ``others`` are writers of further runs in the same transaction; theirs goes first.
        """
        statements = [statement for writer in (*others, self) for statement in await writer.packet()]
        await exchange(self.connection, [*statements, (queries.COMMIT, ())])
        # Now all of it is durable; if the link died before the answer, it may be, and the repetition finds out.

    async def packet(self) -> list[tuple[str, Params]]:
        """All statements of this writer, in order, its texts sealed; for ``commit`` only.

        Raises what `engine.store.sealing.writing_keys` does.
        """
        if self._run_change:
            change = {
                "run_id": self.run_id,
                "state": self.run["state"],
                "reason": self.run["reason"],
                "now": self.now,
                "moved": False,
                "ended": False,
                **dict.fromkeys(("execution_seen", "input_tokens", "output_tokens", "cost_usd"), 0),
                **dict.fromkeys(("attempts_unpriced", "attempts_count"), 0),
                **self._run_change,
            }
            self.statement(queries.UPDATE_RUN, change)
        if self._bodies:
            self.statement(queries.APPEND_LEDGER, (self.run_id, self.seq, self.head, self._bodies))
        keys: RunKeys | None = None
        if any(isinstance(params, ArtifactDraft) for _, params in self._statements):
            keys = await writing_keys(self.connection, self.run_id, self.run["key_epoch"])
        return [
            (sql, params.row(self.tenant_id, self.run_id, keys) if isinstance(params, ArtifactDraft) else params)
            for sql, params in self._statements
        ]


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended. ``cost_usd`` None means that it is not known, never that it was free."""

    state: AttemptState
    error_code: str | None = None
    accepted: bool = False
    finish_reason: str | None = None
    notes: tuple[str, ...] = ()
    provider_status: int | None = None
    provider_request_id: str | None = None
    provider_model: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: Decimal | None = None
    first_token_ms: int | None = None
    duration_ms: int | None = None

    def said(self) -> dict[str, Any]:
        """What row and entry say alike, under the same names: all but the code and the cost."""
        return {
            "state": self.state,
            "accepted": self.accepted,
            "finish_reason": self.finish_reason,
            "notes": list(self.notes),
            "provider_status": self.provider_status,
            "provider_request_id": self.provider_request_id,
            "provider_model": self.provider_model,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "first_token_ms": self.first_token_ms,
            "duration_ms": self.duration_ms,
        }


def usd(value: Decimal | None) -> Decimal | None:
    """Dollars as the columns keep them: to ten decimals, half up, without trailing zeros; None stays unknown."""
    if value is None or not value.is_finite() or not 0 <= value < _USD_MAX:
        return None
    exact = value.quantize(_USD_STEP, ROUND_HALF_UP).normalize()
    return exact or Decimal(0)


def said_usd(value: Decimal | None) -> str | None:
    """Dollars as an entry says them: a plain decimal; None stays unknown."""
    return None if value is None else format(value, "f")


def storable(result: AttemptResult) -> AttemptResult:
    """The result with numbers that the record can hold.

    A provider may report any number; one that cannot be true is unknown, and so is the cost made of it. Closing an
    attempt never fails for such a reason: it would lose an answer that is paid for.
    """
    counts = [result.input_tokens, result.output_tokens]
    sane = [count if count is not None and 0 <= count <= _COUNT_MAX else None for count in counts]
    cost_usd = usd(result.cost_usd) if counts == sane else None
    return replace(result, input_tokens=sane[0], output_tokens=sane[1], cost_usd=cost_usd)


def cost_of(attempt: Mapping[str, Any], known: Decimal | None) -> Decimal | None:
    """What a call cost in US dollars: what is known of it, else 0 if its worst case was 0, else None for unknown."""
    return Decimal(0) if known is None and attempt["reserved_usd"] == 0 else known


def _used(result: AttemptResult) -> Used:
    known = result.input_tokens is not None and result.output_tokens is not None
    if result.state in {"failed", "cancelled"} and result.cost_usd == 0 and not known:
        # Nothing was sent, or the provider bills nothing for it.
        return Used(Decimal(0), 0)
    tokens = (result.input_tokens or 0) + (result.output_tokens or 0)
    return Used(result.cost_usd, tokens if known else None)


async def lock_run(
    connection: Connection, run_id: UUID, *more: tuple[str, Params], actor_id: str = ENGINE_ACTOR
) -> tuple[RunWriter, list[list[Row]]]:
    """Begins a transaction, locks a run and reads its head; ``more`` are queries answered in the same round trip.

    ``actor_id`` is the person who acts; without one it is the engine, on behalf of whoever submitted the run. Where
    there are budgets, they are locked too.

    The head is read by a statement of its own: a subquery of the locking statement would see the time before it
    waited. Raises BugError for a run that does not exist.
    """
    own = ((queries.BEGIN, ()), (queries.LOCK_RUN, (run_id,)), (queries.READ_HEAD, {"run_id": run_id}))
    _, run, head, *rest = await exchange(connection, [*own, *more])
    if not run or not head:
        raise BugError("run-unknown", "there is no such run")
    writer = RunWriter(
        connection=connection,
        run_id=run_id,
        tenant_id=run[0]["tenant_id"],
        actor_id=actor_id,
        on_behalf_of=run[0]["actor_id"] if actor_id == ENGINE_ACTOR else None,
        run=run[0],
        now=head[0]["now"],
        seq=head[0]["seq"],
        head=head[0]["hash"],
        failing=head[0]["failing"],
    )
    if head[0]["budgeted"] or run[0]["parent_run_id"] is not None:
        (writer.budgets,) = await exchange(connection, [(LOCK_BUDGETS, (run_id,))])
    return writer, rest


def new_run_writer(
    connection: Connection,
    run_id: UUID,
    *,
    tenant_id: UUID,
    actor_id: str,
    on_behalf_of: str | None,
    now: datetime,
    key_epoch: int = 0,
) -> RunWriter:
    """A writer for a run that this transaction creates: its chain is empty.

    Its keys are in the key store already; epoch 0 is a run whose texts are in the clear.
    """
    return RunWriter(
        connection=connection,
        run_id=run_id,
        tenant_id=tenant_id,
        actor_id=actor_id,
        on_behalf_of=on_behalf_of,
        run={"state": "created", "reason": None, "execution_seen": 0, "key_epoch": key_epoch},
        now=now,
        seq=0,
        head=GENESIS,
    )
