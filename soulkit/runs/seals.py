"""The seal that tells a run's configuration from one that somebody else wrote or changed.

    key in the user's own state folder ──▶ HMAC of (command, config.yaml, where its code lies)
                                              └─▶ `seal` in the run's environment.json

A seal fits while the bytes of `config.yaml`, the command, and the place of the tasks file (links
followed) are those that this user's own start wrote down; the run's folder may move. The *place* of
the code is sealed and not its text, because rescoring exists to apply changed code. Code inside the
run's folder is never sealed: that folder is what is handed around, and no start finds any in it.

The state folder is what SOULKIT_STATE names, else `soulkit` in XDG_STATE_HOME, else
`~/.local/state/soulkit`. Where no key can be kept (a read-only home) runs go unsealed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATE = "SOULKIT_STATE"
"""The environment variable that names the state folder."""
KEY = "key"
_BYTES = 32
_VERSION = "soulkit run 1"


def seal_of(folder: Path, command: str, config: bytes, settings: Mapping[str, Any]) -> str:
    """The seal of a run's configuration, in hex; empty when none can be made.

    `settings` is what `config`, the text of `config.yaml`, says.
    """
    content = _sealed_content(folder, command, config, settings)
    if content is None:
        return ""
    try:
        return _digest(_key(), content)
    except OSError:  # `no_seal_reason` says why
        return ""


def seal_fits(
    seal: object, folder: Path, command: str, config: bytes, settings: Mapping[str, Any]
) -> bool:
    """Whether `seal` was made of exactly this, by this user."""
    content = _sealed_content(folder, command, config, settings)
    if content is None or not isinstance(seal, str):
        return False
    try:
        right = _digest(_existing_key(), content)
    except OSError:  # without the key nothing is known to be the user's own
        return False
    return hmac.compare_digest(right.encode(), seal.encode("utf-8", "replace"))


def no_seal_reason() -> str:
    """Why no seal can be made here; empty when one can."""
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
    """None for code that no seal covers."""
    code = settings.get("tasks_file")
    if code is not None:
        try:
            place = Path(code).resolve()
            inside = place.is_relative_to(folder.resolve())
        except (OSError, RuntimeError, TypeError, ValueError):  # no path, or links in a circle
            return None
        if inside:
            return None
        code = str(place)
    return json.dumps([_VERSION, command, hashlib.sha256(config).hexdigest(), code]).encode()


# -- the key -------------------------------------------------------------------------------------


def state_folder() -> Path:
    """Where this user's key lies; OSError when there is no such place.

    A relative path would be looked up in whatever folder a stranger's files were unpacked to.
    """
    state, base = os.environ.get(STATE), os.environ.get("XDG_STATE_HOME", "")
    if state and not os.path.isabs(state):
        raise OSError(f"{STATE} is no absolute path")
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
    """OSError when there is none, or one that others can read or have put there."""
    # Neither a link to another file nor a pipe that never answers is a key.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with os.fdopen(os.open(state_folder() / KEY, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"'{file.name}' is no file")
        if hasattr(os, "geteuid") and (
            status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077
        ):
            raise OSError("the key belongs to somebody else, or others can read it")
        key = file.read(_BYTES + 1)
    if len(key) != _BYTES:
        raise OSError("the key is damaged")
    return key


def _make_key(folder: Path) -> None:
    """A new key, whole or not at all; of two processes at once the first one's stays."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=folder, prefix=".key.")  # readable by the user alone
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.link(aside, folder / KEY)
    except FileExistsError:
        return
    finally:
        os.unlink(aside)
