"""Which Temporal servers are too old: what Podium relies on would be left out there without a word."""

from __future__ import annotations

import pytest

from engine.errors import ExitCode, UnavailableError
from engine.settings import TemporalSettings, WorkerBuild
from engine.temporal_client import check_server_version, connect_temporal
from tests.support.old_temporal import OldTemporal


@pytest.mark.parametrize(
    ("version", "plain", "versioned"),
    [
        ("1.0.0", False, False),
        ("1.23.1", False, False),
        ("1.24.1", False, False),
        ("1.24.2", True, False),
        ("1.29.0", True, False),
        ("1.29.1", True, True),
        ("1.32.0", True, True),
        ("v1.32.0", True, True),
        ("2.0.0", True, True),
        ("1.100.0", True, True),
        # Builds between releases, as Temporal Cloud runs them: only the minor version says something.
        ("1.24.0-rc.1", True, False),
        ("1.29.0-147.2", True, True),
        ("1.23.9-147.2", False, False),
        ("", True, True),
        ("development", True, True),
        ("1.24", True, True),
    ],
)
def test_releases_from_the_one_that_has_what_is_relied_on(version: str, plain: bool, versioned: bool):
    for build, fits in ((False, plain), (True, versioned)):
        if fits:
            check_server_version(version, versioned=build)
            continue
        with pytest.raises(UnavailableError) as caught:
            check_server_version(version, versioned=build)
        assert (caught.value.code, caught.value.exit_code) == ("temporal-too-old", ExitCode.UNAVAILABLE)
        assert f"is {version};" in caught.value.message
        assert ("1.29.1" if build else "1.24.2") in caught.value.message
        assert ("PODIUM_BUILD_ID" in caught.value.message) == build
        assert "PODIUM_TEMPORAL_ADDRESS" in str(caught.value.hint)


async def test_a_server_that_is_too_old_is_refused_at_once_and_a_newer_one_is_not():
    with OldTemporal("1.23.1") as server, pytest.raises(UnavailableError) as caught:
        await connect_temporal(TemporalSettings(server.address))
    assert caught.value.code == "temporal-too-old"
    with OldTemporal("1.28.0") as server:
        await connect_temporal(TemporalSettings(server.address))
        versioned = TemporalSettings(server.address, build=WorkerBuild("podium", "b1"))
        with pytest.raises(UnavailableError) as caught:
            await connect_temporal(versioned)
    assert caught.value.code == "temporal-too-old"
