"""The page's section of one run: task, plans as graphs, steps with their calls and reviews, answer, all events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.evidence.graph_svg import Node, plan_svg
from engine.evidence.markup import escaped, facts, folded, table, tag, text_block
from engine.evidence.page_view import PageView
from engine.evidence.story import AttemptStory, ReviewStory, RoundStory, RunStory, StepStory
from engine.evidence.timeline import cost_words
from engine.verifier.words import SENT_BACK


def run_section(view: PageView, run_id: str) -> Iterator[str]:
    """The section, in pieces."""
    run = view.runs[run_id]
    yield f'<section id="run-{escaped(run_id)}">' + tag("h2", escaped(f"Run {run_id}"))
    yield _facts(view, run)
    if run.task is not None:
        yield tag("h3", "Task") + _text(view, run.task)
    for number in sorted(run.rounds):
        yield from _round(view, run, run.rounds[number], alone=len(run.rounds) == 1)
    answer = run.answer
    if answer is not None and run.state == "succeeded":
        yield tag("h3", "Answer") + _output(view, run_id, answer)
    yield _reasons(view, run)
    yield _events(run)
    yield "</section>\n"


def _facts(view: PageView, run: RunStory) -> str:
    created = run.created
    by = run.actor if run.on_behalf_of is None else f"{run.actor} on behalf of {run.on_behalf_of}"
    rows = [
        ("State", _state(run.state, run.reason)),
        ("Submitted", f"{escaped(run.created_at)} by {escaped(by)}"),
        ("Ended", escaped(run.ended_at or "not yet")),
        ("Pool", tag("a", escaped(run.pool[:16]), href=f"#pool-{run.pool[:16]}")),
    ]
    if "parent" in created:
        rows.append(("Made for", f"step {created['parent_step']} of run {_run_link(view, created['parent'])}"))
    source = created.get("source")
    if source:
        reused = ", ".join(str(step["step"]) for step in source["reused"]) or "no step"
        rows.append(("Fork of", f"run {_run_link(view, source['run'])}; takes over the output of {escaped(reused)}"))
    if created.get("budget"):
        rows.append(("Budget", escaped(", ".join(f"{v} {k}" for k, v in created["budget"].items() if v is not None))))
    if run.totals is not None:
        used = run.totals
        words = f"{used['attempts']} calls, {used['input_tokens']} + {used['output_tokens']} tokens, "
        unknown = f", and {used['unpriced']} calls of unknown cost" if used["unpriced"] else ""
        rows.append(("Used", escaped(words + cost_words(used["cost_usd"]) + unknown)))
    return facts(rows)


def _round(view: PageView, run: RunStory, found: RoundStory, *, alone: bool) -> Iterator[str]:
    yield tag("h3", escaped("Plan" if alone else f"Plan of round {found.number}"))
    if found.plan is None:
        yield tag("p", "There is no plan yet.")
    elif not found.steps:
        yield tag("p", "The answer of the round before was kept.")
    else:
        nodes = [Node(step.position, step.worker, step.model, step.state, step.reads) for step in found.steps]
        yield plan_svg(nodes, f"Plan of round {found.number}: {len(nodes)} steps")
    for attempt in found.planning:
        yield _attempt(view, attempt)
    for text in found.texts:
        yield folded(escaped(_kind_words(text.kind)), _text(view, text.id))
    yield _reviews(view, run, (found.number, None))
    for step in found.steps:
        yield _step(view, run, step)


def _step(view: PageView, run: RunStory, step: StepStory) -> str:
    access = step.planned["access"]
    reads = "all earlier steps" if access == "all" else ", ".join(f"step {number}" for number in access) or "nothing"
    if step.planned.get("round_before"):
        reads += " and the round before"
    given = "" if step.worker == step.planned["worker"] else f" (the plan named {step.planned['worker']})"
    rows = [
        ("State", _state(step.state, step.reason)),
        ("Worker", escaped(f"{step.worker}{given}, model {step.model or 'the Conductor'}")),
        ("May read", escaped(reads)),
    ]
    if step.child is not None:
        rows.append(("Delegated to", f"run {_run_link(view, step.child)}"))
    parts = [tag("h4", escaped(f"Step {step.position}")), facts(rows)]
    if step.subtask is not None:
        parts += ["Subtask", _text(view, step.subtask)]
    parts += [_attempt(view, attempt) for attempt in step.attempts]
    if step.accepted is not None:
        parts += [tag("h4", escaped(f"Output of step {step.position}")), _output(view, run.id, step)]
    parts.append(_reviews(view, run, (step.round, step.position)))
    return tag("div", *parts, class_="box", id=f"step-{run.id}-{step.round}-{step.position}")


def _output(view: PageView, own: str, step: StepStory) -> str:
    if step.accepted is None:
        return tag("p", "not there")
    artifact = view.output_of(step.accepted)
    readers = [
        f"{attempt.sent['worker']} ({attempt.sent['model']}) in {_place_words(attempt.place)}"
        + ("" if run_id == own else f" of run {run_id}")
        for run_id, attempt in view.shown_to.get(artifact, [])
    ]
    for run in view.runs.values():
        quoting = [child for child, shown in run.delegated.items() if artifact in shown]
        readers += [f"the models of run {child}, whose task quotes it" for child in quoting]
        readers += [f"{who} (podium {command})" for _, who, command, read in run.reads if artifact in read]
    seen = "; ".join(dict.fromkeys(readers)) or "nobody, as far as the runs of this bundle say"
    return _text(view, artifact) + tag("p", tag("b", "Shown to: "), escaped(seen), class_="quiet")


def _place_words(place: tuple[int, int | None]) -> str:
    what = "planning" if place[1] is None else f"step {place[1]}"
    return f"{what} of round {place[0]}" if place[0] else what


def _attempt(view: PageView, attempt: AttemptStory) -> str:
    sent, closed = attempt.sent, attempt.closed
    rows = [
        ("Sent", f"{escaped(attempt.sent_at)} to {escaped(sent['worker'])}, model {escaped(sent['model'])}"),
    ]
    if closed is not None:
        tokens = [closed["input_tokens"], closed["output_tokens"]]
        said = ["? tokens" if count is None else f"{count:,}" for count in tokens]
        duration = closed.get("duration_ms")
        took = "" if duration is None else f", {duration:,} ms"
        rows += [
            ("Ended", escaped(f"{attempt.closed_at}{took}")),
            ("Used", escaped(f"{said[0]} tokens in, {said[1]} out, {cost_words(closed['cost_usd'])}")),
        ]
        rows += _provider_rows(sent["model"], closed)
        if closed["notes"]:
            rows.append(("Notes", escaped(", ".join(closed["notes"]))))
    prompt = view.prompt(attempt)
    if prompt.messages is None:
        shown = tag("p", escaped(f"The prompt cannot be shown: {prompt.why}."), class_="warn")
    else:
        badge = "equal to what was committed to before the call" if prompt.proven else prompt.why
        body = [tag("b", escaped(role)) + text_block(text) for role, text in prompt.messages]
        summary = "exact prompt: " + tag("span", escaped(badge), class_="ok" if prompt.proven else "bad")
        shown = folded(summary, *body)
    texts = [
        folded(escaped(_kind_words(text.kind)), _text(view, text.id))
        for text in attempt.texts
        if not (text.kind == "output" and closed is not None and closed["accepted"])
    ]
    state = _state(attempt.state, None if closed is None else closed["code"])
    summary = escaped(f"Attempt {sent['number']} of {_place_words(attempt.place)}: ") + state
    return folded(summary, facts(rows), shown, *texts, is_open=True)


def _provider_rows(asked: str, closed: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the provider says of the call; entries of older versions do not tell."""
    model, request = closed.get("provider_model"), closed.get("provider_request_id")
    if model is not None:
        # `openai/gpt-4o` is how litellm asks OpenAI for `gpt-4o`.
        same = asked == model or asked.endswith(f"/{model}")
        note = "" if same else " " + tag("span", "not the name that was asked for", class_="warn")
        yield "Answered by", escaped(model) + note
    if request is not None:
        yield "Provider's request", escaped(request)


