"""One player as it is written, in a text, in settings or in the endpoints file; and its kind.

endpoint:MODEL@URL#KEY   an OpenAI-compatible server; KEY is the NAME of the variable with its
                         key, each header follows as NAME=VARIABLE: #KEY,X-Team=MY_TEAM
local:PATH, vllm:PATH    a checkpoint in this process, or behind a vLLM server of its own
actor                    the model under test, or in training the one that is trained
scripted:FILE            replies from a file (stand_ins.py): trials without any model
NAME                     an entry of the endpoints file (docs/guides/choose-players.md)

Everything that differs between kinds of players is in PlayerKind and its subclasses. A further kind
is a subclass, its name in `KindName` and an object of it in KINDS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import Field, ValidationError, field_validator, model_serializer, model_validator

from soulkit.config import Settings, merge
from soulkit.errors import ConfigError, did_you_mean
from soulkit.models.api.addresses import (
    OPENAI_URL,
    checked_headers,
    checked_url,
    is_loopback,
    with_address,
)
from soulkit.models.local.weights import weights_hash
from soulkit.models.vllm.settings import checked_flags
from soulkit.runs.folder import is_secret
from soulkit.runs.jsonl import first_problem
from soulkit.types import Sampling

if TYPE_CHECKING:
    from soulkit.models.api.batches import Batches
    from soulkit.models.api.prices import Price, PriceTable
    from soulkit.models.api.probing import Preflight
    from soulkit.models.base import ChatModel
    from soulkit.models.ledger.ledger import Ledger

KindName = Literal["endpoint", "local", "vllm", "actor", "scripted"]
VERSION = r"^[A-Za-z0-9_.-]+$"
"""Of an interface's version, a date at Azure."""
REPLY: dict[str, tuple[float, int]] = {
    "partner": (1.0, 4096),
    "environment": (1.0, 4096),
    "judge": (0.0, 4096),
    "auditor": (0.0, 4096),
    "coach": (1.0, 2048),
    "blind_reader": (1.0, 256),
    "drafter": (1.0, 4096),
    "filter": (0.0, 4096),
}
"""Role → temperature and longest reply where nothing else is said. Reasoning counts as reply, so
that a reasoning partner says nothing within a few hundred tokens."""
SELDOM = ("headers", "api_version", "args", "top_k", "min_p")
"""Settings that are written only where they say something."""
PANELS = ("judge", "auditor")
"""Roles that several players may fill together."""
RULES = ("symbolic", "terse", "none")
"""What a coach may be beside a player."""


# -- the kinds -------------------------------------------------------------------------------------


class Maker(Protocol):
    """What a kind needs to make a player: the `Players` of a run."""

    ledger: Ledger | None
    actor: ChatModel | None
    load: Callable[[str], ChatModel] | None
    serve: Callable[[RoleSettings], ChatModel] | None
    call_arguments: Mapping[str, Any]
    batches: Batches | None
    preflight: Preflight

    def model(self, role: str, settings: RoleSettings) -> ChatModel: ...

    def limits_and_prices(self, settings: RoleSettings) -> dict[str, Any]: ...


Live = Callable[[], "ChatModel"]
"""Makes a player, or gives the one that is made."""


