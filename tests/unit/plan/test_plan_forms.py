"""Truncation, cleaning, step objects and the finding of plans (G1-15, G1-16, G1-20 and the rules round them)."""

from __future__ import annotations

import json

import pytest
from plan_reading import codes, lists, notes, places, read, steps

LISTS = lists("[0, 1]", '["a", "b"]', '[[], ["all"]]')
AB = [("alpha", "a", ()), ("beta", "b", "all")]
YAML = "- agent: 0\n  instruction: a\n  access_list: []\n- agent: 1\n  instruction: b\n  access_list: all\n"
STEP = '{"agent": 0, "instruction": "x", "access_list": []}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (lists("[1, 2, 0]", '["a", "b", "c"]', "[[], [0], [0, 1"), "length"),
        ('model_id = [1, 2]\nsubtasks = ["Solve.", "Check the', None),
        (f"[{STEP}, {STEP},", None),
        (f"[{STEP}, {STEP}", "length"),
        (f'{{"steps": [{STEP}, {STEP}', None),
        ('{"model_id":[2, 1', None),
        ('{"model_id":[2, 1], "subtasks": ["a", "b"], "access_list": [[], []]', None),
        ('model_id = [0]\nsubtasks = ["a"]', "length"),
        (f"```yaml\n{YAML}", None),
        (YAML, "length"),
        (YAML, "max_tokens"),
        ("[{agent: 0, instruction: x, access_list: []}", None),
        (f"{LISTS}\nFinal:\nmodel_id =", None),
        (f"{LISTS}\nFinal:\nmodel_id", None),
        ("I think that", "length"),
    ],
    ids=["G1-15a", "G1-15b", "G1-15d", *[f"G1-15-{number}" for number in range(12)]],
)
def test_a_cut_plan_is_never_closed_for_the_model(text, reason):
    result = read(text, finish_reason=reason, output_tokens=1024)
    assert set(codes(result)) == {"truncated"}
    assert "limit" in (result.errors[0].hint or "")
    assert "1024 tokens" in (result.errors[0].hint or "")


@pytest.mark.parametrize("plan", [LISTS, json.dumps(json.loads(f"[{STEP}]")), f"```yaml\n{YAML}```"])
def test_a_cut_after_the_plan_is_accepted_with_a_note(plan):
    """G1-15 (c)"""
    result = read(f"{plan}\nThis plan is goo", finish_reason="length")
    assert result.valid
    assert notes(result) == ["cut-after-plan"]


def test_a_yaml_plan_without_fence_or_reason_cannot_show_that_it_was_cut():
    """G1-15 (d): documented limit"""
    assert len(steps(read(YAML[: YAML.index("- agent: 1")]))) == 1


DIRTY = "ok \x00 half \ud83d emoji, whole \U0001f600 emoji"
CLEAN = "ok \ufffd half \ufffd emoji, whole \U0001f600 emoji"


@pytest.mark.parametrize(
    "text",
    [
        lists("[0]", f'["{DIRTY}"]', "[[]]"),
        f'{{"model_id": [0], "subtasks": ["{DIRTY}"], "access_list": [[]]}}',
        f'[{{"agent": 0, "instruction": "{DIRTY}", "access_list": []}}]',
        f'- agent: 0\n  instruction: "{DIRTY}"\n  access_list: []',
        f"- agent: 0\n  instruction: {DIRTY}\n  access_list: []",
        lists("[0]", '["ok \\u0000 half \\ud83d emoji, whole \\ud83d\\ude00 emoji"]', "[[]]"),
        '- agent: 0\n  instruction: "ok \\u0000 half \\ud83d emoji, whole \\ud83d\\ude00 emoji"\n  access_list: []',
    ],
)
def test_nul_and_half_an_emoji_are_replaced_visibly(text):
    """G1-16"""
    result = read(text)
    assert steps(result) == [("alpha", CLEAN, ())]
    assert notes(result) == ["text-cleaned"]
    assert result.notes[0].position == 0
    assert "1 NUL" in result.notes[0].text
    assert "1 lone surrogate" in result.notes[0].text


