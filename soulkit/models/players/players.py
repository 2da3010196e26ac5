"""The live players of a run, one model per distinct setting, and the cast they form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.models.api.probing import ASKED_FOR_FORMS, Preflight, forget
from soulkit.models.base import Cast, ChatModel, Player
from soulkit.models.local.loading import ADAPTER_CONFIG
from soulkit.models.local.weights import json_object, unusable
from soulkit.models.players.config import LIMITS, RolesConfig
from soulkit.models.players.settings import PANELS, RoleSettings
from soulkit.reporting import SILENT, Reporter
from soulkit.types import Role

if TYPE_CHECKING:
    from soulkit.models.api.batches import Batches
    from soulkit.models.ledger.ledger import Ledger
    from soulkit.models.local.quantize import Quantize
    from soulkit.models.local.sampler import LocalModel


def checkpoint_player(
    model: str, *, adapter: str | None = None, device: str = "auto", dtype: str = "auto",
    quantize: Quantize = "none", batch_size: int = 64, max_context: int | None = None,
) -> LocalModel:  # fmt: skip
    """Load a model folder or Hub id, with an adapter if given; the folder may be an adapter's.

    ModelLoadError if it cannot be loaded. Imports torch only when called.
    """
    from soulkit.models.local.sampler import LocalModel

    if adapter is None:
        model, adapter = base_and_adapter(model)
    return LocalModel.load(
        model, adapter=adapter, device=device, dtype=dtype, quantize=quantize,
        batch_size=batch_size, max_context=max_context,
    )  # fmt: skip


def base_and_adapter(model: str) -> tuple[str, str | None]:
    """(base model, adapter) of an adapter's folder; (`model`, None) for anything else."""
    file = Path(model) / ADAPTER_CONFIG
    if not file.exists():
        return model, None
    settings = json_object(file)
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(base, str) or not isinstance(revision, str | None):
        raise unusable(file, "it does not name the base model of the adapter")
    return f"{base}{f'@{revision}' if revision else ''}", model


Serve = Callable[[RoleSettings], ChatModel]
"""Returns the player for a model on a vLLM server."""
SEVERAL = 2
"""Stands for any number of samples above one; they are all sampled alike."""


@dataclass
class Players:
    """Creates the players of a run. Equal settings share one model, and therefore connections,
    rate limits and timeouts. Close it when the run ends.

    `actor` is the model of kind `actor`; `load` loads a local checkpoint; `serve` returns the
    player of a model on a running vLLM server (vllm/manager.py); `call_arguments` go to every
    Endpoint (timeouts, retries, concurrency, prices, budget). `by_batch` tells whether a role with
    its settings uses `batches`. For equal endpoints in `settings_of_all`, the tightest limit and
    the first price apply.
    """

    ledger: Ledger | None = None
    actor: ChatModel | None = None
    load: Callable[[str], ChatModel] | None = None
    call_arguments: Mapping[str, Any] = field(default_factory=dict)
    settings_of_all: Sequence[RoleSettings] = ()
    batches: Batches | None = None
    by_batch: Callable[[str, RoleSettings], bool] = lambda role, settings: False
    reporter: Reporter = SILENT
    """Receives one line per checked server before the first call."""
    note: Callable[[Mapping[str, Any]], None] = forget
    """Receives deviations from the settings, to be recorded with the run."""
    serve: Serve | None = None
    _made: dict[tuple[str, ...], ChatModel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.preflight = Preflight(self.reporter, self.note)

    def player(
        self, role: str, settings: RoleSettings, seed: int | None, samples: int = 1
    ) -> Player:
        """The player of `settings` in `role`; UserError if it cannot be created."""
        model, sampling = self.model(role, settings), settings.sampling(role, seed, samples)
        again = settings.sampling(role, seed, SEVERAL) if role in PANELS else None
        return Player(model, sampling, again)

    def model(self, role: str, settings: RoleSettings) -> ChatModel:
        """The model for `settings`, created once."""
        kind = settings.player_kind
        if not kind.is_named:  # the actor is created and closed elsewhere
            return kind.make(role, settings, self, False)
        batched = self.batches is not None and self.by_batch(role, settings)
        key = (*kind.key(settings), "batch" if batched else "")
        if key not in self._made:
            self._made[key] = kind.make(role, settings, self, batched)
        expect_forms = getattr(self._made[key], "expect_forms", None)
        if expect_forms is not None and role in ASKED_FOR_FORMS:
            expect_forms()
        return self._made[key]

    def limits_and_prices(self, settings: RoleSettings) -> dict[str, Any]:
        """Limits and prices of the endpoint of `settings`."""
        key = settings.player_kind.key(settings)
        others = (one for one in self.settings_of_all if one.player_kind.key(one) == key)
        alike = [settings, *others]
        priced = next((one for one in alike if one.price_in is not None), settings)
        return {
            **{name: _least(getattr(one, name) for one in alike) for name in LIMITS},
            "price_in": priced.price_in,
            "price_out": priced.price_out,
        }

    async def close(self) -> None:
        """Close every model that was created here (not a local actor)."""
        for model in self._made.values():
            await model.close()


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def cast_of(config: RolesConfig, players: Players, actor: Player, seed: int | None) -> Cast:
    """The cast of a configuration with its actor, and the casts of tasks with their own players."""
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


def check_players(config: RolesConfig) -> None:
    """Raise errors in addresses, keys, prices, scripts and vLLM settings without any model call."""
    from soulkit.models.vllm.manager import check_needs, players_needs, terms_of

    players = Players(
        call_arguments=config.call_arguments(None), settings_of_all=config.settings_of_players()
    )
    for role, settings in config.players():
        settings.player_kind.check(role, settings, players)
    check_needs(players_needs(config), terms_of(config))
