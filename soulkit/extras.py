"""The extra of an optional package, and the command that adds it to *this* installation.

A bare package name would install any package that the current index has under that name. So the
command names the source of this installation: the running checkout, or the folder, archive or
repository commit that the installer recorded (`direct_url.json`, PEP 610). Without such a record
the package came from an index, and the command pins the installed version.

To add an optional package: a row in EXTRAS, and its extra in `pyproject.toml`.
"""

from __future__ import annotations

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    from importlib.metadata import Distribution

EXTRAS = {
    "torch": "train",
    "transformers": "train",
    "tokenizers": "train",
    "peft": "train",
    "safetensors": "train",
    "datasets": "train",
    "vllm": "vllm",
    "sklearn": "people",
    "spacy": "privacy",
    "bitsandbytes": "nf4",
    "fastapi": "serve",
    "uvicorn": "serve",
    "llguidance": "serve",
    "ray": "ray",
    "matplotlib": "report",
    "sacrebleu": "metrics",
    "rouge_score": "metrics",
    "bpe_openai": "metrics",
    "jsonschema": "metrics",
    "jsonschema_specifications": "metrics",
    "referencing": "metrics",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""Optional package → the extra of soulkit that contains it."""

NAME = "soulkit"
HOME = Path(__file__).resolve().parent


def install_line(extra: str, home: Path = HOME) -> str:
    """The shell command that adds `extra` to the installation whose package folder is `home`."""
    pip = "pip" if find_spec("pip") is not None else "uv pip"
    if _project(home.parent):
        return f"{pip} install -e {shlex.quote(f'{home.parent}[{extra}]')}"
    installed = _distribution(home)
    if installed is None:
        return f"pip install '.[{extra}]' in a checkout of {NAME}"
    pip = "uv pip" if (installed.read_text("INSTALLER") or "").strip() == "uv" else pip
    try:
        note = json.loads(installed.read_text("direct_url.json") or "{}")
        source = _folder_or_file(note, extra) or _address(note, extra)
    except (ValueError, LookupError, TypeError, AttributeError):  # no such note as PEP 610 asks for
        source = ""
    return f"{pip} install {source or shlex.quote(f'{NAME}[{extra}]=={installed.version}')}"


def declared_requirements(home: Path = HOME) -> tuple[str, list[str], dict[str, list[str]]]:
    """(Python versions, core requirements, extra → requirements) of the installation at `home`.

    Read from the checkout's pyproject.toml, else from the installer's metadata; all empty without
    either.
    """
    if project := _project(home.parent):
        extras = project.get("optional-dependencies", {})
        return project.get("requires-python", ""), project.get("dependencies", []), extras
    installed = _distribution(home)
    if installed is None:
        return "", [], {}
    core: list[str] = []
    extras = {}
    for line in installed.requires or ():
        package, _, marker = line.partition(";")
        extra = re.search(r"""extra *== *['"]([\w-]+)['"]""", marker)
        (extras.setdefault(extra[1], []) if extra else core).append(package.strip())
    return installed.metadata["Requires-Python"] or "", core, extras


def _project(folder: Path) -> dict[str, Any]:
    import tomllib

    try:
        page = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    project = page.get("project")
    return project if isinstance(project, dict) and project.get("name") == NAME else {}


def _distribution(home: Path) -> Distribution | None:
    """The metadata installed next to the running code, not that of another copy."""
    from importlib.metadata import distributions

    return next(iter(distributions(name=NAME, path=[str(home.parent)])), None)


def _folder_or_file(note: dict[str, Any], extra: str) -> str:
    """The local source in `note`; empty for other kinds, or if it no longer exists."""
    from urllib.request import url2pathname

    parts = urlsplit(note.get("url", ""))
    if parts.scheme != "file" or "vcs_info" in note:
        return ""
    path = Path(url2pathname(parts.path))
    option = "-e " if note.get("dir_info", {}).get("editable") else ""
    return f"{option}{shlex.quote(f'{path}[{extra}]')}" if path.exists() else ""


def _address(note: dict[str, Any], extra: str) -> str:
    """The remote source in `note` without secrets; empty without one, or if it needs secrets.

    Passwords and user names are removed, because user names are often tokens; only ssh keeps its
    user.
    """
    parts = urlsplit(note.get("url", ""))
    vcs = note.get("vcs_info")
    if parts.query or not (parts.netloc or vcs):  # the query of a signed address is its secret
        return ""
    user, _, host = parts.netloc.rpartition("@")
    login = f"{user.partition(':')[0]}@" if user and "ssh" in parts.scheme else ""
    address = urlunsplit((parts.scheme, login + host, parts.path, "", ""))
    if vcs:
        address = f"{vcs['vcs']}+{address}@{vcs['commit_id']}"
    inside = f"#subdirectory={note['subdirectory']}" if "subdirectory" in note else ""
    return shlex.quote(f"{NAME}[{extra}] @ {address}{inside}")
