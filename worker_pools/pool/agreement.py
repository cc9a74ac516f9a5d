"""What must agree between the parts of a pool file: names, fallbacks, the Conductor as a worker, budgets.

Pure. Works on the file's plain data, whatever else is wrong with it, so that everything is reported at once and at its
own place. Stored pools are not judged again: a rule that is added later must not stop a run under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]
Disagreement = tuple[Path, str]

# The Conductor's own entry says how it is called; a worker that stands for it only has a name and a purpose.
CONDUCTOR_WORKER_KEYS = frozenset({"name", "description", "kind", "clearance", "fallbacks"})


def disagreements(data: dict[str, Any]) -> list[Disagreement]:
    """Each disagreement with the path of what to change. `data` is a pool file as plain data, right or wrong."""
    workers = data.get("workers")
    entries = [
        (index, worker)
        for index, worker in enumerate(workers if isinstance(workers, list) else [])
        if isinstance(worker, dict)
    ]
    policy = data.get("policy")
    rules = policy if isinstance(policy, dict) else {}
    return [
        *_repeated_names(entries),
        *_fallbacks(data.get("conductor"), entries, rules),
        *_conductor_workers(entries, rules),
        *_unpriced(data.get("conductor"), entries, rules),
        *_reviews(entries, rules),
    ]


def _repeated_names(entries: list[tuple[int, dict[str, Any]]]) -> Iterator[Disagreement]:
    first: dict[str, int] = {}
    for index, worker in entries:
        name = worker.get("name")
        if not isinstance(name, str):
            continue
        earlier = first.setdefault(name.casefold(), index)
        if earlier != index:
            yield (
                ("workers", index, "name"),
                f"two workers are called {name[:64]!r} (the other is workers[{earlier}]; case does not count)",
            )


def _fallbacks(
    conductor: Any, entries: list[tuple[int, dict[str, Any]]], policy: dict[str, Any]
) -> Iterator[Disagreement]:
    if isinstance(conductor, dict) and conductor.get("fallbacks"):
        yield ("conductor", "fallbacks"), "nobody stands in for the Conductor; only workers have fallbacks"
    names = {worker["name"] for _, worker in entries if isinstance(worker.get("name"), str)}
    for index, worker in entries:
        fallbacks = worker.get("fallbacks")
        if not isinstance(fallbacks, list):
            continue
        if fallbacks and policy.get("on_failed_step", "fail") != "fallback":
            text = "does nothing unless `policy.on_failed_step` is `fallback`; set that, or remove this"
            yield ("workers", index, "fallbacks"), text
        for number, name in enumerate(fallbacks):
            path = ("workers", index, "fallbacks", number)
            if not isinstance(name, str):
                continue
            if name == worker.get("name"):
                yield path, f"falls back on {name[:64]!r}, which is this worker itself"
            elif name not in names:
                yield path, f"falls back on {name[:64]!r}, which is not a worker of this pool"
            elif name in fallbacks[:number]:
                yield path, f"falls back on {name[:64]!r} a second time"


def _conductor_workers(entries: list[tuple[int, dict[str, Any]]], policy: dict[str, Any]) -> Iterator[Disagreement]:
    conductors = [(index, worker) for index, worker in entries if worker.get("kind") == "conductor"]
    for index, worker in conductors:
        for key in worker:
            if key not in CONDUCTOR_WORKER_KEYS:
                text = "not for a worker of `kind: conductor`, which is called as the pool's `conductor` says"
                yield ("workers", index, key), text
        if policy.get("depth_max") == 0:
            yield ("workers", index, "kind"), "`policy.depth_max` is 0, which forbids a Conductor as a worker"
    if conductors and len(conductors) == len(entries):
        yield ("workers",), "every worker is a Conductor; at least one must be a model that does the work"


def _unpriced(
    conductor: Any, entries: list[tuple[int, dict[str, Any]]], policy: dict[str, Any]
) -> Iterator[Disagreement]:
    budget = policy.get("budget")
    if not isinstance(budget, dict) or budget.get("usd") is None:
        return
    models: list[tuple[Path, Any]] = [(("conductor",), conductor)]
    models += [(("workers", index), worker) for index, worker in entries if worker.get("kind") != "conductor"]
    for path, model in models:
        if isinstance(model, dict) and model.get("price") is None:
            yield path, "has no `price`, so `policy.budget.usd` could not be kept; give it one (0 if it is free)"


def _reviews(entries: list[tuple[int, dict[str, Any]]], policy: dict[str, Any]) -> Iterator[Disagreement]:
    """Rules for workers or labels that the pool does not have would never apply, and nobody would notice."""
    there = {"workers": {worker.get("name") for _, worker in entries}}
    there["clearance"] = {worker.get("clearance") for _, worker in entries}
    known = {"workers": "is not a worker of this pool", "clearance": "is not the clearance of any worker of this pool"}
    rules = policy.get("reviews")
    seen: list[Any] = []
    for index, rule in enumerate(rules if isinstance(rules, list) else []):
        if not isinstance(rule, dict):
            continue
        if rule in seen:
            yield ("policy", "reviews", index), f"the same rule as policy.reviews[{seen.index(rule)}]"
        seen.append(rule)
        for part, path in ((rule, ()), (rule.get("escalate"), ("escalate",))):
            if isinstance(part, dict) and "on_expiry" in part and part.get("expires_s") is None:
                text = "says what happens after `expires_s`, which is missing"
                yield ("policy", "reviews", index, *path, "on_expiry"), text
        for key, words in known.items():
            wanted = rule.get(key)
            for number, name in enumerate(wanted if isinstance(wanted, list) else []):
                if isinstance(name, str) and name not in there[key]:
                    yield ("policy", "reviews", index, key, number), f"{name[:64]!r} {words}"
