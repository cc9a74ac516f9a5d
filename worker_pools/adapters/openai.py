"""The thin client for OpenAI-compatible chat-completions endpoints: OpenAI, vLLM, llama.cpp and the local model.

One streamed request for one call. All limits are ours (`worker.timeouts`); a call never outlives them. Must never
retry, and must never hand on a reply whose end it has not seen.

Protocol: POST {base_url}/chat/completions with `stream: true`; server-sent events. The answer has ended when a finish
reason was given; `[DONE]` alone says only that the connection has, and proxies write it after a broken answer too.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace

import httpx

from worker_pools.adapters.base import OUTPUT_BYTES_MAX, CallFailed, ModelCall, ModelReply, Progress
from worker_pools.adapters.classify import ProviderError, provider_failure, request_id
from worker_pools.adapters.clients import HttpClients
from worker_pools.adapters.exchange import Exchange, attempt_headers, request_body
from worker_pools.adapters.sse import Event, SseDecoder, is_event_stream

ERROR_BYTES_MAX = 65_536
# Room for escapes: a plain JSON body may spell a byte of text with up to six.
BODY_BYTES_MAX = 2 * OUTPUT_BYTES_MAX + 65_536
# After [DONE] the connection is read to its end so that it can serve again, but not for long.
DRAIN_S = 1.0
# A refusal's status and headers are known before its text, which is worth a short wait only.
ERROR_TEXT_S = 5.0


class OpenAiAdapter:
    """Calls OpenAI-compatible endpoints. Safe for any number of calls at once in one event loop."""

    def __init__(self) -> None:
        self._clients = HttpClients()

    async def call(self, call: ModelCall, on_progress: Callable[[Progress], None]) -> ModelReply:
        """See `ModelAdapter.call`."""
        return await _Call(call, on_progress).run(self._clients)

    async def aclose(self) -> None:
        """Closes every connection."""
        await self._clients.aclose()


class _Call(Exchange):
    """The state of one request."""

    def __init__(self, call: ModelCall, on_progress: Callable[[Progress], None]) -> None:
        super().__init__(call, on_progress)
        self._sent = False
        self._refusal: ProviderError | None = None

    async def run(self, clients: HttpClients) -> ModelReply:
        base_url = self._call.base_url or self._call.worker.base_url or ""
        self._check_key()
        content = json.dumps(request_body(self._call)).encode()
        headers = request_headers(self._call)
        try:
            async with self._timer, clients.lease(base_url) as client:
                request = client.build_request("POST", f"{base_url}/chat/completions", content=content, headers=headers)
                response = await client.send(request, stream=True)
                self._sent = True
                try:
                    await self._read(response)
                finally:
                    # Closing an unfinished response closes its connection, which is what stops a paid call.
                    await response.aclose()
        except TimeoutError:
            if self._reply.complete:
                return self._finished()
            if self._refusal is not None:
                raise self._completed(provider_failure(self._refusal)) from None
            raise self._failed(self._timer.code, sent=True) from None
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.UnsupportedProtocol):
            raise self._failed("connection-failed", sent=False) from None
        except httpx.HTTPError:
            if self._reply.complete:
                # All of the answer was there; only the tail (usage, [DONE]) is lost.
                return self._finished()
            raise self._failed("stream-cut" if self._sent else "connection-lost", sent=True) from None
        except CallFailed as failure:
            raise self._completed(failure) from None
        return self._finished()

    async def _read(self, response: httpx.Response) -> None:
        self._request_id = request_id(response.headers)
        if response.status_code != httpx.codes.OK:
            self._refusal = ProviderError("", response.status_code, dict(response.headers))
            self._timer.within(ERROR_TEXT_S, self._timer.code)
            text = await _read_error(response)
            raise provider_failure(replace(self._refusal, text=text))
        await self._read_reply(response)
        if not self._reply.complete:
            raise CallFailed("stream-cut", sent=True)

    async def _read_reply(self, response: httpx.Response) -> None:
        """A stream of events, or one JSON object from a server that does not stream.

        The bytes decide which, and not the content type: servers and proxies get that wrong.
        """
        decoder, body = SseDecoder(), bytearray()
        streamed: bool | None = None
        async for received in response.aiter_bytes():
            if streamed:
                self._take(decoder.feed(received))
                continue
            body += received
            if streamed is None:
                streamed = is_event_stream(body)
                if streamed:
                    self._take(decoder.feed(bytes(body)))
                    body.clear()
            if len(body) > BODY_BYTES_MAX:
                raise CallFailed("output-too-large", sent=True)
        if streamed:
            self._take(decoder.flush())
        elif self._reply.feed_whole(bytes(body)):
            self._arrived()

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            if self._reply.done:
                continue
            if event.data.strip() == b"[DONE]":
                self._reply.done = True
                self._timer.within(DRAIN_S, "idle-timeout")
            elif self._reply.feed_json(event.data):
                self._arrived()

    def _failed(self, code: str, *, sent: bool) -> CallFailed:
        return self._completed(CallFailed(code, sent=sent))


def request_headers(call: ModelCall) -> dict[str, str]:
    """The request's headers."""
    headers = {
        "Content-Type": "application/json",
        "Accept": "text/event-stream, application/json",
        # A compressed reply could grow a thousandfold in memory before its size is known.
        "Accept-Encoding": "identity",
        "User-Agent": "podium",
        **attempt_headers(call.attempt_id),
    }
    if call.api_key:
        headers["Authorization"] = f"Bearer {call.api_key}"
    return headers


async def _read_error(response: httpx.Response) -> str:
    body = bytearray()
    chunks: AsyncIterator[bytes] = response.aiter_bytes()
    try:
        async for received in chunks:
            body += received
            if len(body) > ERROR_BYTES_MAX:
                break
    except httpx.HTTPError:
        # The status is known and is worth more than the rest of the text.
        pass
    return bytes(body[:ERROR_BYTES_MAX]).decode("utf-8", "replace")
