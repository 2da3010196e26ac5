"""One request of a call to an endpoint, and the reply that it is paid for with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from soulkit.models.api.wire import WireReply
from soulkit.models.ledger.ledger import LedgerEntry
from soulkit.types import Call, Sampling

Keep = Callable[[LedgerEntry, Mapping[str, Any]], LedgerEntry]
"""Puts a paid reply into the ledger, with what was sent beside the sampling settings."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One request of a call."""

    messages: list[dict[str, str]]
    settings: Mapping[str, Any]
    sent: Mapping[str, Any]
    call: Call
    number: int
    """Of the requests for this call, from 1."""
    keep: Keep
    sampling: Sampling
    """As it was asked for: the reply may be as long where the server has room for it."""


@dataclass(frozen=True, slots=True)
class PaidReply:
    """A reply that can be read, and what it came to."""

    entry: LedgerEntry
    answer: WireReply

    @property
    def tokens(self) -> float | None:
        if self.answer.prompt_tokens is None or self.answer.completion_tokens is None:
            return None
        return float(self.answer.prompt_tokens + self.answer.completion_tokens)
