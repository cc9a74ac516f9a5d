"""What comes with and after a plan: code that changes its lists, and a later plan in a form that is not read."""

from __future__ import annotations

import pytest
from plan_reading import codes, lists, notes, places, read, steps

PLAN = lists("[0, 1]", '["a", "b"]', '[[], ["all"]]') + "\n"
RUNS = [("alpha", "a", ()), ("beta", "b", "all")]
YAML = "- agent: 0\n  instruction: a\n  access_list: []\n- agent: 1\n  instruction: b\n  access_list: all\n"
JSON = '[{"agent": 0, "instruction": "a", "access_list": []}, {"agent": 1, "instruction": "b", "access_list": "all"}]\n'

BEHIND = [
    *("[::-1]", " [::-1]", "[0:1]", "[-1]", "(0)", "*2", " * 2", " * n", " + [1]", "+[1]", " + more", " - [1]", " @ x"),
    *(".append(2)", ".copy()", ".reverse()", " if fast else [1, 0]", " or [1]", " and [1]", " | x", " % 3", " == x"),
    *(
        "]",
        " ]",
        "\n]",
        " \\\n  + [1]",
        "\n  + [1]",
        "\n.append(2)",
        " != [1]",
        " for x in y",
        " << 1",
        " += [1]",
        " = x",
        "; model_id += [1]",
    ),
]


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("name", ["model_id", "subtasks", "access_list"])
def test_code_behind_a_list_is_an_error(behind, name):
    value = {"model_id": "[0, 1]", "subtasks": '["a", "b"]', "access_list": '[[], ["all"]]'}[name]
    result = read(PLAN.replace(value, value + behind))
    assert set(codes(result)) & {"list-modified", "stray-text"}
    assert all(error.line and error.hint for error in result.errors if error.code == "list-modified")


STATEMENTS = [
    "model_id += [1]",
    "model_id *= 2",
    "model_id.append(2)",
    "model_id.reverse()",
    "subtasks.insert(0, 'x')",
    "access_list.clear ()",
    'subtasks[0] = "x"',
    'subtasks[0] += " more"',
    "model_id[0:1] = [2]",
    "model_id[0], model_id[1] = model_id[1], model_id[0]",
    "access_list[1][0] = 0",
    "del model_id[0]",
    "random.shuffle(model_id)",
    "list.append(model_id, 2)",
    'plan["subtasks"][0] = "x"',
    "plan.subtasks[0] = 'x'",
    "for i in range(2): subtasks[i] = 'x'",
    "model_id = sorted(model_id)",
    "model_id = model_id[::-1]",
    "steps.append({})",
    'steps[0]["agent"] = 2',
    "steps += [x]",
    "plan.reverse()",
]


@pytest.mark.parametrize("statement", STATEMENTS)
@pytest.mark.parametrize("plan", [PLAN, YAML + "\n", JSON], ids=["lists", "yaml", "json"])
def test_a_statement_that_changes_a_list_is_an_error(statement, plan):
    result = read(f"{plan}{statement}\n")
    assert set(codes(result)) & {"list-modified", "list-expected", "incomplete"}
    assert not read(f"```python\n{plan}{statement}\n```\nDone.").valid


def test_a_changed_list_is_named_with_its_place_and_a_hint():
    result = read(PLAN + "\nmodel_id.append(2)")
    assert places(result, "list-modified") == [(None, 5, 1)]
    assert "evaluated" in result.errors[0].hint


@pytest.mark.parametrize("statement", ["model_id.append(2)", "subtasks[0] = 'x'"])
def test_a_statement_between_the_lists_counts_and_one_before_the_plan_does_not(statement):
    assert codes(read(PLAN.replace("\n", f"\n{statement}\n", 1))) == ["list-modified"]
    assert steps(read(f"{PLAN}{statement}\nFinal:\n{PLAN}")) == RUNS
    assert steps(read(f"# {statement}\n{PLAN}# {statement}\n")) == RUNS


