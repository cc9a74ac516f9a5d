"""From a text to a plan, or to the list of everything that is wrong with it. Must never raise, and never guess.

Which form a text is in is decided by what stands in it. The last block that is meant as a plan counts; if it is
incomplete or wrong, the text is rejected and no earlier block is run instead.
"""

from __future__ import annotations

import re
from typing import Final

from engine.plan.blocks import BlockFinder, Found
from engine.plan.candidate import Block
from engine.plan.findings import Fault, Findings, report
from engine.plan.limits import STEPS_SCANNED_MAX, TEXT_BYTES_MAX
from engine.plan.lists import LIST_NAMES, read_lists
from engine.plan.nodes import Mapping, Node, Word
from engine.plan.objects import read_list_object, read_steps
from engine.plan.plan import Form, ParseOptions, ParseResult, Plan, PlanNote, Step
from engine.plan.surroundings import check_surroundings
from engine.plan.torn import text_cut_at, torn_from
from engine.plan.workers import WorkerNames
from engine.plan.yaml_steps import YamlReader

_CUT_REASONS: Final = frozenset({"length", "max_tokens", "max_output_tokens", "model_length", "token_limit"})
_YAML_MARKS: Final = re.compile(r"(?:^|[\s\[{,])[&*][A-Za-z0-9_-]+")
_BLANK: Final = " \t\r\n\f\v\ufeff"
_COMMENT_HINT: Final = "a plan in a comment is never run: take the comment marks away"
_FORMS_HINT: Final = "a plan is three lists model_id, subtasks, access_list, or a JSON or YAML list of step objects"


def parse_plan(text: str, options: ParseOptions) -> ParseResult:
    """Read a plan from a model's reply or a file.

    Any text is answered with a plan or with errors; each error has a stable code (`engine.plan.codes`) and, where there
    is one, a place. A text of more than 1 MiB in UTF-8 is refused unread. A byte order mark at the start is skipped and
    not counted.
    """
    size_bytes = _size_bytes(text)
    if size_bytes > TEXT_BYTES_MAX:
        said = f"the text has {size_bytes} bytes; the limit is {TEXT_BYTES_MAX} bytes"
        return _invalid(text, None, [Fault("text-too-large", None, None, said, "ask for a shorter plan")])
    text = text.removeprefix("\ufeff")
    if not text.strip(_BLANK):
        return _invalid(text, None, [Fault("empty-text", None, None, "the text is empty", _FORMS_HINT)])
    cut_hint = _cut_hint(options)
    found = BlockFinder(text, lenient=options.lenient, cut_hint=cut_hint).find()
    if found.too_complex is not None:
        return _invalid(text, None, [found.too_complex])
    if found.reasoning_open_at is not None:
        said = "the reasoning was opened here and never closed; no plan comes after it"
        fault = Fault("reasoning-not-closed", found.reasoning_open_at, None, said, cut_hint)
        unsure = [fault for block in found.blocks if block.unsure for fault in block.findings.faults]
        return _invalid(text, None, [*unsure, fault])
    if not found.blocks:
        return _invalid(text, None, _no_plan(text, found, options, cut_hint))
    return _read_last(text, found, options, cut_hint)


def _read_last(text: str, found: Found, options: ParseOptions, cut_hint: str) -> ParseResult:
    blocks = found.blocks
    workers = WorkerNames(options.workers)
    unsure = next((index for index, block in enumerate(blocks) if block.unsure), None)
    if unsure is not None and unsure < len(blocks) - 1:
        # Strings may begin and end elsewhere than it seems, so what follows cannot be told from their inside.
        faults = [fault for block in blocks[unsure:] for fault in block.findings.faults]
        return _invalid(text, blocks[unsure].form, faults)
    block = blocks[-1]
    findings = block.findings
    _check_whole(text, blocks, workers, findings)
    steps = _read_block(block, workers, options, cut_hint)
    check_surroundings(text, found, block, findings)
    if steps is not None and not findings.faults:
        _check_count(block, steps, findings, options)
    if _was_cut(options) and not findings.faults:
        if block.form == "steps-yaml" and not block.sure_end:
            said = "the reply was cut at the token limit, and YAML does not show where it should have ended"
            findings.error("truncated", said, at=block.end, hint=cut_hint)
        else:
            findings.note("cut-after-plan", "the reply was cut at the token limit after the plan was complete")
    if len(blocks) > 1:
        ignored = len(blocks) - 1
        findings.note(
            "earlier-block-ignored", f"{ignored} earlier plan(s) in the text were ignored; the last one counts"
        )
    if found.plan_in_comment:
        findings.note("plan-in-comment", "a plan in a comment was passed over")
    if steps is None or findings.faults or block.form is None:
        return _invalid(text, block.form, findings.faults, findings.notes)
    notes = tuple(
        sorted(dict.fromkeys(findings.notes), key=lambda note: -1 if note.position is None else note.position)
    )
    return ParseResult(Plan(steps, notes, block.form), block.form, notes, ())


