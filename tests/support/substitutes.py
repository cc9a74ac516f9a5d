"""A pool with substitutes: ``first`` falls back on ``second`` and then on ``third``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.provider import Provider
from tests.support.stored import Record
from tests.support.workflows import pool_of
from worker_pools.pool import Pool

BAD_KEY = {"status": 401, "body": {"error": {"message": "no such key"}}}
ONE = "model_id = [0]\nsubtasks = ['Go.']\naccess_list = [[]]\n"


def pool_with_substitutes(folder: Path, provider: Provider, **worker: Any) -> Pool:
    """``first`` falls back on ``second`` (another queue, longer calls), then on ``third``; ``other`` on nobody."""
    each = {
        "base_url": provider.base_url,
        "queue": "stand-in",
        "price": {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"},
        "timeouts": {"call_s": 20, "first_token_s": 10, "idle_s": 5},
        "attempts_max": 2,
        **worker,
    }
    first = {**each, "name": "first", "description": "1", "model": "one", "fallbacks": ["second", "third"]}
    second = {
        **each,
        "name": "second",
        "description": "2",
        "model": "two",
        "queue": "other",
        "timeouts": {"call_s": 60},
    }
    third = {**each, "name": "third", "description": "3", "model": "three"}
    other = {**each, "name": "other", "description": "4", "model": "plain"}
    return pool_of(folder, provider.base_url, more=[first, other, second, third], policy={"on_failed_step": "fallback"})


def substitutions(kept: Record) -> list[tuple[str, str, int]]:
    return [
        (entry["data"]["old_worker"], entry["data"]["worker"], entry["data"]["attempts_base"])
        for entry in kept.entries("step.substituted")
    ]
