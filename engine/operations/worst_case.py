"""What the steps of a plan may cost at most, before any is called. Must never take an unknown price for none.

An estimate on the safe side: texts that exist are counted a token a byte, as `worker_pools.prices` does; answers that
do not exist yet are taken to be as long as their worker may write.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from activities.inert import make_inert
from activities.prompts import FINAL_NOTE
from engine.plan import Step
from worker_pools.pool import Pool, Worker
from worker_pools.prices import worst_case_usd

# The tags around what one visible step was asked and has answered, with their nonces.
BLOCK_BYTES: Final = 256
# Tokens have four to five bytes in English and fewer in most other writing. A reader's own tokenizer could need more
# tokens for the same text than its writer's did; with a token a byte, eight bytes leave room for eight times as many.
BYTES_A_TOKEN: Final = 8


@dataclass(frozen=True, slots=True)
class Bound:
    """The most that a step may cost in US dollars: with one call, and with every try it has. None: unknown."""

    once_usd: Decimal | None
    worst_usd: Decimal | None


@dataclass(frozen=True, slots=True)
class PlannedCalls:
    """The steps of a plan that are going to run, and the outputs that exist of the others, by position."""

    task: str
    steps: Sequence[Step]
    runs: Collection[int]
    outputs: Mapping[int, str]


def bounds(pool: Pool, calls: PlannedCalls) -> dict[int, Bound]:
    """The bounds of all steps that run, by position."""
    return {position: _bound(pool, calls, position) for position in sorted(calls.runs)}


def total(parts: Collection[Decimal | None]) -> Decimal | None:
    """The sum; unknown as soon as one part is."""
    known = [part for part in parts if part is not None]
    return sum(known, Decimal(0)) if len(known) == len(parts) else None


def candidates(pool: Pool, worker: str) -> list[Worker]:
    """The workers that may get a step of this one, itself first."""
    first = pool.worker(worker)
    substitutes = first.fallbacks if pool.policy.on_failed_step == "fallback" else ()
    return [first, *(pool.worker(name) for name in substitutes)]


def _bound(pool: Pool, calls: PlannedCalls, position: int) -> Bound:
    prompt_bytes = _prompt_bytes(pool, calls, position)
    workers = candidates(pool, calls.steps[position].worker)
    once = [_call_usd(worker, prompt_bytes) for worker in workers]
    tries = [None if usd is None else usd * worker.attempts_max for worker, usd in zip(workers, once, strict=True)]
    return Bound(once_usd=once[0], worst_usd=total(tries))


def _call_usd(worker: Worker, prompt_bytes: int | None) -> Decimal | None:
    if worker.kind == "conductor":
        # It plans a run of its own; what that calls nobody knows yet.
        return None
    limits = [limit for limit in (prompt_bytes, worker.context_tokens) if limit is not None]
    return worst_case_usd(worker.price, min(limits), worker.output_tokens_max) if limits else None


def _prompt_bytes(pool: Pool, calls: PlannedCalls, position: int) -> int | None:
    """The most bytes that a step's prompt may have; None if it reads an answer of unknown length."""
    step = calls.steps[position]
    parts: list[int | None] = [len(pool.templates.worker.encode()), _size(calls.task), _size(step.subtask)]
    if position == len(calls.steps) - 1:
        parts.append(_size(FINAL_NOTE))
    for earlier in step.visible():
        if earlier in calls.runs:
            parts += [BLOCK_BYTES, _size(calls.steps[earlier].subtask), _answer_bytes(pool, calls.steps[earlier])]
        elif earlier in calls.outputs:
            parts += [BLOCK_BYTES, _size(calls.steps[earlier].subtask), _size(calls.outputs[earlier])]
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _answer_bytes(pool: Pool, step: Step) -> int | None:
    workers = candidates(pool, step.worker)
    if any(worker.kind == "conductor" for worker in workers):
        return None
    return max(worker.output_tokens_max for worker in workers) * BYTES_A_TOKEN


def _size(text: str) -> int:
    # Look-alikes in the place of forged marks are longer than what they replace.
    return len(make_inert(text).encode())
