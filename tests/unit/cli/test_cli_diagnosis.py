"""What people are told about a call names whom that call was to, not whom its step has by now."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from engine.cli.diagnosis import called, failure_words
from engine.store.snapshots import AttemptSnapshot
from worker_pools.pool.file import parse_pool

POOL = """\
name: two
conductor: {base_url: "http://127.0.0.1:1", model: planner}
workers:
  - {name: plain, description: answers, base_url: "http://127.0.0.1:2", model: plain-model}
  - {name: other, description: answers, base_url: "http://127.0.0.1:3", model: other-model}
"""


def attempt(worker: str, model: str, code: str = "model-not-found") -> AttemptSnapshot:
    return AttemptSnapshot(
        id=UUID(int=1),
        number=1,
        state="failed",
        error_code=code,
        worker=worker,
        model=model,
        accepted=False,
        notes=(),
        finish_reason=None,
        provider_status=400,
        started_at=datetime.now(UTC),
        ended_at=None,
        input_tokens=None,
        output_tokens=None,
        cost_usd=None,
        first_token_ms=None,
        duration_ms=None,
        message=None,
    )


def test_a_model_that_is_lacking_is_the_one_that_was_called() -> None:
    pool = parse_pool(POOL, label="two")
    own = attempt("other", "other-model")
    assert "(other-model)" in failure_words(own, called(pool, own))
    # The run was resumed with a pool in which this worker is another model.
    old = attempt("other", "broken")
    assert called(pool, old) is None
    assert failure_words(old, None).startswith("model-not-found (400): the provider lacks this model (broken)")


def test_an_address_is_that_of_the_worker_that_was_called() -> None:
    pool = parse_pool(POOL, label="two")
    own = attempt("other", "other-model", "connection-failed")
    assert "http://127.0.0.1:3" in failure_words(own, called(pool, own))
