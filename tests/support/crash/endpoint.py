"""The provider of the crash suite: what it answers, and what it counted, request by request.

It is never killed, so its count is the truth that the record is held to. Each model behaves in one way; a model whose
behaviour alternates does so in a fixed order, so the outcome of its n-th request is known.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Literal

from tests.support.provider import Provider

INPUT_TOKENS: Final = 110
OUTPUT_TOKENS: Final = 7
# Dollars a million tokens; odd, so that no sum comes out right by chance.
INPUT_USD: Final = Decimal("3.7")
OUTPUT_USD: Final = Decimal("11.3")
ANSWER_USD: Final = (INPUT_TOKENS * INPUT_USD + OUTPUT_TOKENS * OUTPUT_USD) / 1_000_000

# Words in a task by which the stand-in Conductor chooses its plan.
DIAMOND_PLAN: Final = "Plan a diamond"
BROKEN_PLAN: Final = "Plan nonsense first"
BROKEN_STEP: Final = "Plan a step that fails"
# The subtask of a step that the Conductor plans as a run of its own, and of such a step inside of it.
NEST: Final = "Solve this part by a plan."
_NEST_DEEPER: Final = "Solve the innermost part by a plan."
# What the packaged prompts say: of a repair, and of a look back at a finished round.
_REPAIR: Final = "This plan cannot be run"
_REVISE: Final = "You planned this task before"
_MEND: Final = "Mend the answer."
_FLAKY_MAX: Final = 4000

Outcome = Literal["answered", "refused", "broken"]

_USAGE: Final = [INPUT_TOKENS, OUTPUT_TOKENS]
_ANSWER: Final[dict[str, Any]] = {"text": "An answer that is kept.", "usage": _USAGE}
# In turn: a call too many, answers, an answer whose connection is reset in the middle, answers.
_FLAKY: Final[tuple[tuple[Outcome, dict[str, Any]], ...]] = (
    ("refused", {"status": 429}),
    ("answered", _ANSWER),
    ("answered", _ANSWER),
    ("broken", {**_ANSWER, "end": "reset"}),
    ("answered", _ANSWER),
    ("answered", _ANSWER),
)


def _plan(*steps: tuple[str, list[int]], subtask: str = "Do a planned part.") -> dict[str, Any]:
    lists = {
        "model_id": [worker for worker, _ in steps],
        "subtasks": [_NEST_DEEPER if worker == "maestro" else subtask for worker, _ in steps],
        "access_list": [reads for _, reads in steps],
    }
    return {"text": json.dumps(lists), "usage": _USAGE, "delay_first_s": 0.4}


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the provider saw it; times are seconds since the epoch. ``outcome`` None: nothing was answered.

    ``billed`` says whether the provider has told tokens that it will put on the bill.
    """

    attempt_id: str | None
    model: str
    started_at: float
    outcome: Outcome | None

    @property
    def billed(self) -> bool:
        """Whether a whole answer, with its usage, was sent."""
        return self.outcome == "answered"


def script(provider: Provider) -> None:
    """Tells the provider how each model behaves, for good."""
    always: tuple[tuple[str, str | None, dict[str, Any]], ...] = (
        ("planner", _MEND, _plan()),
        ("planner", _REVISE, _plan(("quick", []), ("slow", [0]), subtask=_MEND)),
        ("planner", _REPAIR, _plan(("quick", []), ("slow", [0]))),
        ("planner", _NEST_DEEPER, _plan(("quick", []), ("slow", [0]))),
        ("planner", NEST, _plan(("slow", []), ("maestro", [0]), ("quick", [0, 1]))),
        ("planner", BROKEN_PLAN, {"text": "model_id = [0, 9]\nsubtasks = ['a']\naccess_list = []", "usage": _USAGE}),
        ("planner", BROKEN_STEP, _plan(("quick", []), ("keyless", [0]))),
        ("planner", DIAMOND_PLAN, _plan(("quick", []), ("slow", [0]), ("quick", [0]), ("quick", [1, 2]))),
        ("quick", None, {**_ANSWER, "delay_first_s": 0.1}),
        ("slow", None, {**_ANSWER, "delay_first_s": 0.8}),
        ("long", None, {**_ANSWER, "delay_first_s": 2.0, "delay_piece_s": 0.2}),
        ("keyless", None, {"status": 401, "delay_first_s": 0.2}),
    )
    for model, contains, behaviour in always:
        provider.script(behaviour, model=model, contains=contains, times=None)
    turns = [{"delay_first_s": 0.3, **_FLAKY[number % len(_FLAKY)][1]} for number in range(_FLAKY_MAX)]
    provider.script(*turns, model="flaky", times=1)


def requests_of(provider: Provider) -> list[Request]:
    """Every request in the order of arrival."""
    seen: Counter[str] = Counter()
    found = []
    for record in provider.requests:
        model = str(record["model"])
        outcome: Outcome = "answered"
        if model == "flaky":
            assert seen[model] < _FLAKY_MAX, "the script for the flaky model is used up"
            outcome = _FLAKY[seen[model] % len(_FLAKY)][0]
        elif model == "keyless":
            outcome = "refused"
        seen[model] += 1
        # A reset reply is never finished, and neither is one whose reader was killed.
        told = outcome if record["finished"] or outcome == "broken" else None
        found.append(Request(record["attempt_id"], model, record["started_at"], told))
    return found
