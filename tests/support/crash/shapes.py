"""What is run while processes are killed: one line a shape, in `SHAPES`; and the pools that the shapes name.

A shape says its steps as (worker, what it reads), or None where the stand-in Conductor plans; then the task chooses the
plan, see `endpoint`. `ends` is the state in which such a run has to end whatever is killed, `reason` the code with it.
`order` is what people do to it meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tests.support.crash.endpoint import BROKEN_PLAN, BROKEN_STEP, DIAMOND_PLAN, INPUT_USD, NEST, OUTPUT_USD
from tests.support.crash.orders import (
    Give,
    approve_everything,
    cancel_soon,
    fork_when_done,
    pause_for_a_while,
    replace_worker,
    resume_mended,
)
from worker_pools.pool import Pool, load_pool

Access = list[int] | Literal["all"]
Steps = tuple[tuple[str, Access], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of run.

    ``reviews`` of it are asked for, and it has so many ``executions``; the steps ``reused`` are another run's.
    ``becomes`` is the shape of the run that the order makes.
    """

    name: str
    steps: Steps | None
    pool: str = "near"
    task: str = "What is gravity?"
    ends: str = "succeeded"
    reason: str | None = None
    order: Give | None = None
    reviews: int = 0
    executions: int = 1
    reused: tuple[int, ...] = ()
    becomes: Shape | None = None

    @property
    def plan_text(self) -> str | None:
        """The plan as a file would give it; None when the Conductor plans."""
        if self.steps is None:
            return None
        lists = {
            "model_id": [worker for worker, _ in self.steps],
            "subtasks": [
                NEST if worker == "maestro" else f"Do part {position}."
                for position, (worker, _) in enumerate(self.steps)
            ],
            "access_list": [access for _, access in self.steps],
        }
        return json.dumps(lists)


SHAPES: Final[tuple[Shape, ...]] = (
    Shape("single", (("long", []),)),
    Shape("chain", (("quick", []), ("slow", [0]), ("quick", [1]), ("slow", [2]))),
    Shape("far chain", (("quick", []), ("slow", [0]), ("quick", "all")), pool="far"),
    Shape("fan", (("quick", []), ("slow", []), ("long", []), ("slow", []), ("quick", "all"))),
    Shape("diamond", (("quick", []), ("slow", [0]), ("long", [0]), ("quick", [1, 2])), pool="far"),
    Shape("unread step", (("slow", []), ("long", []), ("quick", [0]))),
    Shape("planned", None, task=f"{DIAMOND_PLAN}: what is gravity?"),
    Shape("planned at the second try", None, task=f"{BROKEN_PLAN}: what is gravity?"),
    Shape("planned far", None, pool="far", task=f"{DIAMOND_PLAN}: what is gravity?"),
    Shape("retried", (("flaky", []), ("flaky", [0]), ("quick", "all"))),
    Shape("retried fan", (("flaky", []), ("flaky", []), ("flaky", []), ("quick", "all")), pool="far"),
    Shape("bad key", (("quick", []), ("keyless", [0]), ("quick", [1])), ends="failed", reason="auth-failed"),
    Shape(
        "bad key beside a call", (("long", []), ("keyless", []), ("quick", "all")), ends="failed", reason="auth-failed"
    ),
    Shape("planned to fail", None, task=f"{BROKEN_STEP}: what?", ends="failed", reason="auth-failed"),
    Shape("recursion", (("quick", []), ("maestro", [0]), ("slow", "all")), pool="deep"),
    Shape("recursion twice", (("maestro", []), ("slow", []), ("maestro", []), ("quick", "all")), pool="deep"),
    Shape("rounds", None, pool="rounds", task=f"{DIAMOND_PLAN}: what is gravity?"),
    Shape("rounds from a file", (("slow", []), ("quick", [0])), pool="rounds"),
    Shape("substitute", (("quick", []), ("fragile", [0]), ("slow", "all")), pool="fallback"),
    Shape("operator", (("keyless", []), ("slow", []), ("quick", "all")), pool="wait", order=replace_worker),
    Shape(
        "cancelled",
        (("long", []), ("long", [0]), ("long", [1])),
        ends="cancelled",
        reason="cancelled",
        order=cancel_soon,
    ),
    Shape(
        "cancelled with a child",
        (("maestro", []), ("long", []), ("long", "all"), ("long", [2])),
        pool="deep",
        ends="cancelled",
        reason="cancelled",
        order=cancel_soon,
    ),
    Shape("paused", (("quick", []), ("slow", [0]), ("quick", [1]), ("slow", [2])), order=pause_for_a_while),
    # The outputs of both slow steps, and the answer besides.
    Shape(
        "reviewed",
        (("quick", []), ("slow", [0]), ("quick", [1]), ("slow", [2])),
        pool="reviewed",
        order=approve_everything,
        reviews=3,
    ),
    Shape(
        "resumed after a bad key",
        (("quick", []), ("slow", []), ("keyless", [0]), ("quick", [1, 2])),
        order=resume_mended,
        executions=2,
    ),
    Shape(
        "forked",
        (("quick", []), ("slow", [0]), ("quick", [0]), ("quick", [1, 2])),
        order=fork_when_done,
        becomes=Shape("fork", None, reused=(0, 1)),
    ),
)

