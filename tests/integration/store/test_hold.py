"""Holds: an erasure under hold is a refusal on record, and a release takes two people."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from engine.errors import InputError, RefusedError
from engine.ledger.commitment import ARTIFACT_DOMAIN, commitment
from engine.ledger.entry import chain_faults
from engine.store.artifacts import read_run_artifacts
from engine.store.database import Database
from engine.store.erasing import erase
from engine.store.holds import Matter, list_holds, place_hold, release_hold
from engine.store.persons import link_account
from engine.store.retention import sweep
from engine.store.tables import DEFAULT_TENANT
from tests.support.ledger_page import check_entry
from tests.support.sealed import BASIS, finished_run, order_for
from tests.support.stored import check_invariants, dump, execute, record, rows

TENANT = UUID(DEFAULT_TENANT)


def matter(actor: str, reason: str = "Doe v. Acme, letter of counsel", name: str = "2026-0042") -> Matter:
    return Matter(TENANT, name, actor, None, reason)


async def system_documents(url: str) -> list[dict[str, Any]]:
    """The entries of the tenant's own chain, held to docs/ledger.md."""
    found = await rows(url, "SELECT body FROM ledger_entries WHERE run_id = %s ORDER BY seq", TENANT)
    documents = [json.loads(row["body"]) for row in found]
    for document in documents:
        check_entry(document)
    return documents


async def committed(database: Database, chain: UUID, entry: dict[str, Any]) -> dict[str, str]:
    """The texts that an entry commits to, by kind; each is the one that it commits to."""
    stored = {str(one.id): one for one in await database.query(lambda link: read_run_artifacts(link, chain))}
    texts = {}
    for said in entry["data"]["artifacts"]:
        own = stored[said["artifact"]]
        assert own.salt is not None
        assert own.content is not None
        assert said["commitment"] == commitment(own.salt, ARTIFACT_DOMAIN, own.path, own.content).hex()
        texts[said["kind"]] = own.content.decode()
    return texts


async def system_entries(url: str) -> list[str]:
    found = await rows(url, "SELECT type, body FROM ledger_entries WHERE run_id = %s ORDER BY seq", TENANT)
    assert chain_faults([row["body"] for row in found]) == []
    return [row["type"] for row in found]


async def test_what_is_held_is_not_erased_and_the_refusal_is_on_record(sealed: Database) -> None:
    run_id = await finished_run(sealed, ["a text that is evidence now"])
    other = await finished_run(sealed, ["a text that nobody needs"])
    await place_hold(sealed, matter("counsel"), [run_id])
    order = order_for(run_id)
    for _ in range(2):
        with pytest.raises(RefusedError) as refused:
            await erase(sealed, order)
        assert refused.value.code == "run-held"
    kept = await record(sealed.url, run_id)
    check_invariants(kept)
    (entry,) = kept.entries("erasure.refused")
    check_entry(entry)
    said = {name: value for name, value in entry["data"].items() if name != "artifacts"}
    assert said == {
        "erasure": str(order.id), "cause": "order", "scope": "run", "reason": "hold", "matters": ["2026-0042"],
    }  # fmt: skip
    assert (entry["actor"], entry["on_behalf_of"]) == ("officer", None)
    # What was asked for and why outlives the refusal, as a text that the entry commits to.
    assert await committed(sealed, run_id, entry) == {"basis": BASIS}
    assert kept.entries("artifact.erased") == []
    assert all(row["erased_at"] is None for row in kept.artifacts)
    # Another run is not held.
    await erase(sealed, order_for(other))


