"""Budgets: the worst case is reserved before each call and settled after it, exactly, whoever writes at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from engine.errors import PodiumError, RefusedError
from engine.service import Submission, prepare
from engine.store.attempts import FAIL, Opening, Place, open_attempt
from engine.store.budgets import Limits
from engine.store.children import ChildOpening, begin_child
from engine.store.closing import Closing, close_step_attempt
from engine.store.database import Database
from engine.store.orders import Order, request_cancel
from engine.store.raising import LimitChange, change_budget
from engine.store.run_writer import AttemptResult
from engine.store.runs import create_run
from engine.store.settling import Settlement, settle_run
from engine.store.snapshots import read_run
from engine.store.states import RUN_ENDED
from tests.support.budgets import CENTS_40, KINDS, UNITS, budget_of, costly, one_pool, run_with, sums
from tests.support.link import Cut, Link
from tests.support.servers import superuser_url
from tests.support.stored import LOST, answered, check_invariants, ended_with, execute, opening, record, rows

ODD = Decimal("0.0123456789")


def order(run_id: UUID, actor: str = "operator", reason: str | None = None) -> Order:
    return Order(run_id, actor, reason=reason)


async def counted_anew(database: Database, run_id: UUID) -> dict[str, Any]:
    """What a budget comes to that is given to the run now, from its attempts; the run must be live."""
    await execute(superuser_url(database.url), "DELETE FROM budgets WHERE run_id = %s", run_id)
    await change_budget(database, order(run_id), LimitChange(Limits(calls=10**9)))
    return await sums(database, run_id)


async def change(database: Database, run_id: UUID, *lifted: str, **limits: Any) -> Any:
    return await change_budget(database, order(run_id), LimitChange(Limits(**limits), frozenset(lifted)))


async def refusal(database: Database, run_id: UUID, **limits: Any) -> PodiumError:
    before = await record(database.url, run_id), await rows(database.url, "SELECT * FROM budgets")
    with pytest.raises(RefusedError) as refused:
        await change(database, run_id, **limits)
    assert (await record(database.url, run_id), await rows(database.url, "SELECT * FROM budgets")) == before
    assert refused.value.hint
    return refused.value


async def test_of_five_parallel_steps_of_40_cents_two_start_with_a_dollar(database: Database, tmp_path: Path) -> None:
    run_id = await run_with(database, tmp_path, limits=Limits(usd=Decimal(1)))
    opened = [costly(run_id, position) for position in range(5)]
    rulings = await asyncio.gather(*(open_attempt(database, one) for one in opened))
    assert sorted(ruling.verdict for ruling in rulings) == ["call", "call", "held", "held", "held"]
    assert {ruling.code for ruling in rulings if ruling.verdict == "held"} == {"budget-usd"}
    assert (await sums(database, run_id))["usd_reserved"] == Decimal("0.80")
    kept = await record(database.url, run_id)
    check_invariants(kept)
    # Calls are in flight, so the run does not wait.
    assert kept.run["state"] == "running"
    called = [one for one, ruling in zip(opened, rulings, strict=True) if ruling.verdict == "call"]
    for one in called:
        await close_step_attempt(database, answered(one, cost_usd=CENTS_40))
    for position, ruling in enumerate(rulings):
        if ruling.verdict == "held":
            assert (await open_attempt(database, costly(run_id, position, (1, 1, 1)))).code == "budget-usd"
    kept = await record(database.url, run_id)
    assert (kept.run["state"], kept.run["reason"]) == ("waiting", "budget-usd")
    run = await read_run(database, run_id)
    assert run is not None
    assert run.budget is not None
    assert (run.budget.usd.spent, run.budget.usd.reserved, run.budget.usd.left) == (
        Decimal("0.8"), Decimal(0), Decimal("0.2"),
    )  # fmt: skip
    assert run.waiting_since is not None
    assert [step.waiting_since is not None for step in run.steps] == [step.state == "waiting" for step in run.steps]
    raised = await change(database, run_id, usd=Decimal("1.20"))
    assert (raised.ordered.state, raised.budget.usd.left) == ("running", Decimal("0.4"))
    again = [costly(run_id, position, (1, 2, 1)) for position in range(5) if rulings[position].verdict == "held"]
    verdicts = [(await open_attempt(database, one)).verdict for one in again]
    assert verdicts == ["call", "held", "held"]
    check_invariants(await record(database.url, run_id))


async def test_a_call_that_costs_twice_its_estimate_passes_the_budget_by_that_and_stops_everything_else(
    database: Database, tmp_path: Path
) -> None:
    run_id = await run_with(database, tmp_path, limits=Limits(usd=Decimal(1)))
    first, second = costly(run_id, 0), costly(run_id, 1)
    await open_attempt(database, first)
    await open_attempt(database, second)
    await close_step_attempt(database, answered(first, cost_usd=2 * CENTS_40))
    await close_step_attempt(database, answered(second, cost_usd=CENTS_40))
    assert (await sums(database, run_id))["usd_spent"] == Decimal("1.20")
    ruling = await open_attempt(database, costly(run_id, 2, usd=Decimal("0.0000000001")))
    assert (ruling.verdict, ruling.code) == ("held", "budget-usd")
    run = await read_run(database, run_id)
    assert run is not None
    assert run.budget is not None
    assert run.budget.usd.left == 0


async def test_every_try_is_reserved_and_settled_for_itself(database: Database, tmp_path: Path) -> None:
    run_id = await run_with(database, tmp_path, limits=Limits(usd=Decimal(1), calls=3))
    failed = AttemptResult("failed", "overloaded", cost_usd=Decimal(0))
    first = costly(run_id, 0)
    await open_attempt(database, first)
    await close_step_attempt(database, ended_with(first, failed, retry=True))
    assert (await sums(database, run_id))["usd_spent"] == 0
    second = costly(run_id, 0, (1, 0, 2))
    await open_attempt(database, second)
    # Its usage never came: it may have cost as much as it could.
    await close_step_attempt(database, ended_with(second, AttemptResult("failed", "idle-timeout"), retry=True))
    found = await sums(database, run_id)
    assert (found["usd_assumed"], found["calls_spent"], found["tokens_assumed"]) == (CENTS_40, 2, 100)
    third = costly(run_id, 0, (1, 0, 3))
    assert (await open_attempt(database, third)).verdict == "call"
    assert (await open_attempt(database, costly(run_id, 1))).code == "budget-usd"
    await close_step_attempt(database, answered(third, cost_usd=Decimal("0.1")))
    # Now money is left, and the third call was the last.
    assert (await open_attempt(database, costly(run_id, 1, (1, 1, 1)))).code == "budget-calls"
    assert (await counted_anew(database, run_id)) == {
        **dict.fromkeys(found, 0), "usd_spent": Decimal("0.1"), "usd_assumed": CENTS_40,
        "tokens_spent": 15, "tokens_assumed": 100, "calls_spent": 3,
    }  # fmt: skip


async def test_a_call_whose_outcome_is_lost_counts_at_its_worst_until_it_reports(
    database: Database, tmp_path: Path
) -> None:
    run_id = await run_with(database, tmp_path, limits=Limits(usd=Decimal(1)))
    lost, following = costly(run_id, 0), costly(run_id, 0, (1, 1, 1))
    await open_attempt(database, lost)
    await open_attempt(database, following)
    found = await sums(database, run_id)
    assert (found["usd_assumed"], found["usd_reserved"], found["calls_assumed"]) == (CENTS_40, CENTS_40, 1)
    await close_step_attempt(database, answered(lost, cost_usd=Decimal("0.05")))
    found = await sums(database, run_id)
    assert (found["usd_assumed"], found["usd_spent"], found["calls_spent"]) == (0, Decimal("0.05"), 1)
    await close_step_attempt(database, answered(following, cost_usd=Decimal("0.05")))
    assert (await sums(database, run_id)) == await counted_anew(database, run_id)


async def test_a_child_that_is_asked_for_again_while_its_calls_end_waits_for_nobody_in_a_circle(
    database: Database, tmp_path: Path
) -> None:
    root = await run_with(database, tmp_path, [[], []], limits=Limits(calls=10**6))
    asked = ChildOpening(Place(root, 0, 0), 1, "alpha", "Go on.", 3, FAIL)
    begun = await begin_child(database, asked)
    assert begun.child_id is not None
    await settle_run(database, Settlement(begun.child_id, 1, "failed", "x"))
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    before = await rows(database.url, deadlocks)
    for execution in range(2, 22):
        opened = opening(begun.child_id, None, (execution, 0, 1), reserve_tokens=10, attempts_max=9)

        async def call(one: Opening = opened) -> None:
            await open_attempt(database, one)

        rulings = await asyncio.gather(begin_child(database, asked), call(), begin_child(database, asked))
        assert rulings[0].child_id == begun.child_id
        await settle_run(database, Settlement(begun.child_id, execution, "failed", "x"))
    assert await rows(database.url, deadlocks) == before
    check_invariants(await record(database.url, begun.child_id))
    assert (await sums(database, root))["calls_reserved"] == 0


class History:
    """Opens, reports and orders at random, on a run and a run below it that shares its budget."""

    def __init__(self, database: Database, runs: Sequence[UUID], seed: int, number: int) -> None:
        self.database = database
        self.runs = runs
        self.rng = random.Random(f"{seed}.{number}")
        # No two histories open the same attempt: each would take its own estimate for the one that was reserved.
        self.number = number
        self.opened: list[Opening] = []
        self.dispatches: dict[tuple[UUID, int], int] = {}

    async def move(self) -> str:
        return await self.rng.choice([self.open, self.open, self.close, self.close, self.raise_])()

    async def open(self) -> str:
        place = (self.rng.choice(self.runs), self.rng.randrange(5))
        self.dispatches[place] = self.dispatches.get(place, 0) + 1
        usd = self.rng.choice([Decimal("0.4"), ODD, Decimal("0.0000000001")])
        opened = costly(*place, (1, 10 * self.dispatches[place] + self.number, 1), usd=usd, attempts_max=100)
        ruling = await open_attempt(self.database, opened)
        if ruling.verdict == "call":
            self.opened.append(opened)
        return f"open {place[1]}: {ruling.verdict} {ruling.code}"

    async def close(self) -> str:
        if not self.opened:
            return "nothing to close"
        opened = self.rng.choice(self.opened)
        # Never more than was reserved, so that the limit must hold to the last digit.
        cost = self.rng.choice([None, Decimal(0), opened.reserve_usd])
        failed = AttemptResult("failed", "overloaded", cost_usd=cost, input_tokens=self.rng.choice([None, 3]))
        closing: Closing = self.rng.choice(
            [
                answered(opened, cost_usd=cost),
                ended_with(opened, failed, retry=True),
                ended_with(opened, LOST, retry=True),
                ended_with(opened, AttemptResult("cancelled", "cancelled", cost_usd=cost), retry=True),
            ]
        )
        return f"close {closing.result.state}: {(await close_step_attempt(self.database, closing)).verdict}"

    async def raise_(self) -> str:
        try:
            await change(self.database, self.runs[0], usd=Decimal(self.rng.randrange(1, 4)), calls=10**6)
        except RefusedError as error:
            return error.code
        return "raised"

    async def finish(self) -> None:
        for opened in self.opened:
            await close_step_attempt(self.database, answered(opened, cost_usd=opened.reserve_usd))


async def family(database: Database, folder: Path, limits: Limits | None) -> list[UUID]:
    runs = [await run_with(database, folder, limits=limits), await run_with(database, folder)]
    await execute(
        database.url, "UPDATE runs SET parent_run_id = %s, parent_round = 0, parent_position = 0 WHERE id = %s", *runs
    )
    return runs


@pytest.mark.parametrize("seed", range(3))
async def test_random_histories_never_pass_the_limit_and_end_with_nothing_reserved(
    database: Database, tmp_path: Path, seed: int
) -> None:
    runs = await family(database, tmp_path, Limits(usd=Decimal(2), calls=10**6))
    histories = [History(database, runs, seed, number) for number in range(4)]

    async def play(history: History) -> None:
        for _ in range(25):
            print(await history.move())
            budget = await budget_of(database, runs[0])
            assert sum(budget[f"usd_{kind}"] for kind in KINDS) <= budget["usd_limit"]
            assert all(budget[f"{unit}_{kind}"] >= 0 for unit in UNITS for kind in KINDS)

    await asyncio.gather(*(play(history) for history in histories))
    for history in histories:
        await history.finish()
    found = await sums(database, runs[0])
    assert {name: found[name] for name in found if name.endswith("reserved")} == {
        f"{unit}_reserved": 0 for unit in UNITS
    }
    assert found == await counted_anew(database, runs[0])
    for run_id in runs:
        check_invariants(await record(database.url, run_id))


@pytest.mark.parametrize("seed", range(3))
async def test_a_first_budget_that_is_given_while_calls_begin_and_end_counts_every_one_once(
    database: Database, tmp_path: Path, seed: int
) -> None:
    runs = await family(database, tmp_path, None)
    histories = [History(database, runs, seed, number) for number in range(3)]

    async def play(history: History) -> None:
        for _ in range(20):
            await history.rng.choice([history.open, history.close])()

    async def give() -> None:
        await asyncio.sleep(random.Random(seed).random() / 4)
        await change(database, runs[0], tokens=10**9)

    await asyncio.gather(give(), *(play(history) for history in histories))
    found = await sums(database, runs[0])
    assert found == await counted_anew(database, runs[0])
    assert found["calls_spent"] + found["calls_reserved"] + found["calls_assumed"] == len(
        await rows(database.url, "SELECT id FROM attempts WHERE run_id = ANY(%s)", runs)
    )
    (entry,) = [
        one for one in (await record(database.url, runs[0])).entries("run.budget_changed") if "opening" in one["data"]
    ][:1]
    assert entry["data"]["budget"] == {"usd": None, "tokens": 10**9, "calls": None}


async def test_a_change_says_who_what_and_why(database: Database, tmp_path: Path) -> None:
    run_id = await run_with(database, tmp_path, limits=Limits(usd=Decimal(1), calls=5))
    given = order(run_id, "boss", "the cänary sang")
    await change_budget(database, given, LimitChange(Limits(usd=Decimal("2.50")), frozenset({"calls"})))
    kept = await record(database.url, run_id)
    check_invariants(kept)
    (entry,) = kept.entries("run.budget_changed")
    assert (entry["actor"], entry["data"]["order"]) == ("boss", str(given.id))
    assert entry["data"]["old"] == {"usd": "1.0000000000", "tokens": None, "calls": 5}
    assert entry["data"]["budget"] == {"usd": "2.50", "tokens": None, "calls": None}
    assert len(entry["data"]["artifacts"]) == 1
    assert b"sang" not in b"".join(kept.bodies)
    assert kept.run["wake_requested_at"] is not None
    before = await record(database.url, run_id)
    assert not (await change(database, run_id, usd=Decimal("2.5"))).ordered.changed
    assert await record(database.url, run_id) == before


async def test_a_limit_below_what_is_used_or_reserved_is_refused(database: Database, tmp_path: Path) -> None:
    run_id = await run_with(database, tmp_path, limits=Limits(usd=Decimal(1)))
    opened = costly(run_id, 0)
    await open_attempt(database, opened)
    refused = await refusal(database, run_id, usd=Decimal("0.39"))
    assert (refused.code, "0.4" in refused.message) == ("budget-below-used", True)
    assert (await refusal(database, run_id, tokens=99)).code == "budget-below-used"
    await change(database, run_id, usd=CENTS_40, tokens=100)
    assert (await open_attempt(database, costly(run_id, 1))).verdict == "held"


async def test_a_budget_in_dollars_is_refused_where_the_cost_of_a_call_has_no_bound(
    database: Database, tmp_path: Path
) -> None:
    run_id = await run_with(database, tmp_path)
    opened = opening(run_id, 0, reserve_tokens=100)
    await open_attempt(database, opened)
    await close_step_attempt(database, answered(opened, cost_usd=None))
    assert (await refusal(database, run_id, usd=Decimal(5))).code == "budget-spend-unknown"
    await change(database, run_id, tokens=1000)
    assert (await refusal(database, run_id, usd=Decimal(5))).code == "budget-spend-unknown"


@pytest.mark.parametrize("state", RUN_ENDED)
async def test_the_budget_of_a_run_that_has_ended_is_not_changed_and_the_hint_says_what_is_possible(
    database: Database, tmp_path: Path, state: str
) -> None:
    run_id = await run_with(database, tmp_path, [[]], limits=Limits(calls=3))
    if state == "succeeded":
        opened = opening(run_id, 0)
        await open_attempt(database, opened)
        await close_step_attempt(database, answered(opened, ends_run=True))
    else:
        await settle_run(database, Settlement(run_id, 1, state, "x"))  # type: ignore[arg-type]  # a state
    refused = await refusal(database, run_id, calls=5)
    assert refused.code == "run-ended"
    assert ("--budget-usd" if state == "succeeded" else "podium resume") in (refused.hint or "")


async def test_a_run_whose_cancel_is_under_way_gets_no_budget(database: Database, tmp_path: Path) -> None:
    run_id = await run_with(database, tmp_path)
    await request_cancel(database, order(run_id))
    assert (await refusal(database, run_id, calls=5)).code == "run-cancelling"


@pytest.mark.slow
async def test_a_raise_in_the_instant_in_which_the_run_ends_counts_or_is_told_that_it_does_not(
    database: Database, tmp_path: Path
) -> None:
    for _ in range(100):
        run_id = await run_with(database, tmp_path, [[]], limits=Limits(calls=3))
        opened = opening(run_id, 0)
        await open_attempt(database, opened)
        raised, _ = await asyncio.gather(
            change(database, run_id, calls=5),
            close_step_attempt(database, answered(opened, ends_run=True)),
            return_exceptions=True,
        )
        kept = await record(database.url, run_id)
        check_invariants(kept)
        assert kept.run["state"] == "succeeded"
        counted = len(kept.entries("run.budget_changed"))
        if isinstance(raised, BaseException):
            assert isinstance(raised, RefusedError)
            assert (raised.code, counted) == ("run-ended", 0)
        else:
            assert counted == 1
        assert (await budget_of(database, run_id))["calls_limit"] == (5 if counted else 3)


@pytest.mark.parametrize("cut", ["before-commit", "after-commit"])
@pytest.mark.parametrize("first", [True, False])
async def test_a_change_whose_link_dies_around_its_commit_counts_once(
    database: Database, tmp_path: Path, first: bool, cut: Cut
) -> None:
    run_id = await run_with(database, tmp_path, limits=None if first else Limits(calls=1))
    given = order(run_id)
    async with Link(database.url) as link:
        linked = Database(link.url, pool_size=1)
        link.cut_next(cut)
        result = await change_budget(linked, given, LimitChange(Limits(calls=7)))
        await linked.close()
        assert link.cuts == 1
    assert result.budget is not None
    assert result.budget.calls.limit == 7
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert len(kept.entries("run.budget_changed")) == 1


async def test_the_same_key_with_another_budget_is_another_request(database: Database, tmp_path: Path) -> None:
    asked = Submission(task="Go.", pool=one_pool(tmp_path), actor_id="tester", idempotency_key=f"key-{tmp_path.name}")
    made = await create_run(database, prepare(replace(asked, limits=Limits(usd=Decimal("2.5"), calls=3))))
    await change(database, made.id, usd=Decimal(9))
    again = await create_run(database, prepare(replace(asked, limits=Limits(usd=Decimal("2.50"), calls=3))))
    assert (again.id, again.existing) == (made.id, True)
    for limits in (None, Limits(usd=Decimal("2.5")), Limits(usd=Decimal(9), calls=3)):
        with pytest.raises(RefusedError) as refused:
            await create_run(database, prepare(replace(asked, limits=limits)))
        assert refused.value.code == "idempotency-conflict"


async def test_a_run_shows_the_budget_that_it_shares_with_the_run_above_it(database: Database, tmp_path: Path) -> None:
    root, child = await family(database, tmp_path, Limits(usd=Decimal(1)))
    await open_attempt(database, costly(child, 0))
    run = await read_run(database, child)
    assert run is not None
    assert run.budget is not None
    assert (run.budget.run_id, run.budget.usd.reserved) == (root, CENTS_40)
    # Its own is one more limit, and counts what it has used itself.
    await change(database, child, usd=CENTS_40)
    assert (await open_attempt(database, costly(child, 1))).code == "budget-usd"
    assert (await sums(database, child))["usd_reserved"] == CENTS_40
    assert (await open_attempt(database, costly(root, 1))).verdict == "call"


@pytest.mark.parametrize("limits", [None, Limits(usd=Decimal(1), tokens=10_000)])
async def test_a_call_that_could_cost_nothing_cost_nothing_whatever_became_of_it(
    database: Database, tmp_path: Path, limits: Limits | None
) -> None:
    run_id = await run_with(database, tmp_path, [[], []], limits=limits)

    def free(position: int, attempt: int) -> Opening:
        return opening(run_id, position, (1, 0, attempt), reserve_usd=Decimal(0), reserve_tokens=100)

    lost, cancelled, failed = free(0, 1), free(0, 2), free(1, 1)
    for opened in (lost, cancelled, failed):
        await open_attempt(database, opened)
    broken = ended_with(failed, AttemptResult("failed", "connection-lost"), retry=True)
    assert await close_step_attempt(database, broken) == await close_step_attempt(database, broken)
    await close_step_attempt(database, ended_with(cancelled, AttemptResult("cancelled", "cancelled")))
    kept = await record(database.url, run_id)
    assert [row["cost_usd"] for row in kept.attempts] == [0, 0, 0]
    assert [entry["data"]["cost_usd"] for entry in kept.entries("attempt.closed")] == ["0"] * 3
    # The late word of the lost one counts once, and it stays as free.
    await close_step_attempt(database, ended_with(lost, AttemptResult("failed", "connection-lost")))
    await settle_run(database, Settlement(run_id, 1, "cancelled", "cancelled"))
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert (kept.run["attempts_unpriced"], kept.run["cost_usd"]) == (0, 0)
    assert [entry["data"]["totals"]["unpriced"] for entry in kept.entries("run.closed")] == [0]
    if limits is not None:
        # The tokens that they used are as unknown as before.
        (budget,) = await rows(database.url, "SELECT * FROM budgets WHERE run_id = %s", run_id)
        assert (budget["usd_spent"], budget["usd_assumed"], budget["tokens_assumed"]) == (0, 0, 300)