class PlayerKind:
    """One kind of player. What is written here holds for a checkpoint on this machine."""

    name: ClassVar[KindName]
    form: ClassVar[str]
    """How it is written."""
    is_named: ClassVar[bool] = True
    """Whether a model is written behind its name."""
    over_http: ClassVar[bool] = False
    """Whether it is asked at an address of its own, where calls may cost money."""
    takes_memory: ClassVar[bool] = False
    """Whether its checkpoint is loaded on this machine."""
    may_be_path: ClassVar[bool] = False
    """Whether its model may be a file or folder of this machine."""
    is_sampled: ClassVar[bool] = True
    """Whether sampling changes what it says."""

    # -- as it is written --------------------------------------------------------------------------

    def parse(self, text: str) -> dict[str, Any]:
        """The settings in what is written behind `NAME:`; ValueError where that says none."""
        return {"model": text}

    def completed(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raw settings with what they leave out."""
        return settings

    def written(self, settings: RoleSettings) -> str:
        """The settings in short, for messages and tables."""
        return f"{self.name}:{settings.model}"

    # -- making ------------------------------------------------------------------------------------

    def key(self, settings: RoleSettings) -> tuple[str, ...]:
        """What two players that are one model have in common."""
        return self.name, settings.model

    def make(self, role: str, settings: RoleSettings, maker: Maker, batched: bool) -> ChatModel:
        """A model for these settings; a UserError when it cannot be made."""
        raise NotImplementedError

    def check(self, role: str, settings: RoleSettings, maker: Maker) -> None:
        """Raise what can be said while nothing is asked, loaded or started."""

    # -- what it is --------------------------------------------------------------------------------

    def identity(
        self, settings: RoleSettings, actor: Mapping[str, Any], live: Live | None
    ) -> dict[str, Any]:
        """What names it in the record of a run, beside its kind and model. `actor` names the model
        under test; `live` makes the player, None where nothing may be made."""
        if live is None:
            return {}
        if (folder := Path(settings.model)).exists():
            return {"path": str(folder.resolve()), "weights": weights_hash(folder)}
        return revision_of(live())

    # -- what it takes -----------------------------------------------------------------------------

    def price(self, settings: RoleSettings, table: Callable[[], PriceTable]) -> Price | None:
        """The price of its calls; None where none is known."""
        return None

    def is_paid(self, settings: RoleSettings, table: Callable[[], PriceTable]) -> bool:
        """Whether its calls cost money, as far as anybody knows."""
        return False


class EndpointKind(PlayerKind):
    """A model on a server with an address."""

    name, form = "endpoint", "endpoint:MODEL@URL"
    over_http = True

    def parse(self, text: str) -> dict[str, Any]:
        text, _, secrets = text.partition("#")
        key, headers = _key_and_headers(secrets)
        # The address begins before its scheme: behind that an @ would end a user name.
        before, sep, after = text.partition("://")
        model, at, scheme = before.rpartition("@") if sep else (text, "", "")
        url = f"{scheme}{sep}{after}" if at else ""
        if sep and not at:
            raise ValueError("an address stands without a model")
        fields = {"model": model, "base_url": url, "api_key_env": key, "headers": headers}
        return {name: value for name, value in fields.items() if value or name == "model"}

    def completed(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return with_address(settings)

    def written(self, settings: RoleSettings) -> str:
        where = "" if settings.base_url in (None, OPENAI_URL) else f"@{settings.base_url}"
        return f"{super().written(settings)}{where}"

    def key(self, settings: RoleSettings) -> tuple[str, ...]:
        headers = [part for pair in sorted(settings.headers.items()) for part in pair]
        server = (checked_url(settings.base_url), settings.api_key_env, settings.api_version or "")
        return self.name, settings.model, *server, *headers

    def make(self, role: str, settings: RoleSettings, maker: Maker, batched: bool) -> ChatModel:
        from soulkit.models.api.endpoint import Endpoint

        arguments: dict[str, Any] = {
            "model": settings.model,
            "base_url": settings.base_url,
            "api_key_env": settings.api_key_env,
            "headers": settings.headers,
            "api_version": settings.api_version,
            "ledger": maker.ledger,
            "preflight": maker.preflight,
            **maker.limits_and_prices(settings),
            **maker.call_arguments,
        }
        if maker.batches is None:
            return Endpoint(**arguments)
        if batched:
            from soulkit.models.api.batch_endpoint import BatchEndpoint

            return BatchEndpoint(batches=maker.batches, **arguments)
        live = Endpoint(**arguments)
        maker.batches.watch(live.gates)
        return live

    def check(self, role: str, settings: RoleSettings, maker: Maker) -> None:
        maker.model(role, settings)

    def identity(
        self, settings: RoleSettings, actor: Mapping[str, Any], live: Live | None
    ) -> dict[str, Any]:
        url = getattr(live() if live else None, "base_url", None) or settings.base_url or OPENAI_URL
        return {"address": str(url).rstrip("/")}

    def price(self, settings: RoleSettings, table: Callable[[], PriceTable]) -> Price | None:
        from soulkit.models.api.prices import own_price

        own = own_price(settings.price_in, settings.price_out)
        return own or table().of(settings.model, checked_url(settings.base_url))

    def is_paid(self, settings: RoleSettings, table: Callable[[], PriceTable]) -> bool:
        if is_loopback(checked_url(settings.base_url)):
            return False
        price = self.price(settings, table)
        return price is None or (price.prompt, price.reply) != (0.0, 0.0)


class LocalKind(PlayerKind):
    """A checkpoint in this process."""

    name, form = "local", "local:PATH"
    takes_memory = may_be_path = True

    def make(self, role: str, settings: RoleSettings, maker: Maker, batched: bool) -> ChatModel:
        if maker.load is None:
            raise _not_loaded(role, settings)
        return maker.load(settings.model)


class VllmKind(PlayerKind):
    """A checkpoint behind a vLLM server that soulkit starts for it."""

    name, form = "vllm", "vllm:PATH"
    takes_memory = True

    def key(self, settings: RoleSettings) -> tuple[str, ...]:
        flags = [part for pair in sorted(settings.args.items()) for part in pair]
        return self.name, settings.model, *flags

    def make(self, role: str, settings: RoleSettings, maker: Maker, batched: bool) -> ChatModel:
        if maker.serve is None:
            raise _not_loaded(role, settings)
        return maker.serve(settings)

    def identity(
        self, settings: RoleSettings, actor: Mapping[str, Any], live: Live | None
    ) -> dict[str, Any]:
        # A quantised model is not the one that it was made of.
        flags = " ".join(f"--{name}={value}" for name, value in sorted(settings.args.items()))
        basis = basis_of(live()) if live else {}
        return {**super().identity(settings, actor, live), "args": flags or "none", **basis}


class ActorKind(PlayerKind):
    """The model under test, or in training the one that is trained."""

    name, form = "actor", "actor"
    is_named = False

    def written(self, settings: RoleSettings) -> str:
        return self.name

    def make(self, role: str, settings: RoleSettings, maker: Maker, batched: bool) -> ChatModel:
        if maker.actor is None:
            raise ConfigError(
                f"The {role} is to be the actor, and there is no actor here.",
                "This command plays nothing: it only asks the models that are named.",
                f"Write {FORMS.replace('actor, ', '')}.",
            )
        return maker.actor

    def identity(
        self, settings: RoleSettings, actor: Mapping[str, Any], live: Live | None
    ) -> dict[str, Any]:
        return dict(actor)


class ScriptedKind(PlayerKind):
    """Replies from a file."""

    name, form = "scripted", "scripted:FILE"
    may_be_path = True
    is_sampled = False

    def identity(
        self, settings: RoleSettings, actor: Mapping[str, Any], live: Live | None
    ) -> dict[str, Any]:
        if live is None:
            return {}
        live()  # says in words what is wrong with the file
        return {"sha256": hashlib.sha256(Path(settings.model).read_bytes()).hexdigest()[:16]}

    def make(self, role: str, settings: RoleSettings, maker: Maker, batched: bool) -> ChatModel:
        from soulkit.models.stand_ins import ScriptedModel

        return ScriptedModel.read(Path(settings.model))

    def check(self, role: str, settings: RoleSettings, maker: Maker) -> None:
        maker.model(role, settings)


KINDS: Mapping[str, PlayerKind] = {
    kind.name: kind for kind in (EndpointKind(), LocalKind(), VllmKind(), ActorKind(),
                                 ScriptedKind())
}  # fmt: skip
FORMS = f"{', '.join(kind.form for kind in KINDS.values())}, or a name in --endpoints FILE"


def is_spec(text: str) -> bool:
    """Whether a text is a player in one of the forms, and not the name of one."""
    return ":" in text or (text in KINDS and not KINDS[text].is_named)


def parse_kind(text: str) -> tuple[PlayerKind, str] | None:
    """The kind that a text begins with, and what is written behind it; None for no kind."""
    name, colon, rest = text.partition(":")
    kind = KINDS.get(name)
    if kind is None or (bool(colon), bool(rest)) != (kind.is_named, kind.is_named):
        return None
    return kind, rest


def _not_loaded(role: str, settings: RoleSettings) -> ConfigError:
    return ConfigError(
        f"The {role} is to be the checkpoint '{settings.model}'.",
        "This command loads no checkpoint.",
        "Serve it and write endpoint:MODEL@URL.",
    )


def _key_and_headers(text: str) -> tuple[str, dict[str, str]]:
    """`KEY,NAME=ENV` behind an address: names of variables, of the key's and of headers' values.
    ValueError for two keys and for a header that is there twice."""
    parts = [part.strip() for part in text.split(",")]
    headers = [part.partition("=") for part in parts if "=" in part]
    keys = [part for part in parts if part and "=" not in part]
    if len(keys) > 1:
        raise ValueError("the address has two keys")
    if len({name.lower() for name, _, _ in headers}) < len(headers):
        raise ValueError("the address has a header twice")
    return "".join(keys), {name: variable for name, _, variable in headers}


def revision_of(live: Any) -> dict[str, Any]:
    """The commit of a model of the hub that is loaded or served; nothing of a folder."""
    config = getattr(getattr(live, "model", None), "config", None)
    codec = getattr(live, "codec", None)
    commit = getattr(config, "_commit_hash", None) or getattr(codec, "commit", None)
    return {"revision": str(commit)} if commit else {}


def basis_of(live: Any) -> dict[str, Any]:
    """How it is known which weights attached servers compute with; nothing of any other model."""
    basis = getattr(live, "weights_basis", "")
    return {"weights_basis": basis} if basis else {}


# -- one player ------------------------------------------------------------------------------------


class RoleSettings(Settings):
    """One player of a role. A text in the forms above is read as these settings."""

    kind: KindName = "endpoint"
    model: str = ""
    """The name on its server, the folder or hub id, or the file of the script."""
    base_url: str | None = None
    """Of an endpoint: filled in where it is left out, with OPENAI_BASE_URL or OpenAI's own."""
    api_key_env: str = "OPENAI_API_KEY"
    """NAME of the environment variable with the key."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with every request: header → NAME of the environment variable with its value."""
    api_version: str | None = Field(default=None, pattern=VERSION)
    """What Azure's deployments want behind the path."""
    temperature: float | None = Field(default=None, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_tokens: int | None = Field(default=None, gt=0)
    thinking: bool | None = None
    reasoning_effort: str | None = None
    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0)
    price_in: float | None = Field(default=None, ge=0)
    """US dollars per million prompt tokens."""
    price_out: float | None = Field(default=None, ge=0)
    args: dict[str, str] = Field(default_factory=dict)
    """Of a vLLM server: flag → value, "" for a flag without one; beside those of the command."""
    by_batch: bool = True
    """Whether it may be asked through its server's batch service, where a run asks for that."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, raw: Any) -> Any:
        settings = parse_spec(raw) if isinstance(raw, str) else raw
        if not isinstance(settings, Mapping):
            return settings
        kind = KINDS.get(str(settings.get("kind", "endpoint")))
        return kind.completed(settings) if kind else settings

    @field_validator("headers")
    @classmethod
    def _named(cls, headers: dict[str, str]) -> dict[str, str]:
        return dict(checked_headers(headers))

    @field_validator("args")
    @classmethod
    def _flags(cls, args: dict[str, str]) -> dict[str, str]:
        return checked_flags(args)

    @model_serializer(mode="wrap")
    def _plain(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """What most players do without is left out, as in runs from before it could be said."""
        return {k: v for k, v in write(self).items() if v or k not in SELDOM}

    @model_validator(mode="after")
    def _checked(self) -> RoleSettings:
        if self.base_url is not None:
            checked_url(self.base_url)
        if self.player_kind.is_named and not self.model:
            raise ValueError(f"it names no model; write {FORMS}")
        if self.args and self.kind != "vllm":
            raise ValueError("args are flags of a vLLM server: they need kind: vllm")
        if (self.price_in is None) != (self.price_out is None):
            raise ValueError("a cost needs both price_in and price_out")
        return self

    @property
    def player_kind(self) -> PlayerKind:
        """What tells this kind of player from the others."""
        return KINDS[self.kind]

    def sampling(self, role: str, seed: int | None, samples: int = 1) -> Sampling:
        """How it is sampled in `role`: repeated opinions of a greedy judge would be one opinion."""
        temperature, reply = REPLY[role]
        if role in PANELS and samples > 1:
            temperature = 1.0
        usual = {"temperature": temperature, "max_tokens": reply}
        return Sampling.first_of({"seed": seed}, vars(self), usual)

    def written(self) -> str:
        """The settings in short, for messages and tables."""
        return self.player_kind.written(self)


Coach = Literal["symbolic", "terse", "none"] | RoleSettings
"""Who writes feedback: the task's rules, with or without remarks on the draft, nobody, or a
player."""


class TaskPlayers(Settings):
    """Who plays in one task; what is left out is as in all tasks."""

    partner: RoleSettings | None = None
    environment: RoleSettings | None = None
    judge: tuple[RoleSettings, ...] = ()
    auditor: tuple[RoleSettings, ...] = ()
    coach: Coach | None = None

    def named(self, role: str) -> Any:
        """What stands under `role`; None for nothing."""
        return getattr(self, role, None) or None


def parse_spec(text: str) -> dict[str, Any]:
    """`endpoint:MODEL@URL#KEY` and its siblings as settings; ValueError for anything else."""
    found = parse_kind(text.strip())
    if found is None:
        shown = "(a secret, not shown)" if is_secret(text.strip()) else f"'{text}'"
        raise ValueError(f"{shown} says no player; write {FORMS}")
    kind, rest = found
    try:
        return {"kind": kind.name, **(kind.parse(rest) if kind.is_named else {})}
    except ValueError as error:
        raise ValueError(f"{error}; write {FORMS}") from None


Book = Mapping[str, Mapping[str, Any]]
"""Name → the settings of a model."""


class EndpointsFile(Settings):
    """The contents of an endpoints file, before names are looked up."""

    endpoints: dict[str, dict[str, Any]] = Field(default_factory=dict)
    roles: dict[str, Any] = Field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)


def player_entry(entry: Any, book: Book, words: Sequence[str] = ()) -> Any:
    """A role's value with names looked up in `book`: `nano`, or `{use: nano, temperature: 0}`.

    Raises ValueError for a bare word that is no entry; `words` are what else could be meant.
    """
    if isinstance(entry, list | tuple):
        return [player_entry(one, book) for one in entry]
    if isinstance(entry, Mapping) and "use" in entry:
        rest = {key: value for key, value in entry.items() if key != "use"}
        return merge(player_entry(entry["use"], book), rest)
    if not isinstance(entry, str) or is_spec(entry):
        return parse_spec(entry) if isinstance(entry, str) else entry
    if entry not in book:
        near = did_you_mean(entry, [*book, *words]) if book or words else ""
        hint = near if book else f"{near} Write {FORMS}.".lstrip()
        shown = "(a secret, not shown)" if is_secret(entry) else f"'{entry}'"
        raise ValueError(f"no endpoint is called {shown}. {hint}")
    return dict(book[entry])


def players_by_name(raw: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Settings in which the roles `names` are players, not names of players; so are those of
    `task_players`."""
    file = _opened(raw.get("endpoints"))
    # One file serves evaluation and training: a coach in it is no mistake where nobody is coached.
    filled = {role: who for role, who in file.roles.items() if role in names}
    settings = {**filled, **{key: value for key, value in raw.items() if value is not None}}
    book = file.endpoints
    named = {name: settings[name] for name in names if settings.get(name) is not None}
    settings |= {name: _looked_up(name, who, book) for name, who in named.items()}
    in_tasks = settings.get("task_players")
    if isinstance(in_tasks, Mapping):
        settings["task_players"] = {
            task: _roles_looked_up(roles, book) for task, roles in in_tasks.items()
        }
    return settings


def players_in_tasks(file: str | None) -> dict[str, TaskPlayers]:
    """Task → who plays in it alone, as an endpoints file says; empty without one."""
    read = _opened(file)
    try:
        return {
            task: TaskPlayers.model_validate(_roles_looked_up(roles, read.endpoints))
            for task, roles in read.tasks.items()
        }
    except ValueError as error:
        raise ConfigError(
            f"The endpoints file '{file}' names players of a task that cannot be read.",
            _problem(error),
            f"Under 'tasks:' write  TASK: {{judge: NAME}}, a player as {FORMS}.",
        ) from error


def _problem(error: ValueError) -> str:
    """What is wrong, without what was written: that may be a key in the wrong place."""
    if not isinstance(error, ValidationError):
        return f"{error}."
    return f"{first_problem(error, 'the file')}."


def _roles_looked_up(roles: Any, book: Book) -> Any:
    if not isinstance(roles, Mapping):
        return roles
    return {role: _looked_up(role, who, book) for role, who in roles.items() if who is not None}


def _looked_up(role: str, value: Any, book: Book) -> Any:
    if role == "coach" and value in RULES:
        return value
    players = player_entry(value, book, RULES if role == "coach" else ())
    return [players] if role in PANELS and not isinstance(players, list) else players


def _opened(file: Any) -> EndpointsFile:
    if file is None:
        return EndpointsFile()
    # Whoever named the file was asked already whether a stranger's is to be trusted.
    read = EndpointsFile.load(Path(str(file)), env={}, trust=True)
    _refuse_unknown(file, read.roles, REPLY)
    for roles in read.tasks.values():
        _refuse_unknown(file, roles, TaskPlayers.model_fields)
    return read


def _refuse_unknown(file: Any, roles: Iterable[str], known_roles: Iterable[str]) -> None:
    for role in roles:
        if role not in known_roles:
            raise ConfigError(
                f"The endpoints file '{file}' fills a role '{role}'.",
                "Nobody would ever ask that player.",
                did_you_mean(role, known_roles),
            )