def test_messages_are_storable_and_quote_at_most_eighty_characters():
    """G1-16"""
    for text in (
        lists("[0]", f'["{DIRTY}"\x00\ud800{"y" * 500}]', "[[]]"),
        lists(f'["\x00\ud800{"y" * 500}"]', '["a"]', "[[]]"),
        f'[{{"agent": 0, "in\x00\ud800{"y" * 500}": "x", "access_list": []}}]',
    ):
        for error in read(text).errors:
            "".join((error.text, error.hint or "", error.field or "")).encode()
            assert "\x00" not in error.text + (error.field or "")
            assert "y" * 81 not in error.text


ODD = """- agent: 0
  instruction: Solve: find x
  access_list: []
- agent: no
  instruction: 2026-01-01
  access_list: all
- agent: 010
  agent: 2
  instruction: Check
  access_list: [1_0]
"""


def test_an_unquoted_colon_is_named_with_its_place_and_a_hint_to_quote():
    """G1-20"""
    result = read(ODD)
    assert places(result, "yaml-syntax") == [(None, 2, 21)]
    assert "quotes" in result.errors[0].hint


def test_every_yaml_oddity_is_reported():
    """G1-20"""
    result = read(ODD.replace("Solve: find x", '"Solve: find x"'))
    assert places(result, "yaml-ambiguous") == [
        ("agent", 4, 10),
        ("instruction", 5, 16),
        ("agent", 7, 10),
        ("access_list", 10, 17),
    ]
    assert places(result, "duplicate-key") == [("agent", 8, 3)]
    assert len(result.errors) == 5


@pytest.mark.parametrize(
    "odd",
    [
        *("no", "yes", "on", "off", "y", "N", "True", "FALSE", "010", "0x1F", "0b1", "0o7", "1_0", "12:30", "1:30:00"),
        *("1.5", ".5", "1e3", "+1", ".inf", ".NaN", "nan", "2026-01-01", "2026-01-01 10:00:00", "2026-1-1T10:00:00Z"),
    ],
)
def test_a_yaml_value_that_readers_disagree_on_is_an_error_unless_quoted(odd):
    """G1-20"""
    text = f"- agent: 0\n  instruction: {odd}\n  access_list: []\n"
    assert codes(read(text)) == ["yaml-ambiguous"]
    assert steps(read(text.replace(f": {odd}\n", f': "{odd}"\n'))) == [("alpha", odd, ())]
    assert codes(read(f"- agent: {odd}\n  instruction: x\n  access_list: []\n")) == ["yaml-ambiguous"]
    assert codes(read(f"- agent: 0\n  instruction: x\n  access_list: [{odd}]\n")) == ["yaml-ambiguous"]


@pytest.mark.parametrize("value", ["42", "null", "~", "", "[a]", "{a: b}"])
def test_a_yaml_instruction_must_be_text(value):
    """G1-20"""
    assert not read(f"- agent: 0\n  instruction: {value}\n  access_list: []\n").valid


@pytest.mark.parametrize(
    ("instruction", "meant"),
    [
        ("Solve x", "Solve x"),
        ("'it''s \\frac \\n'", "it's \\frac \\n"),
        ("|\n    two\n    lines", "two\nlines\n"),
        (">-\n    one\n    line", "one line"),
        ('plain \\frac{a}{b} \\"x\\" C:\\\\new', 'plain \\frac{a}{b} \\"x\\" C:\\\\new'),
        ("yes, do it", "yes, do it"),
        ("issue#3", "issue#3"),
        ('"a # b"', "a # b"),
        ("|\n    ```python\n    print(1)\n    ```", "```python\nprint(1)\n```\n"),
    ],
)
def test_yaml_texts_reach_the_worker_as_written(instruction, meant):
    """G1-20"""
    text = f"- agent: 0\n  instruction: {instruction}\n  access_list: []\n"
    assert steps(read(text)) == [("alpha", meant, ())]
    assert steps(read(f"Plan:\n\n```yaml\n{text}```\nDone.")) == [("alpha", meant, ())]


