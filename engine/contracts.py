"""What the workflow and its activities say to each other: typed requests and results, stubs, queues, timeouts.

Everything in here ends up in Temporal's history, so a field may hold an identifier, a position, a state, a number or
one of our error codes, and never text that a person or a model wrote, a hash of such text, a name or a secret.
The stubs carry the registered names; the worker registers the real functions of ``activities`` under them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal
from uuid import UUID, uuid5

from temporalio import activity

WORKFLOW_TYPE = "RunWorkflow"
WORKFLOW_QUEUE = "podium"
WAKE_SIGNAL = "wake"
_ROUND_PART = re.compile(r"\.r[0-9]+$")
QUEUE_NAME = re.compile(r"[a-z0-9-]{1,32}")

# A workflow task is milliseconds of work. The default of 10 s would be spent waiting for a dead worker's sticky queue.
WORKFLOW_TASK_TIMEOUT = timedelta(seconds=2)
STICKY_QUEUE_TIMEOUT = timedelta(seconds=1)
# Short heartbeats and a loaded worker do not go together (measured: 1,000 calls in flight, 2 s: 247 repeats).
HEARTBEAT_TIMEOUT = timedelta(seconds=10)
# A cancellation reaches a call with its next heartbeat, so they are short; a process with many calls in flight beats
# less often, so that heartbeats never become a load of their own (each is a write in Temporal's database).
HEARTBEAT_INTERVAL_MIN_S = 1.0
HEARTBEAT_INTERVAL_MAX_S = 6.0
HEARTBEATS_A_SECOND_MAX = 100
# Temporal's limit for one try of an activity is above every limit of ours, so that our error comes first. The margin
# is long because an answer that was paid for waits for a database that is away rather than being bought again.
CALL_MARGIN_S = 900.0
# After this long in a queue that nobody polls, the step is shown as waiting for a worker.
NO_WORKER_TIMEOUT = timedelta(seconds=60)
BOOKKEEPING_TIMEOUT = timedelta(seconds=30)
RETRY_INITIAL = timedelta(seconds=1)
RETRY_MAXIMUM = timedelta(seconds=60)
# A held step is looked at again even if the waking signal is lost: after this long, then after twice as long and so on.
# Each look is seven events, and a history ends at 51,200: at one an hour a run can be paused for most of a year.
HELD_RECHECK_FIRST = timedelta(seconds=30)
HELD_RECHECK_MAX = timedelta(hours=1)
# How long the workflow of a run that has ended waits for reports that can say nothing new.
REPORTS_WITHIN_S = 5.0

# `held`: nothing may be called now; `moved`: another worker, and perhaps another queue, has the step now.
Outcome = Literal["succeeded", "failed", "cancelled", "held", "moved"]
ChildOutcome = Literal["begun", "succeeded", "failed", "cancelled", "held", "moved"]
StepKind = Literal["model", "conductor"]
PlanOutcome = Literal["planned", "repair", "failed", "cancelled", "held"]
EndState = Literal["succeeded", "failed", "cancelled"]


def pool_queue(queue: str) -> str:
    """The Temporal task queue for a pool's queue name (``[a-z0-9-]{1,32}``)."""
    return f"pool-{queue}"


def home_queue(queues: Collection[str]) -> str:
    """Where a run's workflow lives: with its calls if all of them go to one pool queue, else on the general queue.

    When one worker serves both, Temporal hands out activities together with the workflow task that asked for them,
    which saves a fifth of what the server does for a step (measured, see docs/decisions).
    """
    return pool_queue(next(iter(queues))) if len(queues) == 1 else WORKFLOW_QUEUE


# The activities that call models: they send heartbeats, and the others do not.
CALLS = frozenset({"perform_step", "plan_task"})


def worker_identity(process_id: UUID) -> str:
    """What Temporal knows a worker process by: the id of its lease."""
    return f"podium-{process_id}"


def workflow_id(run_id: str, execution: int) -> str:
    """The id of the workflow that carries one execution of a run."""
    return f"run-{run_id}.{execution}"


def round_workflow_id(run_id: str, execution: int, round_number: int) -> str:
    """The id of the workflow that carries a later round of an execution."""
    return f"{workflow_id(run_id, execution)}.r{round_number}"


def round_workflow_ids(run_id: str, execution: int, round_number: int) -> list[str]:
    """The ids of the workflows in which an execution may be carrying out a round, the likelier one first.

    A later round has a workflow of its own, unless the execution began with it.
    """
    own = workflow_id(run_id, execution)
    return [round_workflow_id(run_id, execution, round_number), own] if round_number else [own]


def run_of_workflow(workflow: str) -> tuple[str, int] | None:
    """The run id and execution that a workflow id stands for; None if it is none of ours."""
    run_id, _, execution = _ROUND_PART.sub("", workflow).removeprefix("run-").rpartition(".")
    with suppress(ValueError):
        return str(UUID(run_id)), int(execution)
    return None


def attempt_id(run_id: UUID, *, round: int, position: int | None, execution: int, dispatch: int, attempt: int) -> UUID:  # noqa: A002  # `round` is the field's word
    """The id of one attempt, made before its transaction, so that repeating the transaction cannot make a second one.

    ``position`` is None for a planning call. ``attempt`` is Temporal's number for the activity's try, from 1.
    """
    place = "plan" if position is None else str(position)
    return uuid5(run_id, f"attempt/{round}/{place}/{execution}/{dispatch}/{attempt}")


def plan_activity_id(round_number: int, dispatch: int) -> str:
    """The id of a planning activity, from its place."""
    return f"plan-{round_number}-{dispatch}"


