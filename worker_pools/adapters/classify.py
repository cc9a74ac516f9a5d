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
_LIMITED = ("requests", "tokens", "input-tokens", "output-tokens")
RETRY_HEADERS = (
    "retry-after",
    "retry-after-ms",
    *(f"{family}-{what}" for family in ("x-ratelimit", "ratelimit") for what in ("reset", "remaining")),
    *(f"x-ratelimit-{what}-{limited}" for limited in _LIMITED for what in ("reset", "remaining")),
    *(f"anthropic-ratelimit-{limited}-{what}" for limited in _LIMITED for what in ("reset", "remaining")),
)
# google.rpc.RetryInfo in the body of an error: Gemini's only way of giving such advice.
_RETRY_INFO = re.compile(r'"retryDelay"\s*:\s*"([0-9]{1,9}(?:\.[0-9]{1,9})?s)"')
REQUEST_ID_HEADERS = ("x-request-id", "request-id", "x-goog-request-id", "apim-request-id", "x-amzn-requestid")

# HTTP's statuses are below this.
STATUS_END = 600

# Wordings of OpenAI, Azure, Anthropic, Gemini, vLLM (several versions) and llama.cpp.
_CONTEXT = re.compile(
    r"context[ _-]?(length|window|size|limit)|maximum (context|model|prompt) length"
    r"|longer than the maximum model length|max_model_len"
    r"|(prompt|input) is too (long|large)|max_(completion_|output_)?tokens must be at least 1, got -"
    r"|exceeds? the (available|maximum) (context|number of tokens)|prompt exceeds max"
    r"|input token count .{0,80}(exceeds|only supports)|prompt token count .{0,40}exceeds"
    r"|input tokens? (exceeds?|exceeded)|(exceeds?|exceeded) (the )?model(.s)? token limit"
    r"|tokens exceed the configured limit|total tokens limit|request payload size exceeds|range of input length"
    r"|inputs` (tokens \+|must have less than)|too many (input )?tokens(?!, please wait)"
    r"|reduce the length of the (messages|prompt|input)|exceed_context_size|model_max_prompt_tokens",
    re.IGNORECASE,
)
_ABOVE_THE_RATE = re.compile(r"request too large", re.IGNORECASE)
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
    r"model_not_found|invalid[ _]model|model[^.]{0,120}(does not exist|not found|is not supported|not available)"
    r"|model[^.]{0,120}(decommissioned|has been (retired|deprecated))|model not exist|no such model"
    r"|not a valid model|model identifier is invalid|unknown model|not_found_error",
    re.IGNORECASE,
)
_NO_MODEL_HERE = re.compile(r"model|no endpoints found", re.IGNORECASE)
_PARAMETER = re.compile(
    r"unsupported (value|parameter)|unsupported_(value|parameter)|unrecognized request argument|extra inputs are not"
    r"|does not support (the )?(parameter|temperature|top_p)|unknown (name|parameter|field)"
    r"|cannot both be specified|may only be set to|is deprecated for this model",
    re.IGNORECASE,
)
_AUTH = re.compile(
    r"invalid[ _]api[ _]key|incorrect api key|authentication_error|api key not valid|unauthori[sz]ed", re.IGNORECASE
)
_RATE = re.compile(r"rate[ _]?limit|too many requests|resource_exhausted", re.IGNORECASE)
_SERVER = re.compile(r"server_error|internal_error|api_error|internal server error", re.IGNORECASE)

# Such as: maximum context length is 8192 tokens; prompt is too long: 9 > 8; maximum model length of 8192.
_LIMIT = re.compile(
    r"(?:length is(?: only)?|length of|context length|limit of|limit:?|window of|cannot exceed"
    r"|context size|must be <=|>)"
    r"[ (]{0,3}(\d{1,9})(?! ?[\d>+])",
    re.IGNORECASE,
)
_PROMPT = re.compile(
    r"(?:too long: ?|prompt \((?:total )?length |you requested (?:about )?|resulted in |request \(|tokens \("
    r"|(?:input|prompt) token count:? (?:is |of )?\(?|request has |request contains |you passed |requested:? "
    r"|received )"
    r"(\d{1,9})",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ProviderError:
    """What a provider said went wrong: its text as it came, and what could be read from it."""

    text: str
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def provider_failure(error: ProviderError, *, sent: bool = True, code: str | None = None) -> CallFailed:
    """The CallFailed for a refusal, with the retry advice and the sizes that were given. `code`: if it is known."""
    code = code or classify(error.status, error.text)
    headers = {name.lower(): value for name, value in error.headers.items()}
    advice = {name: headers[name] for name in RETRY_HEADERS if name in headers}
    if found := _RETRY_INFO.search(error.text):
        advice["retry-info"] = found[1]
    return CallFailed(
        code,
        sent=sent,
        status=error.status,
        retry_after=headers.get("retry-after"),
        retry_headers=advice,
        date=headers.get("date"),
        provider_text=error.text,
        provider_request_id=request_id(headers),
        sizes=context_sizes(error.text) if code == "context-too-long" else None,
    )


def request_id(headers: Mapping[str, str]) -> str | None:
    """The provider's own id for this request, as it came."""
    return next((headers[name] for name in REQUEST_ID_HEADERS if headers.get(name)), None)


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
        return _by_status(inner, words) if inner is not None else _first(_WORDINGS, words, default="server-error")
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
        return _first(_OF_429, words, default="rate-limited")
    if status in _TRANSIENT or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return _first(_OF_5XX, words, default="server-error")
    if status == HTTPStatus.NOT_FOUND:
        return "model-not-found" if _NO_MODEL_HERE.search(words) else "endpoint-not-found"
    return _first(_WORDINGS, words, default=_TELLING.get(status, "invalid-request"))


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


# What makes these terminal after all: some servers and proxies refuse a prompt with a 500, and one that is larger than
# the account's limit for a minute is refused with a 429. Neither is more likely to pass the next time.
_OF_429 = ((_ABOVE_THE_RATE, "context-too-long"), (_QUOTA, "quota-exhausted"))
_OF_5XX = ((_CONTEXT, "context-too-long"), (_OVERLOADED, "overloaded"))


def _first(wordings: tuple[tuple[re.Pattern[str], str], ...], words: str, *, default: str) -> str:
    return next((code for pattern, code in wordings if pattern.search(words)), default)


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
    return " | ".join(told), _inner_status(error.get("code"))


def _inner_status(code: Any) -> int | None:
    """The HTTP status that an error names itself, as a number or (some proxies) as text."""
    if isinstance(code, str) and code.isascii() and code.isdigit():
        code = int(code[:4])
    usable = isinstance(code, int) and HTTPStatus.BAD_REQUEST <= code < STATUS_END
    return code if usable else None
