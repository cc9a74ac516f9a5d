"""Making forged marks inert: text of tasks, subtasks and outputs must not pass for our tags or for control tokens.

The marks stay readable: their brackets are replaced by look-alikes that no tokenizer and no reader takes for ours.
Only marks are touched; other angle brackets (code, HTML, comparisons) stay as they are. The stored text is never
changed, only what a prompt quotes of it. Belongs to renderer version 1: prompts on record are rendered again by it.
"""

# ruff: noqa: RUF001, RUF003  # the look-alikes are the point of this module

from __future__ import annotations

import re

# Control tokens of chat templates. `<|x|>` is written by most families, `<｜x｜>` by DeepSeek, `<|x>` and `<x|>` by
# Gemma, `[|x|]` by EXAONE; then those of Mistral, Llama 2, Gemma, T5, GLM, InternLM, Seed, Baichuan and MiniMax.
# Every repetition is bounded and every white space possessive, so that hostile text costs linear time.
_CONTROL = re.compile(
    r"""
    <(?=\s{0,8}+/?+\s{0,8}+[|｜])[^<>\n]{1,80}?[|｜]\s{0,8}+> |
    <\s{0,8}+/?+\s{0,8}+[|｜][^<>\s]{1,80}+> |
    <(?=\s{0,8}+/?+\s{0,8}+[a-z])[a-z_0-9\s/]{1,40}+[|｜]\s{0,8}+> |
    \[\s{0,8}+/?+\s{0,8}+\|[^\[\]\n|]{1,40}+\|\s{0,8}+\] |
    <<\s{0,8}+/?+\s{0,8}+SYS\s{0,8}+>> |
    \[\s{0,8}+/?+\s{0,8}+(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|PREFIX|SUFFIX
        |MIDDLE|IMG|IMG_BREAK|IMG_END|AUDIO|BEGIN_AUDIO|ARGS|CALL_ID|THINK|gMASK|sMASK|MASK|CLS|SEP|PAD|UNK)
        \s{0,8}+\] |
    <\s{0,8}+/?+\s{0,8}+(?:start_of_turn|end_of_turn|start_of_image|end_of_image|bos|eos|pad|unk|mask|sop|eop|eot|eoa|eoh
        |s|unused\d{1,3}|extra_id_\d{1,4}|reserved_\d{1,4}|seed:[a-z_:]{1,40})\s{0,8}+> |
    \]~!?b?\[ | \]~b\] | \[e~\[
    """,
    re.VERBOSE | re.IGNORECASE,
)
# Our own tags, with or without a nonce, and those of the reference implementation, with whatever attributes.
_TAG = re.compile(
    r"""
    <(?=[\s/a-z])\s{0,8}+/?+\s{0,8}+
    (?: (?:task|steps?|subtask|asked|answer|final|instructions?|earlier-answer|reviewer-comment)(?:-[0-9a-z]{0,40}+)?+
      | agent\s{1,8}+\d{1,9}+\s{1,8}+(?:response|answer|output)
      | subtask\s{1,8}+assigned\s{1,8}+to\s{1,8}+agent[^<>\n]{0,80}+
      | (?:user|system|assistant)(?:[\s_-]{1,8}+(?:query|prompt|message|task))?
    )(?!\w)
    (?:[\s/][^<>]{0,200}+)? >?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_LOOK_ALIKES = str.maketrans({"<": "‹", ">": "›", "[": "［", "]": "］", "|": "¦", "｜": "¦"})


def make_inert(text: str) -> str:
    """The text with forged tags and control tokens written in look-alike brackets; linear in its length."""
    if not any(sign in text for sign in "<[]"):
        return text
    return _TAG.sub(_replace, _CONTROL.sub(_replace, text))


def _replace(match: re.Match[str]) -> str:
    return match[0].translate(_LOOK_ALIKES)