def _check_whole(text: str, blocks: list[Block], workers: WorkerNames, findings: Findings) -> None:
    """Record an error if the last block may be only a part of a plan, or the text of its last step."""
    torn = torn_from(text, blocks, workers)
    if torn is not None:
        said = "other text stands between the steps, so this may be only the end of a plan"
        findings.error("plan-interrupted", said, at=torn.start, hint="write all steps together")
    cut_at = text_cut_at(text, blocks[-1])
    if cut_at is not None:
        said = "this line may belong to the instruction above it, whose indentation it lacks"
        hint = "indent all lines of the text, or put the text in quotes or the plan in a fence"
        findings.error("yaml-text-cut", said, at=cut_at, hint=hint)


def _read_block(block: Block, workers: WorkerNames, options: ParseOptions, cut_hint: str) -> tuple[Step, ...] | None:
    """The steps of a block, or None after recording what is wrong."""
    findings = block.findings
    if block.fence_open:
        findings.error("truncated", "the text ends inside the fence of a YAML plan", at=block.end, hint=cut_hint)
    if block.form == "lists":
        return _read_labelled(block, workers, findings, options, cut_hint)
    node = block.node
    if node is None:
        return None
    if block.form is None:
        said = "the plan stands inside an object with unknown keys"
        findings.error("unknown-key", said, at=block.start, hint=_FORMS_HINT)
        return None
    if block.form == "json" and isinstance(node, Mapping):
        return read_list_object(node, workers, findings)
    return read_steps(node, workers, findings)


def _read_labelled(
    block: Block, workers: WorkerNames, findings: Findings, options: ParseOptions, cut_hint: str
) -> tuple[Step, ...] | None:
    values: dict[str, Node] = {}
    for name in LIST_NAMES:
        part = block.lists.get(name)
        if part is not None and part.node is not None:
            values[name] = part.node
            continue
        values[name] = Word("", block.start, block.start, "void")
        if part is None and not any(fault.code == "truncated" for fault in findings.faults):
            code = "truncated" if _was_cut(options) else "incomplete"
            hint = (
                cut_hint if _was_cut(options) else "write all three lists together; none is taken from an earlier plan"
            )
            findings.error(code, f"the last plan has no {name}", at=block.start, field=name, hint=hint)
    return read_lists(values, workers, findings)


def _check_count(block: Block, steps: tuple[Step, ...], findings: Findings, options: ParseOptions) -> None:
    if not steps and options.round == 0:
        said = "the plan has no steps; the first round needs at least one"
        findings.error("empty-plan", said, at=block.start)
    limit = min(options.steps_max, STEPS_SCANNED_MAX)
    if len(steps) > limit:
        said = f"the plan has {len(steps)} steps; the limit is {limit}"
        findings.error("too-many-steps", said, at=block.start, hint="merge steps, or raise the pool's steps_max")


def _no_plan(text: str, found: Found, options: ParseOptions, cut_hint: str) -> list[Fault]:
    if found.reasoning_closed:
        said = "nothing that looks like a plan follows the end of the reasoning"
        code = "truncated" if _was_cut(options) else "no-plan-after-reasoning"
        hint = cut_hint if _was_cut(options) else _FORMS_HINT
        return [*found.lost_faults, Fault(code, None, None, said, hint)]
    refused = _refused_yaml(text)
    if refused:
        return refused
    if _was_cut(options):
        return [Fault("truncated", None, None, "the reply was cut before any plan", cut_hint)]
    if found.plan_in_comment:
        return [Fault("no-plan", None, None, "the text holds no plan outside of its comments", _COMMENT_HINT)]
    return [Fault("no-plan", None, None, "the text holds no plan in any known form", _FORMS_HINT)]


def _refused_yaml(text: str) -> list[Fault]:
    """What is dangerous in a text that is no plan but may be YAML: anchors, aliases and tags, never expanded."""
    if _YAML_MARKS.search(text) is None:
        return []
    findings = Findings()
    YamlReader(text, 0, len(text), findings, None).read()
    refused = ("yaml-anchor", "yaml-alias", "yaml-tag", "too-deep")
    faults = [fault for fault in findings.faults if fault.code in refused]
    return faults if any(fault.code in ("yaml-anchor", "yaml-alias") for fault in faults) else []


def _size_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _was_cut(options: ParseOptions) -> bool:
    return (options.finish_reason or "").strip().lower() in _CUT_REASONS


def _cut_hint(options: ParseOptions) -> str:
    if options.finish_reason is None and options.output_tokens is None:
        # A file: nobody knows whether a person or a model wrote it.
        return "close the quote or bracket; if a model wrote this, raise its output token limit"
    used = "" if options.output_tokens is None else f" ({options.output_tokens} tokens were used)"
    return f"nothing is closed for the model; raise the output token limit{used}"


def _invalid(text: str, form: Form | None, faults: list[Fault], notes: list[PlanNote] | None = None) -> ParseResult:
    kept = faults or [Fault("no-plan", None, None, "the text holds no plan in any known form", _FORMS_HINT)]
    return ParseResult(None, form, tuple(notes or ()), report(text, kept))