def test_a_comment_that_would_eat_an_instruction_is_an_error():
    """G1-20"""
    result = read("- agent: 0\n  instruction: Solve task #3\n  access_list: []\n")
    assert codes(result) == ["yaml-comment"]
    assert places(result, "yaml-comment") == [("instruction", 2, 26)]


@pytest.mark.parametrize(
    ("entry", "access"),
    [
        ("all", "all"),
        ("[all]", "all"),
        ("[1]", (0,)),
        ("1", (0,)),
        ('"1"', (0,)),
        ("none", ()),
        ("null", ()),
        ("\n  - 1", (0,)),
    ],
)
def test_yaml_access_has_the_same_shorthands(entry, access):
    """G1-20"""
    text = f"- agent: 0\n  instruction: a\n  access_list: []\n- agent: 1\n  instruction: b\n  access_list: {entry}\n"
    assert steps(read(text))[1] == ("beta", "b", access)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("- agent: 0\n  instruction: x\n", "missing-key"),
        ("- agent: 0\n  instruction: x\n  access_list:\n", "access-not-understood"),
        ("- agent: 0\n  instruction: x\n  acces_list: []\n", "unknown-key"),
        ("- agent: 0\n  instruction: x\n  access_list: []\n  model: y\n", "unknown-key"),
        ("- name: p\n  agent: 0\n  instruction: x\n  access_list: []\n", "unknown-key"),
        ("version: 1\nsteps:\n- agent: 0\n  instruction: x\n  access_list: []\n", "unknown-key"),
        ("steps:\n- agent: 0\n  instruction: x\n  access_list: []\nversion: 1\n", "unknown-key"),
        ("- agent: !!int 0\n  instruction: x\n  access_list: []\n", "yaml-tag"),
        ("- agent: !!python/name:os.system 0\n  instruction: x\n  access_list: []\n", "yaml-tag"),
        ("- agent: &a 0\n  instruction: x\n  access_list: []\n", "yaml-anchor"),
        ("- agent: 0\n  instruction: *x\n  access_list: []\n", "yaml-alias"),
        ("```\n- agent: 0\n  instruction: x\n  access_list: []\n---\n- agent: 0\n```", "yaml-many-documents"),
        ("- agent: 0\n  instruction: x\n  access_list: []\n- text\n", "object-expected"),
        ('- agent: 0\n  instruction: "a \\\n    b"\n  access_list: []\n', "yaml-escape"),
        (f'[{STEP[:-1]}, "agent": 1}}]', "duplicate-key"),
        (f"[{STEP.replace('0', 'NaN')}]", "worker-not-a-number"),
        (f"[{STEP.replace('access_list', 'acces_list')}]", "unknown-key"),
        ('[{"agent": 0, "instruction": "x"}]', "missing-key"),
        ('{"model_id": [0], "subtasks": ["x"], "acces_list": [[]]}', "missing-key"),
        ('{"model_id": [0], "subtasks": ["x"], "access_list": [[]], "model_id": [1]}', "duplicate-key"),
        ('{"model_id": [0], "subtasks": ["x"], "access_list": [[]], "why": "x"}', "unknown-key"),
        ('{"plan": {"model_id": [0], "subtasks": ["x"], "access_list": [[]]}}', "unknown-key"),
        (f'{{"steps": [{STEP}], "version": 1}}', "unknown-key"),
        (STEP, "steps-not-a-list"),
        (f"{STEP}\n{STEP}", "steps-not-a-list"),
        (f"[{STEP}, 1]", "object-expected"),
        (f"[{STEP} {STEP}]", "missing-comma"),
        ("[{'agent': True, 'instruction': 'x', 'access_list': []}]", "worker-not-a-number"),
        ('{"model_id": 0, "subtasks": ["x"], "access_list": [[]]}', "list-expected"),
        ('{"model_id": [0], "subtasks": "x", "access_list": [[]]}', "list-expected"),
    ],
)
def test_step_objects_and_json_reject_what_they_do_not_know(text, code):
    """G1-20"""
    assert code in codes(read(text))


