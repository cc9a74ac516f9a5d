"""Bundles that try to cost too much, to steer a terminal, or to leave out what a rule needs; and files that are none."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from uuid import UUID, uuid5

import pytest

from activities.prompts import render_plan_request
from engine.store.ids import artifact_id, plan_id
from engine.store.inputs import FailedPlanning, Part, PlanInputs
from engine.verifier import visibility
from engine.verifier.__main__ import main
from engine.verifier.inert import make_inert
from engine.verifier.report import Report
from engine.verifier.verify import verify_bundle
from engine.verifier.words import one_line
from tests.support import bundles
from tests.support.bundles import NONCE, RUN, TENANT, PaperRun, Record, pool_of, whole_record
from tests.support.paper_reviews import Reviewing, finish, paper
from tests.support.verdicts import faults_of, verified

ESCAPES = "ann\x1b[2J\nVALID\u202e"


def test_a_plan_has_no_more_steps_than_any_pool_may_allow() -> None:
    run = PaperRun(Record())
    rows = [
        {"step": number, "worker": "alpha", "model": "alpha-1", "access": "all", "skipped": False}
        for number in range(65)
    ]
    run.chain.add("plan.accepted", round=0, attempt=None, steps=rows, artifacts=[])
    assert "do not allow so many steps" in faults_of(verified(run))


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"more": "x" * 2**20}, "larger than an entry may be"), ({"more": [[]] * 10_000}, "more lists and objects")],
)
def test_fields_that_nobody_looks_at_are_bounded(more: dict[str, object], reason: str) -> None:
    run = PaperRun(Record())
    run.chain.add("run.changed", state="planning", reason=None, old="created", **more)
    assert reason in faults_of(verified(run))


def test_a_text_is_made_inert_once_for_all_prompts_that_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counting(text: str) -> str:
        made.append(text)
        return make_inert(text)

    monkeypatch.setattr(visibility, "make_inert", counting)
    report = verified(PaperRun(Record(), task="The one task <task>").whole())
    assert report.findings.faults == []
    assert made.count("The one task <task>") == 1


@pytest.mark.parametrize("name", ["INERT_CHARS_MAX", "RENDERED_BYTES_MAX"])
def test_prompts_that_are_too_much_to_render_leave_the_verdict_open(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, name, 10)
    report = verified(PaperRun(Record()).whole())
    assert (report.findings.faults, report.exit_code) == ([], 3)
    assert any("too much text" in line for line in report.not_proven)


def test_brackets_that_may_begin_marks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "INERT_BRACKETS_MAX", 10)
    assert verified(PaperRun(Record(), task="<a[ ]" * 2).whole()).exit_code == 0
    report = verified(PaperRun(Record(), task="<a[ ]" * 4).whole())
    assert (report.findings.faults, report.exit_code) == ([], 3)
    assert any("too much text" in line for line in report.not_proven)


def repaired(calls: int) -> PaperRun:
    """A planning call that gave no plan, and calls that are shown what was wrong with it."""
    run = PaperRun(Record(), origin="conductor")
    first = run.send(None)
    remarks = json.dumps(
        {"notes": [], "errors": [{"field": "", "line": 0, "column": 0, "text": "<a[ ]" * 9, "hint": ""}]}
    )
    said = [run.chain.commit(first, "plan_text", "{}"), run.chain.commit(first, "plan_remarks", remarks)]
    run.close(None, first, None, artifacts=said)
    texts = [Part(artifact_id(first, kind), text) for kind, text in (("plan_text", "{}"), ("plan_remarks", remarks))]
    task = Part(artifact_id(RUN, "task"), run.task)
    inputs = PlanInputs(
        TENANT, run.digest, plan_id(RUN, 0), planned=False, task=task, failed=(FailedPlanning(first, *texts),)
    )
    for _ in range(calls):
        run.close(None, run.send(None, render_plan_request(run.pool, inputs, NONCE)), None)
    return run


def test_what_a_parser_said_is_counted_each_time_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made inert anew for each prompt, so a large one in thousands of prompts would take hours."""
    monkeypatch.setattr(visibility, "INERT_BRACKETS_MAX", 100)
    report = verified(repaired(2))
    assert report.findings.faults == []
    assert [attempt.rendered for attempt in report.runs[str(RUN)].attempts.values()] == [True] * 3
    report = verified(repaired(6))
    assert (report.findings.faults, report.exit_code) == ([], 3)
    assert any("too much text" in line for line in report.not_proven)


def test_a_run_without_parent_stands_at_the_top() -> None:
    run = PaperRun(Record(), pool_of("{reviews: [{gate: answer, approvals: 2}]}"), depth=1)
    assert "names it" in faults_of(verified(run.whole()))


