"""What stands round the plan that was chosen. Must never let it run against a later word of whoever wrote it."""

from __future__ import annotations

from engine.plan import changes
from engine.plan.blocks import Found
from engine.plan.candidate import Block
from engine.plan.comments import blank_line_comments
from engine.plan.findings import Findings
from engine.plan.later import later_plan


def check_surroundings(text: str, found: Found, block: Block, findings: Findings) -> None:
    """Record an error where code changes the plan's lists, and where a later plan seems to stand that is not read."""
    outside = _outside(text, found, block)
    changed_at = changes.changing_statement(blank_line_comments(outside, headings=True))
    if changed_at is not None:
        said = "code stands here that would change a list of the plan"
        findings.error("list-modified", said, at=changed_at, hint=changes.HINT)
    behind = _blanks(text, 0, block.end) + outside[block.end :]
    later_at = later_plan(blank_line_comments(behind, headings=False), block.end)
    if later_at is not None:
        said = "what looks like a later plan begins here, in a form that is not read"
        hint = "write the final plan last, in one of the known forms, and no other plan behind it"
        findings.error("later-plan-unread", said, at=later_at, hint=hint)
    if found.comment_open_at is not None and found.comment_open_at < block.start:
        said = "a comment opens here and never ends; the plan stands in it"
        findings.error("comment-not-closed", said, at=found.comment_open_at, hint="close the comment, or take it away")


def _outside(text: str, found: Found, block: Block) -> str:
    """The text from the plan on with every value and comment blanked out, offsets kept."""
    values = [(part.label.start, part.end) for part in block.lists.values()] or [(block.start, block.end)]
    pieces = [" " * block.start]
    pos = block.start
    for start, end in sorted([*values, *found.hidden]):
        if end > pos:
            pieces += [text[pos : max(pos, start)], _blanks(text, max(pos, start), end)]
            pos = end
    pieces.append(text[pos:])
    return "".join(pieces)


def _blanks(text: str, start: int, end: int) -> str:
    """Blanks for a piece of the text, and a line end if the piece ends with one."""
    return " " * (end - start - 1) + ("\n" if text[end - 1] == "\n" else " ") if end > start else ""
