"""Which version a worker says it is: both names or the default one, and never half of them."""

from __future__ import annotations

import pytest

from engine.errors import InputError
from engine.settings import WorkerBuild, load_settings

OWN = {"PODIUM_DATABASE_URL": "postgresql://podium@db/podium", "PODIUM_TEMPORAL_ADDRESS": "temporal:7233"}


@pytest.mark.parametrize(
    ("variables", "build"),
    [
        ({}, None),
        ({"PODIUM_BUILD_ID": "", "PODIUM_DEPLOYMENT": ""}, None),
        ({"PODIUM_BUILD_ID": "0.2.0+4.gabc"}, WorkerBuild("podium", "0.2.0+4.gabc")),
        ({"PODIUM_BUILD_ID": "7", "PODIUM_DEPLOYMENT": "podium-eu"}, WorkerBuild("podium-eu", "7")),
    ],
)
def test_the_build_is_read_from_the_environment(variables: dict[str, str], build: WorkerBuild | None) -> None:
    temporal = load_settings(OWN | variables).temporal
    assert temporal is not None
    assert temporal.build == build


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"PODIUM_DEPLOYMENT": "podium"}, "settings-incomplete"),
        ({"PODIUM_BUILD_ID": "a b"}, "setting-invalid"),
        ({"PODIUM_BUILD_ID": "1", "PODIUM_DEPLOYMENT": "podium.eu"}, "setting-invalid"),
        ({"PODIUM_BUILD_ID": "1" * 129}, "setting-invalid"),
    ],
)
def test_half_of_it_or_a_name_that_temporal_refuses_is_an_error(variables: dict[str, str], code: str) -> None:
    with pytest.raises(InputError) as caught:
        load_settings(OWN | variables)
    assert caught.value.code == code
    assert caught.value.hint


def test_the_embedded_worker_is_not_versioned() -> None:
    assert load_settings({"PODIUM_BUILD_ID": "1"}).temporal is None
