"""Which code a provider's refusal stands for, from its status and its words.

Pure. Providers say one thing in many ways (and some say it inside a successful stream), so the structured fields are
read first, then a short list of known wordings, then the status. Nothing is retried or raised here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from worker_pools.adapters.base import CallFailed

# Headers that give advice on when to come back; the values are kept as they came.
RETRY_HEADERS = (
    "retry-after",
    "retry-after-ms",
    "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens",
    "x-ratelimit-reset",
    "anthropic-ratelimit-requests-reset",
    "anthropic-ratelimit-tokens-reset",
)
REQUEST_ID_HEADERS = ("x-request-id", "request-id", "x-goog-request-id", "apim-request-id")

# HTTP's statuses are below this.
STATUS_END = 600

# Wordings of OpenAI, Azure, Anthropic, Gemini, vLLM (several versions) and llama.cpp.
_CONTEXT = re.compile(
    r"context[ _-]?(length|window|size)|maximum (context|model) length|longer than the maximum model length"
    r"|prompt is too long|input is too long|max_tokens must be at least 1, got -"
    r"|exceeds? the (available|maximum) (context|number of tokens)|input token count .{0,80}exceeds"
    r"|too many (input )?tokens|reduce the length of the (messages|prompt|input)|exceed_context_size",
    re.IGNORECASE,
)
_QUOTA = re.compile(
    r"insufficient_quota|billing_hard_limit|credit balance is too low|exceeded your current quota, please check"
    r"|insufficient (credits|balance)",
    re.IGNORECASE,
)
_OVERLOADED = re.compile(r"overloaded|no capacity|model is currently loading|server is busy|throttl", re.IGNORECASE)
_FILTERED = re.compile(
    r"content_filter|content_policy|content management policy|responsibleai|safety (system|filter)", re.IGNORECASE
)
_MODEL = re.compile(
    r"model_not_found|model[^.]{0,120}(does not exist|not found|is not supported|not available)|no such model"
    r"|unknown model|not_found_error",
    re.IGNORECASE,
)
_PARAMETER = re.compile(
    r"unsupported (value|parameter)|unsupported_(value|parameter)|unrecognized request argument|extra inputs are not"
    r"|does not support (the )?(parameter|temperature|top_p)|unknown (name|parameter|field)",
    re.IGNORECASE,
)
_AUTH = re.compile(
    r"invalid[ _]api[ _]key|incorrect api key|authentication_error|api key not valid|unauthori[sz]ed", re.IGNORECASE
)
_RATE = re.compile(r"rate[ _]?limit|too many requests|resource_exhausted", re.IGNORECASE)
_SERVER = re.compile(r"server_error|internal_error|api_error|internal server error", re.IGNORECASE)

# Such as: maximum context length is 8192 tokens; prompt is too long: 9 > 8; maximum model length of 8192.
_LIMIT = re.compile(r"(?:length is|length of|limit of|context size \(?|> ?)\s*\(?(\d{1,9})", re.IGNORECASE)
_PROMPT = re.compile(
    r"(?:too long: ?|prompt \(length |you requested |resulted in |request \(|input token count \()(\d{1,9})",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ProviderError:
    """What a provider said went wrong: its text as it came, and what could be read from it."""

    text: str
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def provider_failure(error: ProviderError, *, sent: bool = True, **known: Any) -> CallFailed:
    """The CallFailed for a refusal, with the retry advice and the sizes that were given."""
    code = classify(error.status, error.text)
    headers = {name.lower(): value for name, value in error.headers.items()}
    return CallFailed(
        code,
        sent=sent,
        status=error.status,
        retry_after=headers.get("retry-after"),
        retry_headers={name: headers[name] for name in RETRY_HEADERS if name in headers},
        date=headers.get("date"),
        provider_text=error.text,
        request_id=request_id(headers),
        sizes=context_sizes(error.text) if code == "context-too-long" else None,
        **known,
    )


def request_id(headers: Mapping[str, str]) -> str | None:
    """The provider's own id for this request, at most 200 characters."""
    return next((headers[name][:200] for name in REQUEST_ID_HEADERS if headers.get(name)), None)


def context_sizes(text: str) -> dict[str, int]:
    """`limit_tokens` and `prompt_tokens` where the text gives them."""
    sizes = {}
    if found := _LIMIT.search(text):
        sizes["limit_tokens"] = int(found[1])
    if found := _PROMPT.search(text):
        sizes["prompt_tokens"] = int(found[1])
    return sizes


def classify(status: int | None, text: str) -> str:
    """The code for an HTTP status (None: an error inside a stream) and the text that came with it."""
    words, inner = _words(text)
    if status is not None and HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return "redirected"
    if status is None or status < HTTPStatus.BAD_REQUEST:
        return _by_status(inner, words) if inner is not None else _by_words(words, default="server-error")
    return _by_status(status, words)


# Statuses that say all there is to say.
_PLAIN: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "auth-failed",
    HTTPStatus.PAYMENT_REQUIRED: "quota-exhausted",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded",
    529: "overloaded",  # Anthropic's own, in no standard
}
# Statuses with a meaning that words can make more exact.
_TELLING: dict[int, str] = {
    HTTPStatus.FORBIDDEN: "permission-denied",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "context-too-long",
}
_TRANSIENT: frozenset[int] = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY})


def _by_status(status: int, words: str) -> str:
    if status in _PLAIN:
        return _PLAIN[status]
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "quota-exhausted" if _QUOTA.search(words) else "rate-limited"
    if status in _TRANSIENT or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "overloaded" if _OVERLOADED.search(words) else "server-error"
    if status == HTTPStatus.NOT_FOUND:
        return "model-not-found" if "model" in words.lower() or _MODEL.search(words) else "endpoint-not-found"
    return _by_words(words, default=_TELLING.get(status, "invalid-request"))


_WORDINGS = (
    (_CONTEXT, "context-too-long"),
    (_QUOTA, "quota-exhausted"),
    (_FILTERED, "content-filtered"),
    (_PARAMETER, "parameter-refused"),
    (_AUTH, "auth-failed"),
    (_MODEL, "model-not-found"),
    (_OVERLOADED, "overloaded"),
    (_RATE, "rate-limited"),
    (_SERVER, "server-error"),
)


def _by_words(words: str, *, default: str) -> str:
    return next((code for pattern, code in _WORDINGS if pattern.search(words)), default)


def _words(text: str) -> tuple[str, int | None]:
    """The telling parts of an error body, and the status it names itself. Unreadable bodies are taken as they are.

    Only message, code and type are read: other fields may echo the prompt, and a prompt can hold any of the wordings.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text[:4096], None
    error = body[0] if isinstance(body, list) and body else body
    error = error.get("error", error) if isinstance(error, dict) else error
    if isinstance(error, str):
        return error[:4096], None
    if not isinstance(error, dict):
        return text[:4096], None
    told = [str(error[name])[:2048] for name in ("type", "code", "status", "message", "detail") if error.get(name)]
    inner = error.get("code")
    usable = isinstance(inner, int) and HTTPStatus.BAD_REQUEST <= inner < STATUS_END
    return " | ".join(told), inner if usable else None
