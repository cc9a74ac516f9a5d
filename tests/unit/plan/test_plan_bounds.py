"""Hostile and degenerate texts (G1-18): bounded time and memory, and a code that says which bound was met."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from plan_reading import codes, lists, read, steps

PLAN = lists("[0]", '["a"]', "[[]]")
WORD = "word " * 4_000_000
BOMB = 'a: &a ["lol", "lol"]\n' + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("model_id = " + "[" * 100_000, "too-deep"),
        ("model_id = [" + "9" * 5000 + "]", "number-too-long"),
        ("subtask: [" * 2_000_000, "text-too-large"),
        (WORD + PLAN, "text-too-large"),
        (BOMB, "yaml-alias"),
        (lists("[0]", '["' + "x" * 5_000_000 + '"]', "[[]]"), "text-too-large"),
        ('{"model_id": ' * 50_000, "too-deep"),
        ("[" * 100_000, "no-plan"),
        ("- " * 100_000 + "agent: 0", "no-plan"),
        ("- agent: " + "[" * 100_000, "too-deep"),
        ("steps:\n" + "- agent: 0\n" * 1000, "too-many-items"),
        ("model_id = [" + "0, " * 1000 + "]", "too-many-items"),
        ("model_id = [0]\n" * 1000, "too-many-blocks"),
        ("steps: *bomb\nagent: x", "yaml-alias"),
        ("model_id = [" + ",," * 1000 + "]", "too-many-errors"),
    ],
    ids=[*(f"G1-18{letter}" for letter in "abcdef"), *(f"G1-18-{number}" for number in range(9))],
)
def test_bombs_are_refused_at_once_with_a_code(text, code):
    started = time.process_time()
    result = read(text)
    assert time.process_time() - started < 2
    assert code in codes(result)


def test_the_size_error_names_limit_and_size():
    """G1-18 (d)"""
    result = read(WORD + PLAN)
    assert "1048576" in result.errors[0].text
    assert str(len(WORD + PLAN)) in result.errors[0].text


def test_size_counts_utf8_bytes_and_the_limit_itself_is_allowed():
    filler = "x" * ((1 << 20) - len(PLAN.encode()) - 1) + "\n"
    assert steps(read(filler + PLAN))
    assert codes(read("x" + filler + PLAN)) == ["text-too-large"]
    assert codes(read("é" * (1 << 19) + "\n" + PLAN)) == ["text-too-large"]
    assert codes(read("\ud800" * (1 << 20))) == ["text-too-large"]


PATTERNS = [
    "[",
    "{",
    '{"',
    '{"a":',
    "[{",
    '"',
    "“",
    "\\",
    "\\n",
    "```\n",
    "- a:\n",
    "- agent: 0\n",
    '- agent: "\n',
    "steps:\n",
    "subtasks = [“",
    'subtasks = ["\n',
    'subtasks = ["a".\n',
    "model_id ",
    "<think>",
    "</think>subtasks = [“",
    " ",
    "\n",
    "0,",
    "[{agent: 0, ",
    "- agent: [\n",
    "&a *a ",
    "a: 'b\n",
    "- agent: 0\n  instruction: ',model_id'\n",
    "- agent: 0\n  instruction: ,model_id\nx\n",
    "- a: b\nx\n",
    "\x00",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_time_grows_no_faster_than_the_text(pattern):
    def seconds(chars: int) -> float:
        body = (pattern * (chars // len(pattern) + 1))[:chars]
        texts = [
            body,
            PLAN + body,
            lists("[0]", '["' + body.replace('"', "") + '"]', "[[]]"),
            "- agent: 0\n  instruction: " + body,
        ]
        taken = []
        for _ in range(2):
            started = time.process_time()
            for text in texts:
                read(text)
            taken.append(time.process_time() - started)
        return min(taken)

    # Sixteen times the time for four times the text would be quadratic; the constant forgives timers and caches.
    assert seconds(120_000) < 9 * seconds(30_000) + 0.1


MARKS = [
    *("# a ", " #", " // ", "#\n", "<!-- ", "\n/* ", "<!-- <think> -->", "<!-- model_id </think>", "model_id\n", " \n"),
    *("<analysis>", "`<think>` ", "</", "< / ", "<|channel|>final ", "[THINK]", "x<aaaaaaaaaaaaaaaa_aaaaaaaaaaaaaaaa_"),
    *("agent: 1\n", "tasks = ", "Final plan:\n", "final plan:", "| agent ", "subtasks[0] ", "x(model_id", "plan.x "),
    *("- agent: 0\n  instruction: |\n# x\n", "\x85", "step\n- agent: 0\n"),
    *("- a: b\nx\n", "- agent: 0\n  instruction: ,model_id\nx\n", '# a {"a":', " #subtasks = [“"),
]


@pytest.mark.parametrize("pattern", MARKS)
def test_a_megabyte_of_marks_round_a_plan_is_read_at_once(pattern):
    half = (pattern * (1 << 19))[: (1 << 19) // len(pattern.encode()) * len(pattern) - len(PLAN)]
    started = time.thread_time()
    read(f"{half}\n{PLAN}\n{half}")
    assert time.thread_time() - started < 2


# A megabyte of each; of what costs a call a character (which tracemalloc slows down) a fifth.
HUNGRY = dict.fromkeys(
    ["[", '"a", ', "é", "\n", " \n", "<think>", "- a: b\n", "0,", "subtasks = [“", "model_id = [0]\n", '{"a":1}'],
    (1 << 20) - 200,
) | {"\x00": 200_000, "\\": 200_000, "\\n": 200_000}


@pytest.mark.parametrize(("pattern", "size_bytes"), HUNGRY.items())
def test_a_large_text_takes_a_few_times_its_size_of_memory(pattern, size_bytes):
    """G1-18, round a plan, in a text of the lists form, and in one of YAML."""
    body = pattern * (size_bytes // len(pattern.encode()))
    for text in (
        f"{body}\n{PLAN}",
        lists("[0]", '["' + body.replace('"', "") + '"]', "[[]]"),
        f"- agent: 0\n  instruction: {body}",
    ):
        check_memory(text)


@pytest.mark.parametrize(
    "text",
    [
        "- agent: 0\n" + "- " * 500_000 + "agent: 0\n",
        "- agent: 0\n  instruction: 1" + ":1" * 500_000 + "\n  access_list: []\n",
        "- agent: 0\n  instruction: |\n    a\n" + "    \n" * 200_000 + "  access_list: []\n",
    ],
    ids=["dashes", "clock", "blank lines"],
)
def test_what_a_pattern_could_take_turn_by_turn_is_not_remembered_turn_by_turn(text):
    check_memory(text)


def check_memory(text: str) -> None:
    tracemalloc.start()
    try:
        read(text)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 18 * len(text.encode()) + 500_000, text[:80]
