"""Who plays a role: one way of writing it for partner, environment, judge, coach and blind reader.

    endpoint:MODEL@URL#KEY   an OpenAI-compatible server; KEY is the NAME of the variable with its
                             key (OPENAI_API_KEY without it); without @URL it is what
                             OPENAI_BASE_URL says, else OpenAI's own service
    local:PATH               a checkpoint on this machine
    actor                    the model under test, or in training the one that is trained, itself
    scripted:FILE            replies from a file (models/scripted.py): trials without any model
    NAME                     an entry of the endpoints file

An endpoints file is YAML, a name for each model, with everything that a command line is too short
for. It may also say who plays a role that no option fills:

    endpoints:
      nano:
        model: gpt-5-nano
        base_url: https://api.openai.com/v1
        api_key_env: OPENAI_API_KEY
        requests_per_minute: 500
        tokens_per_minute: 200000
        price_in: 0.05
        price_out: 0.40
    roles:
      judge: {use: nano, reasoning_effort: low}
      partner: nano

`vllm:PATH` will be one more kind in `RoleSettings`, one more branch in `Players`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from soulkit.config import Settings, merge, setting
from soulkit.errors import ConfigError, did_you_mean
from soulkit.models.api.address import OPENAI_URL, addressed, checked_url
from soulkit.models.base import Cast, ChatModel, Panel, Player
from soulkit.models.calling import ASKING, CallSettings
from soulkit.runs.folder import INSTEAD, is_secret, plain_config, refuse_secrets
from soulkit.types import Role, Sampling

if TYPE_CHECKING:
    from soulkit.models.ledger.ledger import Ledger

FORMS = "endpoint:MODEL@URL, local:PATH, actor, scripted:FILE, or a name in --endpoints FILE"
_REPLY: dict[str, tuple[float, int]] = {
    "partner": (1.0, 4096),
    "environment": (1.0, 4096),
    "judge": (0.0, 4096),
    "coach": (1.0, 2048),
    "blind_reader": (1.0, 256),
}
"""Role → temperature and longest reply where nothing else is said. Reasoning counts as reply, so
that a reasoning partner says nothing within a few hundred tokens."""


class RoleSettings(Settings):
    """One player of a role. A text in the forms above is read as these settings."""

    kind: Literal["endpoint", "local", "actor", "scripted"] = "endpoint"
    model: str = ""
    """The name on its server, the folder or hub id, or the file of the script."""
    base_url: str | None = None
    """Of an endpoint: filled in where it is left out, with OPENAI_BASE_URL or OpenAI's own."""
    api_key_env: str = "OPENAI_API_KEY"
    """NAME of the environment variable with the key."""
    temperature: float | None = Field(default=None, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int | None = Field(default=None, gt=0)
    thinking: bool | None = None
    reasoning_effort: str | None = None
    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0)
    price_in: float | None = Field(default=None, ge=0)
    """US dollars per million prompt tokens."""
    price_out: float | None = Field(default=None, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, raw: Any) -> Any:
        settings = parse_spec(raw) if isinstance(raw, str) else raw
        served = isinstance(settings, Mapping) and settings.get("kind", "endpoint") == "endpoint"
        return addressed(settings) if served else settings

    @model_validator(mode="after")
    def _checked(self) -> RoleSettings:
        if self.base_url is not None:
            checked_url(self.base_url)
        if self.kind != "actor" and not self.model:
            raise ValueError(f"it names no model; write {FORMS}")
        if (self.price_in is None) != (self.price_out is None):
            raise ValueError("a cost needs both price_in and price_out")
        return self

    def sampling(self, role: str, seed: int | None, samples: int = 1) -> Sampling:
        """How it is sampled in `role`: repeated opinions of a greedy judge would be one opinion."""
        temperature, reply = _REPLY[role]
        if role == "judge" and samples > 1:
            temperature = 1.0
        return Sampling(
            temperature=temperature if self.temperature is None else self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens or reply,
            seed=seed,
            thinking=self.thinking,
            reasoning_effort=self.reasoning_effort,
        )

    def written(self) -> str:
        """The settings in short, for messages and tables."""
        where = "" if self.base_url in (None, OPENAI_URL) else f"@{self.base_url}"
        return "actor" if self.kind == "actor" else f"{self.kind}:{self.model}{where}"


