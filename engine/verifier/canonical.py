"""Canonical JSON (RFC 8785) without floats, and hexadecimal digits: read only if the bytes are the only possible ones.

Reading compares with writing, so duplicate keys, blanks, other spellings of a number or letter are all refused.
"""

from __future__ import annotations

import json
from json.scanner import make_scanner
from typing import Any, NoReturn

from engine.verifier.faults import InvalidError

INTEGER_MAX = 2**53 - 1
_HEX = frozenset("0123456789abcdef")


def _float(_: str) -> NoReturn:
    raise ValueError("a float")


def _integer(digits: str) -> int:
    value = int(digits)
    if abs(value) > INTEGER_MAX:
        raise ValueError("too large")
    return value


# The scanner alone: what `decode` adds is to skip blanks, of which there are none.
_SCAN = make_scanner(
    json.JSONDecoder(parse_float=_float, parse_constant=_float, parse_int=_integer)  # type: ignore[arg-type]  # it takes any decoder
)
# With ASCII keys and without floats, what this writes is RFC 8785.
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"), check_circular=False
)


def canonical(value: Any) -> bytes:
    """The bytes of a value of objects with ASCII keys, lists, texts, integers below 2^53, true, false and null."""
    return _ENCODER.encode(value).encode()


def parse(data: bytes) -> Any:
    """The value of canonical bytes; raises InvalidError (without saying what they are of) for all others."""
    try:
        value, _ = _SCAN(data.decode("utf-8"), 0)
        written = canonical(value)
    except (ValueError, StopIteration, RecursionError):
        raise InvalidError("is not canonical JSON") from None
    if written != data:
        raise InvalidError("is not canonical JSON")
    if not data.isascii() and not _has_ascii_keys(value):
        raise InvalidError("has keys that are not ASCII")
    return value


def hex_bytes(text: Any, length: int) -> bytes | None:
    """The bytes of exactly ``length`` pairs of lower-case hexadecimal digits; None for everything else."""
    if type(text) is not str or len(text) != 2 * length or not _HEX.issuperset(text):
        return None
    return bytes.fromhex(text)


def _has_ascii_keys(value: Any) -> bool:
    if isinstance(value, dict):
        return all(key.isascii() and _has_ascii_keys(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(_has_ascii_keys(inner) for inner in value)
    return True
