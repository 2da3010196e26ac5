"""One player: its text form, its settings, its kind, and the endpoints file.

endpoint:MODEL@URL#KEY   an OpenAI-compatible server; KEY is the NAME of the environment variable
                         with the API key; add headers as NAME=VARIABLE: #KEY,X-Team=MY_TEAM
local:PATH, vllm:PATH    a checkpoint in this process, or on a vLLM server that soulkit starts
actor                    the model under test, or in training the model that is trained
scripted:FILE            replies from a file (stand_ins.py), to try things without a model
function:FILE.py:NAME    a Python function (functions.py); also function:MODULE:NAME
NAME                     an entry of the endpoints file (docs/guides/choose-players.md)

To add a kind: subclass PlayerKind, add its name to `KindName` and an instance to KINDS.
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

KindName = Literal["endpoint", "local", "vllm", "actor", "scripted", "function"]
VERSION = r"^[A-Za-z0-9_.-]+$"
"""Format of an API version; at Azure it is a date."""
REPLY: dict[str, tuple[float, int]] = {
    "partner": (1.0, 4096),
    "environment": (1.0, 4096),
    "judge": (0.0, 4096),
    "auditor": (0.0, 4096),
    "coach": (1.0, 2048),
    "blind_reader": (1.0, 256),
    "dev_judge": (0.0, 4096),
    "drafter": (1.0, 4096),
    "filter": (0.0, 4096),
}
"""Role → default temperature and maximum reply tokens. Reasoning counts towards the reply, so a
reasoning model needs more than a few hundred tokens."""
SELDOM = ("headers", "api_version", "args", "top_k", "min_p")
"""Settings that are stored only if they are set."""
PANELS = ("judge", "auditor")
"""Roles that may have several players."""
RULES = ("symbolic", "terse", "judge", "raw", "none")
"""Coaches that are not a player."""


# -- kinds of players ------------------------------------------------------------------------------


class Maker(Protocol):
    """What a kind needs to create a player: the `Players` of a run."""

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
"""Creates the player, or returns the existing one."""


class PlayerKind:
    """One kind of player. The defaults here fit a checkpoint on this machine."""

    name: ClassVar[KindName]
    form: ClassVar[str]
    """Its text form."""
    is_named: ClassVar[bool] = True
    """Whether the text form includes a model."""
    over_http: ClassVar[bool] = False
    """Whether it has its own server address, where calls may cost money."""
    takes_memory: ClassVar[bool] = False
    """Whether its checkpoint is loaded on this machine."""
    may_be_path: ClassVar[bool] = False
    """Whether its model may be a file or folder on this machine."""
    is_sampled: ClassVar[bool] = True
    """Whether sampling settings affect its replies."""

    # -- text form ---------------------------------------------------------------------------------

    def parse(self, text: str) -> dict[str, Any]:
        """Settings from the string after `NAME:`; ValueError if it is not valid."""
        return {"model": text}

    def completed(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raw settings with their defaults filled in."""
        return settings

    def written(self, settings: RoleSettings) -> str:
        """The settings in short form, for messages and tables."""
        return f"{self.name}:{settings.model}"

    # -- creation ----------------------------------------------------------------------------------

    def key(self, settings: RoleSettings) -> tuple[str, ...]:
        """A key that is equal for two players with the same model."""
        return self.name, settings.model

    def make(self, role: str, settings: RoleSettings, maker: Maker, batched: bool) -> ChatModel:
        """Create the model; UserError if that fails."""
        raise NotImplementedError

    def check(self, role: str, settings: RoleSettings, maker: Maker) -> None:
        """Raise errors that can be found without calling, loading or starting a model."""

    # -- identity ----------------------------------------------------------------------------------

    def identity(
        self, settings: RoleSettings, actor: Mapping[str, Any], live: Live | None
    ) -> dict[str, Any]:
        """Fields that identify the player in a run's record, besides kind and model. `actor`
        identifies the model under test; `live` creates the player (None: do not create one)."""
        if live is None:
            return {}
        if (folder := Path(settings.model)).exists():
            return {"path": str(folder.resolve()), "weights": weights_hash(folder)}
        return revision_of(live())

    # -- cost --------------------------------------------------------------------------------------

    def price(self, settings: RoleSettings, table: Callable[[], PriceTable]) -> Price | None:
        """The price of its calls; None if unknown."""
        return None

    def is_paid(self, settings: RoleSettings, table: Callable[[], PriceTable]) -> bool:
        """Whether its calls cost money; True if the price is unknown."""
        return False


