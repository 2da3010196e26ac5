"""Trust in settings files: a config of someone else's run takes effect only with `--trust`.

A run's config names addresses, environment variables whose values are sent as keys, code, and
files. In a folder from the Hub or a shared disk they may be malicious. A config with a valid seal
(runs/folder.py) is trusted. For any other config, the command lists everything it would reach and
stops; with `--trust` it continues, for this command only, and the new run is not sealed. Options
and settings files outside run folders are the user's own. Endpoints files and tasks files are
opened to list what they would reach.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soulkit.errors import RunError, UserError
from soulkit.parse import ParseError, parse_yaml, read_limited
from soulkit.runs.folder import (
    CONFIG,
    config_bytes,
    is_run,
    parsed_config,
    read_environment,
    seal_fits,
)
from soulkit.text import one_line

RUN_FILES = (
    *("environment.json", "episodes.jsonl", "metrics.jsonl", "summary.json", "ledger.sqlite"),
    *("judgements.jsonl", "episodes.jsonl.gz"),
)
PLAYERS = frozenset((
    "partner", "environment", "judge", "auditor", "coach", "blind_reader", "drafter", "filter",
    "dev_judge",
))  # fmt: skip
GROUPS = frozenset((
    "data", "eval_data", "held_out", "experts", "roles", "endpoints", "option", "headers",
    "teacher_adapters", "vllm_arg", "args",
))  # fmt: skip
"""Settings whose members are all of one kind."""
ROWS = ("data", "eval_data", "held_out")
"""Settings that name files with rows, or a number of rows to generate."""
FILES = frozenset((
    "adapter", "teacher_model", "teacher_adapter", "teacher_adapters", "prices", "ledger_file",
    "experts", "corpora", "validation", "path", "gates", "system_prompt",
))  # fmt: skip
CODE = frozenset((
    "vllm_python", "vllm_arg", "args", "module", "reference", "rows", "binder", "synth", "importer",
    "builder", "drafting", "audit", "scripted_partner",
))  # fmt: skip
"""Keys in entries of a tasks file."""
ABOUT = frozenset({"url", "citation", "licence"})
"""Keys in entries of a tasks file with addresses for readers; nothing is sent to them."""
DEFAULT_KEY = "OPENAI_API_KEY"
"""The default variable with a player's key."""
SERVERS_KEY = "VLLM_API_KEY"
"""Variable with the key of attached vLLM servers; vLLM itself reads it, too."""
DEFAULT_SERVER = "OpenAI's own address, or that in OPENAI_BASE_URL"
OPENED = 1_000_000
"""Maximum bytes of a named file that are read."""
SHOWN = 40
"""Maximum number of items per kind; runs written by soulkit never have more."""


class TrustError(UserError):
    """Settings are not known to be the user's own, and --trust was not given."""


# -- what settings reach -------------------------------------------------------------------------


@dataclass
class Reach:
    """The addresses, variables, code and files outside its folder that settings use."""

    addresses: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    """NAMES of environment variables; their values are never read here."""
    code: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def words(self) -> str:
        """Everything on one line, safe for a terminal; empty if nothing is reached."""
        parts = {
            "addresses": self.addresses,
            "variables whose values go there as keys": self.keys,
            "code": self.code,
            "files": self.files,
        }
        return "; ".join(f"{what}: {_listed(names)}" for what, names in parts.items() if names)


