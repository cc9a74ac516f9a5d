"""Rules for reviews in pool files: what they may say, what is refused at its line, and what a run keeps of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import rfc8785

from engine.errors import InputError
from engine.store.gates import GateRule, Gates
from worker_pools.pool import load_pool, pool_digest, pool_document, pool_from_document
from worker_pools.pool.file import parse_pool

CHECKOUT = Path(__file__).parents[3]
POOL = """\
name: p
conductor: {base_url: "http://127.0.0.1:9/v1", model: m}
workers:
  - {name: a, description: x, base_url: "http://127.0.0.1:9/v1", model: m, clearance: secret}
  - {name: b, description: x, base_url: "http://127.0.0.1:9/v1", model: m}
policy:
  reviews:
"""


def pool_of(*rules: str) -> Any:
    return parse_pool(POOL + "".join(f"    - {rule}\n" for rule in rules), label="p.yaml")


def test_a_rule_needs_only_its_gate_and_is_strict_by_default() -> None:
    (rule,) = pool_of("{gate: answer}").policy.reviews
    assert (rule.approvals, rule.four_eyes, rule.sample_percent, rule.bypass) == (1, True, 100, "others")
    assert (rule.on_expiry, rule.on_reject, rule.expires_s) == ("reject", "fail", None)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("{gate: never}", "Input should be"),
        ("{gate: answer, approvals: 0}", "greater than or equal to 1"),
        ('{gate: answer, approvals: "2"}', "whole number"),
        ("{gate: answer, four_eyes: 1}", "true or false"),
        ("{gate: answer, sample_percent: 0}", "greater than or equal to 1"),
        ("{gate: answer, sample_percent: 101}", "less than or equal to 100"),
        ("{gate: answer, workers: [a]}", "select steps"),
        ("{gate: plan, clearance: [secret]}", "select steps"),
        ("{gate: after, workers: [nobody]}", "is not a worker of this pool"),
        ("{gate: after, clearance: [public]}", "is not the clearance of any worker"),
        ("{gate: answer, on_expiry: approve}", "`expires_s`, which is missing"),
        ("{gate: answer, expires_s: 60, on_expiry: escalate}", "belong together"),
        ("{gate: answer, expires_s: 60, escalate: {approvals: 1}}", "belong together"),
        (
            "{gate: answer, expires_s: 60, on_expiry: escalate, escalate: {on_expiry: approve}}",
            "`expires_s`, which is missing",
        ),
        ("{gate: answer, approvals: 2, reviewers: [bob]}", "cannot come from 1 reviewers"),
        ("{gate: answer, reviewers: [a b]}", "an account or a person"),
        ("{gate: answer, reviewer: [bob]}", "unknown key"),
    ],
)
def test_a_rule_that_could_not_be_kept_is_refused_at_its_line(rule: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        pool_of("{gate: plan}", rule)
    assert caught.value.code == "pool-invalid"
    assert words in caught.value.message
    assert "p.yaml:9: policy.reviews[1]" in caught.value.message


def test_the_same_rule_twice_is_a_mistake() -> None:
    with pytest.raises(InputError, match="the same rule as"):
        pool_of("{gate: plan}", "{gate: plan}")


def test_a_rules_digest_is_that_of_its_place_in_the_pinned_pool() -> None:
    rule = (
        "{gate: after, expires_s: 60, on_expiry: escalate, escalate: {reviewers: [bob], approvals: 1}, meaning: I did}"
    )
    pool = pool_of("{gate: answer, approvals: 2}", rule)
    document = pool_document(pool)
    kept = pool_from_document(document).policy.reviews
    for stated, own in zip(json.loads(document)["pool"]["policy"]["reviews"], kept, strict=True):
        assert own.digest == hashlib.sha256(rfc8785.dumps(stated)).hexdigest() == GateRule(own.document).digest.hex()


def test_a_pool_without_reviews_is_the_pool_that_it_was() -> None:
    pool = load_pool("local")
    assert b"reviews" not in pool_document(pool)
    assert pool_digest(pool_document(pool_from_document(pool_document(pool)))) == pool_digest(pool_document(pool))


def test_rules_are_for_the_workers_and_labels_that_they_name() -> None:
    from uuid import UUID

    rules = (
        "{gate: after}", "{gate: after, workers: [b]}", "{gate: after, clearance: [secret]}",
        "{gate: after, workers: [b], clearance: [secret]}",
    )  # fmt: skip
    pool = pool_of(*rules)
    gates = Gates(
        tuple(GateRule(rule.document) for rule in pool.policy.reviews),
        {worker.name: worker.clearance for worker in pool.workers},
    )

    def chosen(worker: str) -> list[int]:
        found = [draw.rule for draw in gates.draws(UUID(int=1), "after", 0, 0, worker) if draw.chosen]
        return [gates.rules.index(rule) for rule in found]

    assert (chosen("a"), chosen("b")) == ([0, 2], [0, 1])
    assert [rule.reason for rule in gates.rules] == ["policy", "label", "label", "label"]


def test_the_example_pool_has_the_gates_that_the_readme_tells_of() -> None:
    pool = load_pool(str(CHECKOUT / "examples" / "pools" / "local-reviewed.yaml"))
    assert [(rule.gate, rule.approvals) for rule in pool.policy.reviews] == [("plan", 1), ("answer", 2)]
