"""Run folders: everything that one command produced, from which it can be resumed.

    config.yaml, environment.json    the resolved configuration; the command, versions and starts
    episodes.jsonl, metrics.jsonl    one Record a line, one step a line
    ledger.sqlite, checkpoints/      every model call; step_000050/, …
    summary.json, report/            the final numbers; pages and figures

A folder belongs to one command and one configuration: the same pair resumes it, any other is
rejected with a list of the differences. Files are append-only or replaced atomically.
Secrets are never written. A new folder gets a seal in `environment.json`: an HMAC of the command,
`config.yaml` and the path of the tasks file, with a key in the user's state folder. The seal does
not cover code inside the folder."""

from __future__ import annotations

import hashlib
import hmac
import importlib.metadata
import json
import os
import platform
import re
import secrets
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from soulkit.errors import ConfigError, RunError
from soulkit.parse import ParseError, parse_json, parse_yaml, read_limited
from soulkit.runs.jsonl import form_of, write_aside, write_json
from soulkit.version import __version__

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
BEGUN = "as at the start of this run"
"""Why a resumed run has a setting that is otherwise chosen by the machine."""
PACKAGES = (
    *("torch", "transformers", "peft", "tokenizers", "vllm", "openai", "huggingface-hub"),
    *("datasets", "pyarrow", "numpy", "pydantic", "jinja2"),
)

_SECRET_WORDS = {"key", "apikey", "token", "secret", "password", "passwd", "authorization"}
_SECRET_VALUE = re.compile(
    r"^(?:Bearer\s+\S+|(?:sk|rk|pk)-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,})$"
)
_CREDENTIAL_URL = re.compile(r"[a-z][\w+.-]{0,30}://[^/\s@]+@", re.IGNORECASE)
_VARIABLE_NAME = re.compile(r"^[A-Za-z_]\w*$", re.ASCII)
_RANDOM_WORD = re.compile(r"(?<![A-Za-z0-9])(?=[A-Za-z]*[0-9])[A-Za-z0-9]{16,}")
"""Looks like a key and not like a variable name: `gsk_4f09aB17cD22eF93`."""

STATE = "SOULKIT_STATE"
"""Environment variable with the path of the state folder."""
KEY = "key"
_KEY_BYTES = 32
_SEAL_VERSION = "soulkit run 1"