# Attempts lost by kills count; with this many no run of the suite can use them up.
ATTEMPTS_MAX: Final = 40
WORKERS: Final = ("quick", "slow", "long", "flaky", "keyless")
# Limits that no run reaches: every call reserves and settles.
BUDGET: Final = {"usd": "100", "tokens": 10_000_000, "calls": 10_000}
MAESTRO: Final = {"name": "maestro", "kind": "conductor", "description": "plans a step as a run of its own"}
FRAGILE: Final = {"name": "fragile", "model": "keyless", "description": "fails for good", "fallbacks": ["quick"]}
# What the pools have beyond their models: policies, and workers that are no models.
POOLS: Final[Mapping[str, dict[str, Any]]] = {
    # Everything on one queue: workflows live with their calls.
    "near": {"policy": {"unread_steps": "run"}},
    # A queue for each model.
    "far": {"policy": {"budget": BUDGET}},
    "deep": {"policy": {"depth_max": 3, "budget": BUDGET}, "workers": [MAESTRO]},
    "rounds": {"policy": {"rounds_max": 3, "budget": BUDGET}},
    "fallback": {"policy": {"on_failed_step": "fallback"}, "workers": [FRAGILE]},
    "wait": {"policy": {"on_failed_step": "wait"}},
    "reviewed": {"policy": {"budget": BUDGET, "reviews": [{"gate": "after", "workers": ["slow"]}, {"gate": "answer"}]}},
}


def load_pools(folder: Path, base_url: str) -> dict[str, Pool]:
    """The pools by name, read from files as users write them."""
    return {name: _load(folder, base_url, name, more) for name, more in POOLS.items()}


def _load(folder: Path, base_url: str, name: str, more: dict[str, Any]) -> Pool:
    def model(of: str) -> dict[str, Any]:
        return {
            "adapter": "openai",
            "base_url": base_url,
            "model": of,
            "queue": f"own-{of}" if name == "far" else "shared",
            "price": {"input_usd_per_mtok": str(INPUT_USD), "output_usd_per_mtok": str(OUTPUT_USD)},
            "timeouts": {"call_s": 60, "first_token_s": 30, "idle_s": 20},
            "attempts_max": ATTEMPTS_MAX,
        }

    workers = [{"name": worker, "model": worker, "description": f"is {worker}"} for worker in WORKERS]
    workers += more.get("workers", [])
    document = {
        **more,
        "name": f"crash-{name}",
        "conductor": model("planner"),
        "workers": [one if "kind" in one else {**model(one["model"]), **one} for one in workers],
    }
    path = folder / f"pool-{name}.yaml"
    path.write_text(json.dumps(document))
    return load_pool(str(path))
