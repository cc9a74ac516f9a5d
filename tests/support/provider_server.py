"""The process of the stand-in provider; see provider.py. Standard library only, one event loop, one task a request.

Ends when its standard input closes, so it never outlives the test process that started it.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import sys
import time
from typing import Any

from tests.support.provider_dialects import dialect, gemini_plain, plain

MARKER = re.compile(r"\[\[provider: (\{.*?\})\]\]", re.DOTALL)
SLEEP = re.compile(r"sleep-(\d+)ms")

DEFAULTS: dict[str, Any] = {
    "status": 200,
    "headers": {},
    "body": None,  # JSON of an error reply
    "raw_body": None,  # any text instead of a JSON body
    "text": None,
    "answered_model": None,  # what it says in place of the model that was asked for
    "text_bytes": None,  # so many bytes of "x" instead of a text
    "pieces": 4,  # events over which the text is spread
    "reasoning": "",
    "reasoning_field": "reasoning_content",
    "finish_reason": "stop",
    "refusal": None,
    "usage": True,  # True: counted in words; an object: as it stands; None: none
    "stream": True,
    "delay_headers_s": 0.0,
    "delay_first_s": 0.0,
    "delay_piece_s": 0.0,
    "error_event": None,  # sent after all pieces, before the end
    "raw_events": None,  # data of events, sent as they stand instead of everything
    "raw_stream": None,  # the same without any framing
    "cut_head": None,  # so many bytes of the reply's head are all that is sent before `end`
    "strict_messages": False,  # 400 for what Claude refuses: a last message by the assistant, blank ends, empty content
    "end": "done",
}


class State:
    def __init__(self, bodies: bool) -> None:
        self.bodies = bodies
        self.rules: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []
        self.in_flight = 0
        self.in_flight_max = 0
        self.connections = 0

    def behaviour(self, model: str, prompt: str, body: dict[str, Any]) -> dict[str, Any]:
        if marker := MARKER.search(prompt):
            return DEFAULTS | json.loads(marker[1])
        for rule in self.rules:
            fits = rule["model"] in (None, model) and (rule["contains"] is None or rule["contains"] in prompt)
            if fits and rule["times"] != 0:
                rule["times"] = None if rule["times"] is None else rule["times"] - 1
                return DEFAULTS | rule["behaviour"]
        return DEFAULTS | _by_name(model, prompt, body)


def _by_name(model: str, prompt: str, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if sleep := SLEEP.search(model):
        found["delay_first_s"] = int(sleep[1]) / 1000
    if "echo" in model:
        found["text"] = prompt
    elif body.get("response_format"):
        plan = {"model_id": [0], "subtasks": ["Answer the task."], "access_list": [[]]}
        found["text"] = json.dumps(plan)
    return found


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection: parses a request, lets a task answer it, then parses the next."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.buffer = bytearray()
        self.task: asyncio.Task[None] | None = None
        self.record: dict[str, Any] | None = None
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.state.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.state.connections -= 1
        self.writable.set()
        if self.record is not None and not self.record["finished"]:
            self.record["disconnected"] = True
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.task is None:
            self.next_request()

    def next_request(self) -> None:
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        lines = self.buffer[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = int(headers.get("content-length", "0"))
        if len(self.buffer) < end + 4 + length:
            return
        body = bytes(self.buffer[end + 4 : end + 4 + length])
        del self.buffer[: end + 4 + length]
        method, target, _ = lines[0].split(" ", 2)
        self.task = asyncio.get_running_loop().create_task(self.answer(method, target, headers, body))
        self.task.add_done_callback(self.answered)

    def answered(self, task: asyncio.Task[None]) -> None:
        self.task = None
        self.record = None
        if not task.cancelled() and task.exception() is not None:
            self.transport.abort()
            raise task.exception() or AssertionError
        if not self.transport.is_closing():
            self.next_request()

    async def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        if target.startswith("/_") or target == "/health":
            self.control(target, body)
            return
        record = self.open_record(target, headers, json.loads(body) if body else {})
        state = self.state
        state.in_flight += 1
        state.in_flight_max = max(state.in_flight_max, state.in_flight)
        try:
            await self.reply(record, state.behaviour(record["model"], record.pop("prompt"), record["request"]))
        finally:
            state.in_flight -= 1
            record["ended_at"] = time.time()
            request = record.pop("request")
            record["body"] = request if state.bodies else None

    def open_record(self, target: str, headers: dict[str, str], request: dict[str, Any]) -> dict[str, Any]:
        record = {
            "number": len(self.state.records),
            "path": target,
            "model": request.get("model") or target.rpartition("/")[2].partition(":")[0],
            "attempt_id": headers.get("x-podium-attempt"),
            "headers": headers,
            "body": request if self.state.bodies else None,
            "request": request,
            "prompt": _prompt(request),
            "started_at": time.time(),
            "ended_at": None,
            "finished": False,
            "disconnected": False,
        }
        self.state.records.append(record)
        self.record = record
        return record

    def control(self, target: str, body: bytes) -> None:
        state = self.state
        answer: Any = {}
        if target == "/_requests":
            hidden = {"request", "prompt"}
            answer = [{name: value for name, value in one.items() if name not in hidden} for one in state.records]
        elif target == "/_stats":
            answer = {
                "requests": len(state.records),
                "in_flight": state.in_flight,
                "in_flight_max": state.in_flight_max,
                "connections": state.connections,
            }
        elif target == "/_script":
            state.rules += json.loads(body)
        elif target == "/_reset":
            state.rules.clear()
            state.records.clear()
            state.in_flight_max = state.in_flight
        content = json.dumps(answer).encode()
        self.transport.write(_head(200, {"Content-Type": "application/json", "Content-Length": len(content)}) + content)

    async def reply(self, record: dict[str, Any], do: dict[str, Any]) -> None:
        if do["delay_headers_s"]:
            await asyncio.sleep(do["delay_headers_s"])
        if do["end"] == "refuse":
            self.transport.abort()
            return
        if do["strict_messages"] and (fault := _message_fault(record["request"])):
            do |= {"status": 400, "body": {"error": {"type": "invalid_request_error", "message": fault}}}
        if do["cut_head"] is not None:
            self.transport.write(_head(200, {"Content-Type": "text/event-stream"})[: do["cut_head"]])
            await self.end(do["end"], record)
            return
        if do["status"] != 200 or do["raw_body"] is not None or not (do["stream"] and _wants_stream(record)):
            await asyncio.sleep(do["delay_first_s"])
            await self.whole(record, do)
            return
        headers = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"} | do["headers"]
        self.transport.write(_head(200, headers))
        if do["delay_first_s"]:
            await asyncio.sleep(do["delay_first_s"])
        if do["raw_stream"] is not None:
            if do["raw_stream"]:
                self.chunk(do["raw_stream"].encode())
            await self.end("no-done" if do["end"] == "done" else do["end"], record)
            return
        for event in dialect(record["path"])(record, do):
            await self.writable.wait()
            self.chunk(event)
            if do["delay_piece_s"]:
                await asyncio.sleep(do["delay_piece_s"])
        await self.end(do["end"], record)

    async def end(self, end: str, record: dict[str, Any]) -> None:
        if end in {"done", "no-done"}:
            if end == "done" and "chat/completions" in record["path"]:
                self.chunk(b"data: [DONE]\n\n")
            self.transport.write(b"0\r\n\r\n")
            record["finished"] = True
        elif end == "cut":
            self.transport.write(b"0\r\n\r\n")
        elif end == "break":
            self.transport.close()
        elif end == "reset":
            await asyncio.sleep(0.05)  # what was written must arrive before the reset overtakes it
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        while end in {"hang", "drip"}:
            await asyncio.sleep(0.05)
            if end == "drip":
                self.chunk(b": still here\n\n")

    def chunk(self, content: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(content), content))

    async def whole(self, record: dict[str, Any], do: dict[str, Any]) -> None:
        if do["raw_body"] is not None:
            content, kind = do["raw_body"].encode("utf-8", "surrogatepass"), "text/plain"
        elif do["status"] != 200:
            body = do["body"] if do["body"] is not None else {"error": {"message": "scripted failure"}}
            content, kind = json.dumps(body).encode(), "application/json"
        else:
            body = gemini_plain if "enerateContent" in record["path"] else plain
            content, kind = json.dumps(body(record, do)).encode(), "application/json"
        headers = {"Content-Type": kind, "Content-Length": len(content)} | do["headers"]
        if do["end"] in {"done", "no-done"}:
            self.transport.write(_head(do["status"], headers) + content)
            record["finished"] = True
            return
        self.transport.write(_head(do["status"], headers) + content[: len(content) // 2])
        await self.end("break" if do["end"] == "cut" else do["end"], record)


def _wants_stream(record: dict[str, Any]) -> bool:
    return bool(record["request"].get("stream")) or "streamGenerateContent" in record["path"]


def _head(status: int, headers: dict[str, Any]) -> bytes:
    lines = [f"HTTP/1.1 {status} Scripted"]
    if not any(name.lower() == "date" for name in headers):
        lines.append(time.strftime("Date: %a, %d %b %Y %H:%M:%S GMT", time.gmtime()))
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _message_fault(request: dict[str, Any]) -> str | None:
    """What Anthropic's API would refuse in the messages, in its words."""
    texts = []
    for message in request["messages"]:
        content = message["content"]
        texts += [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    system = request.get("system") or []
    texts += [system] if isinstance(system, str) else [part.get("text", "") for part in system]
    if request["messages"][-1]["role"] == "assistant":
        return "This model does not support assistant message prefill."
    if not all(text.strip() for text in texts):
        return "messages: text content blocks must be non-empty"
    return "final content cannot end with trailing whitespace" if any(text != text.rstrip() for text in texts) else None


def _prompt(request: dict[str, Any]) -> str:
    """The text of the last message, whatever the protocol."""
    messages = request.get("messages") or request.get("contents") or []
    content = (messages[-1].get("content") or messages[-1].get("parts") or "") if messages else ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))


async def main() -> None:
    loop = asyncio.get_running_loop()
    state = State(bodies="--no-bodies" not in sys.argv)
    server = await loop.create_server(lambda: Connection(state), "127.0.0.1", 0, backlog=2048)
    port = server.sockets[0].getsockname()[1]
    sys.stdout.write(f"http://127.0.0.1:{port}\n")
    sys.stdout.flush()
    # Reading to the end of standard input returns when the test process is gone, however it ended.
    parent_gone = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), lambda: None if sys.stdin.buffer.raw.read(1) else parent_gone.set())
    await parent_gone.wait()


if __name__ == "__main__":
    asyncio.run(main())
