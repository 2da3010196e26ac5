"""Settings: validated strictly and merged in a fixed order.

    defaults < file < environment (SOULKIT_*) < flags

An unknown key is an error that suggests the nearest known key; all problems are reported at once,
each with its origin. Nested settings merge key by key; in the environment `SOULKIT_LORA__R` means
`lora.r`. Other SOULKIT_ variables are ignored unless they look like a typo of a setting. A
settings file written by a run takes effect only with a valid seal or with `trust` (trust.py).

A setting is declared once, as a field made by `setting`; the command line (cli/options.py) and the
reference pages are made from it. Importing this module never imports torch.
"""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from soulkit import trust as trusting
from soulkit.errors import ConfigError, did_you_mean
from soulkit.option_texts import given_twice, row_sources, settings_from_texts, text_form
from soulkit.parse import ParseError, parse_yaml, read_limited

PREFIX = "SOULKIT_"
RESERVED = frozenset({"DATA", "DEBUG", "REQUIRE", "STATE", "TEST_DATA", "VECTORS"})
"""SOULKIT_ variables that are not settings."""

ASKING = ("plays", "check")
"""Traits of the commands that call other models than the actor."""
_SECRETIVE = re.compile(r"key|token|secret|password|auth", re.IGNORECASE)


OPTION = "option"
"""The key in a field's `json_schema_extra` with the facts about its option."""


def setting(
    default: Any = ..., *, help: str, flag: str | None = "", section: str = "Run",
    only: Collection[str] = (), unset: str = "", metavar: str | None = None,
    complete: str | None = None, factory: Any = None, **limits: Any,
) -> Any:  # fmt: skip
    """A field of Settings with its option and help.

    `flag` is the option's flag: empty for a flag made from the name, None if only --set NAME=VALUE
    can set it. `only` lists the commands, methods or traits that the setting applies to; empty
    means all. `unset` describes the value None, `complete` names the shell completion.
    """
    facts: dict[str, Any] = {
        "flag": flag, "section": section, "only": sorted(only), "unset": unset, "metavar": metavar,
        "complete": complete,
    }  # fmt: skip
    start = {"default_factory": factory} if factory is not None else {"default": default}
    return Field(**start, description=help, json_schema_extra={OPTION: facts}, **limits)


def section(title: str, *, only: Collection[str] = ()) -> Callable[..., Any]:
    """`setting` for fields of one help section and the same `only`."""
    return partial(setting, section=title, only=only)


class MissingSetting(ValueError):
    """Raised by a validator for a missing setting that another one could replace.

    Pydantic's own `missing` covers only required settings.
    """

    def __init__(self, name: str, message: str, why: str, fix: str) -> None:
        super().__init__(message)
        self.name, self.why, self.fix = name, why, fix


class MissingSettings(ConfigError):
    """Some settings are missing and nothing else is wrong."""

    names: tuple[str, ...] = ()
    """The missing settings."""


