"""What a run may cost: asked before each request, told after each reply.

One Budget serves all endpoints of a run. What a reply will cost is known only when it is there, so
a run may pass the limit by what was in flight at that moment; those replies are paid for, so they
are waited for and kept in the ledger. Replies out of a ledger cost nothing: the same command with
a larger limit goes on where this one stopped.
"""

from __future__ import annotations

import threading

from soulkit.errors import ConfigError, UserError


class BudgetSpent(UserError):
    """The limit is reached: no further request is made."""


class Budget:
    """US dollars that may be spent, and those that were.

    Args:
        max_cost: the limit, above 0.
        spent: what the run cost before: the total of its ledger.

    Raises:
        ConfigError: the limit is not above 0.
    """

    def __init__(self, max_cost: float, spent: float = 0.0) -> None:
        if not max_cost > 0:
            raise ConfigError(
                f"The cost limit of {max_cost} US dollars allows nothing.",
                "Before each request the run compares what it has spent with its limit.",
                "Set --max-cost to an amount above 0, or leave it out.",
            )
        self.max_cost = max_cost
        self._spent, self._reserved, self._reservations = spent, 0.0, 0
        self._lock = threading.Lock()

    @property
    def spent(self) -> float:
        return self._spent

    @property
    def reserved(self) -> float:
        """What is under way in batches may cost so much at most."""
        return self._reserved

    def reserve(self, cost: float, *, sent: bool = False) -> bool:
        """Whether `cost` fits into what is left; it is then kept free until `release`. What was
        `sent` already is counted whether it fits or not."""
        with self._lock:
            fits = sent or self._spent + self._reserved + cost <= self.max_cost
            if fits:
                self._reserved, self._reservations = self._reserved + cost, self._reservations + 1
        return fits

    def release(self, cost: float) -> None:
        """What was reserved is spent (`add` says how much of it) or will not be."""
        with self._lock:
            self._reservations = max(0, self._reservations - 1)
            # Counted, since sums of fractions taken apart again leave something of themselves.
            self._reserved = max(0.0, self._reserved - cost) if self._reservations else 0.0

    @property
    def exhausted(self) -> bool:
        return self._spent >= self.max_cost

    def check(self) -> None:
        """Raise BudgetSpent when nothing is left."""
        if self.exhausted:
            raise BudgetSpent(
                f"The run has spent {self._spent:.4f} US dollars of the {self.max_cost:g} that it "
                "may cost.",
                "No further request is made; replies that were under way are in the ledger.",
                "Run the same command with a larger --max-cost: what is done is not paid for "
                "again.",
            )

    def add(self, cost: float) -> None:
        """A reply cost this much."""
        with self._lock:
            self._spent += cost

    def __repr__(self) -> str:
        return f"Budget(max_cost={self.max_cost}, spent={self._spent:.6f})"
