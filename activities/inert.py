"""Making forged marks inert: text of tasks, subtasks and outputs must not pass for our tags or for control tokens.

The marks stay readable: their brackets are replaced by look-alikes that no tokenizer and no reader takes for ours.
Only marks are touched; other angle brackets (code, HTML, comparisons) stay as they are. The stored text is never
changed, only what a prompt quotes of it.
"""

# ruff: noqa: RUF001, RUF003  # the look-alikes are the point of this module

from __future__ import annotations

import re

# Control tokens of chat templates: <|im_end|>, <｜User｜> and the like, [INST], <<SYS>>, <start_of_turn>, <s>.
_CONTROL = re.compile(
    r"""
    <(?=\s{0,8}/?\s{0,8}[|｜])[^<>\n]{1,80}?[|｜]\s{0,8}> |
    <<\s{0,8}/?\s{0,8}SYS\s{0,8}>> |
    \[\s{0,8}/?\s{0,8}(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\s{0,8}\] |
    <\s{0,8}/?\s{0,8}(?:start_of_turn|end_of_turn|start_of_image|bos|eos|pad|unk|s|unused\d{1,3})\s{0,8}>
    """,
    re.VERBOSE | re.IGNORECASE,
)
# Our own tags, with or without a nonce, and those of the reference implementation, with whatever attributes.
_TAG = re.compile(
    r"""
    <\s{0,8}/?\s{0,8}
    (?: (?:task|steps?|subtask|asked|answer|final|instructions?)(?:-[0-9a-z]{0,40})?
      | agent\s{1,8}\d{1,9}\s{1,8}(?:response|answer|output)
      | subtask\s{1,8}assigned\s{1,8}to\s{1,8}agent[^<>\n]{0,80}
      | (?:user|system|assistant)(?:[\s_-]{1,8}(?:query|prompt|message|task))?
    )
    (?:\s[^<>\n]{0,200})? \s{0,8} >?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_LOOK_ALIKES = str.maketrans({"<": "‹", ">": "›", "[": "［", "]": "］", "|": "¦", "｜": "¦"})


def make_inert(text: str) -> str:
    """The text with forged tags and control tokens written in look-alike brackets; linear in its length."""
    if "<" not in text and "[" not in text:
        return text
    return _TAG.sub(_replace, _CONTROL.sub(_replace, text))


def _replace(match: re.Match[str]) -> str:
    return match[0].translate(_LOOK_ALIKES)
