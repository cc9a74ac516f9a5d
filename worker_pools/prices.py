"""What a call costs, in exact decimals.

An unknown price or an unknown usage gives None and never 0: a cost that nobody knows must not look like a free one.
Nothing here looks prices up; they come from the pool file.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

TOKENS_PER_MTOK = Decimal(1_000_000)


# Python's own reader also takes 1_0, 1e3 and the digits of other scripts.
_DECIMAL = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?")


def _exact(value: Any) -> Any:
    # YAML reads 1.25 as a float; its shortest spelling is what the author wrote, so the decimal is taken from that.
    if isinstance(value, bool) or (isinstance(value, str) and not _DECIMAL.fullmatch(value)):
        raise ValueError("must be a decimal number such as 1.25")
    return str(value) if isinstance(value, float) else value


def _plain(value: Decimal) -> str:
    return format(value, "f")


Usd = Annotated[
    Decimal,
    BeforeValidator(_exact),
    PlainSerializer(_plain, return_type=str),
    Field(ge=0, le=Decimal(1_000_000), allow_inf_nan=False, max_digits=18, decimal_places=9),
]


class Price(BaseModel):
    """US dollars for a million tokens, as the provider lists them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_usd_per_mtok: Usd = Field(description="US dollars for a million input tokens.")
    output_usd_per_mtok: Usd = Field(
        description="US dollars for a million output tokens; reasoning tokens count as output."
    )


def cost_usd(price: Price | None, input_tokens: int | None, output_tokens: int | None) -> Decimal | None:
    """The cost of a call in US dollars: tokens x price / 1,000,000, exact.

    None where the price or either count is unknown. Source: the providers' price lists quote a price a million tokens.
    """
    if price is None or input_tokens is None or output_tokens is None:
        return None
    total = price.input_usd_per_mtok * input_tokens + price.output_usd_per_mtok * output_tokens
    return total / TOKENS_PER_MTOK


def worst_case_usd(price: Price | None, prompt_bytes: int, output_tokens_max: int | None) -> Decimal | None:
    """An upper bound for a call's cost before it is made, in US dollars; None where price or output limit is unknown.

    `prompt_bytes` is the UTF-8 length of everything sent. The byte-level tokenizers in use never make more tokens than
    bytes, so a byte is counted as a token; chat templates add some tokens a message, covered by `PROMPT_TOKENS_EXTRA`.
    """
    if output_tokens_max is None:
        return None
    return cost_usd(price, prompt_bytes + PROMPT_TOKENS_EXTRA, output_tokens_max)


def worst_case_tokens(prompt_bytes: int, output_tokens_max: int) -> int:
    """An upper bound for a call's tokens before it is made; a byte counts as a token, see `worst_case_usd`."""
    return prompt_bytes + PROMPT_TOKENS_EXTRA + output_tokens_max


# Role marks and a provider's own preamble: 64 tokens is more than the chat templates of the supported servers add.
PROMPT_TOKENS_EXTRA = 64
