"""Money is exact and never invented; secrets are found and never shown."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from worker_pools.prices import Price, cost_usd, worst_case_usd
from worker_pools.secrets import SecretRef, SecretStore

PRICE = Price(input_usd_per_mtok=1.25, output_usd_per_mtok="10")


def test_a_cost_is_exact():
    assert cost_usd(PRICE, 3, 1) == Decimal("0.00001375")
    assert cost_usd(Price(input_usd_per_mtok="0.1", output_usd_per_mtok="0.2"), 1, 1) == Decimal("0.0000003")


def test_a_free_model_costs_nothing_and_an_unknown_one_is_unknown():
    assert cost_usd(Price(input_usd_per_mtok=0, output_usd_per_mtok=0), 5, 5) == 0
    assert cost_usd(None, 5, 5) is None
    assert cost_usd(PRICE, None, 5) is None
    assert cost_usd(PRICE, 5, None) is None
    assert worst_case_usd(None, 5, 5) is None
    assert worst_case_usd(PRICE, 5, None) is None


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_the_worst_case_is_never_below_the_cost(prompt_bytes, tokens_below, output_tokens):
    input_tokens = min(prompt_bytes, tokens_below)
    assert worst_case_usd(PRICE, prompt_bytes, output_tokens) >= cost_usd(PRICE, input_tokens, output_tokens)


def test_a_secret_comes_from_what_was_put_in_then_the_environment_then_the_file(tmp_path):
    path = tmp_path / "key"
    path.write_text("  from-file \nsecond line\n")
    store = SecretStore({"KEY": "from-environment", "EMPTY": " "})
    assert store.get(SecretRef(env="KEY")) == "from-environment"
    assert store.get(SecretRef(file=str(path))) == "from-file"
    assert store.get(SecretRef(env="EMPTY")) is None
    assert store.get(SecretRef(file=str(tmp_path / "none"))) is None
    store.put("KEY", "given")
    assert store.get(SecretRef(env="KEY")) == "given"
    assert store.missing([SecretRef(env="A"), SecretRef(env="KEY"), SecretRef(env="A")]) == [SecretRef(env="A")]


def test_no_representation_shows_a_value():
    store = SecretStore({})
    store.put("KEY", "canary")
    assert "canary" not in repr(store) + str(store)


@pytest.mark.parametrize("fields", [{}, {"env": "A", "file": "/x"}, {"env": "has blank"}, {"file": "relative"}])
def test_a_reference_names_exactly_one_place(fields):
    with pytest.raises(ValidationError):
        SecretRef(**fields)
