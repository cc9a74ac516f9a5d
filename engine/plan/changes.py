"""Code that would change a plan's lists. Must never evaluate any: who writes it means another plan than was read."""

from __future__ import annotations

import re
from typing import Final

from engine.plan.lists import LIST_NAMES

HINT: Final = "write the lists out as they are meant: nothing is evaluated"

_NAMES: Final = (*LIST_NAMES, "steps", "plan")
_LISTS: Final = "|".join(LIST_NAMES)

# Behind a value on its line (or at the head of the next one): an index, a call, a method, an operator with something
# to work on. Emphasis that closes, dashes and words of prose are none.
_BEHIND: Final = re.compile(
    r"""[ \t]*\[(?!/) | \( | \s*\] | [ \t]*\.[A-Za-z_]\w*[ \t]*[\[(.]
      | [ \t]*\\[ \t]*\r?\n
      | [ \t]*(?:\*\*|//|<<|>>|[-+*/%@&|^])=                       # += and its kind
      | [ \t]*(?:==|!=|<=|>=|=(?![>=]))
      | [ \t]*\+[ \t]*[\w\[("'\u201c] | [ \t]*-[ \t]*[\[(] | -\d
      | [ \t]+\*{1,2}[ \t]*[\d\[(] | [ \t]+\*[ \t]+\w | \*{1,2}[\d\[(]
      | [ \t]*[%@&|^][ \t]*(?!model_id|subtasks|access_list)[\w\[({] | [ \t]*(?:<<|>>)
      | [ \t]+(?:or|and|in|not[ \t]+in)[ \t]*[\[(] | [ \t]+if[ \t][^\r\n]{0,200}?\belse\b | [ \t]+for[ \t]+\w+[ \t]+in\b
      | [ \t]*\r?\n[ \t]*(?:\+[ \t]*[\[(] | \.[A-Za-z_]\w*[ \t]*\( | \[-?\d*:)
    """,
    re.VERBOSE,
)
# More values after a bracket that closed too early.
_MORE_VALUES: Final = re.compile(
    rf"[ \t]*(?:,[ \t]*\[|,[ \t]*[\"“](?!{_LISTS})|,[ \t]*\d+[ \t]*[,\]])",
)

_NAME: Final = rf"(?<![A-Za-z0-9])(?:{_LISTS}|steps|plan)(?![A-Za-z0-9_])[\"'`]{{0,2}}\]?"
_INDEX: Final = r"(?:\[[^\[\]\r\n]{0,80}\])"
_STATEMENT: Final = re.compile(
    rf"""{_NAME}{_INDEX}{{0,4}}[ \t]*(?:\*\*|//|<<|>>|[-+*/%@&|^])=(?!=)       # model_id += [1]
      | {_NAME}{_INDEX}{{1,4}}[ \t]*=(?![=>])                                  # subtasks[0] = "x"
      | {_NAME}{_INDEX}{{1,4}}[ \t]*,[ \t]*{_NAME}{_INDEX}{{1,4}}[ \t]*[=,](?!=)  # swapped
      | {_NAME}{_INDEX}{{0,4}}[ \t]*\.[ \t]*[A-Za-z_]\w{{0,40}}[ \t]*\(         # model_id.append(2)
      | \bdel[ \t]+[(\w.\[\]"']{{0,40}}?(?:{_LISTS})\b
      | \b[A-Za-z_][\w.]{{0,60}}\([ \t]*(?:{_LISTS})[ \t]*[,)]                 # shuffle(model_id)
    """,
    re.VERBOSE,
)


def code_behind(text: str, end: int) -> bool:
    """Whether code that works on it stands right behind the value that ends here."""
    return _BEHIND.match(text, end) is not None


def more_values(text: str, end: int) -> bool:
    """Whether the list that ends here seems to go on, so that its bracket closed too early."""
    return _MORE_VALUES.match(text, end) is not None


def changing_statement(outside: str) -> int | None:
    """Where a statement changes a list of the plan, in a text whose values and comments are blanked out."""
    if not any(name in outside for name in _NAMES):
        return None
    match = _STATEMENT.search(outside)
    return None if match is None else match.start()
