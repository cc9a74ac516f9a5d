"""The page on states is drawn from the table, never written beside it."""

from __future__ import annotations

from pathlib import Path

from engine.store.states import ATTEMPT_STATES, RUN_STATES, STEP_STATES, TRANSITIONS, as_markdown

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_on_states_is_what_the_table_gives() -> None:
    assert (DOCS / "states.md").read_text() == as_markdown()


def test_every_state_can_be_reached_or_is_a_start() -> None:
    for subject, states, start in (
        ("run", RUN_STATES, "created"),
        ("step", STEP_STATES, "pending"),
        ("attempt", ATTEMPT_STATES, "sent"),
    ):
        reached = {new for _, new in TRANSITIONS[subject]} | {start}
        assert reached == set(states)
