"""What calls to endpoints may cost, in time and money: settings of every command that asks some."""

from __future__ import annotations

from soulkit.config import Settings, setting

ASKING = ("plays", "check")
"""Traits of the commands that ask models beside the actor."""

LIMITED = (
    "Of a served model under test; without one, of each served player for which --endpoints says "
    "nothing else."
)


class CallSettings(Settings):
    """Time, attempts and money. None of it changes what is answered."""

    concurrency: int = setting(16, gt=0, section="Calls", only=ASKING, help="Requests at once.")
    requests_per_minute: float | None = setting(
        None, gt=0, section="Calls", only=ASKING, help=LIMITED
    )
    tokens_per_minute: float | None = setting(
        None, gt=0, section="Calls", only=ASKING, help=LIMITED
    )
    prices: str | None = setting(
        None,
        section="Calls",
        only=ASKING,
        metavar="FILE",
        unset="the built-in table",
        help="Prices that go before the built-in table.",
    )
    max_cost: float | None = setting(
        None,
        gt=0,
        section="Calls",
        only=ASKING,
        help="Stop after so many US dollars; resumable.",
    )
    yes: bool = setting(
        False,
        section="Calls",
        only=ASKING,
        flag="--yes",
        help="Confirm what the run will cost.",
    )
    timeout_s: float = setting(
        120.0,
        gt=0,
        section="Calls",
        only=ASKING,
        flag="--timeout",
        help="Seconds for one attempt at an endpoint.",
    )
    max_attempts: int = setting(
        6, gt=0, section="Calls", only=ASKING, help="Tries of a call before it fails."
    )
    backoff_s: float = setting(
        1.0,
        ge=0,
        section="Calls",
        only=ASKING,
        flag="--backoff",
        help="Seconds before the second attempt, doubled after each.",
    )
    rate_limit_wait_s: float = setting(
        600.0,
        ge=0,
        section="Calls",
        only=ASKING,
        flag="--rate-limit-wait",
        help="Total seconds one call waits when rate-limited (429) before it fails.",
    )
    down_after_s: float = setting(
        120.0,
        gt=0,
        section="Calls",
        only=ASKING,
        flag="--down-after",
        help="Seconds until a silent server counts as down; 30 at most if it never answered.",
    )
