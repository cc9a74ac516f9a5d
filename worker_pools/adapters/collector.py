"""Gathers the pieces of one chat-completions reply, streamed or whole, within a bounded memory.

Speaks the OpenAI chat-completions format and its dialects (vLLM, llama.cpp, Mistral, OpenRouter). No I/O and no clock.
"""

from __future__ import annotations

import json
from typing import Any

from worker_pools.adapters.base import OUTPUT_BYTES_MAX, CallFailed
from worker_pools.adapters.classify import ProviderError, provider_failure

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class Collector:
    """The growing reply. `feed` takes one decoded object of the stream (or the whole body of a plain reply)."""

    def __init__(self) -> None:
        self.model: str | None = None
        self.finish_reason: str | None = None
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.done = False
        self.whole = False
        self.pieces = 0
        self.text_chars = 0
        self.reasoning_chars = 0
        self._bytes = 0
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []

    def feed_json(self, data: str | bytes) -> bool:
        """Takes one event's data. True if it brought text or reasoning. Raises CallFailed."""
        return self.feed(_decoded(data))

    def feed_whole(self, data: bytes) -> bool:
        """Takes the body of a reply that was not streamed. True if it brought text or reasoning. Raises CallFailed."""
        body = _decoded(data)
        arrived = self.feed(body)
        if not isinstance(body.get("choices"), list):
            raise CallFailed("reply-unreadable", sent=True, provider_text=_printable(data))
        # The object is whole, so the answer is, whether or not the server says why it ended.
        self.whole = True
        return arrived

    def feed(self, chunk: dict[str, Any]) -> bool:
        """Takes one decoded object. True if it brought text or reasoning. Raises CallFailed."""
        if chunk.get("error") or chunk.get("object") == "error" or chunk.get("type") == "error":
            raise provider_failure(ProviderError(json.dumps(chunk)[:8192]))
        # Azure's first piece of a stream has an empty one.
        if not self.model and isinstance(chunk.get("model"), str):
            self.model = chunk["model"]
        self._take_usage(chunk.get("usage"))
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or choice.get("index", 0) not in (0, None):
            return False
        if isinstance(choice.get("finish_reason"), str) and choice["finish_reason"]:
            self.finish_reason = choice["finish_reason"]
        delta = choice.get("delta") or choice.get("message")
        return self._take_delta(delta) if isinstance(delta, dict) else False

    def _take_delta(self, delta: dict[str, Any]) -> bool:
        text, thinking = _content(delta.get("content"))
        # Two names for one thing; servers in transition send both with the same value.
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        thinking += reasoning if isinstance(reasoning, str) else ""
        refusal = delta.get("refusal")
        if isinstance(refusal, str) and refusal:
            self._refusal.append(self._counted(refusal))
        if text:
            self._text.append(self._counted(text))
            self.text_chars += len(text)
        if thinking:
            self._reasoning.append(self._counted(thinking))
            self.reasoning_chars += len(thinking)
        arrived = bool(text or thinking or refusal)
        self.pieces += arrived
        return arrived

    def _counted(self, piece: str) -> str:
        self._bytes += len(piece) if piece.isascii() else len(piece.encode("utf-8", "surrogatepass"))
        if self._bytes > OUTPUT_BYTES_MAX:
            raise CallFailed("output-too-large", sent=True)
        return piece

    def _take_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        self.input_tokens = _count(usage.get("prompt_tokens"), self.input_tokens)
        self.output_tokens = _count(usage.get("completion_tokens"), self.output_tokens)

    @property
    def complete(self) -> bool:
        """Whether the provider said that the answer has ended."""
        return self.whole or self.finish_reason is not None

    @property
    def refusal(self) -> str | None:
        """What the model said in declining, where the protocol has a field for it."""
        return join(self._refusal) or None

    def content(self) -> str:
        """The text as received."""
        return join(self._text)

    def answer(self) -> tuple[str, str]:
        """The text without a leading `<think>` block, and all reasoning."""
        text, thought = split_thinking(self.content())
        return text, join(self._reasoning) + thought


def split_thinking(content: str) -> tuple[str, str]:
    """Divides `<think>reasoning</think>answer`. A block that is never closed is all reasoning."""
    if not content.lstrip().startswith(THINK_OPEN):
        return content, ""
    inside = content.lstrip()[len(THINK_OPEN) :]
    reasoning, closed, answer = inside.partition(THINK_CLOSE)
    return (answer.lstrip() if closed else ""), reasoning.strip()


def join(pieces: list[str]) -> str:
    """One string. A surrogate pair that two pieces share becomes the character that it stands for."""
    text = "".join(pieces)
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return text


def _content(content: Any) -> tuple[str, str]:
    """Text and reasoning of a `content` field, which is a string or a list of typed parts."""
    if isinstance(content, str):
        return content, ""
    text = thinking = ""
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, dict):
            continue
        if isinstance(part.get("text"), str):
            text += part["text"]
        inner = part.get("thinking")
        thinking += inner if isinstance(inner, str) else _content(inner)[0]
    return text, thinking


def _count(value: Any, known: int | None) -> int | None:
    usable = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if usable else known


def _decoded(data: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CallFailed("reply-unreadable", sent=True, provider_text=_printable(data))
    return found


def _printable(data: str | bytes) -> str:
    return data[:4096] if isinstance(data, str) else data[:4096].decode("utf-8", "replace")
