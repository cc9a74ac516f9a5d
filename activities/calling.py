"""Making one model call on behalf of an attempt: progress, and how it ended, as data.

Nothing here touches the record. A call ends in exactly one ``CallEnd``, also when it is cancelled from outside.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from temporalio import activity

from activities.context import ActivityContext
from activities.failures import ended_state, remedy_for, verdict_retries
from engine.errors import BugError, UnavailableError
from engine.plan.clean import clean_text
from engine.store.artifacts import ArtifactDraft, text_draft
from engine.store.attempts import Place
from engine.store.run_writer import AttemptResult
from worker_pools.adapters import CallFailed, Message, ModelCall, ModelReply, Progress
from worker_pools.adapters.verdict import judge
from worker_pools.pool import Worker
from worker_pools.prices import cost_usd

FREE = Decimal(0)
# Nobody watches a call that is over before it can be shown.
PROGRESS_AFTER_S = 0.5
# Larger texts are worked on in a thread, so that the calls of other runs are not held up.
LARGE_CHARS = 65_536
# More than tokenizers make one token of: prose has about 4 characters a token, code 3, long runs of blanks more.
CHARS_A_TOKEN_MAX = 16


@dataclass(frozen=True, slots=True)
class CallPlan:
    """A call about to be made."""

    place: Place
    attempt_id: UUID
    worker: Worker
    messages: tuple[Message, ...]
    response_schema: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CallEnd:
    """How a call ended: for the record (``result``, ``drafts``), and what to do (``retry``, ``delay``).

    ``text`` is the answer, cleaned, when there is one. ``interrupted`` says that the activity was cancelled.
    """

    result: AttemptResult
    drafts: tuple[ArtifactDraft, ...] = ()
    text: str | None = None
    raw_text: str | None = None
    retry: bool = False
    delay: timedelta | None = None
    interrupted: bool = False


async def make_call(context: ActivityContext, plan: CallPlan) -> CallEnd:
    """Calls the model once; never raises for anything that can happen to a call."""
    if plan.worker.kind == "conductor":
        raise BugError("conductor-step-called", "a step of the Conductor is a run of its own and no call")
    try:
        _refuse_hopeless(plan)
        reply = await _send(context, plan)
    except CallFailed as failure:
        return _failed(plan, failure, context.key_of(plan.worker))
    except UnavailableError:
        # The embedded model server did not start: the same as a provider that nobody reaches.
        return _failed(plan, CallFailed("connection-failed", sent=False), None)
    except asyncio.CancelledError:
        return _interrupted()
    if len(reply.text) + len(reply.reasoning) > LARGE_CHARS:
        return await asyncio.to_thread(_answered, plan, reply)
    return _answered(plan, reply)


def not_called() -> CallEnd:
    """The end of a call that was not made because the activity was cancelled just before it: it cost nothing."""
    end = _interrupted()
    return replace(end, result=replace(end.result, cost_usd=FREE))


def _refuse_hopeless(plan: CallPlan) -> None:
    """Raises CallFailed for a prompt that cannot fit the model's window, where that is known, before it is sent.

    Only what is certain is refused here; in doubt the provider decides, whose refusal costs nothing.
    """
    window = plan.worker.context_tokens
    if window is None:
        return
    chars = sum(len(message.content) for message in plan.messages)
    if chars > window * CHARS_A_TOKEN_MAX:
        told = (
            f"Not sent: a prompt of {chars:,} characters cannot fit a window of {window:,} tokens (`context_tokens`)."
        )
        raise CallFailed("context-too-long", sent=False, provider_text=told, sizes={"limit_tokens": window})


async def _send(context: ActivityContext, plan: CallPlan) -> ModelReply:
    worker = plan.worker
    base_url, api_key = None, None
    if worker.is_local:
        endpoint = await context.local_endpoint()
        base_url, api_key = endpoint.base_url, endpoint.api_key
    elif worker.api_key is not None:
        api_key = context.key_of(worker)
    adapter = await context.adapter(worker)
    place = plan.place

    def on_progress(progress: Progress) -> None:
        if progress.elapsed_s >= PROGRESS_AFTER_S:
            context.progress.report(place.run_id, place.round, place.position, progress.pieces)

    return await adapter.call(
        ModelCall(
            worker=worker,
            messages=plan.messages,
            attempt_id=str(plan.attempt_id),
            response_schema=plan.response_schema,
            api_key=api_key,
            base_url=base_url,
        ),
        on_progress,
    )


def _answered(plan: CallPlan, reply: ModelReply) -> CallEnd:
    verdict = judge(reply)
    cleaned = clean_text(reply.text)
    drafts = []
    if reply.reasoning:
        drafts.append(text_draft(plan.attempt_id, "reasoning", clean_text(reply.reasoning).text))
    if cleaned.text:
        # A text that is no answer (a refusal) is kept for the operator under another name and passed on to nobody.
        kind = "output" if verdict.failure is None else "declined_output"
        drafts.append(text_draft(plan.attempt_id, kind, cleaned.text))
    numbers = AttemptResult(
        state="succeeded",
        finish_reason=_code_like(reply.finish_reason),
        notes=tuple(
            code
            for code, applies in (
                ("nul-replaced", cleaned.nul_count),
                ("surrogate-replaced", cleaned.surrogate_count),
                ("answer-truncated", verdict.truncated),
            )
            if applies
        ),
        input_tokens=reply.input_tokens,
        output_tokens=reply.output_tokens,
        cost_usd=cost_usd(plan.worker.price, reply.input_tokens, reply.output_tokens),
        first_token_ms=_milliseconds(reply.first_token_s),
        duration_ms=_milliseconds(reply.duration_s),
        provider_request_id=reply.provider_request_id,
        provider_model=reply.provider_model,
    )
    if verdict.failure is None:
        return CallEnd(numbers, tuple(drafts), text=cleaned.text, raw_text=reply.text)
    result = replace(numbers, state=ended_state(verdict.failure), error_code=verdict.failure)
    return CallEnd(result, tuple(drafts), retry=verdict_retries(verdict.failure))


def _without_key(text: str, key: str | None) -> str:
    """What a provider said, without the key that some repeat in their complaint about it."""
    return text if key is None else text.replace(key, "[key]")


def _failed(plan: CallPlan, failure: CallFailed, key: str | None) -> CallEnd:
    remedy = remedy_for(failure, datetime.now(UTC), wait_max_s=plan.worker.retry_after_max_s)
    cost = cost_usd(plan.worker.price, failure.input_tokens, failure.output_tokens)
    drafts: tuple[ArtifactDraft, ...] = ()
    if failure.provider_text:
        said = clean_text(_without_key(failure.provider_text, key)).text
        drafts = (text_draft(plan.attempt_id, "provider_message", said),)
    result = AttemptResult(
        state=ended_state(remedy.code),
        error_code=remedy.code,
        provider_status=failure.status,
        input_tokens=failure.input_tokens,
        output_tokens=failure.output_tokens,
        cost_usd=cost if cost is not None or failure.billable else FREE,
        duration_ms=_milliseconds(failure.duration_s),
        provider_request_id=failure.provider_request_id,
        provider_model=failure.provider_model,
    )
    return CallEnd(result, drafts, retry=remedy.retry, delay=remedy.delay)


def _interrupted() -> CallEnd:
    """The activity was cancelled: the connection is closed, the provider may bill what it had begun."""
    details = activity.cancellation_details()
    if details is not None and details.cancel_requested:
        return CallEnd(AttemptResult("cancelled", "cancelled"), interrupted=True)
    if details is not None and details.worker_shutdown:
        return CallEnd(AttemptResult("unknown", "worker-shutdown"), retry=True, interrupted=True)
    return CallEnd(AttemptResult("unknown", "lease-lost"), retry=True, interrupted=True)


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _code_like(value: str | None) -> str | None:
    """A provider's word for the end of an answer, if it is a word: other columns hold codes only."""
    if value is None:
        return None
    short = value[:40]
    return short if short.replace("_", "").replace("-", "").isalnum() and short.isascii() else "other"
