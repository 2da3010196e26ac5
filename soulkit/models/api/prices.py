"""Prices per token: a built-in table of published prices, and the user's own table.

A price is looked up by model name and host, first in the user's table, then in the built-in one.
The longest matching entry applies:

* `gpt-4o` matches that name and its dated versions (`gpt-4o-2024-08-06`, `gpt-4o-latest`), but not
  `gpt-4o-mini`, which is another model; `llama-*` matches every name with that prefix;
* an entry with a `host` only applies to that host.

A model in neither table has no known price: None, never 0.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field

from soulkit.config import Settings
from soulkit.errors import ConfigError
from soulkit.models.api.protocol import WireReply

BATCH = 0.5
"""Usual batch discount: half the price for prompts and replies."""
BUILT_IN = Path(__file__).with_name("prices.yaml")
_VERSION = re.compile(r"[-@:](?:latest|\d[\d.-]{3,})")
"""Version suffix that may follow a listed name."""


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars per million tokens."""

    prompt: float
    reply: float
    cached: float | None = None
    """Price of prompt tokens that the server had cached; None: the normal price."""
    batch: float = BATCH
    """Factor on the price for the batch API."""

    @property
    def by_batch(self) -> Price:
        """The price through the batch API."""
        cached = None if self.cached is None else self.cached * self.batch
        return Price(self.prompt * self.batch, self.reply * self.batch, cached)

    def cost(self, prompt: int, reply: int, cached: int = 0) -> float:
        """US dollars of one call; `cached` of its `prompt` tokens were cached."""
        cached_tokens = 0 if self.cached is None else min(cached, prompt)
        paid = (
            self.prompt * (prompt - cached_tokens)
            + self.reply * reply
            + (self.cached or 0.0) * cached_tokens
        )
        return paid / 1e6


class PriceEntry(Settings):
    """One line of a price file."""

    model: str = Field(min_length=1)
    host: str | None = None
    prompt: float = Field(alias="in", ge=0)
    reply: float = Field(alias="out", ge=0)
    cached: float | None = Field(default=None, ge=0)
    batch: float = Field(default=BATCH, ge=0, le=1)
    as_of: datetime.date | None = None
    source: str = ""

    def names(self, model: str, host: str) -> bool:
        """Whether the entry applies to this model on this host."""
        if self.host is not None and self.host != host:
            return False
        if self.model.endswith("*"):
            return model.startswith(self.model[:-1])
        if not model.startswith(self.model):
            return False
        version = model[len(self.model) :]
        return not version or _VERSION.fullmatch(version) is not None

    @property
    def price(self) -> Price:
        return Price(self.prompt, self.reply, self.cached, self.batch)


class PriceFile(Settings):
    """Contents of a price file."""

    prices: tuple[PriceEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Price tables in order of precedence."""

    tables: tuple[Sequence[PriceEntry], ...]

    def of(self, model: str, base_url: str) -> Price | None:
        """The price of `model` at `base_url`; None if unknown."""
        host = urlsplit(base_url).hostname or ""
        for table in self.tables:
            matches = [entry for entry in table if entry.names(model, host)]
            if matches:
                return max(matches, key=lambda e: (len(e.model), e.host is not None)).price
        return None


@cache
def _built_in() -> tuple[PriceEntry, ...]:
    return PriceFile.load(BUILT_IN, env={}).prices


def load_prices(file: Path | str | None = None) -> PriceTable:
    """The built-in prices, and those of the user's `file`, which take precedence. ConfigError if
    the file is invalid.

    The file is YAML with a list `prices`. Entries have `{model, in, out}` and optionally `cached`,
    `batch` (the batch API's share of the price), `host`, `as_of` and `source`.
    """
    user_tables = (
        (PriceFile.load(Path(file), env={}, trust=True).prices,) if file is not None else ()
    )
    return PriceTable((*user_tables, _built_in()))


def own_price(price_in: float | None, price_out: float | None) -> Price | None:
    """The price in an endpoint's own settings. ConfigError if one of the two is missing or
    negative."""
    if price_in is None and price_out is None:
        return None
    if price_in is None or price_out is None or price_in < 0 or price_out < 0:
        raise ConfigError(
            f"The prices of an endpoint are incomplete or negative: {price_in} and {price_out}.",
            "The cost of a call depends on the prices of both prompt and reply tokens.",
            "Set both in US dollars per million tokens, or neither.",
        )
    return Price(price_in, price_out)


def unpriced_model(model: str, base_url: str) -> ConfigError:
    """The error for a cost limit if the price of a model is unknown."""
    return ConfigError(
        f"The price of '{model}' at {base_url} is unknown, but the run has a cost limit.",
        "The limit cannot be enforced without the price of every model.",
        "Add the model to a price file (--prices FILE) or to the endpoints file (price_in and "
        "price_out, 0 for your own server), or remove --max-cost.",
    )


def cost_of(price: Price | None, reply: WireReply) -> float | None:
    """US dollars of a reply; None if its price or its tokens are unknown."""
    if price is None or reply.prompt_tokens is None or reply.completion_tokens is None:
        return None
    return price.cost(reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens)