def _listed(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = [f"and {len(distinct) - SHOWN} more"] if len(distinct) > SHOWN else []
    return ", ".join([*(_quoted(name) for name in distinct[:SHOWN]), *more])


def _quoted(name: str) -> str:
    # Look-alikes of letters would make one host pass for another.
    text = name if "://" not in name else name.encode("ascii", "backslashreplace").decode()
    return text if name == DEFAULT_SERVER else f"'{one_line(text, 300)}'"


def reach_of(settings: Mapping[str, Any]) -> Reach:
    """What the settings of an evaluation or training reach."""
    reach = Reach()
    _add_actor(reach, settings)
    _add_mapping(reach, "", settings, set())
    return reach


def _add_actor(reach: Reach, settings: Mapping[str, Any]) -> None:
    """What the model under test reaches."""
    kind, address = settings.get("kind"), settings.get("base_url")
    actor = settings.get("actor_kind", "endpoint")
    served = kind == "api" and actor == "endpoint"
    if served and "base_url" in settings and address is None:
        reach.addresses.append(DEFAULT_SERVER)
    if actor == "function":
        reach.code.append(_text(settings.get("model")))
    elif not served and address is None and settings.get("model") is not None:
        reach.files.append(_text(settings["model"]))


def _add_mapping(
    reach: Reach, under: str, settings: Mapping[Any, Any], seen: set[tuple[int, str]]
) -> None:
    _add_omitted(reach, under, settings)
    for name, value in settings.items():
        _add(reach, under if under in GROUPS else _text(name), value, seen)


def _add_omitted(reach: Reach, under: str, player: Mapping[Any, Any]) -> None:
    """What a player reaches by default, and the file it is made from."""
    kind = player.get("kind", "endpoint")
    server, key = player.get("base_url"), player.get("api_key_env")
    if server is not None and key is None:
        reach.keys.append(DEFAULT_KEY)
    if under not in {*PLAYERS, "roles", "endpoints"} or "model" not in player:
        return
    if kind in ("local", "vllm", "scripted", "function"):
        place = reach.code if kind == "function" else reach.files
        place.append(_text(player["model"]))
    elif kind != "actor" and server is None and "use" not in player:
        reach.addresses.append(DEFAULT_SERVER)
        reach.keys += [] if key is not None else [DEFAULT_KEY]


def _add(reach: Reach, name: str, value: Any, seen: set[tuple[int, str]]) -> None:
    if isinstance(value, Mapping | list | tuple | set):
        if (id(value), name) in seen:  # an alias of what is listed already, or of itself
            return
        seen.add((id(value), name))
        if isinstance(value, Mapping):
            _add_mapping(reach, name, value, seen)
        else:
            for one in value:
                _add(reach, name, one, seen)
    elif isinstance(value, str | bytes) and value:
        _add_text(reach, name, _text(value))


def _text(value: object) -> str:
    """A YAML value as text; binary values are decoded."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _add_text(reach: Reach, name: str, value: str) -> None:
    if name in ("tasks_file", "endpoints"):
        (reach.code if name == "tasks_file" else reach.files).append(value)
        for part in _contents(value):
            _add_mapping(reach, "", part, set())
    elif name.endswith("_env") or name == "headers":
        reach.keys.append(value)
    elif name in PLAYERS or name == "roles":
        _add_player(reach, value)
    elif name in CODE:
        reach.code.append(value)
    elif name == "experts" and value.startswith("endpoint:"):
        _add_player(reach, value)
    elif name in ROWS:
        reach.files += [] if value.startswith("synth:") else [value]
    elif name == "engine" and "://" in value:
        reach.addresses.append(value.partition("@")[2])
        reach.keys.append(SERVERS_KEY)
    elif name == "base_url" or ("://" in value and name not in ABOUT):
        reach.addresses.append(value)
    elif name in FILES:
        reach.files.append(value)
    elif name == "option":  # a task's option may be a path
        is_place = any(sign in value for sign in "/\\.~") or Path(value).exists()
        code = re.fullmatch(r"[\w./\\~-]+:\w+", value) is not None  # FILE.py:NAME
        reach.code += [value] if code else []
        reach.files += [value] if is_place and not code else []
    elif name == "track" and value != "none":
        reach.addresses.append(f"track: {value}")


def _add_player(reach: Reach, text: str) -> None:
    """What a player in text form reaches: `endpoint:MODEL@URL#KEY`, `scripted:FILE`, a name."""
    kind, _, rest = text.strip().partition(":")
    if kind in ("local", "vllm", "scripted", "function"):
        (reach.code if kind == "function" else reach.files).append(rest)
    elif kind == "endpoint":
        address, _, secrets = rest.partition("#")
        reach.addresses.append(address if "://" in address else DEFAULT_SERVER)
        key, *headers = secrets.split(",")
        reach.keys += [key.rpartition("=")[2] or DEFAULT_KEY]
        reach.keys += [header.rpartition("=")[2] for header in headers]


def _contents(file: str) -> Iterator[Mapping[Any, Any]]:
    """The content of an endpoints or tasks file, if it is readable."""
    try:
        path = Path(file)
        if not path.is_file() or path.stat().st_size > OPENED:
            return
        loaded = parse_yaml(read_limited(path))
    except (OSError, ParseError):  # then its name alone is shown
        return
    if isinstance(loaded, Mapping):
        yield loaded


# -- whose they are ------------------------------------------------------------------------------


def is_own(folder: Path, text: bytes, settings: Mapping[str, Any]) -> bool:
    """Whether `text`, the `config.yaml` of `folder`, is unchanged since a run of this user wrote
    it.

    `settings` is its parsed content.
    """
    try:
        noted = read_environment(folder)
    except RunError:
        return False
    return seal_fits(noted.get("seal"), folder, str(noted.get("command", "")), text, settings)


def is_foreign(
    file: Path, text: bytes, settings: Mapping[str, Any], fields: Collection[str]
) -> bool:
    """Whether a settings file belongs to a run and is not known to be the user's own.

    A file in a run folder belongs to a run, and so does a likely copy: one that names more than
    half of the settings in `fields`.
    """
    copied = len(fields) >= 20 and 2 * len(set(settings) & set(fields)) > len(fields)
    configs = [place for place in _places(file) if place.name == CONFIG]
    beside = any((place.parent / name).exists() for place in configs for name in RUN_FILES)
    if not (copied or beside or in_run(file)):
        return False
    return not any(is_own(config.parent, text, settings) for config in configs)


def in_run(file: Path) -> bool:
    """Whether a file is in a run folder, at any depth."""
    return any(is_run(above) for place in _places(file) for above in place.parents)


def _places(file: Path) -> tuple[Path, Path]:
    return file.absolute(), file.resolve()


def acting_settings(settings: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a file that `over` does not replace.

    Groups merge. Settings combined with an address or model of the file are included.
    """
    acting = {
        name: value for name, value in settings.items()
        if name not in over or isinstance(over[name], Mapping)
    }  # fmt: skip
    context = {"kind": "model", "api_key_env": "base_url", "headers": "base_url"}
    shared = {name for name, partner in context.items() if name in over and partner in acting}
    for name in shared:
        groups = isinstance(over[name], Mapping) and isinstance(acting.get(name), Mapping)
        acting[name] = {**acting[name], **over[name]} if groups else over[name]
    return acting


def inside_runs(settings: Mapping[str, Any]) -> dict[str, Path]:
    """The endpoints and tasks files in `settings` that are in a run folder; no seal covers them."""
    named = [name for name in ("endpoints", "tasks_file") if settings.get(name)]
    paths = {name: Path(str(settings[name])) for name in named}
    return {name: path for name, path in paths.items() if in_run(path)}


def refuse_foreign(file: Path, settings: Mapping[str, Any]) -> None:
    """Raise TrustError with everything that foreign settings reach; return if they reach
    nothing."""
    words = reach_of(settings).words()
    if words:
        raise TrustError(
            f"The settings in '{file}' are not known to be yours.",
            "They come from another user or machine, were changed, or have no seal. They would "
            f"reach {words}.",
            "Read the file. If you trust all of this, run the same command again with --trust.",
        )


def run_settings(folder: Path) -> tuple[dict[str, Any], bool]:
    """The settings of the run in `folder`, and whether they are known to be the user's own.

    Both come from one reading of the file. RunError if `folder` is not a run.
    """
    text = config_bytes(folder)
    settings = parsed_config(folder, text)
    return settings, is_own(folder, text, settings)
