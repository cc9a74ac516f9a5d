"""One condition, many wordings: what providers say and the code that it stands for."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_pools.adapters.base import CallFailed, ModelReply
from worker_pools.adapters.classify import ProviderError, classify, context_sizes, provider_failure
from worker_pools.adapters.codes import CALL_CODES
from worker_pools.adapters.sse import SseDecoder
from worker_pools.adapters.verdict import judge


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


# One condition, many wordings (G2-04): who says it, with which status, in which words, and the sizes that it tells.
TOO_LONG = [
    ("openai", 400, ("This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens. "
     "Please reduce the length of the messages."), 8192, 9000),
    ("openai, newer", 400, ("Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in "
     "300000 tokens. Please reduce the length of the messages."), 272000, 300000),
    ("openai, responses", 400, "Your input exceeds the context window of this model.", None, None),
    ("openai, above the rate", 429, ("Request too large for gpt-4 in organization o on tokens per min (TPM): Limit 10000, "
     "Requested 15000."), 10000, 15000),
    ("groq", 413, "Request too large for model `m` on tokens per minute (TPM): Limit 6000, Requested 12000", 6000, 12000),
    ("anthropic", 400, "prompt is too long: 210000 tokens > 200000 maximum", 200000, 210000),
    ("anthropic, with max_tokens", 400, ("input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, "
     "decrease input length or `max_tokens` and try again"), 200000, None),
    ("anthropic, bytes", 413, "Request exceeds the maximum size", None, None),
    ("gemini", 400, "The input token count (90) exceeds the maximum number of tokens allowed (80).", None, 90),
    ("vertex", 400, ("Unable to submit request because the input token count is 1200000 but model only supports up to "
     "1048576. Reduce the input token count and try again."), None, 1200000),
    ("gemini, bytes", 400, "Request payload size exceeds the limit: 20971520 bytes.", 20971520, None),
    ("bedrock", 400, "Input is too long for requested model.", None, None),
    ("bedrock, counted", 400, "Too many input tokens. Max input tokens: 8192, request input token count: 9000", None, 9000),
    ("mistral", 400, ("Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context "
     "length"), None, None),
    ("cohere", 400, ("too many tokens: total number of tokens in the prompt cannot exceed 4081 - received 5000. Try using a "
     "shorter prompt."), 4081, 5000),
    ("text-generation-inference", 422, ("Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8193. Given: "
     "9000 `inputs` tokens and 512 `max_new_tokens`"), 8193, None),
    ("text-generation-inference, inputs", 422, ("Input validation error: `inputs` must have less than 1000 tokens. Given: "
     "1200"), None, None),
    ("xai", 400, "This model's maximum prompt length is 131072 but the request contains 200000 tokens.", 131072, 200000),
    ("openrouter", 400, "This endpoint's maximum context length is 8192 tokens. However, you requested about 9000 tokens",
     8192, 9000),
    ("dashscope", 400, "Range of input length should be [1, 30720]", None, None),
    ("zhipu", 400, "Prompt exceeds max length", None, None),
    ("moonshot", 400, "Invalid request: Your request exceeded model token limit: 8192 (requested: 9000)", 8192, 9000),
    ("watsonx", 400, "the number of input tokens 9000 cannot exceed the total tokens limit 8192 for this model", 8192, None),
    ("copilot", 400, "prompt token count of 90000 exceeds the limit of 64000", 64000, 90000),
    ("vllm", 400, ("The decoder prompt (length 9000) is longer than the maximum model length of 8192. Make sure that "
     "`max_model_len` is no smaller than the number of text tokens."), 8192, 9000),
    ("vllm, before", 400, "The prompt (total length 9000) is too long to fit into the model (context length 8192).",
     8192, 9000),
    ("vllm, counted", 400, ("You passed 9000 input tokens and requested 1 output tokens. However, the model's context length "
     "is only 8192 tokens, resulting in a maximum input length of 8191 tokens."), 8192, 9000),
    ("vllm, max_tokens", 400, ("'max_tokens' or 'max_completion_tokens' is too large: 8192. This model's maximum context "
     "length is 8192 tokens and your request has 30 input tokens (8192 > 8192 - 30)."), 8192, 30),
    ("vllm, nothing left", 400, "max_tokens must be at least 1, got -808", None, None),
    ("vllm, nothing left, newer", 400, "max_completion_tokens must be at least 1, got -808.", None, None),
    ("vllm, engine", 400, "The engine prompt length 8193 exceeds the max_model_len 8192. Please reduce prompt.", None, None),
    ("sglang", 400, "The input (9000 tokens) is longer than the model's context length (8192 tokens).", 8192, None),
    ("llama.cpp", 400, "request (9000 tokens) exceeds the available context size (8192 tokens), try increasing it",
     8192, 9000),
    ("llama.cpp, as its own fault", 500, "input is too large to process. increase the physical batch size", None, None),
    ("llama-cpp-python", 400, "Requested tokens (9000) exceed context window of 8192", 8192, 9000),
    ("lm studio, in a stream", None, ("Trying to keep the first 9000 tokens when context the overflows. However, the model "
     "is loaded with context length of only 2048 tokens"), None, None),
    ("a proxy", 500, "litellm.ContextWindowExceededError: prompt is too long: 9 > 8", 8, 9),
]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "text", "limit", "prompt"), [case[1:] for case in TOO_LONG], ids=[c[0] for c in TOO_LONG]
)
def test_a_prompt_that_does_not_fit_is_known_in_every_wording(status, text, limit, prompt):
    """G2-04."""
    failure = provider_failure(ProviderError(said(text), status))
    assert (failure.code, failure.entry.kind, failure.billable) == ("context-too-long", "terminal", False)
    assert (failure.sizes.get("limit_tokens"), failure.sizes.get("prompt_tokens")) == (limit, prompt)


@pytest.mark.parametrize(
    ("status", "text", "code"),
    [
        (429, said("Too many tokens, please wait before trying again."), "rate-limited"),
        (None, said("Too many tokens, please wait before trying again."), "server-error"),
        (429, said("This request would exceed your organization's rate limit of 30,000 input tokens"), "rate-limited"),
        (
            400,
            said("max_tokens: 64000 > 32000, which is the maximum allowed number of output tokens"),
            "invalid-request",
        ),
        (None, said("x", code="503"), "overloaded"),
        (None, json.dumps({"error": "Overloaded"}), "overloaded"),
        (None, json.dumps({"object": "error", "message": "EngineCore died", "code": 500}), "server-error"),
        (503, said("Loading model", code=503, type="unavailable_error"), "overloaded"),
        (524, "<html>A timeout occurred</html>", "server-error"),
        (403, "<html>Just a moment...</html>", "permission-denied"),
        (404, "<html>404 Not Found nginx</html>", "endpoint-not-found"),
        (404, said("No endpoints found for x/y."), "model-not-found"),
        (404, said("model: claude-x", type="not_found_error"), "model-not-found"),
        (400, said("Invalid model: x", type="invalid_model"), "model-not-found"),
        (400, said("x/y is not a valid model ID"), "model-not-found"),
        (400, said("The model `x` has been decommissioned and is no longer supported."), "model-not-found"),
        (400, said("Model Not Exist"), "model-not-found"),
        (400, said("The provided model identifier is invalid."), "model-not-found"),
        (403, said("Project `p` does not have access to model `m`", code="model_not_found"), "model-not-found"),
        (400, said("`temperature` and `top_p` cannot both be specified for this model."), "parameter-refused"),
        (400, said("`temperature` may only be set to 1 when thinking is enabled."), "parameter-refused"),
        (400, said("This model does not support assistant message prefill."), "invalid-request"),
    ],
)
def test_what_looks_alike_is_told_apart(status, text, code):
    """G2-03, G2-04, G2-10, G2-12."""
    assert classify(status, text) == code


def test_the_advice_in_geminis_body_is_kept():
    """G2-01."""
    body = json.dumps({"error": {"code": 429, "details": [{"@type": "RetryInfo", "retryDelay": "34.07s"}]}})
    assert provider_failure(ProviderError(body, 429)).retry_headers == {"retry-info": "34.07s"}


@pytest.mark.parametrize(
    ("finish", "failure"),
    [
        ("stop", None),
        ("end_turn", None),
        ("tool_calls", None),
        (None, None),
        ("length", None),
        ("model_context_window_exceeded", None),
        ("SAFETY", "content-filtered"),
        ("content_filter", "content-filtered"),
        ("refusal", "refused"),
        ("error", "stream-cut"),
        ("abort", "stream-cut"),
        ("OTHER", "stream-cut"),
        ("insufficient_system_resource", "overloaded"),
    ],
)
def test_a_text_whose_end_the_server_regrets_is_no_answer(finish, failure):
    """G2-03, G2-05: what was written until then is half an answer, though the reply was closed in order."""
    reply = ModelReply("some text", "some text", "", finish, None, 1, 2, "m", None, 0.1, 0.2)
    assert judge(reply).failure == failure


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
    assert (failure.retry_after, failure.provider_request_id) == ("3", "r")
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
