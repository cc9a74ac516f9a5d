"""Fixtures for the tests of pools: a stand-in provider, and adapters that are closed at the end."""

from __future__ import annotations

import pytest

from tests.support.provider import Provider


@pytest.fixture(scope="module")
def running_provider():
    with Provider() as provider:
        yield provider


@pytest.fixture
def provider(running_provider):
    running_provider.reset()
    return running_provider
