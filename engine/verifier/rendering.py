"""Prompts rendered again from their manifests, by the engine's renderer version 1, and compared with commitments. Pure.

A manifest names the pool, a nonce and artifacts in order; with the pool's templates and the artifacts' texts this gives
the exact bytes that the engine committed to before it called the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.verifier.faults import InvalidError
from engine.verifier.inert import make_inert
from engine.verifier.pools import Pool
from engine.verifier.shapes import fields, is_any, is_count, is_flag, is_hash, is_id, is_text, list_of, one_of, optional

RENDERER_VERSION: Final = 1
FINAL_NOTE: Final = "Your answer is the answer to the whole task: write it so that it stands on its own."
SENT_BACK_NOTE: Final = (
    "A reviewer has read your earlier answer and sent it back with the comment above. Do the subtask again, from the "
    "start, and heed the comment. Do not mention the review."
)
_PLACE = re.compile(r"\{\{([a-z_]+)\}\}")
_SECTION = re.compile(r"^=== (system|user) ===[ \t]*\r?$", re.MULTILINE)

_COMMON = {
    "version": is_count,
    "renderer": is_count,
    "pool": is_hash,
    "nonce": is_text,
    "task": is_id,
}
_STEP = fields(
    {
        **_COMMON,
        "kind": one_of("step"),
        "steps": list_of(fields({"step": is_count, "asked": is_id, "answer": is_id}, {"round": is_count})),
        "subtask": is_id,
        "final": is_flag,
    },
    {"sent_back": list_of(fields({"answer": is_id, "comment": is_id})), "parameters": is_any},
)
_PLAN = fields(
    {**_COMMON, "kind": one_of("plan"), "repairs": list_of(is_id)},
    {"depth": is_count, "previous": optional(fields({"plan": is_id, "answer": is_id})), "parameters": is_any},
)
_KNOWN: Final = {
    "step": {*_COMMON, "kind", "steps", "subtask", "final", "sent_back", "parameters"},
    "plan": {*_COMMON, "kind", "repairs", "depth", "previous", "parameters"},
}
_REMARKS = fields(
    {
        "errors": list_of(
            fields(
                {
                    "field": optional(is_text),
                    "line": optional(is_count),
                    "column": optional(is_count),
                    "text": is_text,
                    "hint": optional(is_text),
                }
            )
        )
    }
)


class UnknownRendererError(InvalidError):
    """The manifest is of a version that this verifier cannot render; what it names is not known either."""


class TextMissingError(InvalidError):
    """A text that the prompt is made of is redacted, erased, or not in the bundle."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A prompt's manifest. ``parts`` are the artifacts that it names, in its order."""

    kind: str
    document: Mapping[str, Any]
    parts: tuple[str, ...]

    @property
    def pool(self) -> str:
        """Digest of the pool whose templates it was rendered with."""
        return str(self.document["pool"])