@dataclass(frozen=True, slots=True)
class Run:
    """An open run folder of one command. Create it with `Run.open`."""

    path: Path
    command: str
    resumed: bool
    """Whether the folder already existed with the same command and configuration."""
    created: bool = False
    """Whether the folder contained no run before."""

    @property
    def episodes(self) -> Path:
        return self.path / "episodes.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger_path(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @classmethod
    def open(
        cls,
        path: Path,
        command: str,
        config: Mapping[str, Any],
        *,
        sealed: bool = True,
        replacing: bool = False,
    ) -> Run:
        """Create the run folder `path`, or resume it if `command` and `config` are the same.

        A new folder is sealed as the user's own unless `sealed` is False (foreign settings); a
        resumed one keeps its seal. With `replacing`, an existing run gets this configuration and
        keeps its other files.

        RunError if the folder belongs to another command or configuration, or is not a run.
        ConfigError if `config` contains a secret.
        """
        path, plain = Path(path), plain_config(config)
        refuse_secrets(plain)
        there = is_run(path)
        resumed = there and not replacing
        if resumed:
            _same_run(path, command, plain)
        elif not there:
            refuse_other_files(path)
            path.mkdir(parents=True, exist_ok=True)
        text = _yaml_text(plain).encode()
        seal = seal_of(path, command, text, plain) if sealed and not resumed else ""
        _note_environment(path, command, resumed, seal)
        if not resumed:  # last, because config.yaml makes the folder a run
            write_aside(path / CONFIG, text)
        return cls(path=path, command=command, resumed=resumed, created=not there)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, replacing an earlier one."""
        write_json(self.summary_path, summary)


def is_run(path: Path) -> bool:
    """Whether `path` is a complete run folder."""
    return (path / CONFIG).is_file() and (path / ENVIRONMENT).is_file()


def read_config(path: Path) -> dict[str, Any]:
    """The resolved configuration of the run in folder `path`; RunError if there is none."""
    return parsed_config(path, config_bytes(path))


def config_bytes(path: Path) -> bytes:
    """The bytes of `config.yaml` in folder `path`; RunError if there is none."""
    try:
        return read_limited(path / CONFIG)
    except (OSError, ParseError) as error:
        raise _no_run(path, str(error)) from error


def parsed_config(path: Path, text: bytes) -> dict[str, Any]:
    """Parse `text`, the bytes of `config.yaml` in folder `path`; RunError if it is invalid."""
    try:
        loaded = parse_yaml(text)
    except ParseError as error:
        raise _no_run(path, str(error)) from error
    if not isinstance(loaded, dict):
        raise _no_run(path, f"{CONFIG} contains no settings")
    return loaded


def read_environment(path: Path) -> dict[str, Any]:
    """The contents of `environment.json` in folder `path`; RunError if there is none."""
    try:
        loaded = parse_json(read_limited(path / ENVIRONMENT))
    except (OSError, ParseError) as error:
        raise _no_run(path, str(error)) from error
    if not isinstance(loaded, dict):
        raise _no_run(path, f"{ENVIRONMENT} is not a JSON object")
    starts = loaded.get("resumed", [])
    if not isinstance(starts, list) or not all(isinstance(one, dict) for one in starts):
        raise _no_run(path, f"`resumed` in {ENVIRONMENT} is not a list of starts")
    return loaded


def change_settings(run: Run, config: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    """Change the configuration of an open run and record what `changed` in its newest start.

    The seal is renewed only if it was valid: changing one setting of a foreign run does not make
    its other settings trusted."""
    text, noted = _yaml_text(config).encode(), read_environment(run.path)
    old = config_bytes(run.path)
    if seal_fits(noted.get("seal"), run.path, run.command, old, parsed_config(run.path, old)):
        noted["seal"] = seal_of(run.path, run.command, text, config)
        write_json(run.path / ENVIRONMENT, noted)
    note_start(run.path, {"changed": dict(changed)})
    write_aside(run.path / CONFIG, text)


def default_run_path(command: str, tasks: Iterable[str], root: Path = Path("runs")) -> Path:
    """A new folder name: `runs/<date>-<time>-<command>-<tasks>`, with a number appended if that
    folder exists."""
    names = list(tasks)
    label = "+".join(names[:3]) + (f"+{len(names) - 3}" if len(names) > 3 else "")
    words = [datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"), command, label]
    stem = re.sub(r"[^\w.+-]+", "-", "-".join(w for w in words if w)).strip("-.")[:120]
    path, number = root / stem, 2
    while path.exists():
        path, number = root / f"{stem}-{number}", number + 1
    return path


# --- configuration --------------------------------------------------------------------------------


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` as plain JSON values; ValueError for a value that cannot be converted."""
    plain: dict[str, Any] = form_of(dict).dump_python(dict(config), mode="json")
    return plain


def refuse_secrets(config: Mapping[str, Any]) -> None:
    """ConfigError if a value of `config` looks like a key, token or password."""
    for where, value in _flat(config).items():
        if isinstance(value, str) and value and _looks_secret(where, value):
            raise ConfigError(
                f"The setting '{where}' seems to contain a secret.",
                "Settings are stored in the run folder, where others can read them.",
                "Put the secret into an environment variable and set the variable's name in a "
                "setting that ends in _env, such as api_key_env: OPENAI_API_KEY.",
            )


def is_secret(value: str) -> bool:
    """Whether a string looks like a key, or like an address with a user name or password."""
    return bool(_SECRET_VALUE.match(value) or _CREDENTIAL_URL.search(value))


def _looks_secret(where: str, value: str) -> bool:
    if is_secret(value):
        return True
    name = re.sub(r"\[\d+\]", "", where).rsplit(".", 1)[-1].lower()
    words = name.replace("-", "_").split("_")
    if re.search(r"(?:^|\.)headers\.", where):  # header → name of the variable with its value
        return not _VARIABLE_NAME.match(value) or bool(_RANDOM_WORD.search(value))
    if words[-1] == "env":
        name_like = _VARIABLE_NAME.match(value) and not _RANDOM_WORD.search(value)
        return not name_like and bool(_SECRET_WORDS & set(words))
    # The last word decides: `client_secret` is a secret, `secret_garden` is not.
    return words[-1] in _SECRET_WORDS


