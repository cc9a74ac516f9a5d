"""One call under way: what both adapters keep of it, send with it and make of its end. Does no I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from worker_pools.adapters.base import CallFailed, ModelCall, ModelReply, Progress, request_parameters
from worker_pools.adapters.collector import Collector
from worker_pools.adapters.timer import CallTimer


class Exchange:
    """The state of one request, until its reply or its failure."""

    def __init__(self, call: ModelCall, on_progress: Callable[[Progress], None]) -> None:
        self._call = call
        self._on_progress = on_progress
        self._reply = Collector()
        self._timer = CallTimer(call.worker.timeouts)
        self._request_id: str | None = None

    def _check_key(self) -> None:
        """Raises CallFailed for a key that no header can hold; an HTTP library would quote it in its complaint."""
        if not is_header_safe(self._call.api_key):
            raise self._completed(CallFailed("auth-failed", sent=False))

    def _arrived(self) -> None:
        """A piece of the answer or of the reasoning is here."""
        self._timer.arrived()
        reply = self._reply
        self._on_progress(Progress(reply.text_chars, reply.reasoning_chars, reply.pieces, self._timer.elapsed_s()))

    def _finished(self) -> ModelReply:
        text, reasoning = self._reply.answer()
        return ModelReply(
            text=text,
            content=self._reply.content(),
            reasoning=reasoning,
            finish_reason=self._reply.finish_reason,
            refusal=self._reply.refusal,
            input_tokens=self._reply.input_tokens,
            output_tokens=self._reply.output_tokens,
            model=self._reply.model,
            request_id=self._request_id,
            first_token_s=self._timer.first_token_s,
            duration_s=self._timer.elapsed_s(),
        )

    def _completed(self, failure: CallFailed) -> CallFailed:
        """Adds what is known of the call so far, so that the record of a failed attempt is complete."""
        failure.output_chars = self._reply.text_chars + self._reply.reasoning_chars
        failure.input_tokens = self._reply.input_tokens
        failure.output_tokens = self._reply.output_tokens
        failure.duration_s = self._timer.elapsed_s()
        failure.request_id = failure.request_id or self._request_id
        return failure


def request_body(call: ModelCall) -> dict[str, Any]:
    """The parameters, the messages and the schema of a request, as OpenAI's protocol and litellm both take them."""
    messages = [{"role": message.role, "content": message.content} for message in call.messages]
    body = {**request_parameters(call.worker), "messages": messages}
    if call.response_schema is not None:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "plan", "schema": call.response_schema, "strict": True},
        }
    return body


def attempt_headers(attempt_id: str) -> dict[str, str]:
    """The attempt id under every name that a provider or proxy may honour."""
    return {"X-Podium-Attempt": attempt_id, "X-Request-Id": attempt_id, "Idempotency-Key": attempt_id}


def is_header_safe(api_key: str | None) -> bool:
    """Whether a key can stand in a header: printable ASCII without blanks."""
    return api_key is None or (api_key.isascii() and api_key.isprintable() and " " not in api_key)