def parse_spec(text: str) -> dict[str, Any]:
    """`endpoint:MODEL@URL#KEY` and its siblings as settings; ValueError for anything else."""
    if text.strip() == "actor":
        return {"kind": "actor"}
    kind, colon, rest = text.strip().partition(":")
    if kind == "vllm":
        raise ValueError(f"vllm:PATH is not there yet; serve it and write {FORMS}")
    if not colon or kind not in ("endpoint", "local", "scripted") or not rest:
        shown = "(a secret, not shown)" if is_secret(text.strip()) else f"'{text}'"
        raise ValueError(f"{shown} says no player; write {FORMS}")
    if kind != "endpoint":
        return {"kind": kind, "model": rest}
    rest, _, key = rest.partition("#")
    # The address begins before its scheme: behind that an @ would end a user name.
    before, sep, after = rest.partition("://")
    model, at, scheme = before.rpartition("@") if sep else (rest, "", "")
    url = f"{scheme}{sep}{after}" if at else ""
    if sep and not at:
        raise ValueError(f"an address stands without a model; write {FORMS}")
    fields = {"kind": kind, "model": model, "base_url": url or None, "api_key_env": key or None}
    return {name: value for name, value in fields.items() if value is not None}


# -- the endpoints file ----------------------------------------------------------------------------


class EndpointsFile(Settings):
    """The contents of an endpoints file, before names are looked up."""

    endpoints: dict[str, dict[str, Any]] = Field(default_factory=dict)
    roles: dict[str, Any] = Field(default_factory=dict)


def player_entry(
    entry: Any, book: Mapping[str, Mapping[str, Any]], words: Sequence[str] = ()
) -> Any:
    """A role's value with names looked up in `book`: `nano`, or `{use: nano, temperature: 0}`.

    Raises ValueError for a bare word that is no entry; `words` are what else could be meant.
    """
    if isinstance(entry, list | tuple):
        return [player_entry(one, book) for one in entry]
    if isinstance(entry, Mapping) and "use" in entry:
        rest = {key: value for key, value in entry.items() if key != "use"}
        return merge(player_entry(entry["use"], book), rest)
    if not isinstance(entry, str) or ":" in entry or entry == "actor":
        return parse_spec(entry) if isinstance(entry, str) else entry
    if entry not in book:
        near = did_you_mean(entry, [*book, *words]) if book or words else ""
        hint = near if book else f"{near} Write {FORMS}.".lstrip()
        shown = "(a secret, not shown)" if is_secret(entry) else f"'{entry}'"
        raise ValueError(f"no endpoint is called {shown}. {hint}")
    return dict(book[entry])


