"""No part of a plan runs as the whole, and no list is lent from a draft (found by an attack on the parser)."""

from __future__ import annotations

import time

import pytest

from engine.plan import ParseOptions, parse_plan

OPTIONS = ParseOptions(workers=("a", "b", "c"))
M, S, A = "model_id = [0, 1]\n", 'subtasks = ["A1", "A2"]\n', 'access_list = [[], ["all"]]\n'
M2, S2, A2 = "model_id = [2, 1]\n", 'subtasks = ["B1", "B2"]\n', "access_list = [[], []]\n"


@pytest.mark.parametrize(
    "text",
    [
        M + S + A + M2 + S2,
        M + S + A + M2,
        M + S + A + A2,
        M + S + M2 + A,
        M + S + A + M2 + A,
        M + S + A + M2 + S2 + A2 + M,
        A2 + "then\n" + M + S + A + M2 + S2,
        A2 + M + S + A,
        M + S + A + M2 + S2 + "access_l",
        M + S + A + "---\n" + M2 + S2,
    ],
)
def test_no_list_is_lent_from_another_block(text: str) -> None:
    result = parse_plan(text, OPTIONS)
    assert not result.valid
    assert "incomplete" in {error.code for error in result.errors}


def test_a_complete_last_block_still_wins() -> None:
    for text in (M + S + A + M2 + S2 + A2, A2 + "then\n" + M + S + A, M + S + A + "Final:\n" + M2 + S2 + A2):
        plan = parse_plan(text, OPTIONS).plan
        assert plan is not None
        assert len({step.subtask[0] for step in plan.steps}) == 1


ONE = "- step: 1\n  agent: 0\n  instruction: Write\n  access_list: []\n"
TWO = "- step: 2\n  agent: 1\n  instruction: Check\n  access_list: all\n"
PLAIN_ONE, PLAIN_TWO = (part.replace("- step: 1\n  ", "- ").replace("- step: 2\n  ", "- ") for part in (ONE, TWO))


@pytest.mark.parametrize(
    "text",
    [
        "Step 1:\n" + ONE + "Step 2:\n" + TWO,
        ONE + "---\n" + TWO,
        PLAIN_ONE + "---\n" + PLAIN_TWO,
        PLAIN_ONE + "***\n" + PLAIN_TWO,
        PLAIN_ONE + ",\n" + PLAIN_TWO,
        f"```yaml\n{ONE}```\n```yaml\n{TWO}```\n",
        '[{"agent": 0, "instruction": "A", "access_list": []}],\n[{"agent": 1, "instruction": "B", "access_list": []}]',
    ],
)
def test_the_rest_of_a_plan_is_not_run_as_the_whole(text: str) -> None:
    result = parse_plan(text, OPTIONS)
    assert not result.valid, result.plan


def test_another_plan_behind_a_draft_still_counts() -> None:
    plan = parse_plan(
        f"Draft:\n```yaml\n{ONE}```\nFinal:\n```yaml\n{TWO.replace('step: 2', 'step: 1')}```\n", OPTIONS
    ).plan
    assert plan is not None
    assert [step.subtask for step in plan.steps] == ["Check"]


def test_a_bracket_and_a_million_blanks_cost_nothing() -> None:
    begun = time.thread_time()
    assert parse_plan("<" + " " * 900_000 + "\n" + M + S + A, OPTIONS).valid
    assert time.thread_time() - begun < 1.5


def yaml_plan(instruction: str) -> str:
    return f"- agent: 0\n  instruction: {instruction}\n  access_list: []\n"


@pytest.mark.parametrize("instruction", ["Do A\n    # and B", "Do A\n\n    # and B", "Do A\n    more\n    # and B"])
def test_a_comment_that_looks_like_more_of_the_text_is_not_dropped(instruction: str) -> None:
    result = parse_plan(yaml_plan(instruction), OPTIONS)
    assert [error.code for error in result.errors] == ["yaml-comment"]


@pytest.mark.parametrize("instruction", ["Do A\n  # the access of this step", '"Do A"\n  # plain', "Do A\n# aside"])
def test_a_comment_between_the_keys_is_only_a_comment(instruction: str) -> None:
    plan = parse_plan(yaml_plan(instruction), OPTIONS).plan
    assert plan is not None
    assert plan.steps[0].subtask == "Do A"
