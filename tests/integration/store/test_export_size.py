"""What an export costs: memory that does not grow with the texts, and few bytes a step."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pytest

from engine.evidence.page_view import TEXT_CHARS_MAX
from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from tests.support.exports import exported, members
from tests.support.stored import answered, opening, stored_run

STEPS, OUTPUT_CHARS = 5, 8 * 2**20


async def a_run(database: Database, chars: int) -> object:
    run_id = await stored_run(database, [[]] * STEPS)
    rng = random.Random(7)
    for position in range(STEPS):
        opened = opening(run_id, position)
        await open_attempt(database, opened)
        text = "".join(rng.choices("abcdefgh \n", k=chars // 16)) * 16
        await close_step_attempt(database, answered(opened, text, ends_run=True))
    return run_id


@pytest.mark.slow
async def test_large_outputs_are_not_all_in_memory_at_once(database: Database, tmp_path: Path) -> None:
    run_id = await a_run(database, OUTPUT_CHARS)
    tracemalloc.start()
    done = await exported(database, tmp_path / "large.zip", run_id)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert done.artifacts["disclosed"] > 2 * STEPS
    # One output, packed and unpacked, on its way from the database: not all of them.
    assert peak < 5 * OUTPUT_CHARS / 1.2, peak
    page = members(done.path)["index.html"].decode()
    assert page.count("Cut here; all of it is in artifacts/") >= STEPS
    assert len(page) < 3 * STEPS * TEXT_CHARS_MAX


async def test_a_step_with_a_short_answer_takes_a_few_kilobytes(database: Database, tmp_path: Path) -> None:
    run_id = await a_run(database, 256)
    done = await exported(database, tmp_path / "small.zip", run_id)
    assert done.byte_count / STEPS < 6_000, done.byte_count
