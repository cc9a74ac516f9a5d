"""Anchors by a time-stamp service (RFC 3161), against a real one on loopback; none without an address."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine.errors import UnavailableError
from engine.signing import FileAnchor, TimestampAnchor
from engine.store.log import Checkpoint
from engine.verifier import checkpoint as formats
from engine.verifier import note as notes
from tests.support.timestamper import OPENSSL, Timestamper

TENANT = UUID(int=1)
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="there is no openssl here")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Timestamper]:
    folder = tmp_path / "service"
    folder.mkdir()
    with Timestamper(folder) as running:
        yield running


def checkpoint(size: int = 7) -> Checkpoint:
    origin, root = formats.origin_of(str(TENANT)), bytes([size]) * 32
    note = notes.sign(formats.text(origin, size, root), origin, Ed25519PrivateKey.generate())
    return Checkpoint(size, root, note, "00000000", datetime.now(UTC))


async def test_a_stamp_of_the_note_is_kept_beside_it_and_openssl_takes_it(service: Timestamper, tmp_path: Path) -> None:
    anchors = tmp_path / "anchors"
    found = checkpoint()
    for _ in range(2):
        await FileAnchor(anchors).put(TENANT, found)
        await TimestampAnchor(anchors, service.url).put(TENANT, found)
    # Once asked, never again.
    assert len(service.requests) == 1
    note, stamp = (anchors / str(TENANT) / f"{found.size:016d}.{kind}" for kind in ("checkpoint", "tsr"))
    assert note.read_bytes() == found.note
    assert service.verifies(note, stamp)
    assert stamp.stat().st_mode & 0o777 == 0o444
    other = tmp_path / "other"
    other.write_bytes(checkpoint(8).note)
    assert not service.verifies(other, stamp)


async def test_without_an_address_only_the_request_is_written_for_the_way_by_hand(
    service: Timestamper, tmp_path: Path
) -> None:
    anchors = tmp_path / "anchors"
    found = checkpoint()
    await TimestampAnchor(anchors, None).put(TENANT, found)
    (request,) = (anchors / str(TENANT)).iterdir()
    assert request.suffix == ".tsq"
    assert service.requests == []
    answer, note = tmp_path / "answer", tmp_path / "note"
    answer.write_bytes(service.stamp(request.read_bytes()))
    note.write_bytes(found.note)
    assert service.verifies(note, answer)


async def test_an_answer_that_is_not_about_this_checkpoint_is_not_kept(service: Timestamper, tmp_path: Path) -> None:
    anchor = TimestampAnchor(tmp_path / "anchors", service.url)
    await anchor.put(TENANT, checkpoint(8))
    other = service.stamp(service.requests[0])
    for status, answer in ((200, other), (200, b"nonsense"), (200, b""), (200, bytes(300_000)), (500, b"oh")):
        service.status, service.answer = status, answer
        with pytest.raises(UnavailableError) as caught:
            await anchor.put(TENANT, checkpoint(9))
        assert caught.value.code == "anchor-failed"
        assert "\n" not in caught.value.message
    assert not (tmp_path / "anchors" / str(TENANT) / f"{9:016d}.tsr").exists()
    service.status, service.answer = 200, None
    await anchor.put(TENANT, checkpoint(9))
    assert (tmp_path / "anchors" / str(TENANT) / f"{9:016d}.tsr").exists()


async def test_a_service_that_is_not_there_is_an_error_in_words(tmp_path: Path) -> None:
    for url in ("http://127.0.0.1:9/tsa", "http://[::bad/tsa"):
        with pytest.raises(UnavailableError) as caught:
            await TimestampAnchor(tmp_path / "anchors", url).put(TENANT, checkpoint())
        assert caught.value.code == "anchor-failed"


def test_the_library_is_needed_only_where_stamps_are_wanted(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['rfc3161_client'] = None\n"
        "import asyncio, uuid\n"
        "from pathlib import Path\n"
        "from engine.errors import UnavailableError\n"
        "from engine.signing import TimestampAnchor\n"
        "from engine.store.log import Checkpoint\n"
        "found = Checkpoint(1, b'', b'x', '', None)\n"
        "try:\n"
        "    asyncio.run(TimestampAnchor(Path(sys.argv[1]), None).put(uuid.UUID(int=1), found))\n"
        "except UnavailableError as error:\n"
        "    print(error.code, error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("timestamps-missing pip install")
