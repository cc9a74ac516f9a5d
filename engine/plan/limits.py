"""The bounds of plan parsing. Must never depend on the text that is parsed.

Every loop of the parser ends at one of these numbers, so that a hostile or degenerate reply costs linear time.
"""

from __future__ import annotations

from typing import Final

TEXT_BYTES_MAX: Final = 1 << 20
"""Size of a plan text in UTF-8 bytes (1 MiB); a larger one is refused unread."""

STEPS_SCANNED_MAX: Final = 64
"""Elements read of any one list, and steps read of any one plan, whatever the pool allows."""

DEPTH_MAX: Final = 8
"""Brackets inside brackets; the deepest legal form needs four."""

ERRORS_MAX: Final = 64
"""Errors reported of one plan; scanning stops there."""

LISTS_MAX: Final = 256
"""Labelled lists, or blocks of other forms, read in one text."""

ATTEMPTS_MAX: Final = 2048
"""Places in one text at which a value is tried that may be no plan."""

STARTS_MAX: Final = 20_000
"""Tags, fences, labels and values looked at in one text."""

WORK_FACTOR_MAX: Final = 4
"""Characters scanned inside values, as a multiple of the text's length; rereading after faults is bounded by it."""

INTEGER_DIGITS_MAX: Final = 9
"""Digits of a number that is converted at all; longer ones are refused as text."""

YAML_EVENTS_MAX: Final = 16_384
"""Parser events read of one YAML block."""

QUOTE_CHARS_MAX: Final = 80
"""Characters of the text that one error or note quotes."""