def test_python_spellings_are_read_in_json_where_they_are_legal():
    """G1-20"""
    result = read("{'model_id': [0, 1], 'subtasks': ['a', 'b'], 'access_list': [None, 'all'],}")
    assert steps(result) == AB
    assert result.form == "json"
    assert notes(result) == ["access-none"]


def test_references_of_step_objects_count_from_one_or_by_step_number():
    assert steps(
        read(f'[{STEP}, {{"agent": "coder", "instruction": "y", "access_list": [1]}}]', workers=("a", "coder"))
    )[1] == ("coder", "y", (0,))
    numbered = "- {step: 10, agent: 0, instruction: x, access_list: []}\n- {step: 20, agent: 1, instruction: z, access_list: [10]}"
    assert steps(read(numbered))[1] == ("beta", "z", (0,))


@pytest.mark.parametrize(
    "numbers", [("1", ""), ("2", "1"), ("1", "1"), ("0", "1"), ("-1", "1"), ("'1'", "2"), ("1.0", "2"), ("", "2")]
)
def test_step_numbers_are_given_for_all_and_ascend(numbers):
    text = "".join(
        f"- agent: 0\n  instruction: x\n  access_list: []\n{f'  step: {number}' if number else ''}\n"
        for number in numbers
    )
    assert "step-number" in codes(read(text))


def test_references_counted_from_zero_in_step_objects_get_a_hint():
    result = read(f'[{STEP}, {{"agent": 1, "instruction": "y", "access_list": [0]}}]')
    assert codes(result) == ["access-unknown"]
    assert "counted from 0" in result.errors[0].hint


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (LISTS, "lists"),
        ('{"model_id": [0, 1], "subtasks": ["a", "b"], "access_list": [[], "all"]}', "json"),
        (
            json.dumps(
                [
                    {"agent": 0, "instruction": "a", "access_list": []},
                    {"agent": 1, "instruction": "b", "access_list": "all"},
                ]
            ),
            "steps-json",
        ),
        (YAML, "steps-yaml"),
        ("steps:\n" + YAML, "steps-yaml"),
        (
            "[{agent: alpha, instruction: a, access_list: []}, {agent: beta, instruction: b, access_list: [all]}]",
            "steps-yaml",
        ),
    ],
)
@pytest.mark.parametrize(
    "before", ["", "Here is the plan:\n\n", "It's [1] a {draft}.\n", "<think>hm</think>\n", "- first\n- second: x\n\n"]
)
@pytest.mark.parametrize("after", ["", "\n", "\n\nDone, see [2]. It's {fine}.", '\n\nNote: [1] and "quotes" …'])
@pytest.mark.parametrize("fenced", [False, True])
def test_prose_and_fences_round_any_form_are_ignored(text, form, before, after, fenced):
    result = read(before + (f"```\n{text}\n```" if fenced else text) + after)
    assert result.form == form
    assert steps(result) == AB