async def test_a_release_takes_two_people_not_two_accounts(sealed: Database) -> None:
    run_id = await finished_run(sealed, ["a text that is evidence now"])
    await place_hold(sealed, matter("counsel"), [run_id])
    await link_account(sealed, TENANT, "ada-admin", "ada", actor_id="hr")
    asked = await release_hold(sealed, matter("ada"))
    assert (asked.state, asked.release_asked_by) == ("asked", "ada")
    for account in ("ada", "ada-admin"):
        with pytest.raises(RefusedError) as refused:
            await release_hold(sealed, matter(account))
        assert refused.value.code == "second-person-needed"
    with pytest.raises(RefusedError, match="under hold"):
        await erase(sealed, order_for(run_id))
    released = await release_hold(sealed, matter("bob"))
    assert (released.state, released.released_by) == ("released", "bob")
    await erase(sealed, order_for(run_id))
    assert await list_holds(sealed, TENANT) == []
    assert await system_entries(sealed.url) == [
        "hold.placed", "person.linked", "hold.release_asked", "hold.released",
    ]  # fmt: skip
    placed, _, wish, release = await system_documents(sealed.url)
    assert [entry["actor"] for entry in (placed, wish, release)] == ["counsel", "ada", "bob"]
    own = {"hold": placed["data"]["hold"], "matter": "2026-0042"}
    without = [{name: value for name, value in entry["data"].items() if name != "artifacts"} for entry in
               (placed, wish, release)]  # fmt: skip
    assert without == [{**own, "runs": [str(run_id)], "all_runs": False}, own, {**own, "asked_by": "ada"}]
    for entry in (placed, wish, release):
        assert await committed(sealed, TENANT, entry) == {"reason": "Doe v. Acme, letter of counsel"}
    # The refusal under hold came before the release, the erasure after it.
    kept = await record(sealed.url, run_id)
    (refusal,), (erased,) = kept.entries("erasure.refused"), kept.entries("artifact.erased")
    assert refusal["at"] < release["at"] < erased["at"]
    with pytest.raises(RefusedError, match="nothing is held"):
        await release_hold(sealed, matter("bob"))


@pytest.mark.parametrize(
    ("asks", "confirms"),
    [(("ada", None), ("bot", "ada")), (("bot", "ada"), ("ada-admin", None)), (("bot", "ada"), ("tool", "ada"))],
)
async def test_who_lets_somebody_else_act_for_them_is_no_second_person(
    sealed: Database, asks: tuple[str, str | None], confirms: tuple[str, str | None]
) -> None:
    await place_hold(sealed, matter("counsel"), [await finished_run(sealed, ["a text that is evidence now"])])
    await link_account(sealed, TENANT, "ada-admin", "ada", actor_id="hr")
    await release_hold(sealed, replace(matter(asks[0]), on_behalf_of=asks[1]))
    with pytest.raises(RefusedError) as refused:
        await release_hold(sealed, replace(matter(confirms[0]), on_behalf_of=confirms[1]))
    assert refused.value.code == "second-person-needed"
    assert (await release_hold(sealed, replace(matter("bob"), on_behalf_of="carol"))).state == "released"


async def test_more_runs_take_a_wish_to_release_back(sealed: Database) -> None:
    first, second = [await finished_run(sealed, [text]) for text in ("the first text", "the second text")]
    await place_hold(sealed, matter("counsel"), [first])
    await release_hold(sealed, matter("ada"))
    view = await place_hold(sealed, matter("counsel"), [first, second])
    assert (view.state, set(view.runs)) == ("held", {first, second})
    placed, wish, widened = await system_documents(sealed.url)
    assert (wish["type"], wish["actor"], widened["type"]) == ("hold.release_asked", "ada", "hold.widened")
    assert (widened["data"]["hold"], widened["data"]["runs"]) == (placed["data"]["hold"], [str(second)])
    # So another person alone does not release it: that is the first wish of two.
    assert (await release_hold(sealed, matter("bob"))).state == "asked"
    await place_hold(sealed, matter("counsel"), [first], all_runs=True)
    assert (await system_documents(sealed.url))[-1]["data"]["all_runs"] is True
    # The same once more changes nothing.
    before = await system_entries(sealed.url)
    await place_hold(sealed, matter("counsel"), [second])
    assert await system_entries(sealed.url) == before