class Settings(BaseModel):
    """Base class of a command's settings: frozen, unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, defer_build=True
    )
    WHOLE: ClassVar[frozenset[str]] = frozenset()
    """Mappings that a later layer replaces as a whole instead of merging."""
    _foreign: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _whole_numbers(self) -> Self:
        for name, value in self:
            if isinstance(value, int) and abs(value) >= 1 << 64:
                raise ValueError(f"{name}: the number is too large")
        return self

    @property
    def foreign(self) -> bool:
        """Whether some settings come from a run's file that is not known to be the user's own."""
        return self._foreign

    @classmethod
    def load(
        cls,
        file: Path | None = None,
        env: Mapping[str, str] | None = None,
        flags: Mapping[str, Any] | None = None,
        *,
        trust: bool = False,
        unread: Collection[str] = (),
    ) -> Self:
        """Merge file, environment and flags over the defaults.

        `file` is YAML (or JSON); `env` defaults to os.environ; a flag of None counts as not given;
        a dotted flag name means a nested setting. ConfigError lists all problems. TrustError for a
        run's file that is not known to be the user's own, unless `trust`; `unread` lists settings
        that the caller never uses.
        """
        text = _text_of(file) if file is not None else b""
        raw = _parsed(file, text) if file is not None else {}
        from_environment = _from_environment(cls, os.environ if env is None else env)
        from_flags = _from_flags(flags or {})
        settings, keys = cls.from_file(raw, merge(from_environment, from_flags))
        layers: dict[str, dict[str, Any]] = {
            f"the file {file}": settings,
            "the environment": from_environment,
            "the command line": from_flags,
        }
        merged: dict[str, Any] = {}
        for layer in layers.values():
            under = {k: v for k, v in merged.items() if not (k in cls.WHOLE and k in layer)}
            merged = merge(under, layer)
        _refuse_unknown(cls, layers)
        over = merge(layers["the environment"], layers["the command line"])
        # Paths in the user's own file count like options: no seal covers them either.
        strays = trusting.inside_runs(merged)
        foreign = file is not None and trusting.is_foreign(file, text, raw, cls.model_fields)
        if file is not None and foreign and not trust:
            acting = trusting.acting_settings(settings, over)
            trusting.refuse_foreign(file, {k: v for k, v in acting.items() if k not in unread})
        for name, stray in strays.items():
            if not trust:
                trusting.refuse_foreign(stray, {name: str(stray)})
        try:
            loaded = cls.model_validate(merged)
        except ValidationError as error:
            raise _config_error(cls, error, layers, keys) from error
        except UnicodeEncodeError as error:
            raise ConfigError(
                "A setting is not UTF-8 text.", f"Python reports: {error}.",
                "Correct the option, the variable or the name of the file.",
            ) from error  # fmt: skip
        loaded._foreign = foreign or bool(strays)
        return loaded

    @classmethod
    def from_file(
        cls, raw: Mapping[str, Any], over: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The settings in a file, and setting → its name in the file.

        A file may use the names and the notation of the options. `over` are the layers above the
        file.
        """
        return settings_in_file(cls, raw, over)

    @classmethod
    def read_rows(
        cls, name: str, texts: Sequence[str], settings: Mapping[str, Any]
    ) -> dict[str, str]:
        """The `[TASK=]ROWS` strings of the setting `name` as task → rows; `settings` are the other
        settings."""
        return row_sources(texts, ())

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default of every optional setting, in plain JSON types."""
        optional = {n: f for n, f in cls.model_fields.items() if not f.is_required()}
        settings = cls.model_construct(**{n: f.get_default(call_default_factory=True)
                                       for n, f in optional.items()})  # fmt: skip
        return settings.model_dump(mode="json", include=set(optional))

    def resolved(self) -> dict[str, Any]:
        """Every setting with its value, in plain JSON types, as stored in a run folder."""
        return self.model_dump(mode="json")


def read_settings_file(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file; ConfigError if it is missing, not YAML or not a mapping."""
    return _parsed(file, _text_of(file))


def _text_of(file: Path) -> bytes:
    try:
        return read_limited(file)
    except (OSError, ParseError) as error:
        raise _unreadable(file, error) from error


def _parsed(file: Path, text: bytes) -> dict[str, Any]:
    try:
        loaded = parse_yaml(text)
    except ParseError as error:
        raise _unreadable(file, error) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"The config file {file} contains a {type(loaded).__name__} instead of settings.",
            "Settings are lines of the form 'name: value'.",
            "Write the settings at the top level of the file.",
        )
    for name in ("task", "tasks", "suite", "data"):  # read before the other settings are checked
        value = loaded.get(name)
        parts = value if isinstance(value, list) else [value or ""]
        if not isinstance(value, dict) and not all(isinstance(part, str) for part in parts):
            raise ConfigError(
                f"'{name}' in the config file {file} is {value!r:.60}.",
                "It names tasks or files, so it is a text, or a list or mapping of texts.",
                "Correct it; quotes make a text of any value.",
            )
    return {str(key): value for key, value in loaded.items()}


