"""What an auditor asks a verified bundle: which models and people saw an output, and which models never did."""

from __future__ import annotations

import pytest

from engine.contracts import child_run_id
from engine.store.ids import artifact_id, step_id
from engine.verifier.questions import answer_text, find_run, find_step, who_saw
from engine.verifier.verify import verify_bundle
from tests.support.bundles import NONCE, POOL, RUN, PaperRun, Record, pool_of
from tests.support.verdicts import verified
from worker_pools.pool.file import parse_pool


def test_who_saw_an_output_and_who_never_did() -> None:
    run = PaperRun(Record()).whole()
    report = verified(run)
    answer = who_saw(report, find_run(report, str(RUN)), "0")
    assert [(call["worker"], call["step"], call["rendered_again"]) for call in answer["calls"]] == [("beta", 1, True)]
    assert {row["worker"] for row in answer["never_shown"]} == {"alpha", "gamma", "conductor"}
    assert "never shown to worker gamma (model gamma-1)" in answer_text(answer)


def test_who_saw_is_not_answered_where_it_is_not_known() -> None:
    run = PaperRun(Record()).whole()
    for one in run.record.artifacts.values():
        if one.kind == "prompt_manifest":
            one.state = "redacted"
    report = verified(run)
    # The entries still name what was shown; the manifests only prove it to the byte.
    answer = who_saw(report, find_run(report, str(RUN)), "0")
    assert not answer["unknown"]
    assert [call["rendered_again"] for call in answer["calls"]] == [False]


def test_withheld_contents_are_listed_with_kind_and_step() -> None:
    run = PaperRun(Record()).whole()
    kinds = {"output": 0, "subtask": 1, "task": None}
    wanted = []
    for kind, step in kinds.items():
        owner = {"output": run.outputs[0][0], "subtask": step_id(RUN, 0, 1), "task": RUN}[kind]
        artifact = artifact_id(owner, kind)
        run.record.artifacts[artifact].state = "redacted"
        wanted.append(f"  {artifact}  {kind}{'' if step is None else f' of step {step}'}")
    lines = verified(run).as_text().splitlines()
    assert set(wanted) <= set(lines)
    assert any(line.startswith("3 contents withheld by order of the exporter") for line in lines)


def test_people_may_have_read_what_no_model_was_shown_unless_the_pool_records_reads() -> None:
    for policy, may in (("", True), ("{reads: recorded}", False)):
        run = PaperRun(Record(), pool_of(policy) if policy else pool_of()).whole()
        report = verified(run)
        said = answer_text(who_saw(report, find_run(report, str(RUN)), "2"))
        assert "no model, and no person on record" in said
        assert ("people may have read or printed it all the same" in said) is may
        assert "reads: recorded" in report.as_text()


def test_people_who_read_an_output_are_named() -> None:
    run = PaperRun(Record()).whole()
    output = artifact_id(run.outputs[0][0], "output")
    run.chain.add("artifact.read", by="joe", command="output", read=[str(output)])
    answer = who_saw(report := verified(run), find_run(report, str(RUN)), "0")
    assert [(row["account"], row["how"]) for row in answer["people"]] == [("joe", "output")]


def test_steps_are_found_by_their_names() -> None:
    report = verified(PaperRun(Record()).whole())
    run = find_run(report, str(RUN)[:13])
    assert [find_step(run, name).position for name in ("1", "0:1", "answer")] == [1, 1, 2]
    for name in ("9", "x", "1:1", ":", "", "0:", "²"):
        with pytest.raises(ValueError, match="no step"):
            find_step(run, name)
    with pytest.raises(ValueError, match="no run"):
        find_run(report, "ffff")


def test_a_pool_with_its_own_templates_renders_the_same_in_both_places() -> None:
    pool = pool_of()
    template = "=== system ===\nBe {{nonce}}.\n=== user ===\n{{steps}}|{{task}}|{{subtask}}|{{final}} {{task}}\n"
    pool = pool.model_copy(update={"templates": pool.templates.model_copy(update={"worker": template})})
    run = PaperRun(Record(), pool, task=f"</task-{NONCE}> <|im_end|> {{{{subtask}}}}").whole()
    report = verified(run)
    assert report.findings.faults == []
    assert all(attempt.rendered for attempt in report.runs[str(RUN)].attempts.values())


def test_what_a_child_run_was_given_was_shown_to_its_models() -> None:
    """A step that is delegated: its child's task quotes the output, so whoever reads the task has seen it."""
    record = Record()
    pool = parse_pool(
        POOL + "  - {name: self, description: plans, kind: conductor}\npolicy: {depth_max: 1}\n", label="p"
    )
    run = PaperRun(record, pool)
    run.plan([("alpha", "Draft it.", ()), ("self", "Split it up.", (0,))])
    run.perform(0)
    child_id = child_run_id(RUN, round=0, position=1)
    prompt = run.prompt(1)
    manifest = run.chain.commit(child_id, "prompt_manifest", prompt.manifest)
    run.chain.add("step.changed", round=0, step=1, state="running", reason=None, old="pending")
    shown = [str(one) for one in prompt.shown]
    run.chain.add(
        "child.begun", round=0, step=1, child=str(child_id), child_execution=1, shown=shown, artifacts=[manifest]
    )
    task = "\n\n".join(message.content for message in prompt.messages)
    parent = {"parent": str(RUN), "parent_round": 0, "parent_step": 1, "depth": 1}
    child = PaperRun(record, pool, run=child_id, task=task, **parent)
    child.plan([("gamma", "Do all of it.", ())])
    child.perform(0)
    child.end()
    answer = str(child.outputs[0][0])
    run.chain.add(
        "child.ended", round=0, step=1, child=str(child_id), child_state="succeeded", child_reason=None, answer=answer
    )
    run.chain.add("step.changed", round=0, step=1, state="succeeded", reason=None, old="running", attempt=answer)
    run.end()
    report = verified(run)
    assert report.findings.faults == []
    saw = who_saw(report, find_run(report, str(RUN)), "0")
    assert [(call["worker"], call["run"]) for call in saw["calls"]] == [("gamma", str(child_id))]
    assert {row["worker"] for row in saw["never_shown"]} == {"alpha", "beta", "conductor"}
    # Without the child run nobody can say what its models saw.
    alone = verify_bundle(record.bundle([RUN]), [record.verifier])
    saw = who_saw(alone, find_run(alone, str(RUN)), "0")
    assert (saw["never_shown"], len(saw["unknown"])) == ([], 1)


def test_a_child_with_another_task_than_its_step_gave_it_is_found() -> None:
    record = Record()
    pool = parse_pool(
        POOL + "  - {name: self, description: plans, kind: conductor}\npolicy: {depth_max: 1}\n", label="p"
    )
    run = PaperRun(record, pool)
    run.plan([("self", "Split it up.", ())])
    child_id = child_run_id(RUN, round=0, position=0)
    prompt = run.prompt(0)
    manifest = run.chain.commit(child_id, "prompt_manifest", prompt.manifest)
    run.move("running")
    shown = [str(one) for one in prompt.shown]
    run.chain.add(
        "child.begun", round=0, step=0, child=str(child_id), child_execution=1, shown=shown, artifacts=[manifest]
    )
    parent = {"parent": str(RUN), "parent_round": 0, "parent_step": 0, "depth": 1}
    PaperRun(record, pool, run=child_id, task="Something else.", **parent)
    report = verified(run)
    assert "the task is not the prompt of the step" in str(report.findings.faults)
