"""What in a text could be a plan, and which labelled lists belong together. Must never use a list twice or lend one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from engine.plan.findings import Findings
from engine.plan.labels import Label
from engine.plan.lists import LIST_NAMES
from engine.plan.nodes import Node
from engine.plan.plan import Form

_BETWEEN_LISTS: Final = re.compile(r"[\s,;`*\"'{>-]*")

_PLAN_INSIDE: Final = re.compile(
    r"(?:model_id|subtasks|access_list)[\"'\u201d\u2019`*]*\s*[=:]|\b(?:agent|instruction)[\"']?\s*:|\bsteps[\"']?\s*:"
)


@dataclass(slots=True)
class LabelledList:
    """One labelled value of the lists form; `node` is None if it could not be read."""

    label: Label
    node: Node | None
    end: int
    findings: Findings
    unsure: bool = False


@dataclass(slots=True)
class Block:
    """One candidate for a plan. `unsure` forbids that anything after it is taken instead.

    `broken` tells that it could not be read; `sure_end` that no truncation can have shortened it.
    """

    form: Form | None
    start: int
    end: int
    findings: Findings
    node: Node | None = None
    lists: dict[str, LabelledList] = field(default_factory=dict)
    unsure: bool = False
    sure_end: bool = True
    fence_open: bool = False


def group_parts(text: str, parts: list[Block | LabelledList]) -> list[Block]:
    """Put labelled lists together into blocks; no list is ever used twice or borrowed from another block.

    A block is closed as soon as it has its three lists, and a label that it already has begins the next one. Three
    different lists that stand together, with nothing but punctuation between them, are always one block.
    """
    blocks: list[Block] = []
    pending: Block | None = None
    together = 0  # lists left of a run that belongs together
    for index, part in enumerate(parts):
        if isinstance(part, Block):
            if pending is not None:
                blocks.append(pending)
                pending = None
            blocks.append(part)
            continue
        name = part.label.name
        # What is begun goes on with the next list beside it; only behind other text may a new run begin instead.
        beside = pending is not None and _BETWEEN_LISTS.fullmatch(text, pending.end, part.label.start) is not None
        if together == 0 and not beside and _stand_together(text, parts[index : index + len(LIST_NAMES)]):
            together = len(LIST_NAMES)
            if pending is not None:
                blocks.append(pending)
                pending = None
        if pending is not None and name in pending.lists:
            blocks.append(pending)
            pending = None
        if pending is None:
            pending = Block("lists", part.label.start, part.end, Findings())
        pending.lists[name] = part
        pending.end = part.end
        pending.unsure = pending.unsure or part.unsure
        pending.findings.merge(part.findings)
        together = max(0, together - 1)
        if len(pending.lists) == len(LIST_NAMES):
            blocks.append(pending)
            pending = None
    if pending is not None:
        blocks.append(pending)
    return blocks


def mark_swallowed_plan(text: str, block: Block) -> None:
    """Distrust an incomplete block whose list holds what looks like a plan: an open quote may have swallowed it.

    What follows such a block may be the rest of a plan, which must not run as if it were the whole.
    """
    if block.form != "lists" or len(block.lists) == len(LIST_NAMES):
        return
    for name, part in block.lists.items():
        inside = part.label.start + len(part.label.exact)  # behind the label itself
        if part.node is not None and _PLAN_INSIDE.search(text, inside, part.end) is not None:
            block.unsure = True
            block.findings.error(
                "stray-text", "a text in this list holds what looks like a plan", at=part.label.start, field=name
            )


def _stand_together(text: str, parts: list[Block | LabelledList]) -> bool:
    """Whether three parts are three different lists with only punctuation between them."""
    run = [part for part in parts if isinstance(part, LabelledList)]
    if len({part.label.name for part in run}) != len(LIST_NAMES):
        return False
    return all(_BETWEEN_LISTS.fullmatch(text, left.end, right.label.start) is not None for left, right in pairwise(run))
