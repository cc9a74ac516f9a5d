"""The protocols of the stand-in provider: a behaviour as the events or the body that a real provider would send.

Standard library only, no I/O. Shapes as the providers document them: OpenAI chat completions, Anthropic messages,
Gemini generateContent.
"""

from __future__ import annotations

import json
from typing import Any


def _text(record: dict[str, Any], do: dict[str, Any]) -> str:
    if do["text_bytes"]:
        return "x" * do["text_bytes"]
    if do["text"] is not None:
        return str(do["text"])
    return f"This is answer {record['number']} of {record['model']}."


def _split(text: str, pieces: int) -> list[str]:
    size = max(1, -(-len(text) // max(1, pieces)))
    return [text[at : at + size] for at in range(0, len(text), size)]


def _usage(record: dict[str, Any], do: dict[str, Any], text: str) -> tuple[int, int] | None:
    if do["usage"] is True:
        asked = record["request"].get("messages") or record["request"].get("contents")
        # Whole words: stable, and plausible enough for sums.
        return len(json.dumps(asked).split()), len(text.split()) + len(do["reasoning"].split())
    if isinstance(do["usage"], list):
        return int(do["usage"][0]), int(do["usage"][1])
    return None


def _model(record: dict[str, Any], do: dict[str, Any]) -> str:
    return str(record["model"] if do["answered_model"] is None else do["answered_model"])


def _openai(record: dict[str, Any], do: dict[str, Any]) -> list[bytes]:
    if do["raw_events"] is not None:
        return [_data(raw) for raw in do["raw_events"]]
    text = _text(record, do)
    frame = {"id": f"chatcmpl-{record['number']}", "object": "chat.completion.chunk", "model": _model(record, do)}

    def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return _data(json.dumps(frame | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}))

    events = [event({"role": "assistant", "content": ""})]
    if do["reasoning"]:
        events += [event({do["reasoning_field"]: piece}) for piece in _split(do["reasoning"], do["pieces"])]
    if do["refusal"] is not None:
        events.append(event({"refusal": do["refusal"]}))
    events += [event({"content": piece}) for piece in _split(text, do["pieces"])]
    if do["error_event"] is not None:
        return [*events, _data(json.dumps(do["error_event"]))]
    if do["end"] in {"done", "no-done"} and do["finish_reason"] is not None:
        events.append(event({}, do["finish_reason"]))
        if usage := _usage(record, do, text):
            events.append(_data(json.dumps(frame | {"choices": [], "usage": _openai_usage(usage)})))
    return events


def _openai_usage(usage: tuple[int, int]) -> dict[str, int]:
    return {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}


def plain(record: dict[str, Any], do: dict[str, Any]) -> dict[str, Any]:
    """The body of a reply that is not streamed, OpenAI's format."""
    text = _text(record, do)
    message = {"role": "assistant", "content": text, "refusal": do["refusal"]}
    if do["reasoning"]:
        message[do["reasoning_field"]] = do["reasoning"]
    usage = _usage(record, do, text)
    return {
        "id": f"chatcmpl-{record['number']}",
        "object": "chat.completion",
        "model": _model(record, do),
        "choices": [{"index": 0, "message": message, "finish_reason": do["finish_reason"]}],
    } | ({"usage": _openai_usage(usage)} if usage else {})


def _anthropic(record: dict[str, Any], do: dict[str, Any]) -> list[bytes]:
    if do["raw_events"] is not None:
        return [_data(raw) for raw in do["raw_events"]]
    text = _text(record, do)
    asked, answered = _usage(record, do, text) or (0, 0)
    stop = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}.get(
        do["finish_reason"], do["finish_reason"]
    )
    message = {
        "id": f"msg_{record['number']}", "type": "message", "role": "assistant", "model": _model(record, do),
        "content": [], "stop_reason": None, "stop_sequence": None,
        "usage": {"input_tokens": asked, "output_tokens": 1},
    }  # fmt: skip
    events: list[dict[str, Any]] = [{"type": "message_start", "message": message}]
    blocks = [("thinking", "thinking_delta", do["reasoning"])] if do["reasoning"] else []
    blocks += [("text", "text_delta", text)] if text or not blocks else []
    for index, (kind, delta, content) in enumerate(blocks):
        block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events += [
            {"type": "content_block_delta", "index": index, "delta": {"type": delta, kind: piece}}
            for piece in _split(content, do["pieces"])
        ]
        if index < len(blocks) - 1:
            events.append({"type": "content_block_stop", "index": index})
    if do["error_event"] is not None:
        events.append(do["error_event"])
    elif do["end"] in {"done", "no-done"}:
        events.append({"type": "content_block_stop", "index": len(blocks) - 1})
        delta = {"stop_reason": stop, "stop_sequence": None}
        events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": answered}})
        events.append({"type": "message_stop"})
    return [f"event: {one['type']}\n".encode() + _data(json.dumps(one)) for one in events]


def _gemini(record: dict[str, Any], do: dict[str, Any]) -> list[bytes]:
    if do["raw_events"] is not None:
        return [_data(raw) for raw in do["raw_events"]]
    text = _text(record, do)
    finish = {"stop": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}.get(
        do["finish_reason"], do["finish_reason"]
    )
    pieces = _split(text, do["pieces"]) or [""]
    events = []
    if do["reasoning"]:
        thought = {"content": {"role": "model", "parts": [{"text": do["reasoning"], "thought": True}]}, "index": 0}
        events.append(_data(json.dumps({"candidates": [thought], "modelVersion": _model(record, do)})))
    for number, piece in enumerate(pieces):
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": [{"text": piece}]}, "index": 0}
        event: dict[str, Any] = {"candidates": [candidate], "modelVersion": _model(record, do)}
        if number == len(pieces) - 1 and do["end"] in {"done", "no-done"}:
            candidate["finishReason"] = finish
            if usage := _usage(record, do, text):
                event["usageMetadata"] = {
                    "promptTokenCount": usage[0], "candidatesTokenCount": usage[1], "totalTokenCount": sum(usage),
                }  # fmt: skip
        events.append(_data(json.dumps(event)))
    return events


def _data(text: str) -> bytes:
    return b"data: " + text.encode("utf-8", "surrogatepass") + b"\n\n"


def dialect(path: str) -> Any:
    if path.endswith("/messages") or "/messages?" in path:
        return _anthropic
    return _gemini if "GenerateContent" in path else _openai


def gemini_plain(record: dict[str, Any], do: dict[str, Any]) -> dict[str, Any]:
    *thoughts, last = [
        json.loads(event.removeprefix(b"data: ")) for event in _gemini(record, do | {"pieces": 1, "end": "done"})
    ]
    parts = last["candidates"][0]["content"]["parts"]
    for thought in thoughts:
        parts[:0] = thought["candidates"][0]["content"]["parts"]
    body: dict[str, Any] = last
    return body
