r"""The public cases about the three lists (G1-01 to G1-13, G1-22): each input has exactly one right result."""

from __future__ import annotations

import pytest
from plan_reading import THREE, codes, lists, notes, places, read, steps

TWO_STEPS = '["Read.", "Write."]'
DECOY = 'model_id=[9] subtasks=["decoy"] access_list=[[]]'
REAL = 'model_id=[0] subtasks=["real"] access_list=[[]]'


def test_lists_glued_together_are_read_without_a_note():
    """G1-01"""
    result = read('model_id = [1, 0]\nsubtasks = ["Plan it.", "Write it."]access_list = [[], ["all"]]')
    assert steps(result) == [("beta", "Plan it.", ()), ("alpha", "Write it.", "all")]
    assert result.plan.steps[1].visible() == (0,)
    assert notes(result) == []


@pytest.mark.parametrize("glue", ["", " ", "\t", "\n\n", ",\n", "\r\n", ";"])
def test_any_glue_between_lists_is_lossless(glue):
    """G1-01"""
    result = read(f'model_id = [1]{glue}subtasks = ["Plan it."]{glue}access_list = [[]]')
    assert steps(result) == [("beta", "Plan it.", ())]


STRAY = lists("[3, 1]", '["Estimate the limit.".", "Check the estimate."]', '[[], ["all"]]')


def test_a_stray_mark_after_a_quote_is_rejected_at_its_place():
    """G1-02"""
    result = read(STRAY)
    assert codes(result) == ["stray-text"]
    assert places(result, "stray-text") == [("subtasks", 2, 34)]
    assert '."' in result.errors[0].text


def test_lenient_mode_reads_the_two_subtasks_and_notes_the_stray_mark():
    """G1-02"""
    result = read(STRAY, lenient=True)
    assert [subtask for _, subtask, _ in steps(result)] == ["Estimate the limit.", "Check the estimate."]
    assert notes(result) == ["stray-mark"]
    assert result.notes[0].position == 0


@pytest.mark.parametrize("mark", ['."', '"', ".", '!"', '?"', '..."', ";"])
@pytest.mark.parametrize("last", [False, True])
def test_every_kind_of_stray_mark_is_rejected_unless_lenient(mark, last):
    """G1-02"""
    first, second = ("", mark) if last else (mark, "")
    text = lists("[0, 1]", f'["One"{first}, "Two"{second}]', "[[], []]")
    assert "stray-text" in codes(read(text))
    assert [subtask for _, subtask, _ in steps(read(text, lenient=True))] == ["One", "Two"]


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("mark", ["!", ".", ";", " "])
def test_no_text_of_another_list_ends_up_inside_a_subtask(mark, lenient):
    """G1-02"""
    draft = 'maybe subtasks = ["cut '
    plan = lists("[0, 1]", f'["{mark}x", "{mark}"]', '["all", []]')
    result = read(f"{draft}\n{plan}", lenient=lenient)
    assert result.plan is None
    closed = read(f"{draft}</think>\n{plan.replace(' x', 'x')}", lenient=lenient)
    if mark.strip():
        assert [subtask for _, subtask, _ in steps(closed)] == [f"{mark}x", mark]


@pytest.mark.parametrize("stray", ["x", " and so on", ".x", ' + "Two"', ".upper()", " if True else 1"])
@pytest.mark.parametrize("lenient", [False, True])
def test_stray_words_after_a_quote_are_never_accepted(stray, lenient):
    """G1-02"""
    result = read(lists("[0, 1]", f'["One"{stray}, "Two"]', "[[], []]"), lenient=lenient)
    assert "stray-text" in codes(result)
    assert result.errors[0].field == "subtasks"


def test_faults_of_the_other_lists_are_reported_beside_a_stray_mark():
    """G1-02"""
    result = read(lists("[3, 99]", '["One"x, "Two"]', "[[], [7]]"))
    assert set(codes(result)) == {"stray-text", "worker-unknown", "access-unknown"}


MISSING_COMMA = lists(
    "[1, 0, 2]", "[“Read the task.”,\n\n“Make a plan.”\n\n“Write the code.”]", "[[], [“all”], [“all”]]"
)


def test_a_missing_comma_is_rejected_at_its_place():
    """G1-03 (a)"""
    result = read(MISSING_COMMA)
    assert codes(result) == ["missing-comma"]
    assert places(result, "missing-comma") == [("subtasks", 6, 1)]