@pytest.mark.parametrize("behind", ["[::-1]", " * 2", ".append(1)", " + extra", '[0]["agent"] = 1', " | x"])
def test_code_behind_a_json_plan_is_an_error(behind):
    assert codes(read(JSON.rstrip() + behind)) == ["list-modified"]
    assert codes(read(f'{{"model_id": [0], "subtasks": ["a"], "access_list": [[]]}}{behind}')) == ["list-modified"]


PROSE = [
    *(
        "",
        ".",
        ",",
        ";",
        " (step 1 sees step 0)",
        " – the two fast ones",
        " - two steps",
        " and that is all",
        "**",
        "*",
        "`",
    ),
    *(
        "  # two",
        " // two",
        ", as asked",
        " is the plan",
        "</answer>",
        "\n* 2 workers\n+ 1 check",
        "\n- done",
        "\n[1] note",
    ),
    *(
        "\nsubtasks[0] is the plan, access_list[1] sees it.",
        "\nmodel_id[0] == 0 holds.",
        "\nThe model_id and subtasks fit.",
    ),
    *(
        "\nThe access_list -> step 1 sees step 0.",
        "\nIn model_id, subtasks and access_list two steps each.",
        "\nSteps: two.",
    ),
]


@pytest.mark.parametrize("behind", PROSE)
def test_prose_behind_a_plan_is_no_code_and_no_later_plan(behind):
    assert steps(read(PLAN.rstrip() + behind)) == RUNS
    assert steps(read(JSON.rstrip() + behind)) == RUNS


EXPLAINED = """
Explanation:
- Step 0 (alpha) reads the task.
- Step 1 (beta) checks it; its access list is "all", so it sees step 0.

Models used: alpha and beta. Note: [1] budget, see {x} and `model_id`.
1. Agent 0 drafts
2. Agent 1 checks
"""


def test_an_explanation_behind_the_plan_is_ignored():
    assert steps(read(PLAN + EXPLAINED)) == RUNS
    assert steps(read(YAML + EXPLAINED)) == RUNS


SPELLED = [
    "**model_id**\n[1, 0]\n**subtasks**\n['x', 'y']\n**access_list**\n[[], []]",
    "### model_id\n\n[1, 0]\n\n### subtasks\n\n['x', 'y']\n\n### access_list\n\n[[], []]\n",
    "# model_id\n[1, 0]\n# subtasks\n['x', 'y']\n# access_list\n[[], []]\n",
    "`model_id`\n```\n[1, 0]\n```\n`subtasks`\n```\n['x', 'y']\n```\n`access_list`\n```\n[[], []]\n```",
    "model_id -> [1, 0]\nsubtasks -> ['x', 'y']\naccess_list -> [[], []]",
    "model_id => [1, 0]\nsubtasks => ['x', 'y']\naccess_list => [[], []]",
    "model_id → [1, 0]\nsubtasks → ['x', 'y']\naccess_list → [[], []]",
    "model_id [1, 0]\nsubtasks ['x', 'y']\naccess_list [[], []]",
    "- **model_id** [1, 0]\n- **subtasks** ['x', 'y']\n- **access_list** [[], []]",
    "1. model_id\n[1, 0]\n2. subtasks\n['x', 'y']\n3. access_list\n[[], []]",
]


@pytest.mark.parametrize("spelled", SPELLED)
def test_clear_spellings_of_the_labels_are_read(spelled):
    assert steps(read(spelled)) == [("beta", "x", ()), ("alpha", "y", ())]
    result = read(f"Draft:\n{PLAN}Final:\n{spelled}")
    assert steps(result) == [("beta", "x", ()), ("alpha", "y", ())]
    assert notes(result) == ["earlier-block-ignored"]


