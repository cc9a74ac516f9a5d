"""What every model adapter takes and gives.

An adapter makes exactly one request for one call: it never retries, never falls back and never repairs an answer. It
gives the reply as it came, or raises CallFailed. Provider text is carried in fields that must go to the artifact store
only; it never stands in an exception's message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from worker_pools.adapters.codes import CALL_CODES, CallCode
from worker_pools.pool import Worker

OUTPUT_BYTES_MAX = 16 * 1024 * 1024
PROVIDER_TEXT_CHARS_MAX = 4096


@dataclass(frozen=True)
class Message:
    """One message of a prompt. There is no assistant role: current models refuse a request that ends in one."""

    role: Literal["system", "user"]
    content: str


@dataclass(frozen=True)
class ModelCall:
    """One request to one model. `base_url` overrides the worker's (the embedded server's address is known late)."""

    worker: Worker
    messages: Sequence[Message]
    attempt_id: str
    response_schema: dict[str, Any] | None = None
    api_key: str | None = field(default=None, repr=False)
    base_url: str | None = None


@dataclass(frozen=True)
class Progress:
    """What has arrived so far: characters of answer and of reasoning, pieces received, seconds since the start."""

    text_chars: int
    reasoning_chars: int
    pieces: int
    elapsed_s: float


@dataclass(frozen=True)
class ModelReply:
    """A complete reply. Whether it is an answer is `verdict.judge`'s question.

    `content` is the text as received; `text` is the same without a leading `<think>` block, which is in `reasoning`.
    Token counts are the provider's, None where it gave none. Times are in seconds on the monotonic clock.
    `provider_request_id` is its own id for the request, `provider_model` the model that it says it answered with: 1 to
    128 characters of `[A-Za-z0-9._:/@+=-]` without the key or the prompt (see `exchange.id_said`), or None.
    """

    text: str
    content: str
    reasoning: str
    finish_reason: str | None
    refusal: str | None
    input_tokens: int | None
    output_tokens: int | None
    provider_model: str | None
    provider_request_id: str | None
    first_token_s: float | None
    duration_s: float


class CallFailed(Exception):  # noqa: N818  # named as a sentence: the call failed; the codes name the errors
    """A call that gave no complete reply.

    `code` is in `codes.CALL_CODES`; `retry_after` holds the advice headers raw (see `retry_headers`); `date` the
    reply's Date header; `provider_text` what the provider said, for the artifact store only. `sent` is False where no
    byte of the request can have reached the provider. Usage is what the provider had reported until then.
    `provider_request_id` and `provider_model` are those of ModelReply once an adapter has raised it, raw before.
    """

    def __init__(
        self,
        code: str,
        *,
        sent: bool,
        status: int | None = None,
        retry_after: str | None = None,
        retry_headers: dict[str, str] | None = None,
        date: str | None = None,
        provider_text: str = "",
        provider_request_id: str | None = None,
        output_chars: int = 0,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        duration_s: float | None = None,
        sizes: dict[str, int] | None = None,
    ) -> None:
        super().__init__(code)
        self.code = code
        self.sent = sent
        self.status = status
        self.retry_after = retry_after
        self.retry_headers = retry_headers or {}
        self.date = date
        self.provider_text = provider_text[:PROVIDER_TEXT_CHARS_MAX]
        self.provider_request_id = provider_request_id
        self.provider_model: str | None = None
        self.output_chars = output_chars
        self.input_tokens = input_tokens
        self.output_tokens = output_tokens
        self.duration_s = duration_s
        self.sizes = sizes or {}

    @property
    def entry(self) -> CallCode:
        """The row of this code in the table."""
        return CALL_CODES[self.code]

    @property
    def billable(self) -> bool:
        """Whether the provider may charge for this call, so that it must be counted."""
        return self.sent and self.entry.billing != "no"


# Providers (as litellm names them before the model's slash) whose streams it ends with `stop` even when they broke off.
END_UNTOLD: Final = frozenset({"gemini", "vertex_ai", "vertex_ai_beta"})


def streams(worker: Worker) -> bool:
    """Whether the answer is asked for piece by piece; not where the end of a stream could not be told."""
    provider, slash, _ = worker.model.partition("/")
    untold = provider in END_UNTOLD if slash else provider.startswith("gemini")
    return worker.adapter != "litellm" or not untold


def request_parameters(worker: Worker) -> dict[str, Any]:
    """Every field of a request but the messages and the schema, as it is sent."""
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if streams(worker) else {}
    return {
        **worker.parameters,
        "model": worker.model,
        worker.max_tokens_parameter: worker.output_tokens_max,
        **streamed,
    }


class ModelAdapter(Protocol):
    """One way to reach models. One object serves many calls at once."""

    async def call(self, call: ModelCall, on_progress: Callable[[Progress], None]) -> ModelReply:
        """Makes one request. Raises CallFailed. When cancelled it closes the connection before it returns."""

    async def aclose(self) -> None:
        """Closes every connection."""