def test_lenient_mode_reads_three_subtasks_with_a_note():
    """G1-03 (a)"""
    result = read(MISSING_COMMA, lenient=True)
    assert [subtask for _, subtask, _ in steps(result)] == ["Read the task.", "Make a plan.", "Write the code."]
    assert notes(result) == ["missing-comma"]


@pytest.mark.parametrize("lenient", [False, True])
def test_two_subtasks_are_never_glued_to_make_the_count_fit(lenient):
    """G1-03 (b)"""
    result = read(lists("[1, 0]", '["Read." "Plan.", "Write."]', '[[], ["all"]]'), lenient=lenient)
    assert "length-mismatch" in codes(result)


@pytest.mark.parametrize("model_id", ["[0 1]", '["alpha" "beta"]', '["0" 1]', "[0\n1]"])
@pytest.mark.parametrize("lenient", [False, True])
def test_a_missing_comma_between_workers_is_never_read(model_id, lenient):
    """G1-03"""
    assert not read(lists(model_id, TWO_STEPS, "[[], []]"), lenient=lenient).valid


@pytest.mark.parametrize("form", ["lists", "json"])
def test_tex_commands_stay_literal_and_line_breaks_are_real(form):
    """G1-05"""
    first = r"Simplify \frac{a}{b} \times \nu - \beta."
    second = r"Line one\nuse step 0's result\tnow"
    text = lists("[0, 1]", f'["{first}", "{second}"]', '[[], ["all"]]')
    if form == "json":
        text = f'{{"model_id": [0, 1], "subtasks": ["{first}", "{second}"], "access_list": [[], ["all"]]}}'
    result = read(text)
    assert result.form == form
    assert [subtask for _, subtask, _ in steps(result)] == [first, "Line one\nuse step 0's result\tnow"]
    assert notes(result) == ["tex-kept"]
    assert result.notes[0].position == 0


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"\\frac", r"\frac"),
        (r"\\nu", r"\nu"),
        (r"\underline{x}", r"\underline{x}"),
        (r"\u0041b", "Ab"),
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\alpha \beta \sum \x41 \U0001F600 \0", r"\alpha \beta \sum \x41 \U0001F600 \0"),
        (r"\neg a \ne b \not c", r"\neg a \ne b \not c"),
        (r"\tan \tau \text{x} \theta \times \to", r"\tan \tau \text{x} \theta \times \to"),
        (r"\rho \right) \rm", r"\rho \right) \rm"),
        (r"a\nb", "a\nb"),
        (r"a\n\nThen", "a\n\nThen"),
        (r"a\tthe", "a\tthe"),
        (r"a\r\nb", "a\r\nb"),
        (r"say \"hi\" \/ it\'s", 'say "hi" / it\'s'),
        (r"end\\", "end\\"),
    ],
)
def test_escapes_follow_one_table_in_every_form(written, meant):
    """G1-05"""
    in_lists = read(lists("[0]", f'["{written}"]', "[[]]"))
    in_json = read(f'{{"model_id": [0], "subtasks": ["{written}"], "access_list": [[]]}}')
    in_steps = read(f'[{{"agent": 0, "instruction": "{written}", "access_list": []}}]')
    in_yaml = read(f'- agent: 0\n  instruction: "{written}"\n  access_list: []\n')
    in_curly = read(lists("[0]", f"[“{written}”]", "[[]]"))
    for result in (in_lists, in_json, in_steps, in_yaml, in_curly):
        assert steps(result) == [("alpha", meant, ())]


FENCED = lists("[0, 1]", '["Wrap the answer in ```json fences.", "Validate it, see rule [3]."]', '[[], ["all"]]')


@pytest.mark.parametrize("fence", ["```", "````", "~~~"])
@pytest.mark.parametrize("info", ["", "python", "json"])
def test_fences_inside_strings_and_brackets_outside_change_nothing(fence, info):
    """G1-07"""
    result = read(
        f"Here is my plan [draft 2]:\n{fence}{info}\n{FENCED}\n{fence}\nNotes: [1] budget, [docs] style guide. Done]"
    )
    assert steps(result) == [
        ("alpha", "Wrap the answer in ```json fences.", ()),
        ("beta", "Validate it, see rule [3].", "all"),
    ]
    assert notes(result) == []


