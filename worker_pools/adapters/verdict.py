"""Whether a complete reply is an answer.

Pure. A reply that holds no answer is never passed on as one: not the reasoning, not an empty text, not a refusal.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker_pools.adapters.base import ModelReply

# "length" is OpenAI's word, "max_tokens" Anthropic's, "MAX_TOKENS" Gemini's.
_LENGTH = frozenset({"length", "max_tokens", "model_length", "model_context_window_exceeded"})
_FILTER = frozenset(
    {"content_filter", "safety", "recitation", "blocklist", "prohibited_content", "spii", "image_safety", "language"}
)
# The server gave up and still closed the reply in order: OpenRouter and Mistral, vLLM and SGLang, Gemini.
_BROKEN_OFF = frozenset({"error", "abort", "aborted", "cancelled", "other", "malformed_function_call", "network_error"})
# DeepSeek's word for having no capacity left in the middle of an answer.
_NO_CAPACITY = frozenset({"insufficient_system_resource"})
_REFUSAL = frozenset({"refusal", "refused"})


@dataclass(frozen=True)
class Verdict:
    """`failure` is a code of `codes.CALL_CODES`, None for an answer. `truncated` marks an answer cut by its limit."""

    failure: str | None
    truncated: bool


def judge(reply: ModelReply) -> Verdict:
    """What a reply is worth.

    refused: the model or a filter declined, whatever text came with it. stream-cut, overloaded: the server says that it
    broke off, whatever text came before. truncated-thinking: the limit was reached before any text. empty-answer: no
    text but white space. Otherwise an answer, perhaps truncated.
    """
    finish = (reply.finish_reason or "").lower()
    truncated = finish in _LENGTH
    if finish in _REFUSAL or reply.refusal:
        return Verdict("refused", truncated)
    if finish in _FILTER:
        return Verdict("content-filtered", truncated)
    if finish in _BROKEN_OFF:
        return Verdict("stream-cut", truncated)
    if finish in _NO_CAPACITY:
        return Verdict("overloaded", truncated)
    if not reply.text.strip():
        return Verdict("truncated-thinking" if truncated else "empty-answer", truncated)
    return Verdict(None, truncated)