class RolesConfig(CallSettings):
    """The settings of everybody but the actor; base of every command that plays."""

    OUTSIDE_IDENTITY: ClassVar[frozenset[str]] = frozenset(
        (
            "endpoints", "requests_per_minute", "tokens_per_minute", "prices", "max_cost",
            "timeout_s", "max_attempts", "backoff_s", "down_after_s",
        )
    )  # fmt: skip
    """Settings that change only speed, retries and prices: a run may be resumed with others."""

    endpoints: str | None = setting(
        None,
        section="Players",
        only=ASKING,
        metavar="FILE",
        help="Models by name: URLs, limits, prices; may also say who plays a role.",
    )
    partner: RoleSettings | None = setting(
        None, section="Players", only=("plays",), metavar="WHO", help="Plays the other side."
    )
    environment: RoleSettings | None = setting(
        None, section="Players", only=("plays",), metavar="WHO", help="Plays the surroundings."
    )
    judge: tuple[RoleSettings, ...] = setting(
        (), section="Players", only=ASKING, metavar="WHO", help="Scores; may be repeated."
    )
    judge_samples: int = setting(
        1, gt=0, section="Players", only=("plays",), help="Opinions of each judge."
    )
    judge_combine: Literal["mean", "vote"] = setting(
        "mean", section="Players", only=("plays",), help="What becomes of several opinions."
    )
    judge_order: Literal["both", "seeded"] = setting(
        "both",
        section="Players",
        only=("plays",),
        help="Of pairs: both ways round, or one by seed.",
    )

    @model_validator(mode="before")
    @classmethod
    def _look_up(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        return players_by_name(raw, cls.roles())

    @model_validator(mode="after")
    def _different_judges(self) -> Self:
        """Equal judges would be one ledger entry, and agree with themselves by construction."""
        players = [judge.model_dump_json() for judge in self.judge]
        if len(set(players)) < len(players):
            raise ValueError(
                "the same judge is named twice; several opinions of one are --judge-samples 2"
            )
        return self

    @model_validator(mode="after")
    def _without_secrets(self) -> Self:
        """Whatever reads these settings, a plan as well, may print and store them."""
        refuse_secrets(plain_config(self.resolved()))
        return self

    @classmethod
    def roles(cls) -> list[str]:
        """The roles that these settings may fill, the actor's left out."""
        return [name for name in _REPLY if name in cls.model_fields]

    @property
    def panel(self) -> Panel:
        return Panel(
            samples=self.judge_samples, combine=self.judge_combine, orders=self.judge_order
        )

    def players(self) -> list[tuple[str, RoleSettings]]:
        """Everybody who is named beside the actor, with their role."""
        named = [(name, getattr(self, name, None)) for name in _REPLY]
        several = [(n, v if isinstance(v, tuple) else (v,)) for n, v in named]
        return [(n, one) for n, many in several for one in many if isinstance(one, RoleSettings)]

    def settings_of_players(self) -> list[RoleSettings]:
        """Their settings alone, with the limits of this command where they name none."""
        limits = {name: getattr(self, name) for name in _LIMITS} if self.limits_players else {}
        return [
            one.model_copy(update={k: v for k, v in limits.items() if getattr(one, k) is None})
            for _, one in self.players()
        ]

    @property
    def limits_players(self) -> bool:
        """Whether requests and tokens per minute are the players'; else they are the actor's."""
        return True

    def served(self) -> list[tuple[str, RoleSettings]]:
        """Everybody who is asked over HTTP, with their role."""
        return [(role, who) for role, who in self.players() if who.kind == "endpoint"]

    def servers(self) -> list[str]:
        """A line for each server that is asked: its address, and who is asked there."""
        players_by_url: dict[str, dict[str, None]] = {}
        for role, who in self.served():
            players_by_url.setdefault(checked_url(who.base_url), {})[f"{role} {who.model}"] = None
        return [f"server {url}: {', '.join(names)}" for url, names in players_by_url.items()]

    def filled(self) -> set[str]:
        """The roles that somebody fills, the actor's included."""
        return {"actor", *(role for role, _ in self.players())}

    def check_players(self) -> None:
        """Raise what is wrong with addresses, keys, prices and scripts, while nothing is asked."""
        players = Players(
            call_arguments=self.call_arguments(None), settings_of_all=self.settings_of_players()
        )
        for role, settings in self.players():
            if settings.kind in ("endpoint", "scripted"):
                players.model(role, settings)

    def identity(self) -> dict[str, Any]:
        """The settings that a run folder stores and compares."""
        return self._of_identity(self.resolved())

    @classmethod
    def identity_defaults(cls) -> dict[str, Any]:
        """What a folder of an earlier version is taken to say of settings that it does not name."""
        player = {UNSAID: OPENAI_URL, **cls._of_identity(RoleSettings.defaults())}
        return cls._of_identity(cls.defaults()) | {
            f"{role}.{name}": value
            for role in cls.roles()
            for name, value in player.items()
            if name not in _PRICING
        }

    @classmethod
    def _of_identity(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {
            k: _without_pricing(v) for k, v in settings.items() if k not in cls.OUTSIDE_IDENTITY
        }

    def call_arguments(self, ledger: Ledger | None) -> dict[str, Any]:
        """Further arguments of every Endpoint of the run: time and money."""
        return {
            "timeout_s": self.timeout_s,
            "max_attempts": self.max_attempts,
            "backoff_s": self.backoff_s,
            "down_after_s": self.down_after_s,
            **cost_arguments(self, ledger),
        }


UNSAID = f"base_url{INSTEAD}"
"""What a folder means that names no address: it was written before OPENAI_BASE_URL was read."""
_LIMITS = ("requests_per_minute", "tokens_per_minute")
_PRICING = frozenset((*_LIMITS, "price_in", "price_out"))


def _without_pricing(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: v for k, v in value.items() if k not in _PRICING}
    return [_without_pricing(one) for one in value] if isinstance(value, list) else value


KEPT_WORDS = ("symbolic", "terse")
"""What a coach may be beside a player."""


def players_by_name(raw: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Settings in which the roles `names` are players, not names of players."""
    book, filled = _book(raw.get("endpoints"), names)
    settings = {**filled, **{key: value for key, value in raw.items() if value is not None}}
    for name in names:
        value = settings.get(name)
        if value is None or (name == "coach" and value in KEPT_WORDS):
            continue
        players = player_entry(value, book, KEPT_WORDS if name == "coach" else ())
        settings[name] = [players] if name == "judge" and not isinstance(players, list) else players
    return settings


def _book(
    file: Any, names: Sequence[str]
) -> tuple[Mapping[str, Mapping[str, Any]], dict[str, Any]]:
    if file is None:
        return {}, {}
    # Whoever named the file was asked already whether a stranger's is to be trusted.
    read = EndpointsFile.load(Path(str(file)), env={}, trust=True)
    for role in read.roles:
        if role not in _REPLY:
            raise ConfigError(
                f"The endpoints file '{file}' fills a role '{role}'.",
                "Nobody would ever ask that player.",
                did_you_mean(role, _REPLY),
            )
    # One file serves evaluation and training: a coach in it is no mistake where nobody is coached.
    return read.endpoints, {role: who for role, who in read.roles.items() if role in names}


# -- from settings to players ----------------------------------------------------------------------


@dataclass
class Players:
    """Makes the players of a run: one model for equal settings, so that equal endpoints share
    their connections, rate limits and time-outs. Close it when the run ends.

    `actor` is what the kind `actor` stands for; `load` loads a local checkpoint; `call_arguments`
    are further arguments of every Endpoint (time-outs, attempts, concurrency, prices, budget).
    In `settings_of_all`, equal endpoints count together: the tightest limit, the first price.
    """

    ledger: Ledger | None = None
    actor: ChatModel | None = None
    load: Callable[[str], ChatModel] | None = None
    call_arguments: Mapping[str, Any] = field(default_factory=dict)
    settings_of_all: Sequence[RoleSettings] = ()
    _made: dict[tuple[str, ...], ChatModel] = field(default_factory=dict)

    def player(
        self, role: str, settings: RoleSettings, seed: int | None, samples: int = 1
    ) -> Player:
        """The player of `settings` in `role`; a UserError when it cannot be made."""
        return Player(self.model(role, settings), settings.sampling(role, seed, samples))

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
        key = _identity(settings)
        if key not in self._made:
            self._made[key] = self._make(role, settings)
        return self._made[key]

    def _make(self, role: str, settings: RoleSettings) -> ChatModel:
        from soulkit.models.api.endpoint import Endpoint
        from soulkit.models.roles.scripted import ScriptedModel

        if settings.kind == "scripted":
            return ScriptedModel.read(Path(settings.model))
        if settings.kind == "endpoint":
            return Endpoint(
                model=settings.model,
                base_url=settings.base_url,
                api_key_env=settings.api_key_env,
                ledger=self.ledger,
                **self._terms(settings),
                **self.call_arguments,
            )
        if self.load is None:
            raise ConfigError(
                f"The {role} is to be the checkpoint '{settings.model}'.",
                "This command loads no checkpoint.",
                "Serve it and write endpoint:MODEL@URL.",
            )
        return self.load(settings.model)

    def _terms(self, settings: RoleSettings) -> dict[str, Any]:
        """Limits and prices of the endpoint of `settings`."""
        key = _identity(settings)
        alike = [settings, *(one for one in self.settings_of_all if _identity(one) == key)]
        priced = next((one for one in alike if one.price_in is not None), settings)
        return {
            **{name: _least(getattr(one, name) for one in alike) for name in _LIMITS},
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
        return settings.kind, settings.model
    server = (checked_url(settings.base_url), settings.api_key_env)
    return settings.kind, settings.model, *server


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def cast_of(config: RolesConfig, players: Players, actor: Player, seed: int | None) -> Cast:
    """The cast of a configuration around its actor (coaches are training's)."""

    def one(role: Role, settings: RoleSettings | None) -> Player | None:
        return None if settings is None else players.player(role, settings, seed)

    return Cast(
        actor=actor,
        partner=one("partner", config.partner),
        environment=one("environment", config.environment),
        judges=judges_of(config, players, seed),
        panel=config.panel,
        ledger=players.ledger,
    )


def cost_arguments(config: RolesConfig, ledger: Ledger | None) -> dict[str, Any]:
    """What every Endpoint of a run is told about money."""
    from soulkit.models.api.budget import Budget
    from soulkit.models.api.prices import load_prices

    arguments: dict[str, Any] = {"prices": load_prices(config.prices)}
    if config.max_cost is not None:
        spent = ledger.totals()["cost"] if ledger is not None else None
        arguments["budget"] = Budget(config.max_cost, spent or 0.0)
    return arguments


def judges_of(config: RolesConfig, players: Players, seed: int | None) -> tuple[Player, ...]:
    """The judges of a configuration."""
    return tuple(players.player("judge", j, seed, config.judge_samples) for j in config.judge)
