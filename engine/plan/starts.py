"""Where in a text something may begin that matters to the search for plans. Must never decide what it is.

The groups of a match tell the kind: `yaml`, `fence`, `label`, `tag` (of reasoning), `comment`, `json`, `flow`.
"""

from __future__ import annotations

import re
from typing import Final

from engine.plan.comments import COMMENT_OPENING
from engine.plan.labels import LABEL
from engine.plan.reasoning import MARK

_QUOTE_CLASS: Final = "[\"'\u201c\u201d\u2018\u2019]"
_YAML_START: Final = r"""(?P<yaml>[ ]*(?:
    -[ \t]*(?:\n[ ]*)?(?:\{[ ]*)?["']?[A-Za-z_]\w*["']?[ \t]*:(?:\s|\Z)
  | ["']?steps["']?[ \t]*:))"""
# The two lookaheads only save time: every start begins a line or begins with one of these characters.
_STARTS_TEXT: Final = rf"""^(?=[ \t`~"'s-])(?:YAML | (?P<fence>[ \t]*(?:`{{3,}}|~{{3,}})))
  | (?=[<\[{{◁/ams])(?:
      (?P<label>{LABEL})
    | (?P<tag>{MARK})
    | (?P<comment>{COMMENT_OPENING})
    | (?P<json>(?:\[\s*)?\{{\s*{_QUOTE_CLASS})
    | (?P<flow>(?:\[\s*)?\{{\s*(?:agent|instruction|access_list|step|steps)[ \t]*:))"""
_FLAGS: Final = re.VERBOSE | re.MULTILINE | re.IGNORECASE
STARTS: Final = re.compile(_STARTS_TEXT.replace("YAML", _YAML_START), _FLAGS)
STARTS_WITHOUT_YAML: Final = re.compile(_STARTS_TEXT.replace("YAML", "(?P<yaml>(?!))"), _FLAGS)
ANY_LABEL: Final = re.compile(LABEL, _FLAGS)
