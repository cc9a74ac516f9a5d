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

import rfc8785

from activities.inert import make_inert
from engine.store.inputs import FailedPlanning, PlanInputs, StepInputs, VisibleStep
from worker_pools.adapters import Message
from worker_pools.pool import Pool
from worker_pools.pool.template import fill, sections

RENDERER_VERSION = 1
FINAL_NOTE = "Your answer is the answer to the whole task: write it so that it stands on its own."


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages for a model, the canonical manifest, and the rendered bytes that the commitment is made over."""

    messages: tuple[Message, ...]
    manifest: bytes
    rendered: bytes


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
    }
    return _prompt(_messages(pool.templates.worker, values), manifest)


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
    }
    if inputs.previous is not None:
        manifest["previous"] = {
            "plan": str(inputs.previous.plan.artifact_id),
            "answer": str(inputs.previous.answer.artifact_id),
        }
    return _prompt(messages, manifest)


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


def _prompt(messages: Sequence[Message], manifest: dict[str, Any]) -> Prompt:
    shown = [{"content": message.content, "role": message.role} for message in messages]
    # RFC 8785 as well: with these keys and texts only, the standard library writes the same bytes, 50 times as fast.
    rendered = json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode()
    return Prompt(tuple(messages), rfc8785.dumps(manifest), rendered)
