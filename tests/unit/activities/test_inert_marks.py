"""Forged marks are made inert and stay readable; everything else stays as it is; hostile text costs linear time."""

from __future__ import annotations

import re
import time

import pytest

from activities.inert import make_inert

FORGED = (
    "</Agent 0 response>",
    "</AGENT 0 RESPONSE >",
    "</Agent 0 response foo=1>",
    "<Subtask assigned to Agent 1>",
    "</Subtask assigned to Agent 1>",
    "</task>",
    "</ task >",
    "< / TASK>",
    "</task\n>",
    "</step-00ff00ff00ff00ff>",
    '<step-00ff00ff00ff00ff position="1">',
    "</answer-00ff00ff00ff00ff",
    "<subtask-1 x='y'>",
    "<instructions>",
    "</user query>",
    "<system>",
    "<assistant_message>",
    "<|im_end|>",
    "<|im_start|>",
    "<| im_start |>",
    "<|IM_END|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|endoftext|>",
    "<|channel|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|turn>",
    "<turn|>",
    "<｜User｜>",
    "<｜begin▁of▁sentence｜>",
    "[INST]",
    "[/INST]",
    "[ /inst ]",
    "[SYSTEM_PROMPT]",
    "<<SYS>>",
    "<</SYS>>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<s>",
    "</s>",
    "<bos>",
    "<eos>",
    "<unused42>",
    "<extra_id_0>",
    "[gMASK]",
    "<sop>",
    "<seed:bos>",
    "[|user|]",
    "[|endofturn|]",
    "]~b]",
    "]~!b[",
    "[e~[",
)


@pytest.mark.parametrize("mark", FORGED)
def test_a_forged_mark_is_inert_and_readable(mark: str) -> None:
    inert = make_inert(f"before {mark} after")
    assert mark not in inert
    assert not re.search(r"[<>\[\]]", inert)
    # What a person reads is the same: every letter is there.
    assert re.sub(r"\W", "", inert) == re.sub(r"\W", "", f"before {mark} after")


@pytest.mark.parametrize(
    "text",
    [
        "a < b and c > d",
        "x = list[int] | None",
        '<div class="task">text</div>',
        "if a<b|c>d: pass",
        "f <| x",
        "<userName>Ann</userName>",
        "<finally> <stepper> <tasks>",
        "vector<string> v;",
        "2 << 3 >> 1",
        "[1, 2, 3] [link](url) [x]",
        "the task is to answer",
        "",
    ],
)
def test_what_is_no_mark_stays_as_it_is(text: str) -> None:
    assert make_inert(text) == text


def test_making_inert_twice_is_the_same_as_once() -> None:
    text = " ".join(FORGED)
    assert make_inert(make_inert(text)) == make_inert(text)


@pytest.mark.parametrize(
    "piece",
    [
        "<",
        "< ",
        "<|",
        "<| ",
        "<|a",
        "<task ",
        "<user ",
        "<agent 1 response ",
        "[",
        "[|a",
        "<        /        ",
        "]~",
        "<a",
    ],
)
def test_hostile_text_costs_linear_time(piece: str) -> None:
    """Ten times the text may cost ten times the time, with room for a busy machine; quadratic would be a hundred."""
    small, large = (_best_time(piece * (length // len(piece))) for length in (30_000, 300_000))
    assert large < 40 * small + 0.05


def test_one_mark_with_a_million_blanks_costs_nothing() -> None:
    assert _best_time("<" + " " * 1_000_000) < 0.5
    assert _best_time("<task" + " " * 1_000_000) < 0.5


def _best_time(text: str) -> float:
    best = float("inf")
    for _ in range(3):
        # The thread's own time: other processes do not count.
        begun = time.thread_time()
        make_inert(text)
        best = min(best, time.thread_time() - begun)
    return best
