"""Reviews by the real command with a real keeper, as a compliance reviewer would do them; only the models stand in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Done, validate
from tests.support.podium_home import POOL, PRICE, PodiumHome
from tests.support.provider import Provider

pytestmark = pytest.mark.slow

PLAN = 'model_id = ["echo", "quick"]\nsubtasks = ["one", "two"]\naccess_list = [[], [0]]\n'
RULES = """
  reviews:
    - {gate: plan}
    - {gate: answer, approvals: 2}
"""


@pytest.fixture(scope="module")
def home(session_provider: Provider) -> Iterator[PodiumHome]:
    with PodiumHome(session_provider.base_url) as made:
        text = POOL.format(url=session_provider.base_url, price=PRICE)
        text = text.replace("policy: {steps_max: 8}", f"policy:\n  steps_max: 8{RULES.rstrip()}")
        (made.folder / "reviewed.yaml").write_text(text)
        yield made


def as_(home: PodiumHome, who: str, *arguments: str) -> Done:
    return home.podium(*arguments, env={"PODIUM_ACTOR": who})


def submitted(home: PodiumHome, who: str = "alice") -> dict[str, Any]:
    (home.folder / "plan.txt").write_text(PLAN)
    done = as_(home, who, "run", "Weigh it.", "--pool", "./reviewed.yaml", "--plan", "plan.txt", "--json")
    assert done.code == 3, done.err
    run: dict[str, Any] = done.valid_json("run")
    assert (run["state"], run["reason"]) == ("waiting", "review")
    return run


def open_review(home: PodiumHome, run: dict[str, Any], gate: str) -> str:
    done = home.podium("review", "list", "--json")
    found = [one for one in done.valid_json("review-list") if (one["run"], one["gate"]) == (run["id"], gate)]
    assert len(found) == 1, done.out
    return str(found[0]["id"])


def test_a_compliance_reviewer_is_refused_their_own_run_and_two_others_approve(
    home: PodiumHome, provider: Provider
) -> None:
    run = submitted(home)
    assert provider.count == 0
    plan = open_review(home, run, "plan")
    watched = as_(home, "alice", "watch", run["id"])
    assert watched.code == 3
    lines = watched.err.splitlines()
    assert lines[-1] == (
        f"hint: `podium review show {plan}`, then `podium review approve {plan}` or "
        f"`podium review reject {plan} --reason TEXT`"
    )
    assert any(line.startswith("review of the plan has 0 of 1 approval; open for ") for line in lines)
    shown = home.podium("show", run["id"]).out
    assert "state   waiting (review)" in shown
    assert f"podium review approve {plan}" in shown
    own = as_(home, "alice", "review", "approve", plan, "--json")
    assert (own.code, own.error_code) == (1, "review-own")
    looked = as_(home, "bob", "review", "show", plan)
    assert looked.code == 0, looked.err
    for words in ("gate    the plan (policy)", "--- the task ---", "Weigh it.", "not by  alice", "worker quick"):
        assert words in looked.out
    assert "approving says: I checked that this plan is fit for the task and may be performed.\n" in looked.out
    assert "rejecting says: I checked the plan, and it must not be performed.\n" in looked.out
    done = as_(home, "bob", "review", "approve", plan, "--reason", "It is short.", "--json")
    assert (done.valid_json("review-decision")["review_state"], done.json["delivered"]) == ("approved", True)

    waited = as_(home, "alice", "watch", run["id"], "--json")
    assert (waited.code, waited.valid_json("run")["reason"]) == (3, "review")
    assert provider.count == 2
    answer = open_review(home, run, "answer")
    assert as_(home, "alice", "review", "approve", answer, "--json").error_code == "review-own"
    first = as_(home, "bob", "review", "approve", run["id"], "--meaning", "I weighed it.")
    assert first.code == 0, first.err
    assert first.out == f"review {answer} approved by you; 1 more needed, from another\n"
    assert as_(home, "bob", "review", "approve", answer, "--json").error_code == "review-decided"
    assert as_(home, "carol", "review", "comment", answer, "Fine with me.").code == 0
    second = as_(home, "carol", "review", "approve", answer)
    assert (second.code, second.out) == (0, f"review {answer} approved by you\n")

    ended = as_(home, "alice", "watch", run["id"], "--json").valid_json("run")
    assert (ended["state"], [one["state"] for one in ended["reviews"]]) == ("succeeded", ["approved", "approved"])
    told = home.podium("review", "show", answer, "--json").valid_json("review-show")
    assert [(one["person"], one["meaning"], one["meaning_text"]) for one in told["decisions"]] == [
        ("bob", "own-words", "I weighed it."),
        ("carol", "answer-checked", "I checked the answer against the task, and it may be given out."),
    ]
    assert told["meanings"]["approve"] == "I checked the answer against the task, and it may be given out."
    assert (told["comments"][0]["text"], told["intact"]) == ("Fine with me.", True)
    assert told["display"]["parts"][-1] == {**told["display"]["parts"][-1], "role": "output", "step": 1}
    late = as_(home, "dan", "review", "approve", answer, "--json")
    assert (late.code, late.error_code) == (1, "review-closed")
    stats = home.podium("review", "stats", "--json").valid_json("review-stats")
    bob = next(one for one in stats["reviewers"] if (one["person"], one["gate"]) == ("bob", "plan"))
    assert (bob["decisions"], bob["opened"], bob["reject_rate"]) == (1, 1, 0.0)
    assert home.podium("review", "stats").out.splitlines()[0].split()[:3] == ["reviewer", "gate", "decided"]

    log = home.podium("audit", "log", run["id"]).out
    for words in ("reason: It is short.", "meaning: I weighed it.", "comment: Fine with me."):
        assert words in log
    assert home.podium("erase", run["id"], "--basis", "GDPR Art. 17").code == 0
    assert "what it is about was erased" in home.podium("review", "show", answer).out
    gone = home.podium("review", "show", answer, "--json").valid_json("review-show")
    assert (gone["display"], gone["erased"], told["erased"]) == (None, True, False)
    log = home.podium("audit", "log", run["id"]).out
    for words in ("reason: (erased)", "comment: (erased)", "basis: GDPR Art. 17"):
        assert words in log


def test_a_second_account_is_the_same_person(home: PodiumHome, provider: Provider) -> None:
    done = as_(home, "admin", "person", "link", "ann-laptop", "ann", "--json")
    assert done.valid_json("person-link")["linked_by"] == "admin"
    again = as_(home, "admin", "person", "link", "ann-laptop", "eve", "--json")
    assert (again.code, again.error_code) == (1, "person-linked")
    assert as_(home, "admin", "person", "link", "a b", "ann", "--json").error_code == "person-invalid"
    listed = home.podium("person", "list", "--json").valid_json("person-list")
    assert [(one["account"], one["person"]) for one in listed] == [("ann-laptop", "ann")]
    run = submitted(home, "ann")
    plan = open_review(home, run, "plan")
    assert as_(home, "ann-laptop", "review", "approve", plan, "--json").error_code == "review-own"
    sent = as_(home, "bob", "review", "reject", plan, "--send-back", "--reason", "no", "--json")
    assert (sent.code, sent.error_code) == (1, "send-back-impossible")
    assert as_(home, "bob", "review", "reject", plan, "--json").error_code == "reason-missing"
    rejected = as_(home, "bob", "review", "reject", plan, "--reason", "Not like this.")
    assert rejected.out == f"review {plan} rejected\n"
    ended = as_(home, "ann", "watch", run["id"], "--json")
    assert (ended.code, ended.json["reason"], provider.count) == (1, "review-rejected", 0)


def test_a_broken_glass_and_a_review_after_the_fact(home: PodiumHome, provider: Provider) -> None:
    run = submitted(home)
    plan = open_review(home, run, "plan")
    assert as_(home, "bob", "review", "bypass", plan, "--json").error_code == "reason-missing"
    done = as_(home, "bob", "review", "bypass", plan, "--reason", "It burns.")
    assert done.out == f"review {plan} bypassed; a later review of the same was opened\n"
    as_(home, "alice", "watch", run["id"])
    later = open_review(home, run, "plan")
    assert later != plan
    assert as_(home, "bob", "review", "approve", later, "--json").error_code == "review-own"
    assert as_(home, "carol", "review", "approve", later).code == 0
    # By order, for a step; whoever names a run of which several are open is told which.
    asked = as_(home, "dora", "review", "request", run["id"], "--step", "0", "--json")
    assert asked.valid_json("review")["reason"] == "order"
    several = as_(home, "carol", "review", "approve", run["id"], "--json")
    assert (several.code, several.error_code) == (2, "review-ambiguous")
    assert home.podium("cancel", run["id"]).code == 0
    listed = home.podium("review", "list")
    assert (listed.code, asked.json["id"] in listed.out) == (0, True)
    assert run["id"] in home.podium("review", "list", "--all").out
    for arguments in (("approve", "ffffffff"), ("show", "zzz"), ("comment", "ffffffff", "hm"), ("bypass", "ffffffff")):
        refused = home.podium("review", *arguments, "--json")
        assert (refused.code, refused.error_code) == (2, "review-unknown")
    assert "Traceback" not in listed.err


def test_looking_where_there_is_nothing_starts_nothing(tmp_path: Path) -> None:
    from tests.support.command import podium

    for arguments in (("review", "list"), ("review", "stats"), ("review", "salt"), ("person", "list")):
        done = podium(*arguments, "--json", home=tmp_path / "home")
        assert done.code == 0
        validate(done.json, "-".join(arguments))
    assert podium("review", "approve", "last", "--json", home=tmp_path / "home").error_code == "run-unknown"
    assert not (tmp_path / "home").exists()