async def test_a_hold_on_everything_and_the_words_of_its_reason(sealed: Database) -> None:
    run_id = await finished_run(sealed, ["any text"])
    await place_hold(sealed, matter("counsel", reason="because of kanarie-in-a-reason"), [], all_runs=True)
    with pytest.raises(RefusedError, match="under hold"):
        await erase(sealed, order_for(run_id))
    assert "kanarie-in-a-reason" not in await dump(sealed.url)


async def test_what_is_no_matter_and_no_run_is_refused(sealed: Database) -> None:
    with pytest.raises(InputError, match="name of a matter"):
        matter("counsel", name="Doe v. Acme")
    with pytest.raises(InputError, match="no run"):
        await place_hold(sealed, matter("counsel"), [UUID(int=7)])


async def test_retention_leaves_what_is_held_and_says_so_once(sealed: Database) -> None:
    run_id = await finished_run(sealed, ["an old text"])
    await execute(
        sealed.url,
        "UPDATE runs SET ended_at = ended_at - interval '9 days', started_at = NULL WHERE id = %s", run_id,
    )  # fmt: skip
    await place_hold(sealed, matter("counsel"), [run_id])
    for _ in range(2):
        done = await sweep(sealed, TENANT, 7)
        assert (done.erased, done.held) == ([], [run_id])
    (entry,) = (await record(sealed.url, run_id)).entries("erasure.refused")
    check_entry(entry)
    data = entry["data"]
    assert (data["cause"], data["scope"], data["reason"], data["matters"]) == (
        "retention",
        "run",
        "hold",
        ["2026-0042"],
    )
    assert (entry["actor"], await system_entries(sealed.url)) == ("podium-engine", ["hold.placed"])


async def test_a_hold_and_an_erasure_at_once_agree_on_who_was_first(sealed: Database) -> None:
    for _ in range(6):
        run_id = await finished_run(sealed, ["contended text"])
        held, erased = await asyncio.gather(
            place_hold(sealed, matter("counsel", name=f"m-{run_id}"), [run_id]),
            erase(sealed, order_for(run_id)),
            return_exceptions=True,
        )
        assert not isinstance(held, BaseException)
        kept = await record(sealed.url, run_id)
        gone = [row for row in kept.artifacts if row["erased_at"] is not None]
        if isinstance(erased, RefusedError):
            assert (erased.code, gone) == ("run-held", [])
        else:
            assert not isinstance(erased, BaseException)
            assert gone
        check_invariants(kept)


@pytest.mark.parametrize(
    ("change", "all_runs"),
    [
        ("UPDATE holds SET released_at = clock_timestamp(), released_by = 'mallory'", False),
        ("UPDATE holds SET released_at = clock_timestamp(), released_by = 'mallory'", True),
        ("UPDATE holds SET all_runs = false", True),
    ],
)
async def test_a_hold_that_sql_released_still_holds(sealed: Database, change: str, all_runs: bool) -> None:
    run_id = await finished_run(sealed, ["a text that is evidence now"])
    await place_hold(sealed, matter("counsel"), [] if all_runs else [run_id], all_runs=all_runs)
    await execute(sealed.url, change)
    for _ in range(2):
        swept = await sweep(sealed, TENANT, 0)
        assert (swept.held, swept.erased, swept.refused) == ([run_id], [], [])
    with pytest.raises(RefusedError, match="under hold for 2026-0042") as refused:
        await erase(sealed, order_for(run_id))
    assert refused.value.code == "run-held"
    kept = await record(sealed.url, run_id)
    # One refusal for all sweeps, one for the order.
    assert [entry["data"]["cause"] for entry in kept.entries("erasure.refused")] == ["retention", "order"]
    assert all(row["erased_at"] is None for row in kept.artifacts)