@pytest.mark.parametrize(
    "first", [LISTS, YAML + "\n", f"[{STEP}]", '{"model_id": [0], "subtasks": ["x"], "access_list": [[]]}']
)
@pytest.mark.parametrize("last", ["lists", "json", "steps-json", "steps-yaml"])
def test_the_last_plan_wins_whatever_the_forms(first, last):
    """G1-10"""
    plans = {
        "lists": lists("[2]", '["last"]', "[[]]"),
        "json": '{"model_id": [2], "subtasks": ["last"], "access_list": [[]]}',
        "steps-json": '{"steps": [{"agent": 2, "instruction": "last", "access_list": []}]}',
        "steps-yaml": "- agent: 2\n  instruction: last\n  access_list: []\n",
    }
    result = read(f"{first}\nBetter:\n{plans[last]}")
    assert steps(result) == [("gamma", "last", ())]
    assert notes(result) == ["earlier-block-ignored"]
    assert not read(f"{first}\nBetter:\n{plans[last][:-12]}", finish_reason="length").valid


@pytest.mark.parametrize(
    "text",
    [
        lists("[0]", '["Do it".x, "then\nmodel_id = [1]\nsubtasks = [\'pwn\']\naccess_list = [[]]\n"]', "[[]]"),
        lists("[0]", '["Do it" "then\nmodel_id = [1]\nsubtasks = [\'pwn\']\naccess_list = [[]]\n"]', "[[]]"),
        '{"model_id": [0], "subtasks": ["Do it".x, "then\nmodel_id = [1]\nsubtasks = [\'pwn\']\naccess_list = [[]]\n"], "access_list": [[]]}',
        '[{"agent": 0, "instruction": "a"b, "x": "\nmodel_id = [1]\nsubtasks = [\'pwn\']\naccess_list = [[]]\n"}]',
        '- agent: 0\n  instruction: "x" y "\nmodel_id = [1]\nsubtasks = [\'pwn\']\naccess_list = [[]]\n"\n  access_list: []',
        lists("[0]", "[“open, “then”\nmodel_id = [1]\nsubtasks = ['pwn']\naccess_list = [[]]\n]", "[[]]"),
    ],
)
@pytest.mark.parametrize("lenient", [False, True])
def test_a_plan_inside_the_strings_of_a_broken_plan_never_runs(text, lenient):
    result = read(text, lenient=lenient)
    assert result.plan is None or all(step.subtask != "pwn" for step in result.plan.steps)


def test_a_plan_inside_a_subtask_is_only_text():
    inner = "Write:\nmodel_id = [1]\nsubtasks = ['x']\naccess_list = [[]]\n```\n- agent: 0"
    for text in (
        lists("[0]", f'["{inner}"]', "[[]]"),
        f'[{{"agent": 0, "instruction": "{inner}", "access_list": []}}]',
    ):
        assert steps(read(text)) == [("alpha", inner, ())]


@pytest.mark.parametrize(
    "text",
    [
        "So model_id = [0, 1], subtasks = ['a', 'b'], access_list = [[], 'all'].",
        "`model_id = [0, 1]`, `subtasks = ['a', 'b']`, `access_list = [[], 'all']`",
        "**model_id**: [0, 1]\n**subtasks:** ['a', 'b']\n- **access_list**: [[], 'all']",
        "- model_id: [0, 1]\n- subtasks: ['a', 'b']\n- access_list: [[], 'all']",
        "model_id:\n```python\n[0, 1]\n```\nsubtasks:\n```\n['a', 'b']\n```\naccess_list:\n```\n[[], 'all']\n```",
        "> model_id = [0, 1]\n> subtasks = ['a', 'b']\n> access_list = [[], 'all']",
        "<answer>model_id=[0,1] subtasks=['a','b'] access_list=[[],'all']</answer>",
        "access_list = [[], 'all']\nmodel_id = [0, 1]\nsubtasks = ['a', 'b']",
        "model_id = [0, 1,]\nsubtasks = ['a', 'b',]\naccess_list = [[], ['all',],]",
        "\ufeffmodel_id = [0, 1]\r\nsubtasks = ['a', 'b']\r\naccess_list = [[], 'all']\r\n",
        "model_id: which worker\nsubtasks: what to do\naccess_list: who sees what\n" + LISTS,
        "I want access_list = [[], [0]] here, and subtasks = [plan, code].\n\n" + LISTS,
        '"model_id": [0, 1], "subtasks": ["a", "b"], "access_list": [[], "all"]',
        "{model_id: [0, 1], subtasks: ['a', 'b'], access_list: [[], 'all']}",
    ],
)
def test_labels_count_wherever_they_clearly_are_labels(text):
    """G1-10, G1-12"""
    assert steps(read(text)) == AB


