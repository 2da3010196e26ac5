"""The live players of a run, each model made once, and the cast that they form."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.errors import ConfigError
from soulkit.models.api.addresses import checked_url
from soulkit.models.api.probing import ASKED_FOR_FORMS, Preflight, forget
from soulkit.models.base import Cast, ChatModel, Player
from soulkit.models.players.config import LIMITS, RolesConfig
from soulkit.models.players.settings import FORMS, PANELS, RoleSettings
from soulkit.types import Role

if TYPE_CHECKING:
    from soulkit.models.api.batch_endpoint import Batches
    from soulkit.models.ledger.ledger import Ledger
    from soulkit.models.local.sampler import LocalModel


def checkpoint_player(
    model: str, *, adapter: str | None = None, device: str = "auto", dtype: str = "auto",
    batch_size: int = 64, max_context: int | None = None,
) -> LocalModel:  # fmt: skip
    """The model of a folder or of the hub, with an adapter if one is named.

    ModelLoadError when it cannot be loaded. It is imported here, since it needs torch.
    """
    from soulkit.models.local.sampler import LocalModel

    return LocalModel.load(
        model, adapter=adapter, device=device, dtype=dtype, batch_size=batch_size,
        max_context=max_context,
    )  # fmt: skip


log = logging.getLogger(__name__)

Serve = Callable[[RoleSettings], ChatModel]
"""Makes the player of a model that a vLLM server serves."""
SEVERAL = 2
"""Any number of opinions above one: how a player is sampled does not depend on which."""


def _never(role: str, settings: RoleSettings) -> bool:
    return False


@dataclass
class Players:
    """Makes the players of a run: one model for equal settings, so that equal endpoints share
    their connections, rate limits and time-outs. Close it when the run ends.

    `actor` is what the kind `actor` stands for; `load` loads a local checkpoint; `serve` makes the
    player of a model behind a vLLM server that runs (vllm/pool.py); `call_arguments` are further
    arguments of every Endpoint (time-outs, attempts, concurrency, prices, budget). `by_batch` says
    of a role and its settings whether it is asked through `batches`.
    In `settings_of_all`, equal endpoints count together: the tightest limit, the first price.
    """

    ledger: Ledger | None = None
    actor: ChatModel | None = None
    load: Callable[[str], ChatModel] | None = None
    call_arguments: Mapping[str, Any] = field(default_factory=dict)
    settings_of_all: Sequence[RoleSettings] = ()
    batches: Batches | None = None
    by_batch: Callable[[str, RoleSettings], bool] = _never
    say: Callable[[str], None] = log.info
    """Is told who answers, before the first call."""
    note: Callable[[Mapping[str, Any]], None] = forget
    """Gets what differs from the settings, to be recorded with the run."""
    serve: Serve | None = None
    _made: dict[tuple[str, ...], ChatModel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.preflight = Preflight(
            lambda line: self.say(line),
            lambda facts: self.note(facts),
            lambda line: self.say(line),
        )

    def player(
        self, role: str, settings: RoleSettings, seed: int | None, samples: int = 1
    ) -> Player:
        """The player of `settings` in `role`; a UserError when it cannot be made."""
        model, sampling = self.model(role, settings), settings.sampling(role, seed, samples)
        again = settings.sampling(role, seed, SEVERAL) if role in PANELS else None
        return Player(model, sampling, again)

    def model(self, role: str, settings: RoleSettings) -> ChatModel:
        """The model behind `settings`, made once."""
        if settings.kind == "actor":
            if self.actor is None:
                raise ConfigError(
                    f"The {role} is to be the actor, and there is no actor here.",
                    "This command plays nothing: it only asks the models that are named.",
                    f"Write {FORMS.replace('actor, ', '')}.",
                )
            return self.actor
        batched = self.batches is not None and self.by_batch(role, settings)
        key = (*_identity(settings), "batch" if batched else "")
        if key not in self._made:
            self._made[key] = self._make(role, settings, batched)
        expect_forms = getattr(self._made[key], "expect_forms", None)
        if expect_forms is not None and role in ASKED_FOR_FORMS:
            expect_forms()
        return self._made[key]

    def _make(self, role: str, settings: RoleSettings, batched: bool) -> ChatModel:
        from soulkit.models.stand_ins import ScriptedModel

        if settings.kind == "scripted":
            return ScriptedModel.read(Path(settings.model))
        if settings.kind == "endpoint":
            return self._endpoint(settings, batched)
        if settings.kind == "vllm" and self.serve is not None:
            return self.serve(settings)
        if settings.kind == "vllm" or self.load is None:
            raise ConfigError(
                f"The {role} is to be the checkpoint '{settings.model}'.",
                "This command loads no checkpoint.",
                "Serve it and write endpoint:MODEL@URL.",
            )
        return self.load(settings.model)

    def _endpoint(self, settings: RoleSettings, batched: bool) -> ChatModel:
        from soulkit.models.api.endpoint import Endpoint

        arguments: dict[str, Any] = {
            "model": settings.model,
            "base_url": settings.base_url,
            "api_key_env": settings.api_key_env,
            "headers": settings.headers,
            "api_version": settings.api_version,
            "ledger": self.ledger,
            "preflight": self.preflight,
            **self._terms(settings),
            **self.call_arguments,
        }
        if self.batches is None:
            return Endpoint(**arguments)
        if batched:
            from soulkit.models.api.batch_endpoint import BatchEndpoint

            return BatchEndpoint(batches=self.batches, **arguments)
        live = Endpoint(**arguments)
        self.batches.watch(live)
        return live

    def _terms(self, settings: RoleSettings) -> dict[str, Any]:
        """Limits and prices of the endpoint of `settings`."""
        key = _identity(settings)
        alike = [settings, *(one for one in self.settings_of_all if _identity(one) == key)]
        priced = next((one for one in alike if one.price_in is not None), settings)
        return {
            **{name: _least(getattr(one, name) for one in alike) for name in LIMITS},
            "price_in": priced.price_in,
            "price_out": priced.price_out,
        }

    async def close(self) -> None:
        """Close every model that was made here (a local actor was not)."""
        for model in self._made.values():
            await model.close()


def _identity(settings: RoleSettings) -> tuple[str, ...]:
    """What two players that are one model have in common."""
    if settings.kind != "endpoint":
        flags = [part for pair in sorted(settings.args.items()) for part in pair]
        return settings.kind, settings.model, *flags
    headers = [part for pair in sorted(settings.headers.items()) for part in pair]
    server = (checked_url(settings.base_url), settings.api_key_env, settings.api_version or "")
    return settings.kind, settings.model, *server, *headers


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def cast_of(config: RolesConfig, players: Players, actor: Player, seed: int | None) -> Cast:
    """The cast of a configuration around its actor, with those of the tasks that have their own."""
    by_task = {task: _cast(config, players, actor, seed, task) for task in config.task_players}
    return replace(_cast(config, players, actor, seed, ""), by_task=by_task)


def _cast(
    config: RolesConfig, players: Players, actor: Player, seed: int | None, task: str
) -> Cast:
    def several(role: Role) -> tuple[Player, ...]:
        samples = config.judge_samples or 1
        return tuple(players.player(role, one, seed, samples) for one in config.cast_as(role, task))

    def single(role: Role) -> Player | None:
        return next(iter(several(role)), None)

    return Cast(
        actor=actor,
        partner=single("partner"),
        environment=single("environment"),
        judges=several("judge"),
        auditors=several("auditor") if config.named("auditor", task) else (),
        coach=single("coach"),
        panel=config.panel,
        ledger=players.ledger,
    )


def cost_arguments(config: RolesConfig, ledger: Ledger | None) -> dict[str, Any]:
    """What every Endpoint of a run is told about money."""
    from soulkit.models.api.limits import Budget
    from soulkit.models.api.prices import load_prices

    arguments: dict[str, Any] = {"prices": load_prices(config.prices)}
    if config.max_cost is not None:
        spent = ledger.totals()["cost"] if ledger is not None else None
        arguments["budget"] = Budget(config.max_cost, spent or 0.0)
    return arguments