@pytest.mark.parametrize(
    "text",
    [f"<think>{DECOY}</think>{REAL}", f"{DECOY}</think>{REAL}", f"<think>\n{DECOY}\n</think>\n{REAL}\n"],
    ids=["G1-08a", "G1-08b", "G1-08a-lines"],
)
def test_a_decoy_in_the_reasoning_never_runs(text):
    assert steps(read(text)) == [("alpha", "real", ())]


@pytest.mark.parametrize("tag", ["think", "THINK", "thinking", "thought", "reasoning", "seed:think"])
def test_reasoning_tags_are_known_by_their_usual_names(tag):
    """G1-08"""
    assert steps(read(f"<{tag}>{DECOY}</{tag}>\n{REAL}")) == [("alpha", "real", ())]
    assert codes(read(f"<{tag}>{DECOY}")) == ["reasoning-not-closed"]


@pytest.mark.parametrize(
    "draft",
    [
        'maybe subtasks = ["unfinished',
        "maybe subtasks = [“unfinished",
        "it's [a, {b",
        '{"model_id": [1, ',
        '- agent: "x',
        "model_id = [[[[[[[[[[[[",
        "<think> again <think>",
    ],
)
def test_a_broken_draft_in_the_reasoning_does_not_hide_the_plan(draft):
    """G1-08"""
    assert steps(read(f"{draft} </think>\n{REAL}")) == [("alpha", "real", ())]


@pytest.mark.parametrize(
    "plan",
    [
        'steps:\n- agent: 0\n  instruction: "]"\n  access_list: []\n- agent: 0\n  instruction: "b"\n  access_list: []',
        'model_id = [0]subtasks = ["]"]access_list = ["all"]',
        '[{"agent": 0, "instruction": "]", "access_list": []}]',
    ],
)
def test_an_open_quote_in_a_draft_never_swallows_part_of_the_plan(plan):
    """G1-08: only a complete block hides the end of the reasoning."""
    whole = steps(read(plan))
    assert steps(read(f'maybe subtasks = ["cut </think>\n{plan}')) == whole
    result = read(f'maybe subtasks = ["cut \n{plan}')
    assert result.plan is None


def test_reasoning_that_never_closes_is_rejected():
    """G1-08 (c)"""
    result = read(f"<think>{DECOY}")
    assert codes(result) == ["reasoning-not-closed"]
    assert "never closed" in result.errors[0].text
    assert (result.errors[0].line, result.errors[0].column) == (1, 1)


def test_nothing_after_the_reasoning_is_rejected():
    """G1-08"""
    assert codes(read(f"{DECOY}</think>\nI am done.")) == ["no-plan-after-reasoning"]


@pytest.mark.parametrize("tagged", ["Explain what <think>x</think> does", "Write </think> once", "Open <think> only"])
def test_reasoning_tags_inside_a_subtask_reach_the_worker(tagged):
    """G1-08 (d)"""
    for text in (
        lists("[0]", f'["{tagged}"]', "[[]]"),
        f'{{"model_id": [0], "subtasks": ["{tagged}"], "access_list": [[]]}}',
        f'[{{"agent": 0, "instruction": "{tagged}", "access_list": []}}]',
        f'- agent: 0\n  instruction: "{tagged}"\n  access_list: []',
    ):
        assert steps(read(text)) == [("alpha", tagged, ())]
        assert steps(read(f"<think>{DECOY}</think>{text}" if text[0] in "m{[" else f"</think>\n{text}"))[0][1] == tagged


DRAFT = "Draft:\n" + lists("[0, 1]", '["A1", "A2"]', '[[], ["all"]]') + "\nToo slow. Final:\n"


def test_the_last_complete_plan_wins_and_a_note_says_so():
    """G1-10 (a)"""
    result = read(DRAFT + lists("[2, 3]", '["B1", "B2"]', "[[], []]"))
    assert steps(result) == [("gamma", "B1", ()), ("fast-model", "B2", ())]
    assert notes(result) == ["earlier-block-ignored"]


FINAL = {"model_id": "[2, 3]", "subtasks": '["B1", "B2"]', "access_list": "[[], []]"}


