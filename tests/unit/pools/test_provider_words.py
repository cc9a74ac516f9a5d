"""What a provider says of a call goes on record in the clear, so nothing but an id or a name may pass."""

from __future__ import annotations

import pytest

from worker_pools.adapters import Message, ModelCall
from worker_pools.adapters.exchange import id_said, model_said
from worker_pools.pool import Worker

KEY = "sk-proj-4f9-abcdefghijkl"
PROMPT = "The patient is kanarie77x. Compare gpt-4o with o3; write to jo.smith@example.org."


def a_call(key: str | None = KEY, model: str = "openai/gpt-4o") -> ModelCall:
    fields = {"name": "w", "description": "d", "base_url": "http://127.0.0.1:9", "model": model}
    return ModelCall(Worker.model_validate(fields), [Message("user", PROMPT)], "attempt-1", api_key=key)


@pytest.mark.parametrize("value", ["req_011CSHoEeqs5C35K2UUqR7Fy", "7", "a" * 128, "8d1c8a1e-1/b:c@d+e=.", "o3"])
def test_an_id_is_recorded_as_it_came(value: str) -> None:
    assert id_said(a_call(), value) == value
    assert id_said(a_call(None), value) == value


@pytest.mark.parametrize(
    "value",
    ["gpt-4o", "gpt-4o-2024-08-06", "o3", "claude-sonnet-4-20250514", "org/model:free", "accounts/f/models/llama@1"],
)
def test_the_name_of_a_model_is_recorded_even_if_the_prompt_speaks_of_it(value: str) -> None:
    assert model_said(a_call(), value) == value


HOSTILE = {
    "nothing": None,
    "empty": "",
    "a newline": "req_1\nX-Evil: 1",
    "a newline at the end": "req_1\n",
    "a NUL": "req\x001",
    "a sentence": "the patient",
    "10 KB": "a" * 10_240,
    "one too many": "a" * 129,
    "other letters": "réq_1",
    "other digits": "req_\u0661",
    "markup": "<script>",
    "half a character": "req\ud83d",
    "the key": KEY,
    "the key in something": f"req:{KEY}/1",
    "most of the key": KEY[:-2],
    "a part of the key": "req-abcdefghijkl",
    "a word of the prompt": "kanarie77x",
    "a word of the prompt in something": "req-kanarie77x-1",
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=list(HOSTILE))
def test_what_is_neither_is_not_recorded(value: str | None) -> None:
    assert id_said(a_call(), value) is None
    assert model_said(a_call(), value) is None


def test_an_address_that_the_prompt_holds_is_no_id() -> None:
    assert id_said(a_call(), "jo.smith@example.org") is None


def test_a_name_that_was_asked_for_is_on_record_already() -> None:
    assert model_said(a_call(model="openai/kanarie77x"), "kanarie77x") == "kanarie77x"
