"""Rendering prompts, and the manifests from which they can be rendered again.

A manifest names the template, the renderer's version, the nonce and the artifacts in order; it holds no text. Each
visible step has one block that is identified by its position, not by its model, so two steps of one model differ.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from uuid import UUID

import rfc8785

from activities.inert import make_inert
from engine.store.inputs import FailedPlanning, PlanInputs, StepInputs, VisibleStep
from engine.store.sent_back import SentBack
from worker_pools.adapters import Message
from worker_pools.adapters.base import request_parameters
from worker_pools.pool import Pool, Worker
from worker_pools.pool.template import fill, sections

# Which bytes a manifest stands for. What reviewers send back made new prompts possible (`sent_back` in the manifest; a
# renderer that does not know it refuses it) and left the others as they were, but where a text forges one of its tags.
RENDERER_VERSION = 1
FINAL_NOTE = "Your answer is the answer to the whole task: write it so that it stands on its own."
SENT_BACK_NOTE = (
    "A reviewer has read your earlier answer and sent it back with the comment above. Do the subtask again, from the "
    "start, and heed the comment. Do not mention the review."
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages for a model, the canonical manifest, and the rendered bytes that the commitment is made over."""

    messages: tuple[Message, ...]
    manifest: bytes
    rendered: bytes
    # Every artifact that it is made of, in the manifest's order.
    shown: tuple[UUID, ...]


def new_nonce() -> str:
    """Sixteen random hexadecimal digits: a text that was written before cannot hold them."""
    return secrets.token_hex(8)


def input_chars(inputs: StepInputs | PlanInputs) -> int:
    """How long the texts are that a prompt is made of, in code points."""
    parts = [inputs.task.text]
    if isinstance(inputs, PlanInputs):
        parts += (failed.plan_text.text for failed in inputs.failed[-1:])
        if inputs.previous is not None:
            parts += [inputs.previous.plan.text, inputs.previous.answer.text]
    else:
        parts += [inputs.subtask.text, *chain.from_iterable((s.subtask.text, s.output.text) for s in inputs.visible)]
        parts += chain.from_iterable((one.answer, one.comment) for one in inputs.sent_back)
    return sum(map(len, parts))


def render_step(pool: Pool, inputs: StepInputs, nonce: str) -> Prompt:
    """The prompt of a step: the task, a block for each visible step, one instruction block."""
    values = {
        "task": make_inert(inputs.task.text),
        "steps": "\n".join(_step_block(step, nonce) for step in inputs.visible),
        "subtask": make_inert(inputs.subtask.text),
        "final": FINAL_NOTE if inputs.is_last else "",
        "nonce": nonce,
    }
    manifest = {
        "version": 1,
        "renderer": RENDERER_VERSION,
        "kind": "step",
        "pool": inputs.pool_digest,
        "nonce": nonce,
        "task": str(inputs.task.artifact_id),
        "steps": [
            {
                "step": step.position,
                "asked": str(step.subtask.artifact_id),
                "answer": str(step.output.artifact_id),
                **({} if step.earlier_round is None else {"round": step.earlier_round}),
            }
            for step in inputs.visible
        ],
        "subtask": str(inputs.subtask.artifact_id),
        "final": inputs.is_last,
        "parameters": _parameters(pool.worker(inputs.worker)),
    }
    seen = ((step.subtask.artifact_id, step.output.artifact_id) for step in inputs.visible)
    quoted = (inputs.task.artifact_id, *chain.from_iterable(seen), inputs.subtask.artifact_id)
    messages = _messages(pool.templates.worker, values)
    if inputs.sent_back:
        manifest["sent_back"] = [
            {"answer": str(one.answer_id), "comment": str(one.comment_id)} for one in inputs.sent_back
        ]
        quoted += tuple(chain.from_iterable((one.answer_id, one.comment_id) for one in inputs.sent_back))
        # Behind the user's own template, which need not know of reviews.
        blocks = [messages[-1].content, *(_sent_back_block(one, nonce) for one in inputs.sent_back), SENT_BACK_NOTE]
        messages = (*messages[:-1], Message(messages[-1].role, "\n\n".join(blocks)))
    return _prompt(messages, manifest, quoted)


