"""A label, a key or a number inside the text of a complete plan is text: it decides nothing."""

from __future__ import annotations

import pytest
from plan_reading import codes, notes, read, steps

LABELS = [
    ",model_id",
    "{subtasks",
    "Compare agents, model_id, subtasks and access_list",
    "model_id = [1]",
    "subtasks: [1]",
    "x, model_id = [1], subtasks = ['b'], access_list = [[]]",
    "**model_id**: [1]",
    '{"model_id": [1], "subtasks": ["b"], "access_list": [[]]}',
]


def quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def written(text: str) -> list[str]:
    """Every way in which YAML may hold the text; in all of them its value is the text."""
    return [
        f"- agent: 0\n  instruction: {quoted(text)}\n  access_list: []\n",
        "- agent: 0\n  instruction: '{}'\n  access_list: []\n".format(text.replace("'", "''")),
        f"- agent: 0\n  access_list: []\n  instruction: |-\n    {text}\n",
        f"- instruction: >-\n    {text}\n  agent: 0\n  access_list: []\n",
        f"- {{agent: 0, instruction: {quoted(text)}, access_list: []}}\n",
        f"- agent: 0\n  step: 1\n  instruction:\n    {quoted(text)}\n  access_list: []\n",
    ]


@pytest.mark.parametrize("text", LABELS)
@pytest.mark.parametrize("number", range(6))
def test_labels_in_a_text_of_a_yaml_plan_are_text(text, number):
    body = written(text)[number]
    for plan in (body, f"The plan:\n\n{body}", f"```yaml\n{body}```\nDone.", "steps:\n" + body):
        result = read(plan)
        assert steps(result) == [("alpha", text, ())], plan
        assert notes(result) == []


@pytest.mark.parametrize("text", LABELS)
def test_labels_in_a_text_of_a_json_plan_are_text(text):
    step = f'{{"agent": 0, "instruction": {quoted(text)}, "access_list": []}}'
    flow = f"{{agent: 0, instruction: {quoted(text)}, access_list: []}}"
    for plan in (f"[{step}]", f'{{"steps": [{step}]}}', f"```json\n[{step}]\n```", f"[{flow}]", f"steps: [{step}]"):
        assert steps(read(plan)) == [("alpha", text, ())], plan


def test_unquoted_texts_may_name_the_lists():
    assert steps(read("- agent: 0\n  instruction: Say, model_id and, subtasks\n  access_list: []\n")) == [
        ("alpha", "Say, model_id and, subtasks", ())
    ]


@pytest.mark.parametrize(
    "text",
    [
        "- model_id: [0]\n- subtasks: ['a']\n- access_list: [[]]\n",
        "- Plan: as follows, model_id = [0]\n  subtasks = ['a']\n  access_list = [[]]\n",
        "- the agent: see below\n  agent: below\n  model_id: [0]\n  subtasks: ['a']\n  access_list: [[]]\n",
    ],
)
def test_lists_written_as_items_are_still_lists(text):
    result = read(text)
    assert result.form == "lists"
    assert steps(result) == [("alpha", "a", ())]


def test_lists_behind_step_objects_that_lack_a_key_are_still_looked_for():
    result = read("- agent: 0\n  instruction: a\n  model_id: [1]\n  subtasks: ['b']\n")
    assert codes(result) == ["incomplete"]


def test_a_step_number_in_a_text_does_not_count_on_from_a_draft():
    draft, final = (
        f'```yaml\n- agent: {n}\n  instruction: "see step: {n + 2}"\n  access_list: []\n```\n' for n in (0, 1)
    )
    assert steps(read(f"Draft:\n{draft}Better:\n{final}")) == [("beta", "see step: 3", ())]
    numbered = final.replace("access_list", "step: 2\n  access_list")
    assert codes(read(f"Draft:\n{draft}Better:\n{numbered}")) == ["plan-interrupted"]