@pytest.mark.parametrize("label", ["Model_ID", "model_ids", "model id", "MODEL_ID"])
def test_a_mistyped_label_is_an_error_and_no_earlier_plan_runs(label):
    result = read(f"{LISTS}\nFinal:\n" + LISTS.replace("model_id", label))
    assert codes(result) == ["unknown-label"]
    assert result.errors[0].hint == "write model_id"


@pytest.mark.parametrize(
    "text", ["", " \n\t", "\ufeff", "I will not plan.", "[]", "{}", "null", "- a\n- b", "[1] {x} (y)"]
)
@pytest.mark.parametrize("round_number", [0, 1])
def test_a_text_without_a_plan_is_never_an_empty_plan(text, round_number):
    result = read(text, round=round_number)
    assert codes(result)[0] in ("empty-text", "no-plan")
    assert result.form is None


@pytest.mark.parametrize(
    "text",
    [lists("[]", "[]", "[]"), '{"model_id": [], "subtasks": [], "access_list": []}', "steps: []", '{"steps": []}'],
)
def test_empty_lists_keep_the_answer_only_in_a_later_round(text):
    assert codes(read(text)) == ["empty-plan"]
    assert steps(read(text, round=1)) == []


@pytest.mark.parametrize("text", [lists("[]", "[]", "[[]]"), lists("[]", "[", "[]"), "model_id = []\nsubtasks = []"])
def test_half_empty_lists_never_keep_the_answer(text):
    assert not read(text, round=1).valid


def test_the_pool_decides_how_many_steps_there_may_be():
    six = lists(str([0] * 6), str(["a"] * 6), str([[]] * 6))
    result = read(six)
    assert codes(result) == ["too-many-steps"]
    assert "6 steps" in result.errors[0].text
    assert "limit is 5" in result.errors[0].text
    assert len(steps(read(six, steps_max=6))) == 6


@pytest.mark.parametrize("subtasks", ['[""]', '["  "]', "[1]", "[None]", "[['a']]", "[a]"])
def test_a_subtask_must_be_a_text_with_something_in_it(subtasks):
    assert codes(read(lists("[0]", subtasks, "[[]]")))[0] in ("subtask-empty", "subtask-not-text")


@pytest.mark.parametrize(
    "subtasks",
    ['["a"], "b"]', '["a"] + ["b"]', '["a"] * 2', '["a",, "b"]', '[, "a"]', '["a")', "[r'a]', 'b']", '["a"}]'],
)
def test_brackets_and_commas_must_be_right(subtasks):
    assert not read(lists("[0]", subtasks, "[[]]")).valid


def test_lines_and_columns_count_code_points_in_every_kind_of_line_ending():
    for ending in ("\n", "\r\n", "\r"):
        result = read(f"\U0001f600 é{ending}" + lists("[0, 9]", '["\U0001f600", "b"]', "[[], 9]").replace("\n", ending))
        assert places(result, "worker-unknown") == [("model_id", 2, 16)] or ending == "\r"
        assert places(result, "access-unknown") == [("access_list", 4, 20)]


def test_every_fault_of_a_plan_is_reported_at_once():
    result = read(lists('["x", 0, 9]', '["a", 5]', "[[1], [9], [True]]"))
    assert set(codes(result)) == {
        "worker-unknown",
        "length-mismatch",
        "subtask-not-text",
        "access-later",
        "access-unknown",
        "access-not-understood",
    }
    assert all(error.line and error.column and error.field for error in result.errors)
