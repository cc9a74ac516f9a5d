"""Properties that hold for every plan and every text."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_reading import POOL, notes, read, steps
from plan_spelling import plans, spelled

from engine.plan import canonical_plan, plan_digest, render_plan

EXAMPLES = 120
_THOROUGH = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
_SAFE = st.text(st.sampled_from("abc XY.,!?:#[]{}()<>=-*&%'’‘“”\"`\n\té\U0001f600"), min_size=1, max_size=25).filter(
    lambda text: text.strip()
)
_PIECES = st.sampled_from(
    [
        "model_id = ",
        "subtasks: ",
        "access_list=",
        "steps:\n",
        "- agent: 0\n  ",
        "instruction: ",
        "access_list: []\n",
        '{"model_id": [0], ',
        '[{"agent": 0, "instruction": ',
        "<think>",
        "</think>",
        "```\n",
        "[",
        "]",
        "(",
        "{",
        "}",
        ",",
        '"',
        "'",
        "“",
        "”",
        "’",
        "\\",
        "\\u12",
        "\\ud83d",
        "\x00",
        "\ud800",
        "\ufeff",
        "\r",
        "\n",
        "0",
        "-1",
        "9" * 30,
        "None",
        '"all"',
        "&a ",
        "*a ",
        "!!x ",
        "%",
        "? ",
        "| \n",
        "\t",
        "model_id = [0]\nsubtasks = ['x']\naccess_list = [[]]\n",
    ]
)


@_THOROUGH
@given(st.data())
def test_a_plan_in_any_spelling_parses_back_to_itself(data):
    plan = data.draw(plans())
    text = data.draw(spelled(plan))
    result = read(text)
    assert steps(result) == [(step.worker, step.subtask, step.access) for step in plan.steps]
    assert "text-cleaned" not in notes(result)
    assert canonical_plan(result.plan) == canonical_plan(plan)


@_THOROUGH
@given(plans(), st.sampled_from(["lists", "json", "steps-json", "steps-yaml"]), st.booleans())
def test_a_rendered_plan_parses_back_to_itself_without_notes(plan, form, lenient):
    result = read(render_plan(plan, form, POOL), lenient=lenient)
    assert result.form == form
    assert result.plan.steps == plan.steps
    assert set(notes(result)) <= {"tex-kept"}
    assert notes(result) == []
    assert plan_digest(result.plan) == plan_digest(plan)


@_THOROUGH
@given(
    st.lists(st.one_of(_PIECES, st.text(max_size=8)), max_size=25).map("".join),
    st.booleans(),
    st.sampled_from([None, "length"]),
)
def test_any_text_is_answered_with_a_plan_or_with_errors(text, lenient, finish_reason):
    result = read(text, lenient=lenient, finish_reason=finish_reason)
    lines = text.count("\n") + text.count("\r") + 1
    for error in result.errors:
        "".join((error.text, error.hint or "", error.field or "")).encode()
        assert (error.line is None) == (error.column is None)
        assert error.line is None or 1 <= error.line <= lines
        assert error.column is None or 1 <= error.column <= len(text) + 1
    if result.plan is not None:
        canonical_plan(result.plan)
        for step in result.plan.steps:
            step.subtask.encode()
            assert step.worker in POOL
            assert all(0 <= seen < step.position for seen in step.visible())


@_THOROUGH
@given(st.data())
def test_a_changed_plan_never_crashes_and_never_invents_text(data):
    plan = data.draw(plans(subtask=_SAFE))
    form = data.draw(st.sampled_from(["lists", "json", "steps-json"]))
    text = render_plan(plan, form, ()).replace("\\", "")
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 3))
        text = (
            text[:at]
            + data.draw(st.sampled_from(["", '"', "'", ",", "[", "]", "“", "”", ".", "x", "\n", " "]))
            + text[at + cut :]
        )
    result = read(text, lenient=data.draw(st.booleans()))
    if result.plan is not None and result.form != "steps-yaml":
        for step in result.plan.steps:
            assert step.subtask in text


@_THOROUGH
@given(st.data())
def test_a_cut_plan_never_yields_a_plan(data):
    plan = data.draw(plans())
    form = data.draw(st.sampled_from(["lists", "json", "steps-json", "steps-yaml"]))
    text = render_plan(plan, form, POOL)
    finish_reason = "length" if form == "steps-yaml" else data.draw(st.sampled_from([None, "length"]))
    inside = len(text.rstrip()) - 1
    for at in {*data.draw(st.lists(st.integers(0, inside), max_size=20)), inside, inside // 2}:
        assert read(text[:at], finish_reason=finish_reason, lenient=True).plan is None


def test_a_plan_cut_at_any_offset_of_its_lists_never_yields_a_plan():
    plan = 'model_id = [0, 1]\nsubtasks = ["Say “a, b” or [c]", \'it\'\n]access_list = [[], ["all", 0]]'
    for at in range(len(plan)):
        for lenient in (False, True):
            assert read(plan[:at], lenient=lenient).plan is None, plan[:at]
    fenced = "```yaml\n- agent: 0\n  instruction: a\n  access_list: []\n- agent: 0\n  instruction: |\n    b\n  access_list: [1]\n"
    for at in range(len(fenced)):
        assert read(fenced[:at]).plan is None, fenced[:at]
