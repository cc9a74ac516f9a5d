"""One condition, many wordings: what providers say and the code that it stands for."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_pools.adapters.base import CallFailed
from worker_pools.adapters.classify import ProviderError, classify, context_sizes, provider_failure
from worker_pools.adapters.codes import CALL_CODES
from worker_pools.adapters.sse import SseDecoder


def said(message: str, **more) -> str:
    return json.dumps({"error": {"message": message, **more}})


@pytest.mark.parametrize(
    ("status", "text", "code"),
    [
        (
            400,
            said("This model's maximum context length is 8192 tokens, however you requested 9000"),
            "context-too-long",
        ),
        (400, said("prompt is too long: 9 > 8"), "context-too-long"),
        (
            400,
            said("The decoder prompt (length 9000) is longer than the maximum model length of 8192"),
            "context-too-long",
        ),
        (400, said("max_tokens must be at least 1, got -808"), "context-too-long"),
        (400, said("x", code="context_length_exceeded"), "context-too-long"),
        (400, said("x", type="exceed_context_size_error"), "context-too-long"),
        (
            400,
            said("The input token count (90) exceeds the maximum number of tokens allowed (80)."),
            "context-too-long",
        ),
        (413, "Payload Too Large", "context-too-long"),
        (429, said("Rate limit reached"), "rate-limited"),
        (429, said("x", code="insufficient_quota"), "quota-exhausted"),
        (400, said("Your credit balance is too low to access the API"), "quota-exhausted"),
        (402, "", "quota-exhausted"),
        (529, "", "overloaded"),
        (503, said("throttled"), "overloaded"),
        (500, said("Overloaded", type="overloaded_error"), "overloaded"),
        (500, "", "server-error"),
        (502, "<html>Bad Gateway</html>", "server-error"),
        (504, "", "server-error"),
        (408, "", "server-error"),
        (401, "", "auth-failed"),
        (400, json.dumps([{"error": {"code": 400, "message": "API key not valid."}}]), "auth-failed"),
        (403, said("no"), "permission-denied"),
        (404, said("The model `x` does not exist or you do not have access to it."), "model-not-found"),
        (404, "Not Found", "endpoint-not-found"),
        (400, said("Unsupported value: 'temperature' does not support 0.2"), "parameter-refused"),
        (400, said("filtered", code="content_filter"), "content-filtered"),
        (400, said("messages: roles must alternate"), "invalid-request"),
        (422, json.dumps({"detail": "bad"}), "invalid-request"),
        (307, "", "redirected"),
        (None, said("Overloaded", type="overloaded_error"), "overloaded"),
        (None, said("x", code=429), "rate-limited"),
        (None, "anything", "server-error"),
    ],
)
def test_each_wording_has_its_code(status, text, code):
    assert classify(status, text) == code


def test_an_echoed_prompt_does_not_decide():
    body = json.dumps({"error": {"message": "bad field", "input": "the prompt is too long: overloaded api_key"}})
    assert classify(400, body) == "invalid-request"


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("maximum context length is 8192 tokens", {"limit_tokens": 8192}),
        ("prompt is too long: 9 > 8", {"limit_tokens": 8, "prompt_tokens": 9}),
        (
            "The decoder prompt (length 9000) is longer than the maximum model length of 8192",
            {"limit_tokens": 8192, "prompt_tokens": 9000},
        ),
        ("max_tokens must be at least 1, got -808", {}),
    ],
)
def test_sizes_are_read_where_they_are_told(text, sizes):
    assert context_sizes(text) == sizes


def test_provider_words_never_stand_in_the_exception():
    failure = provider_failure(ProviderError(said("canary"), 400, {"Retry-After": "3", "X-Request-Id": "r"}))
    assert "canary" not in str(failure) + repr(failure)
    assert (failure.retry_after, failure.request_id) == ("3", "r")
    assert "canary" in failure.provider_text


@given(st.one_of(st.none(), st.integers(300, 999)), st.text(max_size=300))
def test_whatever_is_said_gets_a_known_code(status, text):
    assert classify(status, text) in CALL_CODES
    assert classify(status, json.dumps({"error": text})) in CALL_CODES


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\r\n")), min_size=1), st.data())
def test_events_come_out_the_same_however_the_bytes_are_divided(texts, data):
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    stream = "".join(f": comment{end}data: {text}{end}{end}" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder, found = SseDecoder(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += [event.data.decode() for event in decoder.feed(stream[start:stop])]
    found += [event.data.decode() for event in decoder.flush()]
    assert found == texts


def test_a_line_without_an_end_is_bounded():
    decoder = SseDecoder(event_bytes_max=1000)
    for _ in range(9):
        assert list(decoder.feed(b"data: " + b"x" * 100)) == []
    with pytest.raises(CallFailed, match="output-too-large"):
        list(decoder.feed(b"x" * 100))