def _unreadable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"The config file {file} cannot be read: {' '.join(str(error).split())}.",
        "The run would start without its settings.",
        "Check the path and the YAML syntax.",
    )


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`under` updated with `over`: mappings merge, other values replace."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merge(below, value)
        merged[key] = value
    return merged


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {first: _nested(rest, value) if rest else value}


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    for name, value in flags.items():
        if value is not None:
            layer = merge(layer, _nested(name.split("."), value))
    return layer


# --- names and forms of options in a file ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileOption:
    """An option as it may appear in a file."""

    setting: str
    """Its dotted name."""
    flag: str
    form: str
    file: bool
    """Whether it names a file."""


@cache
def file_options(cls: type[BaseModel], under: str = "") -> dict[str, FileOption]:
    """The options of a command, by name with underscores."""
    options: dict[str, FileOption] = {}
    for name, info in cls.model_fields.items():
        facts, group = about(info), nested_settings(info.annotation)
        flag = flag_of(name, info, under) if facts else None
        if facts and flag is None and group is not None and not under:
            options |= file_options(group, name)
        if flag is not None:
            flag = flag.partition("/")[0]
            form = text_form(info.annotation, facts["metavar"])
            setting = f"{under}.{name}" if under else name
            named = facts["metavar"] == "FILE" and not form
            options[flag.lstrip("-").replace("-", "_")] = FileOption(setting, flag, form, named)
    return options


