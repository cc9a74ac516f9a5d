"""Hypothesis strategies: valid plans, and the many ways in which a model may spell one."""

from __future__ import annotations

import re

from hypothesis import strategies as st
from plan_reading import POOL

from engine.plan import Plan, Step, render_plan
from engine.plan.escapes import encode_escapes

_FRAGMENTS = st.sampled_from(
    [
        "model_id = [9]",
        "\nsubtasks = ['x']\naccess_list = [[]]\n",
        "</think>",
        "<think>",
        "```",
        "\n```\n",
        "- agent: 0\n",
        "\\frac{a}{b}",
        "\\nu",
        "\nu",
        "\tan",
        "\\",
        '"',
        "'",
        "a[i] b]",
        "user’s",
        "“so”",
        "] }",
        "# no comment",
        "key: value",
        "\u2028",
        "\ufeff",
        "\x7f",
        "{task}",
        ",model_id",
        "{subtasks",
        "\n\n  subtasks = [0]\n",
        "\n- instruction: x\n  access_list: []\n",
        "\nsteps:\n- agent: 1\n",
        "\nstep: 2",
        '{"agent": 1, "instruction": "x", "access_list": []}',
        "<!-- ",
        "Final plan:\n",
    ]
)
_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
_PLAIN_YAML = re.compile(r"(?!(?:y|n|yes|no|true|false|on|off|null)\Z)[A-Za-z](?:[^:#]*[^:#\s])?", re.IGNORECASE)
_PLAIN = st.text(st.sampled_from("abc XYZ.,!?-éß中\U0001f600"), min_size=1, max_size=20)
SUBTASK = (
    st.lists(st.one_of(_TEXT, _PLAIN, _FRAGMENTS), min_size=1, max_size=4)
    .map("".join)
    .filter(lambda text: text.strip())
)


@st.composite
def plans(draw, *, subtask=SUBTASK):
    count = draw(st.integers(1, 5))
    steps = []
    for position in range(count):
        earlier = st.lists(st.integers(0, position - 1), unique=True, max_size=position) if position else st.just([])
        access = draw(st.one_of(st.just("all"), earlier.map(lambda found: tuple(sorted(found)))))
        steps.append(Step(position, draw(st.sampled_from(POOL)), draw(subtask), access))
    return Plan(tuple(steps), (), "lists")


def _escape(text: str, quote: str) -> str:
    escaped = text.replace("\\", "\\\\")
    return escaped.replace(quote, "\\" + quote) if quote in "\"'" else escaped


@st.composite
def _string(draw, text: str):
    kinds = ['"', "'", "json"]
    kinds += ["“", "”"] if not set(text) & set("“”") else []
    kinds += ["‘"] if not set(text) & set("‘’") else []
    kind = draw(st.sampled_from(kinds))
    if kind == "json":
        return '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or c in '"\\' else c for c in text) + '"'
    closing = {"“": "”", "”": "”", "‘": "’"}.get(kind, kind)
    return kind + _escape(text, kind) + closing


_BLANK = st.sampled_from(["", " ", "  ", "\n", "\t", " \n  ", "\r\n"])


@st.composite
def _sequence(draw, items: list[str], *, tuples: bool = True):
    opening, closing = draw(st.sampled_from(["[]", "()"] if tuples else ["[]"]))
    inner = ",".join(draw(_BLANK) + item + draw(_BLANK) for item in items)
    trailing = "," if items and draw(st.booleans()) else ""
    return opening + inner + trailing + draw(_BLANK) + closing


@st.composite
def _access(draw, access, first: int):
    if access == "all":
        written = draw(st.sampled_from(['"all"', "'ALL '", "“all”", "[all]"]))
        return draw(_sequence(['"all"'])) if written == "[all]" else written
    numbers = [str(position + first) for position in draw(st.permutations(access))]
    if len(numbers) == 1 and draw(st.booleans()):
        return draw(st.sampled_from([numbers[0], f'"{numbers[0]}"']))
    if not numbers and draw(st.booleans()):
        return draw(st.sampled_from(["None", "null", '"none"']))
    return draw(_sequence([draw(st.sampled_from([number, f"'{number}'"])) for number in numbers]))


@st.composite
def _worker(draw, name: str):
    number = POOL.index(name)
    return draw(st.sampled_from([str(number), f'"{number}"', f'"{name}"', f"' {name.upper()} '"]))