def _reviews(view: PageView, run: RunStory, place: tuple[int, int | None]) -> str:
    return "".join(_review(view, review) for review in run.reviews.values() if review.place == place)


def _review(view: PageView, review: ReviewStory) -> str:
    asked = review.requested
    rows = []
    for number, (type_, at, actor, data) in enumerate(review.events):
        if type_ == "review.requested":
            continue
        words = _review_words(review, number)
        said = [_text(view, row["artifact"]) for row in data.get("artifacts", []) if isinstance(row, dict)]
        rows.append(
            [
                escaped(at),
                escaped(str(data.get("person", actor))),
                words + "".join(said),
            ]
        )
    need = f"{asked.get('approvals', 1)} approval(s)" + (", four eyes" if asked.get("four_eyes") else "")
    head = escaped(f"Review ({asked.get('gate')}), {need}: ") + _state(review.outcome or review.state, None)
    return tag("div", tag("h4", head), table(["when", "who", "what"], rows))


def _review_words(review: ReviewStory, number: int) -> str:
    """What an event of a review is; an approval by somebody to whom it was not displayed before is marked."""
    type_, _, _, data = review.events[number]
    if type_ == "review.closed":
        return escaped(review.outcome or str(data["state"]))
    if type_ != "review.decided":
        return escaped(type_.removeprefix("review."))
    decision = data.get("decision")
    verb = SENT_BACK if decision == "reject" and review.outcome == SENT_BACK else decision
    words = escaped(f"{verb}, meaning {data.get('meaning')}")
    if decision != "approve" or review.was_displayed_to(str(data.get("person")), number):
        return words
    return words + " " + tag("span", "not displayed to them before", class_="warn")


def _reasons(view: PageView, run: RunStory) -> str:
    if not run.reasons:
        return ""
    parts = [escaped(type_.replace(".", " ").replace("_", " ")) + _text(view, text.id) for type_, text in run.reasons]
    return tag("h3", "What people wrote with their orders") + "".join(parts)


def _events(run: RunStory) -> str:
    rows = [[str(line.seq), escaped(line.at), escaped(line.who), escaped(line.text)] for line in run.lines]
    return tag("h3", "All events") + folded(
        escaped(f"{len(rows)} entries of the ledger"), table(["", "when (UTC)", "who", "what"], rows)
    )


def _text(view: PageView, artifact: str) -> str:
    found = view.text(artifact)
    if found.text is None:
        words = f"{_kind_words(found.kind) or 'a text'}, {found.size:,} bytes: {found.missing_words}"
        return tag("p", escaped(words), class_="warn")
    more = tag("p", escaped(f"Cut here; all of it is in artifacts/{found.id}."), class_="warn") if found.cut else ""
    return text_block(found.text) + more


def _kind_words(kind: str) -> str:
    return kind.replace("_", " ")


def _state(state: str, reason: str | None) -> str:
    shade = {"succeeded": "ok", "reused": "ok", "approved": "ok", "failed": "bad", "rejected": "bad"}
    words = state if not reason else f"{state} ({reason})"
    return tag("span", escaped(words), class_=shade.get(state, "warn"))


def _run_link(view: PageView, run_id: str) -> str:
    return tag("a", escaped(run_id), href=f"#run-{run_id}") if run_id in view.runs else escaped(run_id)