def test_a_child_run_was_begun_by_the_run_that_it_names() -> None:
    from engine.verifier.contents import derived_id

    record = Record()
    PaperRun(record).whole()
    own = UUID(derived_id(str(RUN), "child/0/1"))
    child = PaperRun(record, run=own, depth=1, parent=str(RUN), parent_round=0, parent_step=1)
    assert "never began it" in faults_of(verified(child.whole()))


def test_a_run_that_succeeded_is_not_resumed_and_does_not_end_again() -> None:
    run = PaperRun(Record()).whole()
    run.chain.add("run.resumed", by="ann", execution=2, order=str(uuid5(RUN, "o")), deadline=None, artifacts=[])
    run.end(old="succeeded")
    assert "is not resumed" in faults_of(verified(run))


def test_nothing_is_open_when_a_run_succeeds() -> None:
    run = PaperRun(Record())
    run.plan((("alpha", "a", ()), ("beta", "b", ()), ("alpha", "c", ())))
    run.send(0)
    run.perform(2)
    run.end()
    assert "while step 0 was running" in faults_of(verified(run))


def test_the_totals_are_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = PaperRun(Record())
    add = run.chain.add

    def without(type_: str, **data: object) -> str:
        data.pop("totals", None)
        return add(type_, **data)  # type: ignore[arg-type]  # handed on as it came

    monkeypatch.setattr(run.chain, "add", without)
    assert "does not say what the run used" in faults_of(verified(run.whole()))


# The tenant's own chain, cut off


def reviewed(*, says: bool) -> Report:
    """A run that one person reviewed under two accounts, with the link cut off, and other leaves in the log."""
    run = paper("{gate: plan, approvals: 1}")
    system = run.record.system
    system.add("sampling.salt_made", by="root", salt="ab" * 32)
    if says:
        head = {"entries": len(system.bodies), "head": system.hash(-1)}
    PaperRun(run.record, run.pool, run=UUID(int=5)).whole()
    run.plan()
    Reviewing(run, "plan", None).approve("eve")
    finish(run, 0, 1, 2)
    if says:
        export = str(uuid5(RUN, "export"))
        run.chain.add("run.exported", by="ann", export=export, runs=[str(RUN)], redacted=[], system=head)
    run.record.sign()
    return verify_bundle(run.record.bundle([RUN]), [run.record.verifier])


def test_a_run_that_says_how_long_the_system_chain_was_shows_that_nothing_was_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = bundles.manifest_of
    exported = {"export": str(uuid5(RUN, "export"))}
    monkeypatch.setattr(bundles, "manifest_of", lambda *given: {**plain(*given), **exported})
    report = reviewed(says=True)
    assert report.findings.faults == []
    assert not any("left out" in line for line in report.not_proven)


def test_a_system_chain_whose_end_may_be_missing_leaves_the_verdict_open() -> None:
    report = reviewed(says=False)
    assert (report.findings.faults, report.exit_code) == ([], 3)
    assert any("link" in line and "left out" in line for line in report.not_proven)


# Words of others


def test_names_do_not_steer_a_terminal() -> None:
    assert one_line(ESCAPES) == "ann\\x1b[2J\\nVALID\\u202e"
    report = verify_bundle(whole_record().bundle(), [whole_record().verifier])
    assert report.bundle is not None
    object.__setattr__(report.bundle, "producer", ESCAPES)
    text = report.as_text()
    assert "\x1b" not in text
    assert "\nVALID\\u202e" not in text
    assert "by the exporter's own word" in text


# Files and streams


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    record = whole_record()
    (tmp_path / "bundle").write_bytes(record.bundle())
    (tmp_path / "trust").write_text(f"{record.verifier}\n")
    return {name: str(tmp_path / name) for name in ("bundle", "trust")}


@pytest.mark.parametrize(
    "arguments",
    [["/dev/zero", "--trust", "T"], ["B", "--trust", "/dev/zero"], ["B", "--trust", "T", "--checkpoint", "/dev/zero"]],
)
def test_what_is_no_file_is_usage(
    files: dict[str, str], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([{"B": files["bundle"], "T": files["trust"]}.get(one, one) for one in arguments]) == 2
    assert "is not a file" in capsys.readouterr().err


def test_a_step_of_thousands_of_digits_is_usage(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([files["bundle"], "--trust", files["trust"], "--who-saw", str(RUN), "9" * 5000]) == 2
    assert "is no step" in capsys.readouterr().err


def test_a_full_disk_is_said_without_a_traceback(
    files: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123  # a device
        monkeypatch.setattr(sys, "stdout", full)
        assert main([files["bundle"], "--trust", files["trust"]]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_terminal_without_the_letters_of_a_name_gets_them_escaped(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.verifier.__main__ import _say

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert _say("Jos\u00e9\n")
    assert raw.getvalue() == b"Jos\\xe9\n"
