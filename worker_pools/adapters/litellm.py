"""Providers that do not speak the OpenAI protocol, through litellm: Anthropic, Gemini, Bedrock and the rest.

The library is imported at the first call only (see litellm_library.py). All its retries, fallbacks, caches and its own
token estimates are off or ignored: one call is one request, and a count that the provider did not give stays unknown.
Three things that it would hide are looked up behind its back: whether the provider ever ended the stream, whether usage
was reported or guessed, and whether the provider named the model or litellm repeats the name that was asked for. For
Gemini the first cannot be found out (litellm 1.110 marks every piece of its streams as the last), so Gemini is called
without streaming here; its OpenAI-compatible endpoint through the thin adapter does stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from worker_pools.adapters.base import END_UNTOLD, CallFailed, ModelCall, ModelReply, Progress, streams
from worker_pools.adapters.classify import request_id
from worker_pools.adapters.exchange import Exchange, attempt_headers, request_body
from worker_pools.adapters.litellm_failure import failure_of
from worker_pools.adapters.litellm_library import import_litellm

# Our own limits end a call; the library's must come later, so that the record names ours.
LIBRARY_TIMEOUT_EXTRA_S = 30.0


class LiteLlmAdapter:
    """Calls models through litellm. Safe for any number of calls at once in one event loop."""

    def __init__(self) -> None:
        self._litellm: Any = None

    async def call(self, call: ModelCall, on_progress: Callable[[Progress], None]) -> ModelReply:
        """See `ModelAdapter.call`."""
        if self._litellm is None:
            # In a thread: the import would stop every other call's heartbeat for seconds.
            self._litellm = await asyncio.to_thread(import_litellm)
        return await _Call(self._litellm, call, on_progress).run()

    async def aclose(self) -> None:
        """Closes litellm's cached connections."""
        if self._litellm is not None:
            await self._litellm.close_litellm_async_clients()


class _Call(Exchange):
    """The state of one request."""

    def __init__(self, litellm: Any, call: ModelCall, on_progress: Callable[[Progress], None]) -> None:
        super().__init__(call, on_progress)
        self._litellm = litellm

    async def run(self) -> ModelReply:
        self._check_key()
        try:
            async with self._timer:
                await self._request()
        except TimeoutError:
            code = self._timer.code if self._timer.expired else "connection-lost"
            raise self._completed(CallFailed(code, sent=True)) from None
        except CallFailed as failure:
            raise self._completed(failure) from None
        except Exception as error:  # noqa: BLE001  # litellm raises whatever its parts raise; each kind is mapped
            raise self._completed(failure_of(error, streaming=self._reply.pieces > 0)) from None
        return self._finished()

    async def _request(self) -> None:
        # Asked of the library, too: it may know a name without a provider before it.
        provider = self._litellm.get_llm_provider(self._call.worker.model)[1]
        if streams(self._call.worker) and provider not in END_UNTOLD:
            await self._stream()
        else:
            await self._whole()
        if self._reply.finish_reason is None:
            raise CallFailed("stream-cut", sent=True)

    async def _whole(self) -> None:
        # There is no first token to wait for, only the whole answer.
        self._timer.within(self._call.worker.timeouts.call_s, "call-timeout")
        arguments = {
            name: value for name, value in self._arguments().items() if name not in {"stream", "stream_options"}
        }
        response = await self._litellm.acompletion(**arguments)
        self._request_id = _request_id(response)
        self._take(_as_openai(response) | {"model": _told_model(response, self._call.worker.model)})
        self._reply.feed({"usage": _told_usage(response)})

    async def _stream(self) -> None:
        stream = await self._litellm.acompletion(**self._arguments())
        try:
            self._request_id = _request_id(stream)
            async for chunk in stream:
                # What litellm itself noted of the piece as it came; its own field repeats what was asked for.
                noted = getattr(chunk, "_hidden_params", None) or {}
                self._take(_as_openai(chunk) | {"model": noted.get("provider_response_model")})
        finally:
            # The call is paid for as long as its connection is open.
            with contextlib.suppress(Exception):
                await stream.aclose()
        self._reply.finish_reason = _told_finish(stream, self._reply.finish_reason)
        for chunk in stream.chunks:
            self._reply.feed({"usage": _told_usage(chunk)})

    def _take(self, chunk: dict[str, Any]) -> None:
        if self._reply.feed(chunk):
            self._arrived()

    def _arguments(self) -> dict[str, Any]:
        worker = self._call.worker
        return {
            **request_body(self._call),
            "api_key": self._call.api_key,
            "api_base": self._call.base_url or worker.base_url,
            "timeout": worker.timeouts.call_s + LIBRARY_TIMEOUT_EXTRA_S,
            "num_retries": 0,
            "max_retries": 0,
            "extra_headers": attempt_headers(self._call.attempt_id),
        }


def _as_openai(chunk: Any) -> dict[str, Any]:
    """The parts of a litellm chunk or response that count, in the shape that the collector reads."""
    found: dict[str, Any] = {}
    if chunk.choices:
        choice = chunk.choices[0]
        piece = getattr(choice, "delta", None) or choice.message
        delta = {name: getattr(piece, name, None) for name in ("content", "reasoning_content", "refusal")}
        found["choices"] = [{"index": 0, "delta": delta, "finish_reason": choice.finish_reason}]
    return found


def _told_finish(stream: Any, shown: str | None) -> str | None:
    """The finish reason if the provider gave one, None where litellm made it up."""
    told = (
        stream.received_finish_reason
        or stream.intermittent_finish_reason
        or getattr(stream, "received_any_finish_reason", None)
    )
    return shown if told else None


def _told_model(response: Any, asked: str) -> str | None:
    """The model that a whole response names; None if it may be litellm's repetition of what was asked for."""
    model = getattr(response, "model", None)
    return model if isinstance(model, str) and model and not asked.endswith(model) else None


def _told_usage(chunk: Any) -> dict[str, Any] | None:
    usage = getattr(chunk, "usage", None)
    if usage is None or not usage.total_tokens:
        # A whole response without usage carries zeros.
        return None
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}


def _request_id(stream: Any) -> str | None:
    headers = getattr(stream, "_response_headers", None) or {}
    return request_id({str(name).lower().removeprefix("llm_provider-"): str(headers[name]) for name in headers})
