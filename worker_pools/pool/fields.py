"""The kinds of value that a pool's fields have, shared by its models.

Numbers and truth values are strict: YAML reads `yes` and pydantic reads `"2"` as numbers, and a limit that was guessed
costs money. Pure.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict


class Frozen(BaseModel):
    """Base of all models of a pool: cannot be changed, refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Slug = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")]
WorkerName = Annotated[str, Field(min_length=1, max_length=64)]
# A duration in seconds; a whole number is one too.
Seconds = Annotated[float, Strict(), Field(gt=0, le=86_400, allow_inf_nan=False)]
Count = Annotated[int, Strict()]
Tokens = Annotated[Count, Field(ge=1, le=100_000_000)]
Flag = Annotated[bool, Strict()]
