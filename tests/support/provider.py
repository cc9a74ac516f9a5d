"""The stand-in provider: a real HTTP server on loopback that speaks model protocols and can be told to misbehave.

It runs as a process of its own, keeps a record of every request, and serves that record over HTTP, so a test can count
calls that other processes made. It is the only stand-in of the test suite. Protocols: OpenAI chat completions
(`/v1/chat/completions`), Anthropic messages (`/v1/messages`) and Gemini (`...:streamGenerateContent`).

What it answers, first match wins:
1. a marker in the prompt, `[[provider: {...behaviour...}]]`;
2. the first scripted rule that fits and is not used up (`Provider.script`);
3. the model's name: `echo` gives the last message back, `sleep-300ms` waits first, others answer in one sentence;
   a request with a JSON schema gets a plan of one step.

Behaviour (all keys optional; see `DEFAULTS` in provider_server.py): status, headers, body, raw_body, text,
answered_model, text_bytes, pieces, reasoning, reasoning_field, finish_reason, refusal, usage, stream, delay_headers_s,
delay_first_s, delay_piece_s, error_event, raw_events, raw_stream, cut_head, strict_messages, end. `end` is done,
no-done, cut, reset, hang, drip or refuse.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

CHECKOUT = Path(__file__).parents[2]


class Provider:
    """Starts the server on a free port; a context manager. All methods are synchronous."""

    def __init__(self, *, bodies: bool = True) -> None:
        command = [sys.executable, "-u", "-m", "tests.support.provider_server"] + ([] if bodies else ["--no-bodies"])
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("http://"):
            self.stop()
            raise RuntimeError("the stand-in provider did not start")
        self.root_url = line.strip()
        self._client = httpx.Client(base_url=self.root_url, trust_env=False, timeout=30)

    @property
    def base_url(self) -> str:
        """The address for OpenAI-compatible clients."""
        return f"{self.root_url}/v1"

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Every request in order of arrival: {number, path, model, attempt_id, headers, body, started_at, ended_at,
        finished, disconnected}; times are seconds since the epoch."""
        found: list[dict[str, Any]] = self._client.get("/_requests").raise_for_status().json()
        return found

    @property
    def count(self) -> int:
        """How many model requests have arrived."""
        return int(self.stats["requests"])

    @property
    def stats(self) -> dict[str, Any]:
        """{requests, in_flight, in_flight_max, connections}."""
        found: dict[str, Any] = self._client.get("/_stats").raise_for_status().json()
        return found

    def script(
        self,
        *behaviours: dict[str, Any],
        model: str | None = None,
        contains: str | None = None,
        times: int | None = 1,
    ) -> None:
        """Adds rules: each behaviour answers `times` requests (None: all) whose model and prompt text fit."""
        rules = [{"behaviour": one, "model": model, "contains": contains, "times": times} for one in behaviours]
        self._client.post("/_script", json=rules).raise_for_status()

    def reset(self) -> None:
        """Forgets rules and records."""
        self._client.post("/_reset").raise_for_status()

    def wait_for(self, count: int, *, timeout_s: float = 10.0) -> None:
        """Returns when `count` requests have arrived; AssertionError after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while self.count < count:
            assert time.monotonic() < end, f"{self.count} of {count} requests after {timeout_s} s"
            time.sleep(0.01)

    def wait_disconnected(self, count: int, *, timeout_s: float = 10.0) -> None:
        """Returns when clients have left `count` requests before their end; AssertionError after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while (left := sum(one["disconnected"] for one in self.requests)) < count:
            assert time.monotonic() < end, f"{left} of {count} requests were left after {timeout_s} s"
            time.sleep(0.02)

    def stop(self) -> None:
        """Stops the server and waits for it."""
        if hasattr(self, "_client"):
            self._client.close()
        self._process.terminate()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
