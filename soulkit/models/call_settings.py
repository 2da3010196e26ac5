"""What calls to endpoints may cost, in time and money: settings of every command that asks some."""

from __future__ import annotations

from soulkit.config import Settings, section

ASKING = ("plays", "check")
"""Traits of the commands that ask models beside the actor."""

LIMITED = (
    "Of a served model under test; without one, of each served player for which --endpoints says "
    "nothing else."
)
_call = section("Calls", only=ASKING)


class CallSettings(Settings):
    """Time, attempts and money. None of it changes what is answered."""

    concurrency: int = _call(16, gt=0, help="Requests at once.")
    requests_per_minute: float | None = _call(None, gt=0, help=LIMITED)
    tokens_per_minute: float | None = _call(None, gt=0, help=LIMITED)
    prices: str | None = _call(
        None, metavar="FILE", unset="the built-in table",
        help="Prices that go before the built-in table.",
    )  # fmt: skip
    max_cost: float | None = _call(None, gt=0, help="Stop after so many US dollars; resumable.")
    yes: bool = _call(False, flag="--yes", help="Confirm what the run will cost.")
    timeout_s: float = _call(
        120.0, gt=0, flag="--timeout", help="Seconds for one attempt at an endpoint."
    )
    max_attempts: int = _call(6, gt=0, help="Tries of a call before it fails.")
    backoff_s: float = _call(
        1.0, ge=0, flag="--backoff", help="Seconds before the second attempt, doubled after each."
    )
    rate_limit_wait_s: float = _call(
        600.0, ge=0, flag="--rate-limit-wait",
        help="Total seconds one call waits when rate-limited (429) before it fails.",
    )  # fmt: skip
    down_after_s: float = _call(
        120.0, gt=0, flag="--down-after",
        help="Seconds until a silent server counts as down; 30 at most if it never answered.",
    )  # fmt: skip
