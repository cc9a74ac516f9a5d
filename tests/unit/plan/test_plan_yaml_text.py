"""YAML texts that lost their indentation, and characters that YAML takes for line ends."""

from __future__ import annotations

import pytest
from plan_reading import codes, read, steps

LOST = ["def f():\n    pass", "Then check it.", "Note: be quick", "x = 1", "## Heading", "| a | b |", "“so”"]


def item(agent: int, text: str, *, last: bool) -> str:
    keys = ["instruction: " + text, "access_list: []\n"]
    return f"- agent: {agent}\n  " + "  ".join(reversed(keys) if last else keys)


def block(agent: int, lost: str, style: str, *, last: bool) -> str:
    return item(agent, f"{style}\n    Write the code\n{lost}\n", last=last)


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("style", ["|", ">", "|-", ">-"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("wrapper", ["", "steps:\n"])
def test_a_text_cut_by_a_line_without_indentation_never_runs_in_part(lost, style, last, wrapper):
    for body in (
        block(0, lost, style, last=last) + block(1, lost, style, last=last),
        block(0, lost, style, last=last) + item(1, "Check\n", last=last),
        item(0, "Check\n", last=last) + block(1, lost, style, last=last),
        block(0, lost, style, last=last) + item(1, "b\n", last=last) + item(2, "c\n", last=last),
        block(0, lost, style, last=last),
        block(0, "\n" + lost, style, last=last),
        block(0, lost + "\n\nMore words.\n", style, last=last) + item(1, "Check\n", last=last),
    ):
        assert not read(wrapper + body).valid, body
        assert not read(f"The plan:\n\n{wrapper}{body}\nDone.").valid, body
        assert not read(f"```yaml\n{wrapper}{body}\n```").valid, body


def test_a_plain_text_that_goes_on_without_indentation_is_an_error():
    result = read("- agent: 0\n  access_list: []\n  instruction: Write the code\nand test it.\n")
    assert codes(result) == ["yaml-text-cut"]
    assert (result.errors[0].line, result.errors[0].column) == (4, 1)
    assert result.errors[0].hint


@pytest.mark.parametrize("heading", ["# Title", "#Title", "  # aligned with nothing\n# x"])
def test_a_line_that_yaml_takes_for_a_comment_below_a_block_text_is_an_error(heading):
    text = f"- agent: 0\n  instruction: |\n    Write:\n{heading}\n  access_list: []\n"
    assert "yaml-comment" in codes(read(text))
    assert "yaml-comment" in codes(read(f"```yaml\n{text}```"))


def test_a_comment_of_a_key_below_a_block_text_is_only_a_comment():
    text = "- agent: 0\n  instruction: |\n    Write.\n  # sees nothing\n  access_list: []\n"
    assert steps(read(text)) == [("alpha", "Write.\n", ())]


@pytest.mark.parametrize("after", ["\n\nDone.", "\n```\nDone.", "\n</answer>", "\n---\n", "", "\n\n\n"])
def test_a_plan_that_ends_with_its_access_is_not_cut(after):
    text = "- agent: 0\n  instruction: |\n    Write.\n  access_list: []"
    fenced = after.startswith("\n```")
    assert steps(read(("```\n" if fenced else "") + text + after)) == [("alpha", "Write.\n", ())]


@pytest.mark.parametrize("between", ["Step 2:", "Then:", "**Part 2**", "2.", "Next step:", "Second:"])
def test_steps_under_headings_of_their_own_are_not_run_one_by_one(between):
    one, two = item(0, "a\n", last=False), item(1, "b\n", last=False)
    assert not read(f"{one}{between}\n{two}").valid
    assert not read(f"```yaml\n{one}```\n{between}\n```yaml\n{two}```").valid


@pytest.mark.parametrize(
    "text",
    [
        "- ]agent: 1\n  instruction: a\n  access_list: []\n",
        "> - agent: 1\n  instruction: a\n  access_list: []\n",
        "// - agent: 1\n  access_list: []\n  instruction: |-\n    a\n",
        "- instruc{tion: |-\n    a\n  agent: 3\n  access_list: []\n",
        "- agent: 0\n  instruction: a\n  access_list: []\nsubtasks[0] = 'x'\n",
        "- agent: 0\n  instruction: a\n  access_list: []\nmodel_id\n",
        "- agent: 0\n  instruction: |\n“q”\n  access_list: []\n\n",
        "- agent: 0\n  access: []---\n  access_list: []\n\nx y\n",
        "   access: []\n",
    ],
)
def test_items_below_one_that_cannot_be_read_are_not_the_plan(text):
    assert not read(text + item(1, "b\n", last=False)).valid
    assert not read("The plan:\n\n" + text + item(1, "b\n", last=False)).valid


@pytest.mark.parametrize("between", ["--- x y\n\n", "x y\n", "Then we have\n\n"])
def test_the_inner_items_of_a_torn_list_are_not_the_plan(between):
    first, second = ("  " + item(n, "a\n", last=False).replace("\n  ", "\n    ") for n in (0, 1))
    assert not read(f"steps:\n{first}{between}{second}").valid


def test_a_better_plan_below_a_draft_still_counts():
    one, two = item(0, "a\n", last=False), item(1, "b\n", last=False)
    for between in ("\nBetter:\n", "\nThat step is not the next best one. Better:\n\n", "Final:\n"):
        assert steps(read(one + between + two)) == [("beta", "b", ())]
    assert steps(read(f"```yaml\n{one}```\nBetter:\n```yaml\n{two}```")) == [("beta", "b", ())]


SEPARATORS = ["\x85", "\u2028", "\u2029"]


@pytest.mark.parametrize("mark", SEPARATORS)
@pytest.mark.parametrize("text", ["a{}b", "a {} b", "{}ab", "ab{}", "a{0}{0}b", "a\\n{}b", "a{} \\\\frac"])
def test_line_separators_of_unicode_stay_as_they_are(mark, text):
    meant = text.format(mark).replace("\\n", "\n").replace("\\\\", "\\")
    assert steps(read(f'- agent: 0\n  instruction: "{text.format(mark)}"\n  access_list: []')) == [("alpha", meant, ())]
    single = f"- agent: 0\n  instruction: '{text.format(mark)}'\n  access_list: []"
    assert steps(read(single)) == [("alpha", text.format(mark), ())]


@pytest.mark.parametrize("mark", SEPARATORS)
def test_line_separators_of_unicode_stay_in_block_and_plain_texts(mark):
    for style, end in (("|\n    ", "\n"), (">-\n    ", ""), ("", "")):
        text = f"- agent: 0\n  instruction: {style}a{mark}b\n  access_list: []\n"
        assert steps(read(text)) == [("alpha", f"a{mark}b{end}", ())]


@pytest.mark.parametrize("mark", SEPARATORS)
def test_a_line_separator_of_unicode_parts_no_keys(mark):
    assert not read(f"- agent: 0{mark}  instruction: a{mark}  access_list: []\n").valid


@pytest.mark.parametrize("number", ["-0", "+0"])
def test_a_signed_nought_is_no_worker(number):
    assert not read(f"- agent: {number}\n  instruction: a\n  access_list: []\n").valid
    assert not read(f"model_id = [{number}]\nsubtasks = ['a']\naccess_list = [[]]").valid