@st.composite
def spelled(draw, plan: Plan):
    """A text that means the plan, in any form and any spelling that is read without an error."""
    form = draw(st.sampled_from(["lists", "json", "steps-json", "steps-yaml"]))
    first = 0 if form in ("lists", "json") else 1
    workers = [draw(_worker(step.worker)) for step in plan.steps]
    subtasks = [draw(_string(step.subtask)) for step in plan.steps]
    access = [draw(_access(step.access, first)) for step in plan.steps]
    if form == "lists":
        values = {"model_id": workers, "subtasks": subtasks, "access_list": access}
        names = draw(st.permutations(list(values)))
        separator = draw(st.sampled_from([" = ", "=", ": ", ":", " :\n", " := "]))
        glue = draw(st.sampled_from(["", " ", "\n", "\n\n", ",\n", "\r\n"]))
        body = glue.join(f"{name}{separator}{draw(_sequence(values[name]))}" for name in names)
    elif form == "json":
        values = {"model_id": workers, "subtasks": subtasks, "access_list": access}
        names = draw(st.permutations(list(values)))
        quote = draw(st.sampled_from(["''", '""', "“”"]))
        members = [
            f"{quote[0]}{name}{quote[1]}{draw(_BLANK)}:{draw(_BLANK)}{draw(_sequence(values[name]))}" for name in names
        ]
        body = "{" + ", ".join(members) + draw(st.sampled_from(["", ","])) + draw(_BLANK) + "}"
    elif form == "steps-json":
        objects = [
            f'{{"agent": {worker}, "instruction": {subtask}, "access_list": {seen}}}'
            for worker, subtask, seen in zip(workers, subtasks, access, strict=True)
        ]
        body = draw(_sequence(objects, tuples=False))
        body = f'{{"steps": {body}}}' if draw(st.booleans()) else body
    elif draw(st.booleans()):
        body = render_plan(plan, "steps-yaml", POOL)
        if draw(st.booleans()):
            body = body.removeprefix("steps:\n").replace("\n  ", "\n").removeprefix("  ")
    else:
        fence = draw(st.sampled_from(["```", "````yaml", "~~~"]))  # where it ends is not told by the next line
        return draw(_surrounded(f"{fence}\n{draw(_yaml(plan))}{fence.rstrip('yaml')}", form))
    return draw(_surrounded(body, form))


@st.composite
def _yaml(draw, plan: Plan):
    """A list of step objects as people write them: any order of keys, any style of text that can hold it."""
    indent = draw(st.sampled_from(["", "  "]))
    numbered = draw(st.booleans())
    lines = draw(st.sampled_from([["steps:"], ['"steps":'], ["# the plan", "steps: # all"]])) if indent else []
    for step in plan.steps:
        keys = {
            "agent": draw(_worker(step.worker)),
            "instruction": draw(_yaml_text(step.subtask, indent + "    ")),
            "access_list": "all" if step.access == "all" else str([seen + 1 for seen in step.access]),
        }
        keys |= {"step": str(step.position + 1)} if numbered else {}
        entries = [f"{name}: {keys[name]}" for name in draw(st.permutations(list(keys)))]
        lines += [indent + ("  " if index else "- ") + entry for index, entry in enumerate(entries)]
    return "\n".join(lines) + "\n"


@st.composite
def _yaml_text(draw, text: str, indent: str):
    styles = ['"']
    one_line = text.isprintable() and "\ufeff" not in text
    lines = text.split("\n")
    if one_line:
        styles.append("'")
    if one_line and _PLAIN_YAML.fullmatch(text) is not None:
        styles.append("plain")
    if all(line.isprintable() for line in lines) and not text[0].isspace() and text.strip() == text:
        styles.append("|-")
    style = draw(st.sampled_from(styles))
    if style == "'":
        return "'" + text.replace("'", "''") + "'"
    if style == "|-":
        return "|-\n" + "\n".join(indent + line for line in lines)
    return text if style == "plain" else '"' + encode_escapes(text, only_ascii_line=True) + '"'


@st.composite
def _surrounded(draw, body: str, form: str):
    decoy = "model_id = [9]\nsubtasks = ['decoy']\naccess_list = [[]]"
    before = draw(
        st.sampled_from(
            [
                "",
                "Here is the plan:\n",
                "It's [1] easy {really}.\n\n",
                f"<think>\n{decoy}\n</think>\n",
                f"{decoy} </think>\n",
                'maybe subtasks = ["cut </think>\n',
                "Let model_id be the list.\n",
                "```yaml\n- agent: 0\n  instruction: decoy\n  access_list: []\n```\nBetter:\n",
            ]
        )
    )
    after = draw(st.sampled_from(["", "\n", "\n\nDone, see [2]. It's “fine”.", "\n\nNotes: {x} [y] 'z"]))
    fence = draw(st.sampled_from(["", "```", "````python", "~~~"]))
    if fence and form != "steps-yaml":
        return f"{before}{fence}\n{body}\n{fence.rstrip('python')}{after}"
    return before + body + after