class EndpointKind(PlayerKind):
    """A model on a server with an address."""

    name, form = "endpoint", "endpoint:MODEL@URL"
    over_http = True

    def parse(self, text: str) -> dict[str, Any]:
        text, _, secrets = text.partition("#")
        key, headers = _key_and_headers(secrets)
        # Split at the scheme first: an @ after it would belong to a user name.
        before, sep, after = text.partition("://")
        model, at, scheme = before.rpartition("@") if sep else (text, "", "")
        url = f"{scheme}{sep}{after}" if at else ""
        if sep and not at:
            raise ValueError("the address has no model before it")
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
    """A checkpoint on a vLLM server that soulkit starts."""

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
        # A quantised model differs from the original.
        flags = " ".join(f"--{name}={value}" for name, value in sorted(settings.args.items()))
        basis = basis_of(live()) if live else {}
        return {**super().identity(settings, actor, live), "args": flags or "none", **basis}


class ActorKind(PlayerKind):
    """The model under test, or in training the model that is trained."""

    name, form = "actor", "actor"
    is_named = False

    def written(self, settings: RoleSettings) -> str:
        return self.name

    def make(self, role: str, settings: RoleSettings, maker: Maker, batched: bool) -> ChatModel:
        if maker.actor is None:
            raise ConfigError(
                f"The {role} is set to 'actor', but this command has no actor.",
                "The command plays no episodes; it only calls the models you name.",
                f"Use one of: {FORMS.replace('actor, ', '')}.",
            )
        return maker.actor

    def identity(
        self, settings: RoleSettings, actor: Mapping[str, Any], live: Live | None
    ) -> dict[str, Any]:
        return dict(actor)


class ScriptedKind(PlayerKind):
    """Replies from a file."""

    name: ClassVar[KindName] = "scripted"
    form: ClassVar[str] = "scripted:FILE"
    may_be_path = True
    is_sampled = False

    def identity(
        self, settings: RoleSettings, actor: Mapping[str, Any], live: Live | None
    ) -> dict[str, Any]:
        if live is None:
            return {}
        file: Path = getattr(live(), "file", Path(settings.model))  # ConfigError if not valid
        return {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()[:16]}

    def make(self, role: str, settings: RoleSettings, maker: Maker, batched: bool) -> ChatModel:
        from soulkit.models.stand_ins import ScriptedModel

        return ScriptedModel.read(Path(settings.model))

    def check(self, role: str, settings: RoleSettings, maker: Maker) -> None:
        maker.model(role, settings)


class FunctionKind(ScriptedKind):
    """A Python function; its code runs with the rights of the command."""

    name, form = "function", "function:FILE.py:NAME"
    may_be_path = False

    def make(self, role: str, settings: RoleSettings, maker: Maker, batched: bool) -> ChatModel:
        from soulkit.models.players.functions import FunctionModel

        return FunctionModel(settings.model)


KINDS: Mapping[str, PlayerKind] = {
    kind.name: kind for kind in (EndpointKind(), LocalKind(), VllmKind(), ActorKind(),
                                 ScriptedKind(), FunctionKind())
}  # fmt: skip
FORMS = f"{', '.join(kind.form for kind in KINDS.values())}, or a name in --endpoints FILE"


def is_spec(text: str) -> bool:
    """Whether a string is a player in one of the text forms, rather than a player's name."""
    return ":" in text or (text in KINDS and not KINDS[text].is_named)


