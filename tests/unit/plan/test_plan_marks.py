"""Marks of reasoning and of comments: what stands inside never runs, and a mere mention of a mark hides nothing."""

from __future__ import annotations

import pytest
from plan_reading import codes, lists, notes, read, steps

DECOY = 'model_id=[1] subtasks=["decoy"] access_list=[[]]'
REAL = 'model_id=[0] subtasks=["real"] access_list=[[]]'
RUNS = [("alpha", "real", ())]
DECOYS = [
    DECOY,
    '{"model_id": [1], "subtasks": ["decoy"], "access_list": [[]]}',
    '[{"agent": 1, "instruction": "decoy", "access_list": []}]',
    "\n- agent: 1\n  instruction: decoy\n  access_list: []\n",
    "{agent: 1, instruction: decoy, access_list: []}",
]
PAIRS = [
    ("<analysis>", "</analysis>"),
    ("<scratchpad>", "</scratchpad>"),
    ("<scratch_pad>", "</scratch_pad>"),
    ("<reasoning>", "</reasoning>"),
    ("<thought>", "</thought>"),
    ("<reflection>", "</reflection>"),
    ("<inner_monologue>", "</inner_monologue>"),
    ("<chain_of_thought>", "</chain_of_thought>"),
    ("<antThinking>", "</antThinking>"),
    ("<thinking_process>", "</thinking_process>"),
    ("<think\nlevel='2'\n>", "</think\n>"),
    ('<THINK effort="high">', "</THINK>"),
    ("< think >", "< / think >"),
    ("<|think|>", "<|/think|>"),
    ("<|think|>", "</|think|>"),
    ("<|think_start|>", "<|think_end|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<｜think｜>", "<｜/think｜>"),
    ("[THINK]", "[/THINK]"),
    ("[REASONING]", "[/REASONING]"),
    ("◁think▷", "◁/think▷"),
    ("<unused94>thought\n", "<unused95>"),
    ("<|channel>thought\n", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ("<|start|>assistant<|channel|>commentary to=x<|message|>", "<|call|><|channel|>final<|message|>"),
]


@pytest.mark.parametrize(("opened", "closed"), PAIRS)
@pytest.mark.parametrize("decoy", DECOYS)
def test_a_plan_between_reasoning_marks_never_runs(opened, closed, decoy):
    assert steps(read(f"{opened}{decoy}{closed}\n{REAL}")) == RUNS
    alone = codes(read(f"{opened}{decoy}{closed}\nI am done."))
    assert alone == ["no-plan-after-reasoning"]
    assert "reasoning-not-closed" in codes(read(f"{opened}{decoy}"))


@pytest.mark.parametrize("closed", [closed for _, closed in PAIRS if closed != "<|end|>"])
def test_the_closing_mark_alone_is_enough(closed):
    assert steps(read(f"{DECOY}{closed}\n{REAL}")) == RUNS


def test_a_harmony_reply_without_its_special_tokens_still_parts_reasoning_from_answer():
    assert steps(read(f"analysisWe could say {DECOY}. Fine.assistantfinal{REAL}")) == RUNS
    assert codes(read(f"analysisWe could say {DECOY}")) == ["reasoning-not-closed"]


def test_the_end_of_a_turn_behind_the_plan_is_no_end_of_reasoning():
    for mark in ("<|end|>", "<|return|>", "<|im_end|>", "<|eot_id|>", "</s>"):
        assert steps(read(REAL + mark)) == RUNS


@pytest.mark.parametrize("name", ["analysis", "scratchpad", "rationale"])
def test_reasoning_that_opens_and_closes_behind_the_plan_leaves_the_plan(name):
    assert steps(read(f"{REAL}\n<{name}>Why: model_id = [1] is slow.</{name}>")) == RUNS
    assert codes(read(f"{REAL}\n<{name}>Better: {DECOY}")) == ["reasoning-not-closed"]


MENTIONS = [
    "I will not use <think> tags.",
    "I write no <think> or </think> here.",
    "No <think>...</think> block is used.",
    "There is no `<think>` in this reply.",
    "There is no `<think>…</think>` in this reply.",
    'I leave out "<think>" and "</think>".',
    "I leave out “<analysis>”.",
    "The plan comes without <scratchpad>, as asked.",
    "Reply without [THINK] blocks.",
    "(no <reasoning> section)",
]


@pytest.mark.parametrize("mention", MENTIONS)
def test_a_mention_of_a_mark_in_prose_rejects_no_plan(mention):
    assert steps(read(f"{mention}\n{REAL}")) == RUNS
    assert steps(read(f"{REAL}\n{mention}")) == RUNS
    assert steps(read(f"<think>{mention} {DECOY}</think>\n{REAL}")) == RUNS
    assert codes(read(f"<think>{mention}\n{DECOY}")) == ["reasoning-not-closed"]


@pytest.mark.parametrize("before", ["Sure! ", "Let me think. ", "Okay:\n", ""])
def test_a_mark_that_opens_reasoning_is_no_mention(before):
    assert "reasoning-not-closed" in codes(
        read(f"{before}<think> tags are due: {DECOY}" if not before else f"{before}<think> {DECOY}")
    )


COMMENTS = ["<!-- {} -->", "<!--\n{}\n-->", "# {}", "  #{}", "// {}", "    // {}", "/* {} */", "/*\n * {}\n */"]


@pytest.mark.parametrize("comment", COMMENTS)
@pytest.mark.parametrize("decoy", [decoy for decoy in DECOYS if "\n" not in decoy])
def test_a_plan_in_a_comment_never_runs(comment, decoy):
    hidden = comment.format(decoy)
    assert codes(read(hidden)) == ["no-plan"]
    assert steps(read(f"{hidden}\n{REAL}")) == RUNS
    assert steps(read(f"{REAL}\n{hidden}")) == RUNS
    assert steps(read(f"```python\n{REAL}\n{hidden}\n```")) == RUNS


@pytest.mark.parametrize("mark", ["#", "# ", "//", "// "])
def test_lines_that_are_all_commented_out_are_no_plan(mark):
    plan = lists("[1, 0]", '["a", "b"]', "[[], [0]]")
    result = read("\n".join(mark + line for line in plan.splitlines()))
    assert codes(result) == ["no-plan"]
    assert "comment" in (result.errors[0].hint or "")
    assert codes(
        read("\n".join(mark + line for line in "- agent: 0\n  instruction: a\n  access_list: []".splitlines()))
    )


def test_a_commented_value_beside_a_list_is_not_taken():
    text = 'model_id = [0]  # model_id = [1]\nsubtasks = ["real"]  // subtasks = ["decoy"]\naccess_list = [[]]  # access_list = [[0]]'
    result = read(text)
    assert steps(result) == RUNS
    assert set(notes(result)) <= {"plan-in-comment"}


def test_a_plan_passed_over_in_a_comment_is_noted():
    assert "plan-in-comment" in notes(read(f"{REAL}\n# {DECOY}"))


def test_comment_marks_inside_strings_are_text():
    text = 'model_id = [0]subtasks = ["see # here, <!-- and // and /* too"]access_list = [[]]'
    assert steps(read(text)) == [("alpha", "see # here, <!-- and // and /* too", ())]


@pytest.mark.parametrize(
    "text", ["## Plan\n", "# The plan\n", "#1 plan: ", "See https://example.org/a#b for more: ", "C# is fine. "]
)
def test_headings_and_addresses_are_no_comments(text):
    assert steps(read(text + REAL)) == RUNS


def test_a_comment_that_never_ends_hides_no_plan_in_silence():
    assert codes(read(f"{REAL}\n<!-- better:\n{DECOY}")) == ["comment-not-closed"]
    assert codes(read(f"<!-- better:\n{DECOY}")) == ["comment-not-closed"]
    assert steps(read(f"{REAL}\n<!-- the end")) == RUNS
    assert steps(read(f"A `<!--` opens a comment.\n{REAL}")) == RUNS


def test_the_end_of_the_reasoning_counts_inside_a_comment_that_began_in_it():
    assert steps(read(f"<think>a <!-- b {DECOY} </think>\n{REAL}\n<!-- c -->")) == RUNS
    assert codes(read(f"<!-- <think>x</think> {DECOY} -->")) == ["no-plan"]
