"""Settings of all players except the actor: which model fills which role, and limits on API calls.

A player set for one task takes precedence over one set for all tasks. Judges also audit if no
auditor is set. For roles without a player, a task's declaration may offer one
(play/default_players.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import PrivateAttr, model_validator

from soulkit.config import ASKING, Settings, section, setting
from soulkit.models.api.addresses import account_headers, checked_url, is_loopback
from soulkit.models.api.limits import Budget
from soulkit.models.base import Panel
from soulkit.models.players.settings import REPLY, RoleSettings, TaskPlayers, players_by_name
from soulkit.models.vllm.settings import VllmSettings
from soulkit.option_texts import BY_TASK
from soulkit.runs.folder import plain_config, refuse_secrets

if TYPE_CHECKING:
    from soulkit.models.ledger.ledger import Ledger

LIMITS = ("requests_per_minute", "tokens_per_minute")
_PRICING = frozenset((*LIMITS, "price_in", "price_out", "by_batch"))
LIMITED = "to the model under test or, if it is local, to each API model without its own limit."
_player = section("Players", only=("plays",))
_call = section("Calls", only=ASKING)


class CallSettings(Settings):
    """Time, retries and cost of API calls. They do not affect the replies."""

    concurrency: int = _call(16, gt=0, help="Maximum number of requests at once.")
    requests_per_minute: float | None = _call(
        None, gt=0, help=f"Maximum requests per minute {LIMITED}"
    )
    tokens_per_minute: float | None = _call(None, gt=0, help=f"Maximum tokens per minute {LIMITED}")
    prices: str | None = _call(
        None, metavar="FILE", unset="none",
        help="Price file; overrides the built-in price table.",
    )  # fmt: skip
    max_cost: float | None = _call(
        None, gt=0, help="Stop after spending X US dollars. The run can be resumed."
    )
    yes: bool = _call(False, flag="--yes", help="Skip the cost confirmation.")
    timeout_s: float = _call(120.0, gt=0, flag="--timeout", help="Maximum seconds per request.")
    max_attempts: int = _call(6, gt=0, help="Maximum number of attempts per call.")
    backoff_s: float = _call(
        1.0,
        ge=0,
        flag="--backoff",
        help="Seconds before the first retry; doubled after each retry.",
    )
    rate_limit_wait_s: float = _call(
        600.0, ge=0, flag="--rate-limit-wait",
        help="Maximum seconds that a call waits for rate limits (429).",
    )  # fmt: skip
    down_after_s: float = _call(
        120.0, gt=0, flag="--down-after",
        help="Give up on an unresponsive server after X seconds (30 if it has never replied).",
    )  # fmt: skip


class RolesConfig(CallSettings, VllmSettings):
    """Settings of all players except the actor; base of every command that plays episodes."""

    OUTSIDE_IDENTITY: ClassVar[frozenset[str]] = frozenset(
        (
            "endpoints", "requests_per_minute", "tokens_per_minute", "prices", "max_cost", "yes",
            "timeout_s", "max_attempts", "backoff_s", "rate_limit_wait_s", "down_after_s",
            "vllm_python", "vllm_start_s", "max_context", "verify_weights", "allow_private",
        )
    )  # fmt: skip
    """Settings that only affect speed, retries and prices. A resumed run may change them."""

    _budget: Budget | None = PrivateAttr(default=None)
    """The budget that several runs share."""
    allow_private: bool = setting(
        False, section="Calls",
        help="Allow private data (e-mails, phone numbers) of people in your own chats: learn it "
             "without a warning, and send it to models that are not on this machine.",
    )  # fmt: skip
    endpoints: str | None = _player(
        None, only=ASKING, metavar="FILE",
        help="YAML file with named models (URL, limits, prices) and their roles.",
    )  # fmt: skip
    partner: RoleSettings | None = _player(
        None, metavar=BY_TASK, unset="set by the task",
        help="Model for the other side of a dialogue. Repeatable for single tasks.",
    )  # fmt: skip
    environment: RoleSettings | None = _player(
        None, metavar=BY_TASK, unset="set by the task",
        help="Model that plays the environment. Repeatable for single tasks.",
    )  # fmt: skip
    judge: tuple[RoleSettings, ...] = _player(
        (),
        only=ASKING,
        metavar=BY_TASK,
        unset="set by the task",
        help="Model that scores episodes. Repeatable.",
    )
    auditor: tuple[RoleSettings, ...] = _player(
        (), metavar=BY_TASK, unset="the judge if --judge is given, else set by the task",
        help="Model that flags replies written to please the judge. Repeatable.",
    )  # fmt: skip
    task_players: dict[str, TaskPlayers] = _player(
        factory=dict, flag=None, help="Models of single tasks: task → role → model."
    )
    judge_samples: int | None = _player(
        None, gt=0, unset="set by the question", help="Number of replies per judge and question."
    )
    judge_combine: Literal["mean", "vote"] = _player(
        "mean", help="Combine several judge replies by mean or by majority vote."
    )
    judge_order: Literal["both", "seeded"] = _player(
        "both", help="Pairwise judging: ask in both orders, or in one random order."
    )

    @model_validator(mode="before")
    @classmethod
    def _look_up(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        return players_by_name(raw, cls.roles())

    @model_validator(mode="after")
    def _different_judges(self) -> Self:
        """Identical judges would share one ledger entry and always agree."""
        panels = [(one.judge, one.auditor) for one in self.task_players.values()]
        for pair in ((self.judge, self.auditor), *panels):
            for several in pair:
                players = [one.model_dump_json() for one in several]
                if len(set(players)) < len(players):
                    raise ValueError(
                        "the same judge is listed twice; for several samples of one judge use "
                        "--judge-samples 2"
                    )
        return self

    @model_validator(mode="after")
    def _without_secrets(self) -> Self:
        """Refuse secrets: settings are printed and stored."""
        refuse_secrets(plain_config(self.resolved()))
        return self

    @classmethod
    def roles(cls) -> list[str]:
        """The roles that these settings may fill, except the actor."""
        return [name for name in REPLY if name in cls.model_fields]

    def within(self, budget: Budget | None) -> Self:
        """These settings for one of several runs with a common budget and a confirmed cost."""
        copy = self.model_copy(update={"yes": True})
        copy._budget = budget
        return copy

    @property
    def panel(self) -> Panel:
        return Panel(
            samples=self.judge_samples, combine=self.judge_combine, orders=self.judge_order
        )

    # -- players -----------------------------------------------------------------------------------

    def named(self, role: str, task: str = "") -> Any:
        """The value set for `role` in `task`, or else for all tasks; None if not set."""
        alone = self.task_players.get(task)
        return (alone.named(role) if alone else None) or getattr(self, role, None) or None

    def cast_as(self, role: str, task: str) -> tuple[RoleSettings, ...]:
        """The players of `role` in `task`; empty for a coach that uses rules."""
        players = _several(self.named(role, task))
        return self.cast_as("judge", task) if role == "auditor" and not players else players

    def players_in(self, task: str) -> list[tuple[str, RoleSettings]]:
        """(role, player) pairs of one task, except the actor. A judge that audits appears twice."""
        return [(role, one) for role in self.roles() for one in self.cast_as(role, task)]

    def players(self) -> list[tuple[str, RoleSettings]]:
        """(role, player) pairs of all tasks, except the actor."""
        everywhere = [self, *self.task_players.values()]
        return [
            (role, one)
            for role in self.roles()
            for one in _distinct(who for p in everywhere for who in _several(getattr(p, role, ())))
        ]

    def filled(self, task: str = "") -> set[str]:
        """The roles that have a player in `task`, including the actor."""
        return {"actor", *(role for role, _ in self.players_in(task))}

    def settings_of_players(self) -> list[RoleSettings]:
        """Settings of all players, with this command's limits if they set none."""
        limits = {name: getattr(self, name) for name in LIMITS} if self.limits_players else {}
        return [
            one.model_copy(update={k: v for k, v in limits.items() if getattr(one, k) is None})
            for _, one in self.players()
        ]

    @property
    def limits_players(self) -> bool:
        """Whether the requests and tokens per minute apply to the players, not to the actor."""
        return True

    def checkpoints(self, *kinds: str) -> list[str]:
        """Folders and Hub ids of the players loaded on this machine, without repeats; only of
        these `kinds` if any are given."""
        loaded = (who for _, who in self.players() if who.player_kind.takes_memory)
        return list(dict.fromkeys(w.model for w in loaded if not kinds or w.kind in kinds))

    def served(self) -> list[tuple[str, RoleSettings]]:
        """(role, player) pairs of all players called over HTTP."""
        return [(role, who) for role, who in self.players() if who.player_kind.over_http]

    def elsewhere(self) -> list[str]:
        """The players that run on other machines, for messages: `the judge gpt-5`."""
        return [f"the {role} {who.model}" for role, who in self.served()
                if not is_loopback(checked_url(who.base_url))]  # fmt: skip

    def servers(self) -> list[str]:
        """One line per server: its address, and the models called there."""
        players_by_url: dict[str, dict[str, None]] = {}
        for role, who in self.served():
            url = checked_url(who.base_url)
            version = f" (api-version {who.api_version})" if who.api_version else ""
            names = {**account_headers(url), **who.headers}
            headers = f" (headers {', '.join(names)})" if names else ""
            players = players_by_url.setdefault(f"{url}{version}{headers}", {})
            players[f"{role} {who.model}"] = None
        return [f"server {url}: {', '.join(names)}" for url, names in players_by_url.items()]

    def by_batch(self, role: str, settings: RoleSettings) -> bool:
        """Whether a player is called through its server's batch API."""
        return False

    # -- stored with a run -------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """The settings that a run folder stores and compares on resume."""
        return {
            name: _without_pricing(value)
            for name, value in self.resolved().items()
            if name not in self.OUTSIDE_IDENTITY and (value or name != "vllm_arg")
        }

    def call_arguments(self, ledger: Ledger | None) -> dict[str, Any]:
        """Arguments shared by every Endpoint of the run: time limits, prices and budget."""
        from soulkit.models.api.prices import load_prices

        money: dict[str, Any] = {"prices": load_prices(self.prices)}
        if self.max_cost is not None:
            spent = ledger.totals()["cost"] if ledger is not None else None
            money["budget"] = self._budget or Budget(self.max_cost, spent or 0.0)
        return {
            "timeout_s": self.timeout_s,
            "max_attempts": self.max_attempts,
            "backoff_s": self.backoff_s,
            "rate_limit_wait_s": self.rate_limit_wait_s,
            "down_after_s": self.down_after_s,
            **money,
        }


def _several(value: Any) -> tuple[RoleSettings, ...]:
    players = value if isinstance(value, tuple) else (value,)
    return tuple(one for one in players if isinstance(one, RoleSettings))


def _distinct(players: Iterable[RoleSettings]) -> list[RoleSettings]:
    once: list[RoleSettings] = []
    for player in players:
        once += [player] if player not in once else []
    return once


def _without_pricing(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_pricing(v) for k, v in value.items() if k not in _PRICING}
    return [_without_pricing(one) for one in value] if isinstance(value, list) else value
