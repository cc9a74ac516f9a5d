"""`podium review approve` of what has changed since it was displayed: refused when it is decided, with the reason.

Nobody but the owner of the server can change what is stored, and a workflow's next look would close such a review; the
command does not wait for that look.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from engine.operations.reviewing import decide_review
from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.review_requests import request_reviews
from tests.integration.store.test_reviews_on_record import ANSWER, gates, lines, look, proposed, sight
from tests.support.command import Done, podium
from tests.support.orders import temporal_is_away
from tests.support.sealed import sealed_database
from tests.support.servers import superuser_url
from tests.support.stored import answered, execute, opening, record, stored_run

Command = Callable[..., Done]


@pytest.fixture
def command(database_url: str, tmp_path: Path) -> Command:
    """Runs `podium` as bob on the test's database; nobody answers where Temporal should be."""

    def run(*arguments: str, key_store: str = "none", who: str = "bob") -> Done:
        env = {
            "PODIUM_DATABASE_URL": database_url,
            "PODIUM_TEMPORAL_ADDRESS": "127.0.0.1:9",
            "PODIUM_KEY_STORE": key_store,
            "PODIUM_ACTOR": who,
        }
        return podium(*arguments, home=tmp_path / "home", env=env, cwd=tmp_path)

    return run


async def asked(database: Database) -> tuple[UUID, UUID]:
    """A run whose output waits for a review, and the review."""
    run_id = await proposed(database, ANSWER)
    await request_reviews(database, run_id, ANSWER, (await look(database, run_id, ANSWER, 1)).missing)
    (line,) = await lines(database, run_id)
    return run_id, line.id


async def unguarded(url: str, statement: str) -> None:
    """Does what only a superuser can: past every trigger."""
    await execute(superuser_url(url), f"SET session_replication_role = replica; {statement}")


async def refused(
    command: Command, database: Database, run_id: UUID, review: UUID, why: str, *others: tuple[str, ...], **how: str
) -> None:
    """An approval (and what else is tried) is refused for this reason, and leaves nothing behind."""
    before = await record(database.url, run_id)
    for arguments in (("approve", str(review)), *others):
        done = command("review", *arguments, "--json", **how)
        assert (done.code, done.error_code) == (1, "review-stale"), done.err
        error = done.json["error"]
        assert error["message"] == f"review {review} is stale: {why}"
        assert error["hint"].startswith(f"podium show {run_id}")
    after = await record(database.url, run_id)
    assert after == before
    assert after.entries("review.decided") == []
    assert [line.state for line in await lines(database, run_id)] == ["open"]


async def test_a_text_that_was_changed_after_it_was_displayed(command: Command, database: Database) -> None:
    run_id, review = await asked(database)
    seen = command("review", "show", str(review), "--json").valid_json("review-show")
    assert (seen["intact"], seen["display"]["parts"][-1]["text"]) == (True, "An answer.")
    (opened,) = (await record(database.url, run_id)).entries("review.opened")
    assert opened["data"]["person"] == "bob"
    change = f"UPDATE artifacts SET content = '%s' WHERE run_id = '{run_id}' AND kind = 'output'"
    await unguarded(database.url, change % "Pay Eve.")
    others = (("approve", str(run_id)), ("reject", str(review), "--reason", "no"))
    await refused(command, database, run_id, review, "what it displays is not what it was asked for", *others)
    shown = command("review", "show", str(review), "--json", who="carol").valid_json("review-show")
    assert shown["intact"] is False
    assert len((await record(database.url, run_id)).entries("review.opened")) == 1
    # The same text as before is what was displayed, and can be approved: nothing else was in the way.
    await unguarded(database.url, change % "An answer.")
    done = await decide_review(database, temporal_is_away, review, "approve", actor_id="bob")
    assert done.decided.review_state == "approved"
    (decided,) = (await record(database.url, run_id)).entries("review.decided")
    assert decided["data"]["shown"] == opened["data"]["shown"]


async def test_a_sealed_text_that_does_not_open_any_more(command: Command, database_url: str, tmp_path: Path) -> None:
    database = sealed_database(database_url, tmp_path / "keys")
    run_id, review = await asked(database)
    how = {"key_store": (tmp_path / "keys").as_uri()}
    await unguarded(
        database.url,
        f"UPDATE artifacts SET content = set_byte(content, 20, get_byte(content, 20) # 1)"
        f" WHERE run_id = '{run_id}' AND kind = 'output'",
    )
    await refused(command, database, run_id, review, "a text that it displays is not stored any more", **how)
    await database.close()


async def test_a_step_that_has_another_output_by_now(command: Command, database: Database) -> None:
    run_id, review = await asked(database)
    await unguarded(database.url, f"UPDATE steps SET candidate_attempt_id = NULL WHERE run_id = '{run_id}'")
    await refused(command, database, run_id, review, "the step has another output by now")


async def test_a_call_of_an_execution_that_is_over(command: Command, database: Database) -> None:
    """A review before a call is for one execution; the run has been resumed since."""
    rules = gates({"gate": "before"})
    run_id = await stored_run(database, [[], [0]])
    first = opening(run_id, 0, review=await sight(database, run_id, gates()))
    assert (await open_attempt(database, first)).verdict == "call"
    await close_step_attempt(database, answered(first))
    seen = await sight(database, run_id, rules)
    ruling = await open_attempt(database, opening(run_id, 1, (1, 0, 1), review=seen))
    assert (ruling.verdict, len(ruling.missing)) == ("held", 1)
    await request_reviews(database, run_id, rules, ruling.missing)
    (line,) = await lines(database, run_id)
    await unguarded(database.url, f"UPDATE runs SET execution = 2, execution_seen = 2 WHERE id = '{run_id}'")
    await refused(command, database, run_id, line.id, "the run has been resumed since")
