"""The pool as data: workers, the Conductor that plans for them, and the policy of a run.

Pure: reads no file, no environment and no clock. A pool never holds a secret's value, only where to find it.
Every class refuses unknown keys, because a misspelt limit that is silently ignored costs money.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, JsonValue, field_validator, model_validator

from worker_pools.pool.fields import Count, Flag, Frozen, Seconds, Slug, Tokens, WorkerName
from worker_pools.pool.policy import Policy
from worker_pools.prices import Price
from worker_pools.secrets import SecretRef

LOCAL_BASE_URL = "local"
WORKERS_MAX = 64

# Parameters that Podium sets itself, or that would smuggle in a second policy (retries, keys, more than one answer).
RESERVED_PARAMETERS = frozenset(
    {
        "model",
        "messages",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "api_key",
        "api_base",
        "base_url",
        "authorization",
        "headers",
        "extra_headers",
        "response_format",
        "num_retries",
        "max_retries",
        "timeout",
        "fallbacks",
        "tools",
        "tool_choice",
        "functions",
        "user_api_key",
        "mock_response",
        "callbacks",
        "success_callback",
        "failure_callback",
    }
)
# Reasoning models of OpenAI take only the default sampling; the chat variants of gpt-5 take any.
_FIXED_SAMPLING = re.compile(r"^(gpt-5(?!.*chat)|o[134](-|$))", re.IGNORECASE)
# Since 5.1 they take any while they do not reason.
_REASONING_CAN_BE_OFF = re.compile(r"^gpt-5\.[1-9]", re.IGNORECASE)


def _inline_secret(value: Any) -> Any:
    # The value is most likely a key, so it must not reach the message.
    if isinstance(value, str):
        raise ValueError("a key must never stand in a pool file; write `{env: VARIABLE_NAME}` or `{file: /path}`")  # noqa: TRY004  # pydantic turns only ValueError into a finding
    return value


ApiKey = Annotated[SecretRef, BeforeValidator(_inline_secret)]


class Timeouts(Frozen):
    """Limits of one attempt, in seconds. All of them are enforced by the adapter, on the monotonic clock."""

    call_s: Seconds = Field(default=600.0, description="Longest duration of one attempt.")
    first_token_s: Seconds = Field(default=300.0, description="Longest wait for the first token.")
    idle_s: Seconds = Field(default=120.0, description="Longest pause between two tokens.")


class Worker(Frozen):
    """One named model: where it is, what it may be sent, what it costs."""

    name: WorkerName = Field(description="Unique in the pool, whatever the case; not digits only.")
    description: str = Field(min_length=1, max_length=2000, description="What the Conductor is told about this worker.")
    kind: Literal["model", "conductor"] = Field(
        default="model",
        description="`conductor` is the pool's own Conductor: it plans the step as a run of its own. Such a worker has "
        "only a name, a description, a clearance and fallbacks.",
    )
    adapter: Literal["openai", "litellm"] = Field(
        default="openai", description="`openai` for every OpenAI-compatible endpoint, `litellm` for other providers."
    )
    base_url: str | None = Field(
        default=None,
        max_length=2048,
        description="Address of the endpoint up to and with `/v1`; `local` is the embedded model server.",
    )
    model: str = Field(default="", max_length=256, description="The provider's name for the model.")
    api_key: ApiKey | None = Field(default=None, description="Where the key is found; never the key itself.")
    queue: Slug | Literal[""] = Field(
        default="", description="Task queue (one for each provider or server); empty: the pool's name."
    )
    price: Price | None = Field(default=None, description="Absent: unknown, which is not the same as free.")
    context_tokens: Tokens | None = Field(default=None, description="The model's context window, if known.")
    output_tokens_max: Tokens = Field(default=8192, description="Limit of the answer, reasoning included.")
    parameters: dict[str, JsonValue] = Field(
        default_factory=dict, description="Sent with each request as they stand, for example `temperature`."
    )
    timeouts: Timeouts = Timeouts()
    attempts_max: Annotated[Count, Field(ge=1, le=100)] = Field(
        default=4, description="Attempts of one step before it counts as failed."
    )
    retry_after_max_s: Seconds = Field(
        default=900.0,
        description="Longest wait that a provider may ask for before the next attempt; for more the step fails.",
    )
    max_tokens_parameter: Literal["max_tokens", "max_completion_tokens"] = Field(
        default="max_tokens", description="The request field in which the endpoint expects `output_tokens_max`."
    )
    clearance: str | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="A label of your own; `policy.reviews` can ask for reviews by it.",
    )
    fallbacks: tuple[WorkerName, ...] = Field(
        default=(),
        description="Workers that get a step in turn when this one fails for good; needs `on_failed_step: fallback`.",
    )

    @field_validator("name")
    @classmethod
    def _readable_name(cls, name: str) -> str:
        if name != name.strip() or not name.isprintable():
            raise ValueError("a worker's name has no surrounding white space and no control characters")
        if name.isdigit():
            raise ValueError("a worker's name must not be digits only, because plans also name workers by number")
        return name

    @field_validator("description")
    @classmethod
    def _one_line(cls, description: str) -> str:
        # The Conductor reads one line for each worker; a line break would look like another worker.
        folded = " ".join(description.split())
        if not folded:
            raise ValueError("a description says what the worker is good at")
        return folded

    @field_validator("base_url")
    @classmethod
    def _plain_address(cls, url: str | None) -> str | None:
        if url is None or url == LOCAL_BASE_URL:
            return url
        parts = _split_address(url)
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise ValueError("an address must not hold credentials, a query or a fragment; name the key in `api_key`")
        return url.rstrip("/")

    @field_validator("parameters")
    @classmethod
    def _parameters_are_not_ours(cls, parameters: dict[str, JsonValue]) -> dict[str, JsonValue]:
        reserved = sorted(name for name in parameters if name.lower() in RESERVED_PARAMETERS)
        if reserved:
            raise ValueError(f"set by Podium itself, so not allowed here: {', '.join(reserved)}")
        return parameters

    @model_validator(mode="after")
    def _complete_and_consistent(self) -> Self:
        if self.kind == "conductor":
            return self
        if not self.model:
            raise ValueError("`model` is missing")
        if self.adapter == "openai" and self.base_url is None:
            raise ValueError("the `openai` adapter needs a `base_url`")
        if self.adapter == "litellm" and self.base_url == LOCAL_BASE_URL:
            raise ValueError("`base_url: local` needs the `openai` adapter")
        if self.context_tokens is not None and self.output_tokens_max > self.context_tokens:
            raise ValueError("`output_tokens_max` is larger than `context_tokens`")
        _check_sampling(self.model, self.parameters)
        return self

    @property
    def is_local(self) -> bool:
        """Whether the embedded model server answers for this worker."""
        return self.base_url == LOCAL_BASE_URL


class Conductor(Worker):
    """The planning model. The same fields as a worker, and how it is asked for a plan."""

    name: WorkerName = "conductor"
    description: str = Field(default="plans the run", min_length=1, max_length=2000)
    prompt: str = Field(
        default="", max_length=1024, description="Template: a packaged name or a path beside the pool file."
    )
    repair_prompt: str = Field(
        default="conductor-repair.txt", max_length=1024, description="Template for asking again after an invalid plan."
    )
    revise_prompt: str = Field(
        default="conductor-revise.txt",
        max_length=1024,
        description="Template for showing a finished round; used where `policy.rounds_max` is above 1.",
    )
    structured_output: Literal["json-schema", "none"] = Field(
        default="none", description="Whether the endpoint takes a JSON schema that constrains the answer."
    )
    subtask_chars_max: Annotated[Count, Field(ge=20, le=100_000)] | None = Field(
        default=None, description="Bound of a subtask in the schema; small models ramble."
    )
    last_step_reads: Flag = Field(
        default=False, description="Whether the schema demands a last step that reads an earlier one."
    )

    @model_validator(mode="after")
    def _plans_itself(self) -> Self:
        if self.kind == "conductor":
            raise ValueError("the Conductor itself is always `kind: model`")
        return self

    @property
    def prompt_name(self) -> str:
        """The template in use: the named one, else the packaged one for this kind of output."""
        default = "conductor-schema.txt" if self.structured_output == "json-schema" else "conductor-text.txt"
        return self.prompt or default


class PoolFile(Frozen):
    """A pool file as its author writes it."""

    name: Slug
    conductor: Conductor
    workers: tuple[Worker, ...] = Field(min_length=1, max_length=WORKERS_MAX)
    worker_prompt: str = Field(default="worker.txt", max_length=1024, description="Template for the workers' prompts.")
    policy: Policy = Policy()


class Templates(Frozen):
    """The texts of a pool's prompt templates, as they were when the pool was read."""

    conductor: str
    repair: str
    worker: str
    # Empty where a run has one round only.
    revise: str = ""


