"""Making forged marks inert: text of tasks, subtasks and outputs must not pass for our tags or for control tokens.

The rules are in `engine.verifier.inert`, so that whoever verifies a run renders its prompts by the very same ones.
"""

from __future__ import annotations

from engine.verifier.inert import make_inert

__all__ = ["make_inert"]
