"""Prompt templates fill once, and the plan schema lets through only plans that can be run."""

from __future__ import annotations

import jsonschema
import pytest

from worker_pools.conductor_schema import EXACT_STEPS_MAX, plan_schema
from worker_pools.pool.template import WORKER_PLACES, check_template, fill, places, sections


def test_filling_is_one_pass_so_a_value_is_never_filled_again():
    assert fill("{{task}} {{subtask}}", {"task": "{{subtask}}", "subtask": "x {{task}}"}) == "{{subtask}} x {{task}}"
    assert places("{{a}} { {b} } {{c}}") == {"a", "c"}
    with pytest.raises(KeyError):
        fill("{{nobody}}", {})


def test_sections_become_messages():
    found = sections("=== system ===\none\n=== user ===\ntwo\n")
    assert [(section.role, section.text) for section in found] == [("system", "one"), ("user", "two")]
    assert [section.role for section in sections("just text")] == ["user"]


@pytest.mark.parametrize(
    "template",
    [
        "before\n=== user ===\n{{subtask}}",
        "=== user ===\n{{subtask}}\n=== system ===\nx",
        "=== system ===\n{{subtask}}",
        "=== user ===\na {{subtask}}\n=== user ===\nb",
        "{{subtask}} {{unknown}}",
        "nothing to fill",
        # An empty message is refused by some providers (G2-09).
        "=== system ===\n\n=== user ===\n{{subtask}}",
        "=== system ===\n{{final}} {{steps}}\n=== user ===\n{{subtask}}",
    ],
)
def test_a_template_that_cannot_work_is_refused(template):
    with pytest.raises(ValueError):
        check_template(template, allowed=WORKER_PLACES, required=frozenset({"subtask"}))


def fits(plan: dict, **options) -> bool:
    schema = plan_schema(workers=range(3), steps_max=5, **options)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).is_valid(plan)


def plan(models: list, access: list) -> dict:
    return {"model_id": models, "subtasks": ["do it"] * len(models), "access_list": access}


def test_good_plans_fit():
    assert fits(plan([0], [[]]))
    assert fits(plan([2, 1, 0, 1, 2], [[], [0], [0, 1], [2], [0, 1, 2, 3]]))


@pytest.mark.parametrize(
    "bad",
    [
        plan([3], [[]]),
        plan([0], [[0]]),
        plan([0, 1], [[], [1]]),
        plan([0, 1], [[1], []]),
        plan([0, 1], [[]]),
        plan([], []),
        plan([0] * 6, [[]] * 6),
        plan([0], [[]]) | {"subtasks": [""]},
        plan([0], [[]]) | {"more": 1},
    ],
)
def test_bad_plans_do_not_fit(bad):
    assert not fits(bad)


def test_a_small_model_can_be_held_to_short_subtasks_and_a_last_step_that_reads():
    assert not fits(plan([0], [[]]), last_step_reads=True)
    assert not fits(plan([0, 1], [[], []]), last_step_reads=True)
    assert fits(plan([0, 1], [[], [0]]), last_step_reads=True)
    assert not fits(plan([0], [[]]) | {"subtasks": ["x" * 121]}, subtask_chars_max=120)


def test_the_schema_of_long_plans_stays_small():
    assert len(str(plan_schema(workers=range(64), steps_max=64))) < 5_000
    assert len(str(plan_schema(workers=range(7), steps_max=EXACT_STEPS_MAX))) < 20_000
