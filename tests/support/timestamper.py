"""A time-stamp service (RFC 3161) on loopback: real HTTP in front of `openssl ts`, with a certificate of its own."""

from __future__ import annotations

import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Final, Self

OPENSSL: Final = shutil.which("openssl")
_CONFIGURATION: Final = """
[req]
distinguished_name = dn
x509_extensions = v3
prompt = no
[dn]
CN = Time stamps of a test
[v3]
basicConstraints = CA:false
keyUsage = critical, digitalSignature
extendedKeyUsage = critical, timeStamping
[tsa]
default_tsa = one
[one]
serial = {folder}/serial
crypto_device = builtin
signer_cert = {folder}/cert.pem
signer_key = {folder}/key.pem
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256
ess_cert_id_alg = sha256
"""


class Timestamper:
    """The service; ``url`` is where it listens. ``answer`` replaces what it says, ``status`` its HTTP status."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.requests: list[bytes] = []
        self.answer: bytes | None = None
        self.status = 200
        (folder / "config").write_text(_CONFIGURATION.format(folder=folder))
        (folder / "serial").write_text("01\n")
        self._openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-config", "config"),
            *("-keyout", "key.pem", "-out", "cert.pem"),
        )
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                service.requests.append(body)
                answer = service.answer if service.answer is not None else service.stamp(body)
                self.send_response(service.status)
                self.send_header("Content-Type", "application/timestamp-reply")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/tsa"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def stamp(self, request: bytes) -> bytes:
        """The service's answer to a request."""
        (self._folder / "request").write_bytes(request)
        self._openssl("ts", "-reply", "-config", "config", "-section", "one", "-queryfile", "request", "-out", "answer")
        return (self._folder / "answer").read_bytes()

    def verifies(self, data: Path, answer: Path) -> bool:
        """Whether openssl, which knows nothing of us, takes an answer for a time stamp of a file."""
        done = subprocess.run(
            [
                str(OPENSSL),
                "ts",
                "-verify",
                "-data",
                str(data),
                "-in",
                str(answer),
                "-CAfile",
                "cert.pem",
                "-partial_chain",
            ],
            cwd=self._folder,
            capture_output=True,
            check=False,
        )
        return done.returncode == 0

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run([str(OPENSSL), *arguments], cwd=self._folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
