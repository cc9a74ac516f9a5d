"""What an export leaves out: exactly what was asked for, and what the record knows to quote it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

import pytest

from engine.errors import InputError
from engine.evidence.redaction import KINDS, MANIFEST_KINDS, Collected, Rule, artifact_of, read_rules

CHECKOUT = Path(__file__).parents[3]
RUN = "0192f000-0000-7000-8000-000000000001"
CHILD = "0192f000-0000-7000-8000-000000000002"
REVIEW = "0192f000-0000-7000-8000-000000000003"


def owner(name: str) -> str:
    return str(uuid5(UUID(RUN), name))


def row(of: str, kind: str) -> dict[str, Any]:
    return {"artifact": artifact_of(of, kind), "kind": kind, "bytes": 1, "commitment": "00" * 32}


def collected() -> Collected:
    """A run of two steps, the second delegated to a child, with a review of the first."""
    found = Collected()
    steps = [{"step": number, "id": owner(f"step/{number}")} for number in (0, 1)]
    attempt, planned = owner("attempt"), owner("plan")

    def take(run: str, type_: str, **data: Any) -> None:
        found.take({"run": run, "type": type_, "data": data})

    take(RUN, "run.created", pool="aa", artifacts=[row(RUN, "task")], checkpoint=3)
    texts = [row(planned, kind) for kind in ("plan", "plan_text", "plan_remarks")]
    texts += [row(step["id"], "subtask") for step in steps]
    take(RUN, "plan.accepted", round=0, steps=steps, artifacts=texts)
    manifest = row(attempt, "prompt_manifest")
    shown = [artifact_of(RUN, "task"), artifact_of(steps[0]["id"], "subtask")]
    take(RUN, "attempt.sent", round=0, step=0, attempt=attempt, shown=shown, artifacts=[manifest])
    take(RUN, "attempt.closed", round=0, step=0, attempt=attempt, artifacts=[row(attempt, "output")])
    take(RUN, "review.requested", review=REVIEW, round=0, step=0, artifacts=[row(REVIEW, "review_manifest")])
    take(RUN, "review.commented", review=REVIEW, artifacts=[row(owner("order"), "comment")])
    quoted = [*shown, artifact_of(attempt, "output")]
    take(RUN, "child.begun", round=0, step=1, child=CHILD, shown=quoted, artifacts=[row(CHILD, "prompt_manifest")])
    take(CHILD, "run.created", pool="aa", artifacts=[row(CHILD, "task")])
    return found


def left_out(*rules: str, **options: Any) -> set[str]:
    found = collected()
    chosen = found.redacted(read_rules(rules), disclosed_only=options)
    names = {"run": RUN, "child": CHILD}
    return {
        f"{next(name for name, run in names.items() if run == each.run)}/{each.kind}"
        for each in found.artifacts.values()
        if each.id in chosen
    }


PLANS = {"run/plan", "run/plan_text", "run/plan_remarks"}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], set()),
        (["output"], {"run/output", "child/task"}),
        (["output@0"], {"run/output", "child/task"}),
        (["output@0.0"], {"run/output", "child/task"}),
        (["output@1.0"], set()),
        (["output@1"], set()),
        (["reason"], set()),
        (["comment@0"], {"run/comment"}),
        (["comment@1"], set()),
        # The plan holds the subtasks, and the child's task quotes the first.
        (["subtask@0"], {"run/subtask", "child/task"} | PLANS),
        (["subtask@1"], {"run/subtask"} | PLANS),
        (["plan_text"], {"run/plan_text"}),
        (["task"], {"run/task", "child/task"}),
        (["all@0"], {"run/output", "run/subtask", "run/comment", "child/task"} | PLANS),
        (["all"], {"run/task", "run/output", "run/subtask", "run/comment", "child/task"} | PLANS),
        ([artifact_of(RUN, "task")], {"run/task", "child/task"}),
    ],
)
def test_a_rule_leaves_out_what_it_names_and_what_quotes_that(rules: list[str], expected: set[str]) -> None:
    assert left_out(*rules) == expected


def test_of_a_run_that_is_there_for_its_outputs_only_those_are_disclosed() -> None:
    found = collected()
    output = artifact_of(owner("attempt"), "output")
    out = found.redacted((), disclosed_only={RUN: {output}})
    kept = {each.kind for each in found.artifacts.values() if each.run == RUN and each.id not in out}
    assert kept == {"output", *MANIFEST_KINDS}


def test_an_artifact_that_the_runs_do_not_have_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        collected().redacted((Rule(artifact=owner("nothing")),), disclosed_only={})
    assert caught.value.code == "redaction-unknown"


@pytest.mark.parametrize(
    "text", ["", "everything", "output@", "output@x", "output@0.0.0", "@0", "OUTPUT", "output 0", "0192"]
)
def test_what_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        read_rules([text])
    assert caught.value.code == "redaction-invalid"


@pytest.mark.parametrize("text", ["output", "all", "output@0", "all@1.2", RUN])
def test_a_rule_is_recorded_as_it_was_given(text: str) -> None:
    assert [str(rule) for rule in read_rules([text])] == [text]


def test_what_the_entries_name_beside_texts_is_collected() -> None:
    found = collected()
    assert (found.pools, found.checkpoints) == ({"aa"}, {3})
    assert artifact_of(owner("attempt"), "output") in found.shown[RUN]
    found.take({"run": RUN, "type": "artifact.erased", "data": {"erased": [owner("x")], "artifacts": []}})
    assert found.erased == {owner("x")}


def test_every_kind_of_text_that_is_stored_can_be_left_out() -> None:
    kinds: set[str] = set()
    for path in (path for package in ("engine", "activities") for path in (CHECKOUT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"ArtifactDraft", "text_draft"}:
                kinds |= {arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
    assert len(kinds) > 8
    assert kinds - set(KINDS) - MANIFEST_KINDS == set()
