"""What a run used and what it may use: the sums in its closing entry, and its limits. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from engine.verifier.faults import InvalidError
from engine.verifier.records import Attempt, Run

_LIMITS: Final = ("usd", "tokens", "calls")


def count(run: Run, attempt: Attempt, sign: int) -> None:
    """Adds (1) what is known of a call to the sums of its run, or takes (-1) it away, since it reports once more."""
    run.input_tokens += sign * (attempt.input_tokens or 0)
    run.output_tokens += sign * (attempt.output_tokens or 0)
    run.cost_usd += sign * (attempt.cost_usd or Decimal(0))
    run.unpriced += sign * (attempt.cost_usd is None)


def check_totals(run: Run, said: Mapping[str, Any]) -> None:
    """Compares the sums of a closing entry with the attempts so far. Raises InvalidError."""
    known = {
        "attempts": len(run.attempts),
        "input_tokens": run.input_tokens,
        "output_tokens": run.output_tokens,
        "cost_usd": run.cost_usd,
        "unpriced": run.unpriced,
    }
    for name, value in known.items():
        stated = Decimal(said[name]) if name == "cost_usd" else said[name]
        if stated != value:
            raise InvalidError(f"it says {name} {said[name]}, and the attempts say {value}")


def check_nothing_open(run: Run) -> None:
    """Raises InvalidError for a run that succeeds while a step or a call of it has not ended."""
    for found in run.rounds.values():
        for step in found.steps:
            if step.state in ("pending", "running"):
                raise InvalidError(f"the run succeeded while step {step.position} was {step.state}")
            if step.attempts and step.attempts[-1].state == "sent":
                raise InvalidError(f"the run succeeded while an attempt of step {step.position} was open")


def check_limits(run: Run, data: Mapping[str, Any]) -> None:
    """Notes the limits that a run has from now on. Raises InvalidError if those before were others than it says."""
    if "budget" not in data:
        return
    before, run.limits = run.limits, limits_of(data["budget"])
    if "old" in data and limits_of(data["old"]) != before:
        raise InvalidError("the run had other limits than those that it names as the ones before")


def limits_of(said: Mapping[str, Any] | None) -> tuple[Decimal | int | None, ...]:
    """Limits as an entry says them, in the order dollars, tokens, calls; None for no limit."""
    if said is None:
        return (None, None, None)
    return tuple(Decimal(said[name]) if name == "usd" and said[name] is not None else said[name] for name in _LIMITS)
