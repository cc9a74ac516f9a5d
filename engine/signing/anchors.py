"""Anchors: places outside of our reach that a checkpoint is handed to, so that not even we can deny it later.

A file anchor is a folder that somebody ships off; a time-stamp anchor asks a service of RFC 3161 to say when a
checkpoint existed. Nothing goes over a network unless an address was set. Files are written whole, and never changed.

    anchors/<tenant>/<size, 16 digits>.checkpoint     the signed note
    anchors/<tenant>/<size, 16 digits>.tsq            a request for a time stamp of that file, for the way by hand
    anchors/<tenant>/<size, 16 digits>.tsr            the service's answer: openssl ts -verify -data FILE -in TSR ...
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any, Final, Protocol
from uuid import UUID

from engine.errors import UnavailableError
from engine.store.log import Checkpoint

ANSWER_WAIT_S: Final = 20.0
ANSWER_BYTES_MAX: Final = 256 * 1024
GRANTED: Final = (0, 1)  # PKIStatus: granted, granted with modifications


class Anchor(Protocol):
    """A place that keeps checkpoints. Putting one there again does nothing."""

    async def put(self, tenant_id: UUID, checkpoint: Checkpoint) -> None:
        """Hands a checkpoint over; raises UnavailableError ``anchor-failed``."""
        ...


class FileAnchor:
    """A folder with one file a checkpoint, readable and never written again; it is made when it is needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def put(self, tenant_id: UUID, checkpoint: Checkpoint) -> None:
        """Writes the note; on disk when this returns."""
        path = anchored_path(self._folder, tenant_id, checkpoint)
        await asyncio.to_thread(write_once, path.with_suffix(".checkpoint"), checkpoint.note)


class TimestampAnchor:
    """RFC 3161 time stamps, kept beside the files of a `FileAnchor`. Needs the extra ``timestamps``.

    Without ``url`` only the request is written, for somebody who sends it by hand; the network is not touched.
    """

    def __init__(self, folder: Path, url: str | None) -> None:
        self._folder = folder
        self._url = url

    async def put(self, tenant_id: UUID, checkpoint: Checkpoint) -> None:
        """Asks for a time stamp of the note, checks that the answer is about it, and keeps the answer."""
        path = anchored_path(self._folder, tenant_id, checkpoint)
        answered = path.with_suffix(".tsr")
        if answered.exists():
            return
        library = _library()
        builder = library.TimestampRequestBuilder().data(checkpoint.note)
        request = builder.hash_algorithm(library.HashAlgorithm.SHA256).nonce(nonce=self._url is not None).build()
        if self._url is None:
            await asyncio.to_thread(write_once, path.with_suffix(".tsq"), request.as_bytes())
            return
        answer = await _ask(self._url, request.as_bytes())
        _check(library, request, answer, checkpoint.note)
        await asyncio.to_thread(write_once, answered, answer)


def anchored_path(folder: Path, tenant_id: UUID, checkpoint: Checkpoint) -> Path:
    """Where the files about a checkpoint are, without their ending; names sort by size."""
    return folder / str(tenant_id) / f"{checkpoint.size:016d}.note"


def write_once(path: Path, content: bytes) -> None:
    """Writes a file that is then only read; one of that name stays. Raises UnavailableError ``anchor-failed``."""
    try:
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as target:
                target.write(content)
                target.flush()
                os.fsync(target.fileno())
            Path(name).chmod(0o444)
            Path(name).rename(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _failed(f"{path.parent} cannot be written: {(error.strerror or 'unknown error').lower()}") from None


async def _ask(url: str, request: bytes) -> bytes:
    import httpx  # noqa: PLC0415  # only where a service was named

    headers = {"Content-Type": "application/timestamp-query", "Accept": "application/timestamp-reply"}
    try:
        async with (
            httpx.AsyncClient(timeout=ANSWER_WAIT_S) as client,
            client.stream("POST", url, content=request, headers=headers) as response,
        ):
            answer = b""
            async for piece in response.aiter_bytes():
                answer += piece
                if len(answer) > ANSWER_BYTES_MAX:
                    raise _failed("the time-stamp service's answer is too long to be one")
            if response.status_code != httpx.codes.OK:
                raise _failed(f"the time-stamp service answered {response.status_code}")
    except (httpx.HTTPError, httpx.InvalidURL):
        raise _failed("the time-stamp service does not answer") from None
    return answer


def _check(library: Any, request: Any, answer: bytes, note: bytes) -> None:
    """That the answer grants a time stamp of this very note. Whose signature it bears is for whoever relies on it."""
    try:
        decoded = library.decode_timestamp_response(answer)
        granted = decoded.status in GRANTED
        fits = granted and (
            decoded.tst_info.message_imprint.message == hashlib.sha256(note).digest()
            and decoded.tst_info.nonce == request.nonce
        )
    except ValueError:
        raise _failed("the time-stamp service's answer cannot be read") from None
    if not fits:
        raise _failed("the time-stamp service did not stamp this checkpoint" if granted else "the service refused")


def _library() -> Any:
    try:
        import rfc3161_client  # noqa: PLC0415  # an extra
    except ImportError:
        raise UnavailableError(
            "timestamps-missing",
            "time stamps need a library that is not installed",
            hint="pip install -c constraints.txt -e '.[timestamps]'",
        ) from None
    return rfc3161_client


def _failed(message: str) -> UnavailableError:
    return UnavailableError("anchor-failed", message, hint="the checkpoint is signed all the same; it is tried again")