@pytest.mark.parametrize("missing", [("access_list",), ("model_id",), ("subtasks",), ("model_id", "access_list")])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_no_list_is_borrowed_from_a_draft(missing, order):
    """G1-10 (b)"""
    names = list(FINAL)[order:] + list(FINAL)[:order]
    draft = {"model_id": "[0, 1]", "subtasks": '["A1", "A2"]', "access_list": '[[], ["all"]]'}
    text = "Draft:\n" + "\n".join(f"{name} = {draft[name]}" for name in names)
    text += "\nToo slow. Final:\n" + "\n".join(f"{name} = {FINAL[name]}" for name in names if name not in missing)
    result = read(text)
    assert set(codes(result)) == {"incomplete"}
    assert {error.field for error in result.errors} == set(missing)


@pytest.mark.parametrize(
    ("entry", "access", "noted"),
    [
        ('"all"', "all", []),
        ('["ALL "]', "all", []),
        ('["all", 0]', "all", []),
        ("[1, 0]", (0, 1), []),
        ("0", (0,), ["access-number-alone"]),
        ('"0"', (0,), ["access-number-quoted"]),
        ('["1"]', (1,), ["access-number-quoted"]),
        ("[0, 0]", (0,), ["access-repeated"]),
        ('"none"', (), ["access-none"]),
        ("None", (), ["access-none"]),
        ("null", (), ["access-none"]),
        ("(0,)", (0,), ["tuple"]),
    ],
)
def test_access_shorthands_mean_what_they_say(entry, access, noted):
    """G1-11"""
    result = read(lists("[0, 1, 2]", '["a", "b", "c"]', f"[[], [], {entry}]"))
    assert steps(result)[2] == ("gamma", "c", access)
    assert notes(result) == noted


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ("[-1]", "access-unknown"),
        ("[2]", "access-self"),
        ("[5]", "access-unknown"),
        ("[True]", "access-not-understood"),
        ("[0.0]", "access-not-understood"),
        ('"0,1"', "access-not-understood"),
        ("[[0]]", "access-not-understood"),
        ('["none"]', "access-not-understood"),
        ('["all", 5]', "access-unknown"),
        ('["01"]', "access-not-understood"),
        ("[01]", "access-not-understood"),
        ("all", "access-not-understood"),
        ('""', "access-not-understood"),
        ("{}", "access-not-understood"),
        ("[1e0]", "access-not-understood"),
        ('["step 0"]', "access-not-understood"),
        ("True", "access-not-understood"),
        ("[" + "9" * 5000 + "]", "number-too-long"),
    ],
)
def test_access_that_is_not_understood_is_an_error_and_never_nothing(entry, code):
    """G1-11"""
    result = read(lists("[0, 1, 2]", '["a", "b", "c"]', f"[[], [], {entry}]"))
    assert codes(result) == [code]
    assert result.errors[0].field == "access_list"
    assert "step 2" in result.errors[0].text
    assert result.errors[0].line == 3


def test_a_later_step_cannot_be_read():
    """G1-11"""
    assert codes(read(lists("[0, 1, 2]", '["a", "b", "c"]', "[[], [2], []]"))) == ["access-later"]


def test_the_first_step_may_say_all():
    """G1-11"""
    result = read(lists("[0]", '["a"]', '[["all"]]'))
    assert steps(result) == [("alpha", "a", "all")]
    assert result.plan.steps[0].visible() == ()


@pytest.mark.parametrize("whole", ['"all"', "None", "0", "all", "list()", "{}", '{"a": 1}'])
def test_a_whole_access_list_must_be_a_list(whole):
    """G1-11"""
    result = read(lists("[0, 1, 2]", '["a", "b", "c"]', whole))
    assert codes(result) == ["list-expected"]
    assert result.errors[0].field == "access_list"


@pytest.mark.parametrize(
    ("model_id", "worker", "noted"),
    [
        ('["0", 1]', "alpha", ["worker-number-quoted"]),
        ('["fast-model", 1]', "fast-model", []),
        ('[" fast-model ", 1]', "fast-model", []),
        ('["Fast-Model ", 1]', "fast-model", ["worker-name-case"]),
        ("(0, 1)", "alpha", ["tuple"]),
        ("['beta', 1]", "beta", []),
    ],
)
def test_workers_may_be_named_in_a_few_known_ways(model_id, worker, noted):
    """G1-12"""
    result = read(lists(model_id, TWO_STEPS, "[[], [0]]"))
    assert [name for name, _, _ in steps(result)] == [worker, "beta"]
    assert notes(result) == noted