def settings_in_file(
    cls: type[Settings], raw: Mapping[str, Any], over: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """`raw` as settings in their own form, and setting → its name in `raw`."""
    options = file_options(cls)
    by_setting = {option.setting: option for option in options.values()}
    keys: dict[str, str] = {}
    settings: dict[str, Any] = {}
    rows: dict[str, list[str]] = {}
    for key, value in raw.items():
        option = _meant(cls, key, value, options, by_setting)
        name = option.setting if option else key
        if name in keys:
            raise given_twice(f"'{name}'", how=f"in the file, as '{keys[name]}' and as '{key}'")
        keys[name] = key
        texts = _texts(value) if option and option.form else []
        if option is None or not texts:
            parts = _nested(name.split("."), value) if option else {name: value}
        elif option.form == "rows":
            rows[name], parts = texts, {}
        else:
            parts = _from_flags(settings_from_texts(name, option.form, option.flag, texts))
        _refuse_both(settings, parts, keys, key)
        settings = merge(settings, parts)
    for name, texts in rows.items():
        settings[name] = cls.read_rows(name, texts, merge(settings, over))
    return settings, keys


def _meant(
    cls: type[Settings], key: str, value: Any, options: Mapping[str, FileOption],
    by_setting: Mapping[str, FileOption],
) -> FileOption | None:  # fmt: skip
    """The option that `key` stands for; None for a setting without an option and for unknown keys.
    If another setting has this name, too, a text that looks like a file name means the file.
    """
    named = options.get(key.replace("-", "_"))
    if key not in cls.model_fields or (named is not None and named.setting == key):
        return named
    is_file = isinstance(value, str) and Path(value).suffix in (".yaml", ".yml", ".json")
    return named if named is not None and named.file and is_file else by_setting.get(key)


def _texts(value: Any) -> list[str]:
    several = [value] if isinstance(value, str) else value
    plain = isinstance(several, list) and all(isinstance(one, str) for one in several)
    return several if plain else []


def _refuse_both(
    settings: Mapping[str, Any], parts: Mapping[str, Any], keys: Mapping[str, str], key: str
) -> None:
    """ConfigError if a part of a group is given twice."""
    for group, value in parts.items():
        before = settings.get(group)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            for name in before.keys() & value.keys():
                if not (isinstance(before[name], Mapping) and isinstance(value[name], Mapping)):
                    raise given_twice(f"'{group}.{name}'", how=f"in the file, once as '{key}'")
                _refuse_both({name: before[name]}, {name: value[name]}, keys, key)


# --- environment ----------------------------------------------------------------------------------


def _from_environment(cls: type[BaseModel], env: Mapping[str, str]) -> dict[str, Any]:
    variables = {
        PREFIX + path.replace(".", "__").upper(): (path, kind) for path, kind in _leaves(cls)
    }
    layer: dict[str, Any] = {}
    for variable, text in env.items():
        if not variable.startswith(PREFIX) or variable[len(PREFIX) :] in RESERVED or not text:
            continue
        if variable not in variables:
            _refuse_part(variable, variables)
            _refuse_slip(variable, variables)
            continue
        path, kind = variables[variable]
        layer = merge(layer, _nested(path.split("."), _read_variable(variable, text, kind)))
    return layer


def _leaves(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in cls.model_fields.items():
        yield prefix + name, info.annotation
        group = nested_settings(info.annotation)
        if group is not None:
            yield from _leaves(group, f"{prefix}{name}.")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if union else (kind,)


def nested_settings(kind: Any) -> type[BaseModel] | None:
    """The nested model in an annotation such as `Judge` or `Judge | None`."""
    models = [k for k in _alternatives(kind) if isinstance(k, type) and issubclass(k, BaseModel)]
    return models[0] if models else None


def _read_variable(variable: str, text: str, kind: Any) -> Any:
    """The text of a variable as a value: `[…]` and `{…}` are YAML, a list may also be `a,b,c`."""
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return parse_yaml(text)
        except ParseError as error:
            raise ConfigError(
                f"The environment variable {variable} starts like a list but is not a valid one.",
                f"It cannot be read: {error}.",
                f"Write it as [a, b] or unset it: unset {variable}",
            ) from error
    origins = {typing.get_origin(k) or k for k in _alternatives(kind)}
    if origins & {list, tuple, set, frozenset} and str not in origins:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _refuse_part(variable: str, variables: Mapping[str, Any]) -> None:
    whole, _, part = variable.partition("__")
    if part and whole in variables:
        raise ConfigError(
            f"The environment variable {variable} does not match any setting.",
            f"It would be ignored: {whole} has no part of that name, or it is a list.",
            f"Set {whole} as a whole, such as {whole}='[{{...}}]', or unset it: unset {variable}",
        )


def _refuse_slip(variable: str, variables: Mapping[str, Any]) -> None:
    near = difflib.get_close_matches(variable, variables, n=1, cutoff=0.95)
    if near:
        raise ConfigError(
            f"The environment variable {variable} is not a setting.",
            f"It would be ignored, but it looks like a typo of {near[0]}.",
            f"Rename it to {near[0]}, or unset it: unset {variable}",
        )


# --- errors ---------------------------------------------------------------------------------------


def _refuse_unknown(cls: type[BaseModel], layers: Mapping[str, Mapping[str, Any]]) -> None:
    """Runs before validation, so that a misspelled key is not also reported as missing."""
    for source, layer in layers.items():
        for path, names in _unknown(cls, layer, ""):
            hint = did_you_mean(path.rsplit(".", 1)[-1], names)
            raise ConfigError(
                f"'{path}' in {source} is not a setting.",
                "Unknown settings are refused instead of being ignored.",
                hint,
            )


def _unknown(
    cls: type[BaseModel], layer: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, list[str]]]:
    if cls.model_config.get("extra") != "forbid":
        return
    for key, value in layer.items():
        if key not in cls.model_fields:
            yield f"{prefix}{key}", [*cls.model_fields, *file_options(cls)]
            continue
        group = nested_settings(cls.model_fields[key].annotation)
        if group is not None and isinstance(value, Mapping):
            yield from _unknown(group, value, f"{prefix}{key}.")


def _config_error(
    cls: type[BaseModel], error: ValidationError, layers: Mapping[str, Mapping[str, Any]],
    keys: Mapping[str, str],
) -> ConfigError:  # fmt: skip
    items = [dict(item) for item in error.errors(include_url=False)]
    problems = [_problem(cls, item, layers, keys) for item in items]
    missing = [_missing_name(item) for item in items]
    count = "A setting is" if len(items) == 1 else f"{len(items)} settings are"
    if not all(missing):
        lacking = [f"{p} is missing" if m else p for p, m in zip(problems, missing, strict=True)]
        return ConfigError(
            f"{count} wrong: {'; '.join(lacking)}.",
            "Settings are checked before anything runs.",
            "Correct the values named above and run the command again.",
        )
    why = "Required settings have no default."
    fix = f"Add {' and '.join(problems)} on the command line or in the file of --config."
    if len(items) == 1 and (raised := _raised(items[0])):
        why, fix = raised.why, raised.fix
    made = MissingSettings(f"{count} missing: {'; '.join(problems)}.", why, fix)
    made.names = tuple(missing)
    return made


def _missing_name(item: Mapping[str, Any]) -> str:
    if item["type"] == "missing":
        return ".".join(str(part) for part in item["loc"])
    raised = _raised(item)
    return raised.name if raised else ""


def _raised(item: Mapping[str, Any]) -> MissingSetting | None:
    error = item.get("ctx", {}).get("error")
    return error if isinstance(error, MissingSetting) else None


def _problem(
    cls: type[BaseModel], item: Mapping[str, Any], layers: Mapping[str, Mapping[str, Any]],
    keys: Mapping[str, str],
) -> str:  # fmt: skip
    path = [str(part) for part in item["loc"]]
    name, flag = ".".join(path), _flag_at(cls, path)
    message = str(item["msg"]).removeprefix("Value error, ").rstrip(".")
    if not path:  # a rule about several settings names them itself
        return message
    if item["type"] == "missing":
        return flag or name
    shown = item.get("input")
    quoted = isinstance(shown, str | int | float | None) and not _SECRETIVE.search(name)
    got = f"got {shown!r:.60}, " if quoted else ""
    option = f"{flag}, " if flag else ""
    if _source(path, layers).startswith("from the file "):
        name = keys.get(name) or ".".join([keys.get(path[0], path[0]), *path[1:]])
    return f"{name}: {message} ({option}{got}{_source(path, layers)})"


def _flag_at(cls: type[BaseModel], path: list[str]) -> str:
    """The flag of a setting; empty if it has none."""
    group = cls
    for depth, part in enumerate(path):
        info = group.model_fields.get(part)
        if info is None:
            break
        if flag := flag_of(part, info, ".".join(path[:depth])):
            return flag.partition("/")[0]
        group = nested_settings(info.annotation) or group
    return ""


def about(info: Any) -> dict[str, Any]:
    """The facts that `setting` stored about a field's option; empty for other fields."""
    extra = info.json_schema_extra
    return dict(extra.get(OPTION, {})) if isinstance(extra, Mapping) else {}


def flag_of(name: str, info: Any, under: str = "") -> str | None:
    """The flag of the field `name`, such as `--thinking/--no-thinking`; None without an option."""
    flag: str | None = about(info).get("flag")
    if flag != "":
        return flag
    plain = "-".join(filter(None, (under, name))).replace("_", "-").replace(".", "-")
    switch = bool in _alternatives(info.annotation)
    return f"--{plain}/--no-{plain}" if switch else f"--{plain}"


def _source(path: list[str], layers: Mapping[str, Mapping[str, Any]]) -> str:
    for source, layer in reversed(list(layers.items())):
        node: Any = layer
        for part in path:
            if not isinstance(node, Mapping) or part not in node:
                break
            node = node[part]
        if node is not layer:
            return f"from {source}"
    return "the default"