class Pool(PoolFile):
    """A pool that is ready for use: queues filled in, templates read. Needs no file any more."""

    templates: Templates

    def worker(self, name: str) -> Worker:
        """The worker of exactly this name; KeyError where there is none."""
        for worker in self.workers:
            if worker.name == name:
                return worker
        raise KeyError(name)

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Names in the file's order; plans number the workers from 0 in it."""
        return tuple(worker.name for worker in self.workers)

    @property
    def models(self) -> tuple[Worker, ...]:
        """The Conductor and all workers."""
        return (self.conductor, *self.workers)

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues of all models, each once, sorted."""
        return tuple(sorted({model.queue for model in self.models}))

    @property
    def needs_local_model(self) -> bool:
        """Whether the embedded model server must run for this pool."""
        return any(model.is_local for model in self.models)


def required_secrets(pool: Pool) -> list[SecretRef]:
    """Every secret that the pool's models name, each once, in the file's order."""
    return list(dict.fromkeys(model.api_key for model in pool.models if model.api_key is not None))


def _split_address(url: str) -> Any:
    # urlsplit quotes the address in its errors, and an address may hold a password.
    try:
        parts = urlsplit(url)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("an address looks like https://host/v1 or http://127.0.0.1:8000/v1")
    return parts


def _check_sampling(model: str, parameters: dict[str, JsonValue]) -> None:
    name = model.rsplit("/", 1)[-1]
    thinking = parameters.get("thinking")
    if "claude" in name.lower() and isinstance(thinking, dict) and thinking.get("type") != "disabled":
        # Anthropic, "Extended thinking": neither temperature nor top_k may be changed, top_p only slightly.
        for parameter in ("temperature", "top_k"):
            if parameter in parameters and (parameter == "top_k" or parameters[parameter] != 1):
                raise ValueError(f"{model} refuses `{parameter}` while it thinks; remove it from `parameters`")
    reasons = not (_REASONING_CAN_BE_OFF.match(name) and parameters.get("reasoning_effort") == "none")
    if not _FIXED_SAMPLING.match(name) or not reasons:
        return
    for parameter in ("temperature", "top_p"):
        if parameter in parameters and parameters[parameter] != 1:
            raise ValueError(f"{model} refuses `{parameter}`; remove it from `parameters`")