@pytest.mark.parametrize(
    ("model_id", "expected"),
    [
        ('["gpt-x", 0, 1]', {"worker-unknown", "length-mismatch"}),
        ('["gpt-x", 1]', {"worker-unknown"}),
        ("[True, 0]", {"worker-not-a-number"}),
        ("[0.0, 1]", {"worker-not-a-number"}),
        ('["00", 1]', {"worker-unknown"}),
        ("[null, 0]", {"worker-not-a-number"}),
        ("[None, 0]", {"worker-not-a-number"}),
        ("[99, 0]", {"worker-unknown"}),
        ("[-1, 0]", {"worker-unknown"}),
        ("[00, 0]", {"worker-not-a-number"}),
        ("[+1, 0]", {"worker-not-a-number"}),
        ("[1_0, 0]", {"worker-not-a-number"}),
        ("[0x1, 0]", {"worker-not-a-number"}),
        ("[1e0, 0]", {"worker-not-a-number"}),
        ("[alpha, 0]", {"worker-not-a-number"}),
        ("[[0], 0]", {"worker-not-a-number"}),
        ('["", 0]', {"worker-unknown"}),
        ("[NaN, 0]", {"worker-not-a-number"}),
        ('["\u0660", 0]', {"worker-unknown"}),
    ],
)
def test_a_bad_worker_is_an_error_that_names_the_step_and_the_pool(model_id, expected):
    """G1-12"""
    result = read(lists(model_id, TWO_STEPS, "[[], [0]]"))
    assert set(codes(result)) == expected
    worker_error = next(error for error in result.errors if error.code.startswith("worker"))
    assert worker_error.field == "model_id"
    assert (worker_error.line, worker_error.column) == (1, 13)
    assert "step 0" in worker_error.text
    assert "0 (alpha), 1 (beta), 2 (gamma), 3 (fast-model)" in worker_error.text


@pytest.mark.parametrize(
    "value", ["list(range(2))", "range(2)", "[0] * 2", "[0] + [1]", "eval('[0, 1]')", "[0, 1][::-1]"]
)
def test_nothing_is_ever_evaluated(value):
    """G1-12"""
    result = read(lists(value, TWO_STEPS, "[[], [0]]"))
    assert not result.valid


def test_a_name_that_fits_two_workers_without_case_is_refused():
    """G1-12"""
    result = read(lists('["FAST"]', '["a"]', "[[]]"), workers=("Fast", "fast"))
    assert codes(result) == ["worker-ambiguous"]


def test_a_plan_counted_from_one_is_rejected_with_a_hint_and_not_shifted():
    """G1-13 (a)"""
    result = read(lists("[1, 2, 3]", '["a", "b", "c"]', "[[], [1], [1, 2]]"), workers=THREE)
    assert codes(result) == ["worker-unknown", "access-self", "access-self"]
    assert "worker 3 does not exist" in result.errors[0].text
    assert "step 1 refers to itself" in result.errors[1].text
    assert all("counted from 1" in (error.hint or "") for error in result.errors)


def test_a_plan_valid_both_ways_counts_from_zero():
    """G1-13 (b)"""
    result = read(lists("[1, 2, 0]", '["a", "b", "c"]', "[[], [], [1]]"), workers=THREE)
    assert steps(result) == [("beta", "a", ()), ("gamma", "b", ()), ("alpha", "c", (1,))]


def test_curly_quotes_hold_brackets_and_apostrophes():
    """G1-22"""
    subtasks = "[“Fill a[i] and b] as asked”, ”Use ’<idea> … </idea>’, follow the user’s rule”]"
    result = read(lists("[0, 1]", subtasks, "[[], [“all”]]") + "\nNote: [x] and “more”.")
    assert steps(result) == [
        ("alpha", "Fill a[i] and b] as asked", ()),
        ("beta", "Use ’<idea> … </idea>’, follow the user’s rule", "all"),
    ]


@pytest.mark.parametrize(
    ("quoted", "meant"),
    [
        ("“say “hi” to all”", "say “hi” to all"),
        ('“a "straight" one, it\'s [x]”', 'a "straight" one, it\'s [x]'),
        ("'say \"hi\"'", 'say "hi"'),
        ('"it\'s ‘so’ and “so”"', "it's ‘so’ and “so”"),
        ("‘single ] curly’", "single ] curly"),
    ],
)
def test_each_kind_of_quote_keeps_the_others_as_text(quoted, meant):
    """G1-22"""
    assert steps(read(lists("[0]", f"[{quoted}]", "[[]]"))) == [("alpha", meant, ())]