def parse_kind(text: str) -> tuple[PlayerKind, str] | None:
    """The kind that a string starts with, and the rest of the string; None if there is no kind."""
    name, colon, rest = text.partition(":")
    kind = KINDS.get(name)
    if kind is None or (bool(colon), bool(rest)) != (kind.is_named, kind.is_named):
        return None
    return kind, rest


def _not_loaded(role: str, settings: RoleSettings) -> ConfigError:
    return ConfigError(
        f"The {role} is set to the checkpoint '{settings.model}'.",
        "This command cannot load checkpoints.",
        "Serve it and use endpoint:MODEL@URL.",
    )


def _key_and_headers(text: str) -> tuple[str, dict[str, str]]:
    """(key, headers) from `KEY,NAME=ENV`, all given as names of environment variables. ValueError
    for two keys or a repeated header."""
    parts = [part.strip() for part in text.split(",")]
    headers = [part.partition("=") for part in parts if "=" in part]
    keys = [part for part in parts if part and "=" not in part]
    if len(keys) > 1:
        raise ValueError("the address has more than one key")
    if len({name.lower() for name, _, _ in headers}) < len(headers):
        raise ValueError("the address repeats a header")
    return "".join(keys), {name: variable for name, _, variable in headers}


def revision_of(live: Any) -> dict[str, Any]:
    """The commit of a loaded or served Hub model; empty for a folder."""
    config = getattr(getattr(live, "model", None), "config", None)
    codec = getattr(live, "codec", None)
    commit = getattr(config, "_commit_hash", None) or getattr(codec, "commit", None)
    return {"revision": str(commit)} if commit else {}


def basis_of(live: Any) -> dict[str, Any]:
    """How the weights of attached servers were verified; empty for any other model."""
    basis = getattr(live, "weights_basis", "")
    return {"weights_basis": basis} if basis else {}


# -- one player ------------------------------------------------------------------------------------


class RoleSettings(Settings):
    """One player of a role. A string in one of the forms above is parsed into these settings."""

    kind: KindName = "endpoint"
    model: str = ""
    """Name on the server, folder or Hub id, or script file."""
    base_url: str | None = None
    """Address of an endpoint; default: OPENAI_BASE_URL, or else OpenAI's address."""
    api_key_env: str = "OPENAI_API_KEY"
    """NAME of the environment variable that holds the key."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with every request: header → NAME of the environment variable that holds its value."""
    api_version: str | None = Field(default=None, pattern=VERSION)
    """The `api-version` parameter of Azure deployments."""
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
    """Flags of a vLLM server in addition to the command's: flag → value, "" for no value."""
    by_batch: bool = True
    """Whether it may use its server's batch API when the run asks for it."""

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
        """Leave out rarely used settings that are not set, as in older runs."""
        return {k: v for k, v in write(self).items() if v or k not in SELDOM}

    @model_validator(mode="after")
    def _checked(self) -> RoleSettings:
        if self.base_url is not None:
            checked_url(self.base_url)
        if self.player_kind.is_named and not self.model:
            raise ValueError(f"the model is missing; use one of: {FORMS}")
        if self.args and self.kind != "vllm":
            raise ValueError("args are flags of a vLLM server and need kind: vllm")
        if (self.price_in is None) != (self.price_out is None):
            raise ValueError("set both price_in and price_out, or neither")
        return self

    @property
    def player_kind(self) -> PlayerKind:
        """The behaviour of this kind of player."""
        return KINDS[self.kind]

    def sampling(self, role: str, seed: int | None, samples: int = 1) -> Sampling:
        """Its sampling in `role`. A judge with several samples uses temperature 1."""
        temperature, reply = REPLY[role]
        if role in PANELS and samples > 1:
            temperature = 1.0
        usual = {"temperature": temperature, "max_tokens": reply}
        return Sampling.first_of({"seed": seed}, vars(self), usual)

    def written(self) -> str:
        """The settings in short form, for messages and tables."""
        return self.player_kind.written(self)