def read_manifest(content: bytes) -> Manifest:
    """Reads a manifest. Raises UnknownRendererError for another version, InvalidError for what is none."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise InvalidError("the prompt's manifest cannot be read") from None
    if not isinstance(document, dict):
        raise InvalidError("the prompt's manifest cannot be read")
    kind = document.get("kind")
    versions = (document.get("version"), document.get("renderer"))
    if versions != (1, RENDERER_VERSION) or kind not in ("step", "plan") or not document.keys() <= _KNOWN[kind]:
        raise UnknownRendererError("the prompt was rendered in a way that this verifier does not know")
    if not (_STEP if kind == "step" else _PLAN)(document):
        raise InvalidError("the prompt's manifest does not have the fields of one")
    return Manifest(kind, document, tuple(_parts(document)))


def _parts(document: Mapping[str, Any]) -> list[str]:
    found: list[str] = [document["task"]]
    if document["kind"] == "step":
        for step in document["steps"]:
            found += (step["asked"], step["answer"])
        found.append(document["subtask"])
        for back in document.get("sent_back", []):
            found += (back["answer"], back["comment"])
        return found
    previous = document.get("previous")
    if previous is not None:
        found += (previous["plan"], previous["answer"])
    return [*found, *document["repairs"]]


def render(
    manifest: Manifest,
    pool: Pool,
    text: Callable[[str], str],
    remarks: Callable[[str], str],
    *,
    is_inert: bool = False,
) -> bytes:
    """The bytes that the commitment is made over: canonical JSON of the messages.

    ``text`` gives the text of an artifact and raises TextMissingError; ``remarks`` the parser's about a
    plan's text, by that text's artifact; ``is_inert`` says that ``text`` gives inert texts
    already. Raises InvalidError for a template that cannot be filled.
    """
    shown = [
        {"content": content, "role": role}
        for role, content in messages(manifest, pool, text, remarks, is_inert=is_inert)
    ]
    try:
        return json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise InvalidError("a text of the prompt is not clean text") from None


def messages(
    manifest: Manifest,
    pool: Pool,
    text: Callable[[str], str],
    remarks: Callable[[str], str],
    *,
    is_inert: bool = False,
) -> list[tuple[str, str]]:
    """The messages of a prompt: roles and contents. Arguments as for ``render``."""

    def inert(artifact: str) -> str:
        return text(artifact) if is_inert else make_inert(text(artifact))

    if manifest.kind == "step":
        return _step_messages(manifest.document, pool, inert)
    return _plan_messages(manifest.document, pool, inert, remarks)


def _step_messages(document: Mapping[str, Any], pool: Pool, text: Callable[[str], str]) -> list[tuple[str, str]]:
    nonce = document["nonce"]
    values = {
        "task": text(document["task"]),
        "steps": "\n".join(_step_block(step, nonce, text) for step in document["steps"]),
        "subtask": text(document["subtask"]),
        "final": FINAL_NOTE if document["final"] else "",
        "nonce": nonce,
    }
    found = _filled(pool.templates["worker"], values)
    if document.get("sent_back"):
        role, content = found[-1]
        blocks = [content, *(_sent_back_block(back, nonce, text) for back in document["sent_back"]), SENT_BACK_NOTE]
        found[-1] = (role, "\n\n".join(blocks))
    return found


def _plan_messages(
    document: Mapping[str, Any], pool: Pool, text: Callable[[str], str], remarks: Callable[[str], str]
) -> list[tuple[str, str]]:
    usable = [worker.kind != "conductor" or document.get("depth", 0) < pool.depth_max for worker in pool.workers]
    values = {
        "task": text(document["task"]),
        "workers": "\n".join(
            f"{number}: {worker.name} - {worker.description}"
            for number, worker in enumerate(pool.workers)
            if usable[number]
        ),
        "steps_max": str(pool.steps_max),
        "nonce": document["nonce"],
    }
    found = _filled(pool.templates["conductor"], values)
    more: list[tuple[str, str]] = []
    previous = document.get("previous")
    if previous is not None:
        before = {"plan": text(previous["plan"]), "answer": text(previous["answer"])}
        more += _filled(pool.templates.get("revise", ""), before)
    for repair in document["repairs"]:
        failed = {"plan": text(repair), "errors": _errors(remarks(repair))}
        more += _filled(pool.templates["repair"], failed)
    if more:
        found[-1] = ("user", "\n\n".join([found[-1][1], *(content for _, content in more)]))
    return found


def _step_block(step: Mapping[str, Any], nonce: str, text: Callable[[str], str]) -> str:
    earlier = f' round="{step["round"]}"' if "round" in step else ""
    return (
        f'<step-{nonce}{earlier} position="{step["step"]}">\n'
        f"<asked-{nonce}>\n{text(step['asked'])}\n</asked-{nonce}>\n"
        f"<answer-{nonce}>\n{text(step['answer'])}\n</answer-{nonce}>\n"
        f"</step-{nonce}>"
    )


def _sent_back_block(back: Mapping[str, Any], nonce: str, text: Callable[[str], str]) -> str:
    return (
        f"<earlier-answer-{nonce}>\n{text(back['answer'])}\n</earlier-answer-{nonce}>\n"
        f"<reviewer-comment-{nonce}>\n{text(back['comment'])}\n</reviewer-comment-{nonce}>"
    )


def _errors(remarks: str) -> str:
    try:
        document = json.loads(remarks)
    except (ValueError, RecursionError):
        raise InvalidError("the remarks on a plan cannot be read") from None
    if not _REMARKS(document):
        raise InvalidError("the remarks on a plan cannot be read")
    lines = []
    for error in document["errors"]:
        where = f"line {error['line']}, column {error['column']}: " if error["line"] else ""
        hint = f" ({error['hint']})" if error["hint"] else ""
        lines.append(f"- {error['field'] or 'plan'}: {where}{make_inert(error['text'])}{hint}")
    return "\n".join(lines)


def _filled(template: str, values: Mapping[str, str]) -> list[tuple[str, str]]:
    """The messages of a template with its places filled, in one pass."""
    try:
        return [
            (role, _PLACE.sub(lambda match: values[match[1]], section).strip()) for role, section in _sections(template)
        ]
    except KeyError:
        raise InvalidError("a template of the pool has a place that does not exist") from None


def _sections(template: str) -> Sequence[tuple[str, str]]:
    marks = list(_SECTION.finditer(template))
    if not marks:
        return [("user", template.strip())]
    ends = [mark.start() for mark in marks[1:]] + [len(template)]
    return [(mark[1], template[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)]
