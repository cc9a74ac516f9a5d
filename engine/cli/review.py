"""`podium review`: what waits for people, what it is about, and their decisions.

Must never decide anything but what the reviewer names, and never for somebody else than PODIUM_ACTOR.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from engine.cli import terminal
from engine.errors import ExitCode

if TYPE_CHECKING:
    from engine.cli.session import Session
    from engine.operations.reviewing import DecisionGiven
    from engine.settings import Settings
    from engine.store.review_decisions import DecisionKind

Result = TypeVar("Result")
Command = TypeVar("Command", bound=Callable[..., Any])
LIST_MAX: Final = 10_000


@click.group()
def review() -> None:
    """Review plans, steps and answers that wait for people.

    REVIEW is a review's id, the beginning of one, or a run (its id, the beginning of one, 'last') with one open review.
    """


def _review(command: Command) -> Command:
    return click.argument("reference", metavar="REVIEW")(command)


def _json(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print what came of it as one JSON document.")(command)


def _meaning(command: Command) -> Command:
    text = "What this decision says, instead of the pool's or the gate's usual words."
    return click.option("--meaning", metavar="TEXT", help=text)(command)


def _reason(command: Command) -> Command:
    return click.option("--reason", metavar="TEXT", help="Why; it is kept on record with the decision.")(command)


@review.command("list", short_help="List the reviews that wait for somebody.")
@click.option("--all", "all_states", is_flag=True, help="Also those that are decided, expired or withdrawn.")
@click.option("--limit", type=click.IntRange(1, LIST_MAX), default=100, show_default=True, help="At most so many.")
@_json
def list_(all_states: bool, limit: int, as_json: bool) -> int:
    """List the reviews that wait for somebody, oldest first."""
    from engine.cli.render import aligned, columns, show
    from engine.cli.review_render import lines_object, list_line
    from engine.cli.session import run_async, settings_for_reading
    from engine.service import TENANT
    from engine.store.review_views import list_reviews

    settings = settings_for_reading()
    found: tuple[Any, ...] = ()
    if settings is not None:
        found = run_async(
            _with(settings, lambda session: list_reviews(session.database, TENANT, all_states=all_states, limit=limit))
        )
    if as_json:
        terminal.out_json(lines_object(found))
    elif found:
        header = ("review", "run", "what", "state", "needs", "open for")
        show(*aligned(header, [list_line(line) for line in found], columns()))
    else:
        terminal.out("no review is open" if not all_states else "there are no reviews")
    return ExitCode.OK


@review.command("show", short_help="Show what a review is about, and note that you looked.")
@_review
@_json
def show_(reference: str, as_json: bool) -> int:
    """Show REVIEW: what was asked, who decided, and everything that a reviewer has to look at.

    That it was displayed to you goes on record the first time.
    """
    from engine.cli.review_render import print_review, shown_object
    from engine.cli.session import run_async, settings_for_run
    from engine.operations.reviewing import resolve_review, show_review

    settings = settings_for_run()

    async def look(session: Session) -> Any:
        own = await resolve_review(session.database, reference)
        return await show_review(session.database, own, settings.actor_id, settings.on_behalf_of)

    shown = run_async(_with(settings, look))
    if as_json:
        terminal.out_json(shown_object(shown))
        return ExitCode.OK
    print_review(shown)
    if shown.snapshot.line.state == "open":
        own = shown.snapshot.line.id
        terminal.err(f"hint: `podium review approve {own}` or `podium review reject {own} --reason TEXT`")
    return ExitCode.OK


@review.command(short_help="Approve what a review is about.")
@_review
@_meaning
@_reason
@_json
def approve(reference: str, meaning: str | None, reason: str | None, as_json: bool) -> int:
    """Approve REVIEW, in your own name: exactly what it displays now, and nothing else."""
    return _decide("approve", reference, meaning, reason, as_json=as_json)


@review.command(short_help="Reject what a review is about, or send it back.")
@_review
@click.option("--send-back", is_flag=True, help="Let the step be done again, with your reason in its prompt.")
@_meaning
@_reason
@_json
def reject(reference: str, send_back: bool, meaning: str | None, reason: str | None, as_json: bool) -> int:
    """Reject REVIEW; what waits for it fails, or does what the pool's `on_reject` says.

    With --send-back the step is done again, and the reason becomes part of the new prompt.
    """
    return _decide("reject", reference, meaning, reason, send_back=send_back, as_json=as_json)


@review.command(short_help="Break the glass: let a run go on, and force a later review.")
@_review
@_reason
@_json
def bypass(reference: str, reason: str | None, as_json: bool) -> int:
    """Let the run go on without REVIEW. It goes on record as such, and a later review by somebody else is opened."""
    return _decide("bypass", reference, None, reason, as_json=as_json)


def _decide(
    kind: DecisionKind, reference: str, meaning: str | None, reason: str | None, *, as_json: bool,
    send_back: bool = False,
) -> int:  # fmt: skip
    from engine.cli.orders import say_if_not_delivered, settings_for_order
    from engine.cli.review_render import decision_object
    from engine.cli.session import run_async
    from engine.operations.reviewing import decide_review, resolve_review

    settings = settings_for_order(reason)

    async def give(session: Session) -> DecisionGiven:
        own = await resolve_review(session.database, reference)
        return await decide_review(
            session.database,
            session.client,
            own,
            kind,
            actor_id=settings.actor_id,
            on_behalf_of=settings.on_behalf_of,
            reason=reason,
            meaning=meaning,
            send_back=send_back,
        )

    given = run_async(_with(settings, give))
    if as_json:
        terminal.out_json(decision_object(kind, given))
        return ExitCode.OK
    if given.review.holds:
        say_if_not_delivered(given.given)
    _say(kind, given, send_back=send_back)
    return ExitCode.OK


def _say(kind: str, given: DecisionGiven, *, send_back: bool) -> None:
    decided, line = given.decided, given.review
    if kind == "approve":
        more = decided.approvals_needed - decided.approvals
        after = (
            ""
            if decided.review_state != "open"
            else f"; {more} more needed, from {'others' if more > 1 else 'another'}"
        )
        terminal.out(f"review {line.id} approved by you{after}")
    elif kind == "bypass":
        terminal.out(f"review {line.id} bypassed; a later review of the same was opened")
    else:
        terminal.out(f"review {line.id} rejected{'; the step is done again' if send_back else ''}")
    if decided.ordered.state == "waiting":
        terminal.err(f"the run still waits ({decided.ordered.reason})")
    terminal.err(f"hint: podium watch {line.run_id}" if line.holds else f"hint: podium review show {line.id}")


@review.command(short_help="Say something about a review without deciding it.")
@_review
@click.argument("text")
@_json
def comment(reference: str, text: str, as_json: bool) -> int:
    """Put TEXT beside REVIEW, in your own name; it is kept on record."""
    from engine.cli.contract import versioned
    from engine.cli.orders import settings_for_order
    from engine.cli.review_render import review_object
    from engine.cli.session import run_async
    from engine.operations.reviewing import comment_review, resolve_review

    settings = settings_for_order(text)

    async def say(session: Session) -> Any:
        own = await resolve_review(session.database, reference)
        return await comment_review(
            session.database, own, actor_id=settings.actor_id, on_behalf_of=settings.on_behalf_of, text=text
        )

    line = run_async(_with(settings, say))
    if as_json:
        terminal.out_json(versioned(review_object(line)))
    else:
        terminal.out(f"the comment stands beside review {line.id}")
    return ExitCode.OK


@review.command(short_help="Ask for a review of what is done.")
@click.argument("run_reference", metavar="RUN")
@click.option("--step", type=click.IntRange(0), metavar="N", help="The step (from 0); without it the run's answer.")
@click.option(
    "--round", "round_number", type=click.IntRange(0), metavar="N", help="The round; without it the last one."
)
@click.option("--approvals", type=click.IntRange(1, 16), default=1, show_default=True, help="By how many people.")
@_json
def request(run_reference: str, step: int | None, round_number: int | None, approvals: int, as_json: bool) -> int:
    """Ask for a review of RUN's answer, or of one of its steps, after the fact. Nothing waits for it."""
    from engine.cli.contract import versioned
    from engine.cli.review_render import review_object
    from engine.cli.session import run_async, settings_for_run
    from engine.operations.reviewing import request_review
    from engine.service import resolve_run

    settings = settings_for_run()

    async def ask(session: Session) -> Any:
        return await request_review(
            session.database,
            await resolve_run(session.database, run_reference),
            actor_id=settings.actor_id,
            on_behalf_of=settings.on_behalf_of,
            round_number=round_number,
            position=step,
            approvals=approvals,
        )

    line = run_async(_with(settings, ask))
    if as_json:
        terminal.out_json(versioned(review_object(line)))
    else:
        terminal.out(str(line.id))
        terminal.err(f"hint: podium review show {line.id}")
    return ExitCode.OK


