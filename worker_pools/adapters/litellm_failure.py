"""What litellm's exceptions mean in our codes.

Pure, and does not import litellm: its classes are told by name, their status and text are read, and the chain of causes
is searched for the HTTP library's own errors. litellm gives the wrong class for some refusals (an overloaded Anthropic
is a 500, an unknown model a BadRequestError), so the text decides together with the status.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from worker_pools.adapters.base import CallFailed
from worker_pools.adapters.classify import ProviderError, classify, provider_failure

# Classes that say one thing whatever their text.
_BY_CLASS = {
    "ContextWindowExceededError": "context-too-long",
    "ContentPolicyViolationError": "content-filtered",
    "AuthenticationError": "auth-failed",
    "UnsupportedParamsError": "parameter-refused",
}
_NOT_SENT = re.compile(
    r"ConnectError|ConnectTimeout|ClientConnectorError|ClientConnectorDNSError|ConnectionRefusedError|gaierror"
)
# litellm dresses these up as status 500, which no provider ever sent.
_LINE_BROKE = re.compile(
    r"ServerDisconnectedError|ReadError|WriteError|RemoteProtocolError|ClientPayloadError|ClientOSError"
    r"|ConnectionResetError|BrokenPipeError|APIConnectionError"
)
_LIBRARY_REFUSAL = re.compile(r"LLM Provider NOT provided|does not support parameters", re.IGNORECASE)
_UNREADABLE = re.compile(r"Error converting to valid response block|Unable to (parse|get) json", re.IGNORECASE)
_BYTES_LITERAL = re.compile(r"b'(?:[^'\\]|\\.)*'|b\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


def failure_of(error: Exception, *, streaming: bool) -> CallFailed:
    """The CallFailed for an exception of litellm. `streaming`: whether pieces of the answer had arrived."""
    inner = getattr(error, "original_exception", None)
    error = inner if isinstance(inner, Exception) else error
    kind = type(error).__name__
    text = provider_text(error)
    if any(_NOT_SENT.search(type(cause).__name__) for cause in _causes(error)):
        return CallFailed("connection-failed", sent=False)
    status = _answered_status(error)
    if status is None:
        status = getattr(error, "status_code", None)
        line_broke = any(_LINE_BROKE.search(type(cause).__name__) for cause in _causes(error))
        if line_broke or not isinstance(status, int):
            return _line_failure(text, streaming=streaming)
    if _LIBRARY_REFUSAL.search(text):
        code = "model-not-found" if "provider" in text.lower() else "parameter-refused"
        return CallFailed(code, sent=False, provider_text=text)
    if _UNREADABLE.search(str(error)):
        return CallFailed("reply-unreadable", sent=True, provider_text=text)
    if kind == "Timeout":
        return CallFailed("call-timeout", sent=True, provider_text=text)
    sent = kind != "UnsupportedParamsError"
    return provider_failure(ProviderError(text, status, _headers(error)), sent=sent, code=_BY_CLASS.get(kind))


def provider_text(error: Exception) -> str:
    """What the provider said, freed from litellm's wrapping where that is possible."""
    text = str(getattr(error, "message", "") or error)
    if found := _BYTES_LITERAL.search(text):
        body = ast.literal_eval(found[0])
        return bytes(body).decode("utf-8", "replace")
    start, end = text.find("{"), text.rfind("}")
    return text[start : end + 1] if 0 <= start < end else text


def _answered_status(error: Exception) -> int | None:
    """The status that the provider did send, where the HTTP library's own error for it is among the causes.

    litellm gives its exceptions statuses and responses of its own making.
    """
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if type(cause).__name__.endswith("HTTPStatusError") and isinstance(status, int):
            return status
    return None


def _line_failure(text: str, *, streaming: bool) -> CallFailed:
    # An error inside a successful stream comes as a connection error whose text is the provider's.
    told = classify(None, text)
    if told != "server-error":
        return CallFailed(told, sent=True, provider_text=text)
    cut = streaming or "before a finish_reason" in text
    return CallFailed("stream-cut" if cut else "connection-lost", sent=True, provider_text=text)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__]


def _headers(error: Exception) -> dict[str, str]:
    """The provider's headers: litellm keeps them in one place or the other, depending on the provider."""
    found: dict[str, str] = {}
    for holder in (getattr(error, "litellm_response_headers", None), getattr(error, "response", None)):
        headers: Any = getattr(holder, "headers", holder)
        if isinstance(headers, Mapping):
            found |= {str(name).lower().removeprefix("llm_provider-"): str(headers[name]) for name in headers}
    return found