def step_activity_id(round_number: int, position: int, dispatch: int) -> str:
    """The id of a step's activity, from its place."""
    return f"step-{round_number}-{position}-{dispatch}"


def child_activity_id(what: str, round_number: int, position: int, dispatch: int) -> str:
    """The id of an activity that begins or finishes a step's own run."""
    return f"child-{what}-{round_number}-{position}-{dispatch}"


def child_run_id(parent_id: UUID, *, round: int, position: int) -> UUID:  # noqa: A002  # `round` is the field's word
    """The id of the run that a step of another run is delegated to: the same however often it is asked for."""
    return uuid5(parent_id, f"child/{round}/{position}")


@dataclass(frozen=True, slots=True)
class StepSpec:
    """What the workflow knows of a step: its position, what it may read, its queue and how long a call may take.

    A step of the kind ``conductor`` is no call: it is delegated to a run of its own, in a child workflow.
    """

    position: int
    reads: list[int]
    queue: str
    call_s: float
    kind: StepKind = "model"


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Input of the workflow. ``steps`` is None when the Conductor still has to plan on ``plan_queue``.

    ``skipped`` are positions that the policy for unread steps leaves out, ``done`` those with an accepted output,
    ``deadline_s`` the seconds that the run had left when this execution was asked for.
    """

    run_id: str
    execution: int
    round: int = 0
    steps: list[StepSpec] | None = None
    skipped: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    deadline_s: float | None = None
    plan_queue: str = ""
    plan_call_s: float = 0.0
    # The workflow's own task queue, see `home_queue`.
    queue: str = WORKFLOW_QUEUE
    # How many rounds the run may have. A later round is a workflow of its own (`is_round`) and does not end the run.
    rounds_max: int = 1
    is_round: bool = False


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of the workflow: the state in which the run (or the round) ended and our code for the reason.

    A round that keeps the answer of the one before it has succeeded with the code ``kept``.
    """

    state: EndState
    code: str | None = None


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One planning call. ``dispatch`` counts the calls that the workflow asked for, from 0."""

    run_id: str
    execution: int
    round: int
    dispatch: int


@dataclass(frozen=True, slots=True)
class PlanReceipt:
    """What became of a planning call; ``repair`` asks the workflow to plan again with the errors on record."""

    outcome: PlanOutcome
    code: str | None = None
    steps: list[StepSpec] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One dispatch of a step. ``ends_run`` asks the closing transaction to end the run as well."""

    run_id: str
    execution: int
    round: int
    position: int
    dispatch: int
    ends_run: bool


@dataclass(frozen=True, slots=True)
class StepReceipt:
    """What became of a step: identifiers and numbers; ``cost_usd`` is a decimal string or None when unknown."""

    outcome: Outcome
    code: str | None = None
    attempt_id: str | None = None
    artifact_id: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: str | None = None
    run_ended: bool = False
    # With `moved`: where the step goes on.
    step: StepSpec | None = None
    # With `succeeded`: the round's steps without an output, by the same transaction; None where it was not read.
    left: list[int] | None = None


@dataclass(frozen=True, slots=True)
class ChildRequest:
    """Asks for the run that a step is delegated to."""

    run_id: str
    execution: int
    round: int
    position: int
    dispatch: int


@dataclass(frozen=True, slots=True)
class ChildReceipt:
    """What may be done: with ``begun`` the child workflow that ``request`` describes is to be started."""

    outcome: ChildOutcome
    code: str | None = None
    request: RunRequest | None = None
    step: StepSpec | None = None


@dataclass(frozen=True, slots=True)
class ChildEndRequest:
    """Asks to take over what became of a step's own run. ``ends_run`` is as in StepRequest.

    ``child_closed`` says that the child's workflow has ended before the eyes of the parent's.
    """

    run_id: str
    execution: int
    round: int
    position: int
    child_execution: int
    ends_run: bool
    child_closed: bool = False


@dataclass(frozen=True, slots=True)
class SettleRequest:
    """Asks to end a run."""

    run_id: str
    execution: int
    state: EndState
    code: str | None = None


@dataclass(frozen=True, slots=True)
class SettleReceipt:
    """The state the run is in after settling; it may differ from what was asked if it had ended before."""

    state: str
    code: str | None = None


@dataclass(frozen=True, slots=True)
class WaitRequest:
    """Asks to record that a step waits, and for what."""

    run_id: str
    execution: int
    round: int
    position: int | None
    code: str


@activity.defn(name="plan_task")
async def plan_task(request: PlanRequest) -> PlanReceipt:
    """Calls the Conductor once and stores its plan, or what was wrong with it."""
    raise NotImplementedError


@activity.defn(name="perform_step")
async def perform_step(request: StepRequest) -> StepReceipt:
    """Opens an attempt, calls the model, closes the attempt."""
    raise NotImplementedError


@activity.defn(name="begin_child")
async def begin_child(request: ChildRequest) -> ChildReceipt:
    """Creates, or opens again, the run that a step is delegated to."""
    raise NotImplementedError


@activity.defn(name="finish_child")
async def finish_child(request: ChildEndRequest) -> StepReceipt:
    """Takes the answer of a step's own run over as the step's output."""
    raise NotImplementedError


@activity.defn(name="settle_run")
async def settle_run(request: SettleRequest) -> SettleReceipt:
    """Ends a run: open attempts, steps, state. Idempotent."""
    raise NotImplementedError


@activity.defn(name="note_waiting")
async def note_waiting(request: WaitRequest) -> None:
    """Records that a step, or the planning, waits for a worker."""
    raise NotImplementedError
