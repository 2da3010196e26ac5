"""What a run will cost, said before its first paid call, and confirmed.

A call is paid for unless its server is on this machine or its price is 0; an unknown price counts
as one. On a terminal the user is asked; elsewhere `--yes` confirms, or `--max-cost` bounds.
"""

from __future__ import annotations

from collections.abc import Callable

from soulkit.errors import ConfigError
from soulkit.models.api.prices import load_prices
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.settings import RoleSettings
from soulkit.play.plan import Plan
from soulkit.text import dollars

AskUser = Callable[[str], bool]
"""Asks a question at the terminal; returns whether the answer was yes."""


class CostUnconfirmed(ConfigError):
    """A run would cost money, and the cost was not confirmed."""


def prices_of(
    config: RolesConfig, settings: RoleSettings, role: str = ""
) -> tuple[float, float] | None:
    """US dollars per million prompt and reply tokens of a served player, in a role where it may be
    asked by batch; None where unknown."""
    price = settings.player_kind.price(settings, lambda: load_prices(config.prices))
    if price is not None and config.by_batch(role, settings):
        price = price.by_batch
    return None if price is None else (price.prompt, price.reply)


def is_paid(config: RolesConfig, settings: RoleSettings) -> bool:
    """Whether calls of a player cost money, as far as anybody knows."""
    return settings.player_kind.is_paid(settings, lambda: load_prices(config.prices))


def pays(config: RolesConfig) -> bool:
    """Whether anybody is named whose calls cost money."""
    return any(is_paid(config, who) for _, who in config.served())


def cost_words(plan: Plan) -> str:
    """`about $0.4200, at most $3.10`, and of whom no price is known."""
    strangers = sorted({one.name for one in plan.asked if one.paid and one.cost is None})
    if plan.cost is None:
        return f"unknown: no price is known of {', '.join(strangers)}"
    beside = f", without {', '.join(strangers)}: no price is known" if strangers else ""
    return f"about {dollars(plan.cost)}, at most {dollars(plan.cost_limit)}{beside}"


def confirm_cost(
    plan: Plan, config: RolesConfig, say: Callable[[str], None], ask: AskUser | None = None
) -> None:
    """Say what the calls of `plan` will cost; CostUnconfirmed without an agreement.

    `ask` is None where no question can be asked. Nothing is said of a plan that costs nothing.
    """
    if not plan.paid:
        return
    batched = sorted({who.written() for role, who in config.served() if config.by_batch(role, who)})
    through = f" (by batch at a lower price: {', '.join(batched)})" if batched else ""
    say(f"cost of this run: {cost_words(plan)}{through}")
    if config.yes or config.max_cost is not None:
        return
    if ask is not None:
        if ask("Go on?"):
            return
        raise CostUnconfirmed(
            "The cost was not confirmed.",
            "No model was asked, and nothing was written.",
            "Give --yes, bound it with --max-cost, or look closer with soul plan.",
        )
    raise CostUnconfirmed(
        f"This run would cost money ({cost_words(plan)}), and nobody has agreed to it.",
        "It was not started from a terminal, where it would have asked.",
        "Confirm with --yes, or bound the cost with --max-cost DOLLARS. A server of your own has "
        "price_in and price_out 0 in the endpoints file.",
    )
