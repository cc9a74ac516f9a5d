"""Shapes of JSON values: what a field must look like before any rule looks at it. Pure.

Every field of every entry of a log passes here, so the tests of single values are functions of the interpreter itself
(a pattern's match, a set's membership), called without a function of our own between.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from engine.verifier.faults import InvalidError

_LIST_MAX: Final = 1_000_000
_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Shape:
    """A value's exact type (None: any), a test that it must pass (None: none), and whether null will do instead."""

    kind: type | None
    test: Callable[[Any], object] | None = None
    nullable: bool = False

    def __call__(self, value: Any) -> bool:
        """Whether the value has the shape."""
        if self.kind is None or type(value) is self.kind:
            return self.test is None or bool(self.test(value))
        return self.nullable and value is None


def _pattern(expression: str) -> Shape:
    return Shape(str, re.compile(expression, re.DOTALL).fullmatch)


# A lower-case UUID with hyphens.
is_id: Final = _pattern(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
# 64 lower-case hexadecimal digits.
is_hash: Final = _pattern(r"[0-9a-f]{64}")
# RFC 3339 in UTC with microseconds.
is_time: Final = _pattern(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")
# A decimal number of dollars as text.
is_usd: Final = _pattern(r"[0-9]{1,11}(\.[0-9]{1,10})?")
# A short text: codes, names of workers, models and people are short, whatever they are.
is_text: Final = _pattern(r".{0,4096}")
# A provider's own id or name: no sentence fits.
is_provider_word: Final = _pattern(r"[A-Za-z0-9._:/@+=-]{1,128}")
# An integer from 0; canonical JSON has none from 2^53.
is_count: Final = Shape(int, (-1).__lt__)
is_flag: Final = Shape(bool)
is_any: Final = Shape(None)


def one_of(*values: str) -> Shape:
    """One of these texts."""
    return Shape(str, frozenset(values).__contains__)


def optional(shape: Shape) -> Shape:
    """The shape, or null."""
    return replace(shape, nullable=True)


def either(*shapes: Shape) -> Shape:
    """One of these shapes."""
    return Shape(None, lambda value: any(shape(value) for shape in shapes))


def list_of(shape: Shape) -> Shape:
    """A list of the shape."""

    def fits(values: list[Any]) -> bool:
        if len(values) > _LIST_MAX:
            return False
        kind, test, nullable = shape.kind, shape.test, shape.nullable
        for value in values:
            if kind is not None and type(value) is not kind:
                if not (nullable and value is None):
                    return False
            elif test is not None and not test(value):
                return False
        return True

    return Shape(list, fits)


def fields(required: Mapping[str, Shape], more: Mapping[str, Shape] | None = None) -> Shape:
    """An object with these fields, perhaps with those of ``more``; other fields are not looked at."""
    table = [
        *((name, True, shape.kind, shape.test, shape.nullable) for name, shape in required.items()),
        *((name, False, shape.kind, shape.test, shape.nullable) for name, shape in (more or {}).items()),
    ]

    def fits(values: dict[str, Any]) -> bool:
        for name, needed, kind, test, nullable in table:
            value = values.get(name, _MISSING)
            if value is _MISSING:
                if needed:
                    return False
            elif kind is not None and type(value) is not kind:
                if not (nullable and value is None):
                    return False
            elif test is not None and not test(value):
                return False
        return True

    return Shape(dict, fits)


def exactly(required: Mapping[str, Shape]) -> Shape:
    """An object with these fields and no others."""
    fits, count = fields(required), len(required)
    return Shape(dict, lambda values: len(values) == count and fits(values))


def require(value: Any, shape: Shape, what: str) -> Any:
    """The value; raises InvalidError if it has another shape."""
    if not shape(value):
        raise InvalidError(what)
    return value