Coach = Literal["symbolic", "terse", "judge", "raw", "none"] | RoleSettings
"""Source of feedback: the task's rules with or without remarks on the draft, the judge's model, the
judge's words, none, or a player."""


class TaskPlayers(Settings):
    """Players of one task; for missing roles, the players of all tasks apply."""

    partner: RoleSettings | None = None
    environment: RoleSettings | None = None
    judge: tuple[RoleSettings, ...] = ()
    auditor: tuple[RoleSettings, ...] = ()
    coach: Coach | None = None

    def named(self, role: str) -> Any:
        """The value of `role`; None if not set."""
        return getattr(self, role, None) or None


def parse_spec(text: str) -> dict[str, Any]:
    """Parse `endpoint:MODEL@URL#KEY` and the other forms; ValueError for anything else."""
    found = parse_kind(text.strip())
    if found is None:
        shown = "(a secret, not shown)" if is_secret(text.strip()) else f"'{text}'"
        raise ValueError(f"{shown} is not a player; use one of: {FORMS}")
    kind, rest = found
    try:
        return {"kind": kind.name, **(kind.parse(rest) if kind.is_named else {})}
    except ValueError as error:
        raise ValueError(f"{error}; use one of: {FORMS}") from None


Book = Mapping[str, Mapping[str, Any]]
"""Name → the settings of a model."""


class EndpointsFile(Settings):
    """Contents of an endpoints file, before names are resolved."""

    endpoints: dict[str, dict[str, Any]] = Field(default_factory=dict)
    roles: dict[str, Any] = Field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)


def player_entry(entry: Any, book: Book, words: Sequence[str] = ()) -> Any:
    """The settings of a role. A name, as in `nano` or `{use: nano, temperature: 0}`, is replaced
    with its settings in `book`.

    ValueError for an unknown name; `words` are other valid values that the error may suggest.
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
        hint = near if book else f"{near} Use one of: {FORMS}.".lstrip()
        shown = "(a secret, not shown)" if is_secret(entry) else f"'{entry}'"
        raise ValueError(f"no endpoint is named {shown}. {hint}")
    return dict(book[entry])


def players_by_name(raw: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The settings `raw`, with names replaced for the roles `names` and in `task_players`."""
    file = _opened(raw.get("endpoints"))
    # One file serves evaluation and training, so a coach is allowed even where none is used.
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
    """Task → its own players from an endpoints file; empty without one."""
    read = _opened(file)
    try:
        return {
            task: TaskPlayers.model_validate(_roles_looked_up(roles, read.endpoints))
            for task, roles in read.tasks.items()
        }
    except ValueError as error:
        raise ConfigError(
            f"The endpoints file '{file}' has an invalid player under 'tasks:'.",
            _problem(error),
            f"Under 'tasks:' write TASK: {{judge: PLAYER}}, where PLAYER is one of: {FORMS}.",
        ) from error


def endpoint_named(file: Any, name: Any) -> dict[str, Any]:
    """The settings of the endpoint `name` in an endpoints file; empty if it has none."""
    entry = dict(_opened(file).endpoints.get(str(name), {}))
    if (kind := entry.pop("kind", "endpoint")) != "endpoint":
        raise ValueError(f"'{name}' in --endpoints is a {kind} player, not a model on a server")
    return entry


def _problem(error: ValueError) -> str:
    """The problem without the value itself, which may be a misplaced key."""
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
    # The command that named the file has already checked whether to trust it.
    read = EndpointsFile.load(Path(str(file)), env={}, trust=True)
    _refuse_unknown(file, read.roles, REPLY)
    for roles in read.tasks.values():
        _refuse_unknown(file, roles, TaskPlayers.model_fields)
    return read


def _refuse_unknown(file: Any, roles: Iterable[str], known_roles: Iterable[str]) -> None:
    for role in roles:
        if role not in known_roles:
            raise ConfigError(
                f"The endpoints file '{file}' sets an unknown role '{role}'.",
                "No command uses that player.",
                did_you_mean(role, known_roles),
            )
