"""One call under way: what both adapters keep of it, send with it and make of its end. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from worker_pools.adapters.base import CallFailed, ModelCall, ModelReply, Progress, request_parameters
from worker_pools.adapters.collector import Collector
from worker_pools.adapters.timer import CallTimer

# What an id or a name of a provider's looks like, to stand on record in the clear.
_WORD: Final = re.compile(r"[A-Za-z0-9._:/@+=-]{1,128}")
# Long enough that it does not stand in a prompt by chance.
_TELLING_CHARS: Final = 8
_TELLING: Final = re.compile(rf"[A-Za-z0-9]{{{_TELLING_CHARS},}}")


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
            provider_model=model_said(self._call, self._reply.model),
            provider_request_id=id_said(self._call, self._request_id),
            first_token_s=self._timer.first_token_s,
            duration_s=self._timer.elapsed_s(),
        )

    def _completed(self, failure: CallFailed) -> CallFailed:
        """Adds what is known of the call so far, so that the record of a failed attempt is complete."""
        failure.output_chars = self._reply.text_chars + self._reply.reasoning_chars
        failure.input_tokens = self._reply.input_tokens
        failure.output_tokens = self._reply.output_tokens
        failure.duration_s = self._timer.elapsed_s()
        failure.provider_request_id = id_said(self._call, failure.provider_request_id or self._request_id)
        failure.provider_model = model_said(self._call, self._reply.model)
        return failure


def id_said(call: ModelCall, value: str | None) -> str | None:
    """The provider's id for a request as it may stand on record; None if it is no id, or an echo of what was sent."""
    if value is None or _WORD.fullmatch(value) is None:
        return None
    # Servers exist that give back anything in a header.
    parts = [part for part in (value, *_TELLING.findall(value)) if len(part) >= _TELLING_CHARS]
    return None if _has_key(call, value) or _in_prompt(call, parts) else value


def model_said(call: ModelCall, value: str | None) -> str | None:
    """The provider's name of the model, as `id_said`. A prompt may speak of models, so only long parts count there."""
    if value is None or _WORD.fullmatch(value) is None:
        return None
    if value in call.worker.model:
        return value
    return None if _has_key(call, value) or _in_prompt(call, _TELLING.findall(value)) else value


def _has_key(call: ModelCall, value: str) -> bool:
    """Whether the key stands in it, or a long part of it in the key."""
    key = call.api_key or ""
    parts = (value, *_TELLING.findall(value))
    return (len(key) >= _TELLING_CHARS and key in value) or any(
        len(part) >= _TELLING_CHARS and part in key for part in parts
    )


def _in_prompt(call: ModelCall, parts: Sequence[str]) -> bool:
    return any(part in message.content for part in parts for message in call.messages)


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