def render_plan_request(pool: Pool, inputs: PlanInputs, nonce: str) -> Prompt:
    """The prompt of a planning call.

    In a later round the finished one follows; after invalid plans it ends with the last one and what is wrong with it.
    """
    usable = set(usable_workers(pool, inputs.depth))
    values = {
        "task": make_inert(inputs.task.text),
        "workers": "\n".join(
            # The number stays, so that it means the same everywhere; what may not be chosen is not shown.
            f"{number}: {worker.name} - {worker.description}"
            for number, worker in enumerate(pool.workers)
            if number in usable
        ),
        "steps_max": str(pool.policy.steps_max),
        "nonce": nonce,
    }
    messages = _messages(pool.templates.conductor, values)
    more: list[Message] = []
    if inputs.previous is not None:
        shown = {"plan": make_inert(inputs.previous.plan.text), "answer": make_inert(inputs.previous.answer.text)}
        more += _messages(pool.templates.revise, shown)
    if inputs.failed:
        last = inputs.failed[-1]
        more += _messages(pool.templates.repair, {"plan": make_inert(last.plan_text.text), "errors": _errors(last)})
    if more:
        # One user message, not two in a row: some endpoints refuse a repeated role.
        joined = "\n\n".join([messages[-1].content, *(message.content for message in more)])
        messages = (*messages[:-1], Message("user", joined))
    manifest: dict[str, Any] = {
        "version": 1,
        "renderer": RENDERER_VERSION,
        "kind": "plan",
        "pool": inputs.pool_digest,
        "nonce": nonce,
        "task": str(inputs.task.artifact_id),
        "repairs": [str(failed.plan_text.artifact_id) for failed in inputs.failed[-1:]],
        "depth": inputs.depth,
        "parameters": _parameters(pool.conductor),
    }
    quoted = [inputs.task.artifact_id]
    if inputs.previous is not None:
        manifest["previous"] = {
            "plan": str(inputs.previous.plan.artifact_id),
            "answer": str(inputs.previous.answer.artifact_id),
        }
        quoted += [inputs.previous.plan.artifact_id, inputs.previous.answer.artifact_id]
    for failed in inputs.failed[-1:]:
        quoted += [failed.plan_text.artifact_id, failed.remarks.artifact_id]
    return _prompt(messages, manifest, quoted)


def usable_workers(pool: Pool, depth: int) -> list[int]:
    """The numbers of the workers that a plan at this depth may name: the Conductor itself only above the limit."""
    return [
        number
        for number, worker in enumerate(pool.workers)
        if worker.kind != "conductor" or depth < pool.policy.depth_max
    ]


def _step_block(step: VisibleStep, nonce: str) -> str:
    earlier = "" if step.earlier_round is None else f' round="{step.earlier_round}"'
    return (
        f'<step-{nonce}{earlier} position="{step.position}">\n'
        f"<asked-{nonce}>\n{make_inert(step.subtask.text)}\n</asked-{nonce}>\n"
        f"<answer-{nonce}>\n{make_inert(step.output.text)}\n</answer-{nonce}>\n"
        f"</step-{nonce}>"
    )


def _sent_back_block(one: SentBack, nonce: str) -> str:
    return (
        f"<earlier-answer-{nonce}>\n{make_inert(one.answer)}\n</earlier-answer-{nonce}>\n"
        f"<reviewer-comment-{nonce}>\n{make_inert(one.comment)}\n</reviewer-comment-{nonce}>"
    )


def _errors(failed: FailedPlanning) -> str:
    lines = []
    for error in json.loads(failed.remarks.text)["errors"]:
        where = f"line {error['line']}, column {error['column']}: " if error["line"] else ""
        hint = f" ({error['hint']})" if error["hint"] else ""
        lines.append(f"- {error['field'] or 'plan'}: {where}{make_inert(error['text'])}{hint}")
    return "\n".join(lines)


def _messages(template: str, values: dict[str, str]) -> tuple[Message, ...]:
    # A prompt that ends in blanks is refused by some providers, so nothing ends in any.
    return tuple(Message(section.role, fill(section.text, values).strip()) for section in sections(template))


def _parameters(model: Worker) -> dict[str, Any] | None:
    """What is sent beside the messages; a step of the Conductor sends nothing itself."""
    return request_parameters(model) if model.kind == "model" else None


def _prompt(messages: Sequence[Message], manifest: dict[str, Any], quoted: Sequence[UUID]) -> Prompt:
    shown = [{"content": message.content, "role": message.role} for message in messages]
    # RFC 8785 as well: with these keys and texts only, the standard library writes the same bytes, 50 times as fast.
    rendered = json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode()
    return Prompt(tuple(messages), rfc8785.dumps(manifest), rendered, tuple(quoted))