@review.command(short_help="Say how carefully reviews are done, by reviewer and gate.")
@_json
def stats(as_json: bool) -> int:
    """Say how reviews are done: how long people looked, whether they did at all, how often they rejected."""
    from engine.cli.render import aligned, columns, counted, duration, show
    from engine.cli.review_render import stats_object, stats_rows
    from engine.cli.session import run_async, settings_for_reading
    from engine.service import TENANT
    from engine.store.review_views import review_stats

    settings = settings_for_reading()
    people: Any = ()
    gates: Any = ()
    if settings is not None:
        people, gates = run_async(_with(settings, lambda session: review_stats(session.database, TENANT)))
    if as_json:
        terminal.out_json(stats_object(people, gates))
        return ExitCode.OK
    if not gates:
        terminal.out("there are no reviews")
        return ExitCode.OK
    header = ("reviewer", "gate", "decided", "rejected", "opened", "looked for", "at least", "after", "bypassed")
    show(*aligned(header, stats_rows(people), columns()))
    terminal.out()
    for one in gates:
        took = "" if one.open_median_s is None else f", open for {duration(one.open_median_s)}"
        terminal.out(f"{one.gate}: {counted(one.reviews, 'review')} {one.state}{took}")
    return ExitCode.OK


@review.command(short_help="Print the secret that decides what is sampled, for an auditor.")
@_json
def salt(as_json: bool) -> int:
    """Print the secret that decides, with a run's id, what is sampled for review; an auditor draws again with it.

    Whoever knows it before a run is submitted can foresee what is drawn: give it to nobody else.
    """
    from engine.cli.contract import versioned
    from engine.cli.session import run_async, settings_for_reading
    from engine.service import TENANT
    from engine.store.sampling import read_sampling_salt

    settings = settings_for_reading()
    found = None
    if settings is not None:
        found = run_async(_with(settings, lambda session: read_sampling_salt(session.database, TENANT)))
    if as_json:
        terminal.out_json(versioned({"salt": None if found is None else found.hex()}))
    else:
        terminal.out("nothing was sampled yet" if found is None else found.hex())
    return ExitCode.OK


async def _with(settings: Settings, work: Callable[[Session], Coroutine[Any, Any, Result]]) -> Result:
    from engine.cli.session import open_session
    from engine.keeper.client import Needs

    async with open_session(settings, Needs()) as session:
        return await work(session)
