"""Every way in which a model call can fail to give an answer: the one table of codes.

Codes are stable and safe to store. `kind` says what is sensible by nature: a *retryable* call may succeed when repeated
unchanged, a *terminal* one cannot. What a run does about it is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["retryable", "terminal"]
Billing = Literal["no", "maybe", "yes"]


@dataclass(frozen=True)
class CallCode:
    """One code: what it means, whether repeating can help, whether the provider may charge for the call."""

    code: str
    kind: Kind
    billing: Billing
    meaning: str
    hint: str | None = None


_TABLE = (
    # The provider declined for now.
    CallCode("rate-limited", "retryable", "no", "the provider asks to slow down"),
    CallCode("overloaded", "retryable", "maybe", "the provider has no capacity at the moment"),
    CallCode("server-error", "retryable", "maybe", "the provider failed"),
    # The line.
    CallCode("connection-failed", "retryable", "no", "no connection; the request was never sent"),
    CallCode("connection-lost", "retryable", "maybe", "the connection broke before an answer began"),
    CallCode("stream-cut", "retryable", "maybe", "the answer broke off before its end"),
    CallCode("reply-unreadable", "retryable", "maybe", "the reply does not follow the protocol"),
    # Our own limits.
    CallCode("call-timeout", "retryable", "maybe", "no complete answer within call_s"),
    CallCode("first-token-timeout", "retryable", "maybe", "no token within first_token_s"),
    CallCode("idle-timeout", "retryable", "maybe", "no further token within idle_s"),
    CallCode("output-too-large", "terminal", "yes", "the answer is larger than Podium keeps"),
    # The request or the account is wrong.
    CallCode("secret-missing", "terminal", "no", "the key is not there", "Set the variable that the pool names."),
    CallCode("auth-failed", "terminal", "no", "the provider refuses the key", "Check the key that the pool names."),
    CallCode("permission-denied", "terminal", "no", "the key may not use this model", "Check the account's rights."),
    CallCode("quota-exhausted", "terminal", "no", "the account has no credit left", "Check the account's billing."),
    CallCode("model-not-found", "terminal", "no", "the provider lacks this model", "Check the pool's `model`."),
    CallCode("endpoint-not-found", "terminal", "no", "nothing answers at this address", "Check the pool's `base_url`."),
    CallCode("redirected", "terminal", "no", "the endpoint redirects elsewhere", "Put the last address in `base_url`."),
    CallCode(
        "context-too-long",
        "terminal",
        "no",
        "the prompt does not fit the model's window",
        "Let the step read fewer steps, or use a model with a larger window.",
    ),
    CallCode("parameter-refused", "terminal", "no", "the model refuses a parameter", "Remove it from `parameters`."),
    CallCode("invalid-request", "terminal", "no", "the provider refuses the request"),
    CallCode("adapter-unavailable", "terminal", "no", "the adapter is not installed", "Install the extra `litellm`."),
    # The reply is complete and no answer. Judged from a reply, see verdict.py.
    CallCode("refused", "terminal", "yes", "the model declined"),
    CallCode("content-filtered", "terminal", "maybe", "the provider's filter stopped the answer"),
    CallCode("empty-answer", "terminal", "yes", "the reply holds no text"),
    CallCode(
        "truncated-thinking",
        "terminal",
        "yes",
        "the token limit was reached before the answer began",
        "Raise `output_tokens_max` of this worker.",
    ),
)

CALL_CODES: dict[str, CallCode] = {entry.code: entry for entry in _TABLE}
