"""What a fork would do, for people and for programs. Must never call an unknown cost none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.cli import terminal
from engine.cli.contract import Json, decimal_text, versioned
from engine.cli.render import aligned, columns, counted, money, positions, preview, show

if TYPE_CHECKING:
    from engine.operations.forking import ForkProposal, ProposedStep

DIGEST_CHARS: Final = 12
NAME_CHARS: Final = 24
_FATES: Final = {"run": "runs", "reused": "reused", "skipped": "left out"}


def print_preview(proposal: ForkProposal, *, to_error: bool) -> None:
    """A line a step, then what the whole fork may cost at most."""
    say = terminal.err if to_error else terminal.out
    source = proposal.source
    of_round = f", round {source.round}" if source.round else ""
    say(f"fork of run {source.run_id} ({source.state}{of_round})")
    say(f"pool    {proposal.pool.name} ({proposal.new.pool_digest[:DIGEST_CHARS]})")
    say(f"plan    {proposal.digest[:DIGEST_CHARS]}")
    limits = proposal.new.limits
    if limits:
        dollars = [] if limits.usd is None else [money(limits.usd)]
        counts = [counted(n, noun) for n, noun in ((limits.tokens, "token"), (limits.calls, "call")) if n is not None]
        say(f"budget  {', '.join([*dollars, *counts])}")
    header = ("step", "worker", "does", "why", "reads", "one try", "at most")
    lines = aligned(header, [_row(step) for step in proposal.steps], None if to_error else columns())
    show(*lines, to_error=to_error)
    say(cost_words(proposal))


def _row(step: ProposedStep) -> tuple[str, ...]:
    runs = step.fate == "run"
    return (
        f"{step.position:>4}",
        preview(step.worker, NAME_CHARS),
        _FATES[step.fate],
        _why(step),
        positions(step.reads),
        money(step.bound.once_usd) if runs else "-",
        money(step.bound.worst_usd) if runs else "-",
    )


def _why(step: ProposedStep) -> str:
    if step.why == "edited":
        return f"edited: {', '.join(step.fields)}"
    if step.why == "input-changed":
        return f"reads {positions(step.changed_inputs)}"
    words = {
        "task-edited": "the task is edited",
        "unfinished": "has no output yet",
        "unread": "nobody reads it",
        "left-out": "left out by an operator",
    }
    return words.get(step.why or "", "-")


def cost_words(proposal: ForkProposal) -> str:
    """How many steps run, and the most that they may cost; what is unknown is said."""
    runs, reused, skipped = (len(proposal.positions(fate)) for fate in ("run", "reused", "skipped"))
    parts = [f"{counted(runs, 'step')} to run", f"{reused:,} reused", *([f"{skipped:,} left out"] if skipped else [])]
    if proposal.worst_usd is not None:
        cost = f"cost at most {money(proposal.worst_usd)} with every retry, {money(proposal.once_usd)} without"
    else:
        known = [step.bound.worst_usd for step in proposal.steps if step.fate == "run" and step.bound.worst_usd]
        rest = f" (the other steps at most {money(sum(known[1:], known[0]))})" if known else ""
        cost = f"cost unknown: no bound for {', '.join(preview(name, NAME_CHARS) for name in proposal.unpriced)}{rest}"
    return f"{', '.join(parts)}; {cost}"


def preview_object(proposal: ForkProposal) -> Json:
    """The preview as `--dry-run --json` prints it; `docs/schemas/fork.schema.json` describes it."""
    source, new = proposal.source, proposal.new
    return versioned(
        {
            "source": str(source.run_id),
            "source_state": source.state,
            "source_round": source.round,
            "task_edited": new.fork is not None and new.fork.task_edited,
            "pool": proposal.pool.name,
            "pool_digest": new.pool_digest,
            "plan_digest": proposal.digest,
            "budget": {
                "usd": decimal_text(new.limits.usd),
                "tokens": new.limits.tokens,
                "calls": new.limits.calls,
            },
            "steps": [_step(step) for step in proposal.steps],
            "once_usd": decimal_text(proposal.once_usd),
            "worst_usd": decimal_text(proposal.worst_usd),
            "unpriced": list(proposal.unpriced),
        }
    )


def _step(step: ProposedStep) -> Json:
    return {
        "position": step.position,
        "worker": step.worker,
        "model": step.model,
        "access": list(step.reads),
        "fate": step.fate,
        "why": step.why,
        "edited": list(step.fields),
        "changed_inputs": list(step.changed_inputs),
        "once_usd": decimal_text(step.bound.once_usd),
        "worst_usd": decimal_text(step.bound.worst_usd),
    }