def _flat(value: Any, where: str = "") -> dict[str, Any]:
    """Nested settings as `a.b[0]` → value; empty collections are kept."""
    if isinstance(value, Mapping) and value:
        parts = [_flat(v, f"{where}.{k}" if where else str(k)) for k, v in value.items()]
    elif isinstance(value, list) and value:
        parts = [_flat(v, f"{where}[{i}]") for i, v in enumerate(value)]
    else:
        return {where: value}
    return {key: leaf for part in parts for key, leaf in part.items()}


def _yaml_text(config: Mapping[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(
        dict(config), sort_keys=False, allow_unicode=True, default_flow_style=False, width=100
    )
    return text


# --- owner of a folder ----------------------------------------------------------------------------


CHANGES = 8
"""Maximum number of changed settings in an error."""


ADDED = {"quantize": "none", "actor_kind": "endpoint", "system_prompt": None,
         "prompt_mode": "before"}  # fmt: skip
"""Settings that runs of earlier versions do not record, with the values that they had."""
SWITCHED = {False: ("off", "auto"), True: ("on", "auto")}
"""What a recorded switch means if the setting is a choice now; auto keeps what the run has."""


def same_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a plain configuration means the same as a recorded one."""
    return not _changes(ADDED | _flat(old), ADDED | _flat(new))


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Names of the flat settings that differ."""
    pairs = {key: (old.get(key, _UNSET), new.get(key, _UNSET)) for key in {**old, **new}}
    return [
        key for key, (a, b) in pairs.items()
        if a != b and not (isinstance(a, bool) and b in SWITCHED[a])
    ]  # fmt: skip


def _same_run(path: Path, command: str, config: Mapping[str, Any]) -> None:
    before = str(read_environment(path).get("command", ""))
    if before != command:
        raise RunError(
            f"{path} belongs to another command: 'soul {before}', not 'soul {command}'.",
            "One folder cannot contain the results of two commands.",
            "Choose another folder with --out.",
        )
    old, new = ADDED | _flat(read_config(path)), ADDED | _flat(config)
    if keys := _changes(old, new):
        # An added player is a dozen settings: show changed settings first, and among them models.
        keys.sort(key=lambda k: (k not in old or k not in new, not k.endswith(".model")))
        changes = [f"{k}: {_shown(old, k)} -> {_shown(new, k)}" for k in keys[:CHANGES]]
        changes += [f"and {len(keys) - CHANGES} more"] if len(keys) > CHANGES else []
        raise RunError(
            f"{path} was started with different settings: {'; '.join(changes)}.",
            "The results in the folder were made with the old values.",
            "Use the old values to resume, or choose another folder with --out.",
        )


_UNSET = object()


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False)[:80] if key in values else "(unset)"


def refuse_other_files(path: Path) -> None:
    """RunError if `path` is a file, or a folder with files of something else."""
    if path.exists() and not path.is_dir():
        raise _not_ours(path, "it is a file")
    if path.is_dir() and any(not _is_leftover(p) for p in path.iterdir()):
        raise _not_ours(path, "it is not empty and not a complete soulkit run")


def _is_leftover(path: Path) -> bool:
    """Whether it is a file of a start that was killed before config.yaml was written."""
    return path.name == ENVIRONMENT or (path.name.startswith(".") and path.name.endswith(".tmp"))


def _not_ours(path: Path, detail: str) -> RunError:
    return RunError(
        f"{path} cannot be used as a run folder: {detail}.",
        "Writing to it could destroy other files.",
        "Choose a new or empty folder with --out.",
    )


def _no_run(path: Path, detail: str) -> RunError:
    return RunError(
        f"{path} is not a soulkit run ({detail}).",
        f"A run folder contains {CONFIG} and {ENVIRONMENT}.",
        "Give the folder that 'soul eval' or 'soul train' printed.",
    )


# --- environment ----------------------------------------------------------------------------------


def run_environment() -> dict[str, Any]:
    """Versions and machine, without importing packages. No paths, host names or user names."""
    return {
        "soulkit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": _versions(),
        "commit": _commit(),
    }


@cache
def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@cache
def _commit() -> str | None:
    """The git commit of the current folder, with `+` if there are uncommitted changes; cached."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+" if head and _git("status", "--porcelain") else "") if head else None
    except (OSError, subprocess.TimeoutExpired):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, timeout=5, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def note_start(path: Path, facts: Mapping[str, Any]) -> None:
    """Add `facts` to the newest start in `environment.json` of the run in folder `path`.

    RunError if it cannot be read.
    """
    noted = read_environment(path)
    starts = [noted, *noted.get("resumed", [])]
    starts[-1].update(facts)
    write_json(path / ENVIRONMENT, noted)


def latest_note(path: Path | None, name: str) -> Any:
    """The newest value of `name` that `note_start` has recorded; None for a new run."""
    if path is None or not is_run(path):
        return None
    try:
        noted = read_environment(path)
    except RunError:  # reported when the run is opened
        return None
    starts = [noted, *noted.get("resumed", [])]
    values = [one[name] for one in starts if one.get(name) is not None]
    return values[-1] if values else None


def _note_environment(path: Path, command: str, resumed: bool, seal: str) -> None:
    now = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        **run_environment(),
    }
    if not resumed:
        signed = {"seal": seal} if seal else {}
        write_json(path / ENVIRONMENT, {"command": command, **signed, **now, "resumed": []})
        return
    noted = read_environment(path)
    noted["resumed"] = [*noted.get("resumed", []), now]
    write_json(path / ENVIRONMENT, noted)


# --- seals ----------------------------------------------------------------------------------------


def seal_of(folder: Path, command: str, config: bytes, settings: Mapping[str, Any]) -> str:
    """The seal of a run's configuration in hex; empty if none can be made.

    `config` is the text of `config.yaml`, and `settings` its parsed contents.
    """
    content = _sealed_content(folder, command, config, settings)
    if content is None:
        return ""
    try:
        return _digest(_key(), content)
    except OSError:  # see `no_seal_reason`
        return ""


def seal_fits(
    seal: object, folder: Path, command: str, config: bytes, settings: Mapping[str, Any]
) -> bool:
    """Whether this user made `seal` for exactly these contents."""
    content = _sealed_content(folder, command, config, settings)
    if content is None or not isinstance(seal, str):
        return False
    try:
        right = _digest(_existing_key(), content)
    except OSError:  # without the key no seal can be checked
        return False
    return hmac.compare_digest(right.encode(), seal.encode("utf-8", "replace"))


def no_seal_reason() -> str:
    """Why no seal can be made here; empty if one can."""
    try:
        _key()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _digest(key: bytes, content: bytes) -> str:
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def _sealed_content(
    folder: Path, command: str, config: bytes, settings: Mapping[str, Any]
) -> bytes | None:
    """The content to seal; None if it includes code that a seal does not cover."""
    code = settings.get("tasks_file")
    if code is not None:
        try:
            place = Path(code).resolve()
            inside = place.is_relative_to(folder.resolve())
        except (OSError, RuntimeError, TypeError, ValueError):  # not a path, or circular links
            return None
        if inside:
            return None
        code = str(place)
    return json.dumps([_SEAL_VERSION, command, hashlib.sha256(config).hexdigest(), code]).encode()


def state_folder() -> Path:
    """The folder of this user's key; OSError if there is none.

    Relative paths are rejected, because they could point into a folder with foreign files.
    """
    state, base = os.environ.get(STATE), os.environ.get("XDG_STATE_HOME", "")
    if state and not os.path.isabs(state):
        raise OSError(f"{STATE} is not an absolute path")
    if state:
        return Path(state)
    if os.path.isabs(base):
        return Path(base) / "soulkit"
    try:
        return Path.home() / ".local" / "state" / "soulkit"
    except RuntimeError as error:
        raise OSError("there is no home folder") from error


def _key() -> bytes:
    try:
        return _existing_key()
    except FileNotFoundError:
        _make_key(state_folder())
        return _existing_key()


def _existing_key() -> bytes:
    """The key; OSError if there is none, or other users own it or can read it."""
    # Do not follow links or block on a pipe.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with os.fdopen(os.open(state_folder() / KEY, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"'{file.name}' is not a regular file")
        if hasattr(os, "geteuid") and (
            status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077
        ):
            raise OSError("the key belongs to another user, or other users can read it")
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        raise OSError("the key is damaged")
    return key


def _make_key(folder: Path) -> None:
    """Create a key atomically; if two processes do so at once, the first one wins."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=folder, prefix=".key.")  # readable only by the user
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.link(aside, folder / KEY)
    except FileExistsError:
        return
    finally:
        os.unlink(aside)