UNREAD = [
    "models = [1, 0]\ntasks = ['x', 'y']\naccess = [[], []]",
    "models: [1, 0]\ntasks: ['x', 'y']",
    "workers = [1]\ninstructions = ['x']\nvisible = [[]]",
    "| model_id | subtasks | access_list |\n|---|---|---|\n| 1 | x | [] |",
    "| Agent | Instruction | Access list |\n|---|---|---|\n| 1 | x | none |",
    "| Step | Model | Task | Access |\n|---|---|---|---|\n| 0 | 1 | x | none |",
    "agent | instruction | access_list\n--- | --- | ---\n1 | x | []",
    "agent,instruction,access_list\n1,x,[]",
    "* agent: 1\n  instruction: x\n* agent: 0\n  instruction: y",
    "* agent: 1\n  instruction: x\n  access_list: none\n",
    "+ agent: 1\n  instruction: x\n",
    "1. agent: 1\n   instruction: x\n",
    "- **agent**: 1\n  **instruction**: x\n",
    "Agent: 1\nInstruction: x\nAccess: none",
    "<step><agent>1</agent><instruction>x</instruction></step>",
    "[[steps]]\nagent = 1\ninstruction = 'x'",
    "Step(agent=1, instruction='x')",
    '{"models": [1], "tasks": ["x"], "access": [[]]}',
    "final_model_id = [1]\nfinal_subtasks = ['x']\nfinal_access_list = [[]]",
    "model_id2 = [1]\nsubtasks2 = ['x']\naccess_list2 = [[]]",
    "the model_id becomes → [1, 0]; model_id -> [1, 0]",
    "__model_id__\n[1, 0]\n__subtasks__\n['x', 'y']\n",
    "Final plan:\nfirst alpha, then beta, who sees nothing",
    "Here is the revised plan:\n\nbeta reads",
    "agent = 1, instruction = 'x'",
]


@pytest.mark.parametrize("unread", UNREAD)
@pytest.mark.parametrize("plan", [PLAN, YAML + "\n", JSON], ids=["lists", "yaml", "json"])
@pytest.mark.parametrize("between", ["Too slow. Final:\n", "\n"])
def test_a_draft_does_not_run_when_a_later_plan_cannot_be_read(unread, plan, between):
    result = read(f"Draft:\n{plan}{between}{unread}")
    assert not result.valid
    assert all(error.line for error in result.errors)


@pytest.mark.parametrize("unread", UNREAD)
def test_text_that_is_not_read_before_the_plan_does_no_harm(unread):
    assert steps(read(f"{unread}\n\nFinal:\n{JSON}")) == RUNS
    plan = JSON.replace('"a"', '"' + unread.replace('"', "'").replace("\\", "") + '"')
    assert read(plan).valid


CUT = [
    *(
        "mod",
        "model",
        "model_i",
        "model_id",
        "**model_id**",
        "sub",
        "access_l",
        "- age",
        "- agent",
        "steps",
        "{",
        '{"',
        '{"mod',
        "[{",
    ),
    *(
        '[{"ag',
        "[",
        "```yaml",
        "```python\n",
        "Final plan:",
        "Better version:\n",
        "model_id =",
        "- agent:",
        "```\nmodel",
    ),
]


@pytest.mark.parametrize("cut", CUT)
def test_a_second_plan_cut_at_its_beginning_stops_the_first(cut):
    assert not read(f"{PLAN}\nToo slow.\n{cut}").valid
    assert not read(f"{YAML}\nToo slow.\n{cut}").valid
    assert steps(read(f"{cut}\n\n{JSON}")) == RUNS if cut in ("mod", "sub", "Final plan:") else True


@pytest.mark.parametrize("end", ["\n```", "\nDone.", "\n}", "\n]", "\n---", "\nThis is the model", "\nUse agents well"])
def test_an_end_that_is_no_beginning_of_a_plan_is_ignored(end):
    assert steps(read(f"```\n{PLAN}```{end}")) == RUNS
