"""Which packages are here, in which versions, and what the missing ones would bring.

What soulkit asks for is read from its own metadata; nothing that is looked at is imported.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from soulkit.doctor.checkup import CheckLine, Health
from soulkit.errors import ConfigError
from soulkit.extras import HOME, declared_requirements, install_line
from soulkit.models.vllm.engine import interpreter
from soulkit.models.vllm.version import NEWER, OLDEST, vllm_version
from soulkit.version import __version__

PART = "packages"
BRINGS = {
    "train": "models on this machine, and training",
    "report": "figures in reports",
    "contamination": "near-duplicates in soul data contamination",
    "metrics": "BLEU, ROUGE and other measures of texts",
    "tensorboard": "--track tensorboard",
    "trackio": "--track trackio",
    "wandb": "--track wandb",
}
"""Extra → what a user gets from it."""
ELSEWHERE = ("dev", "track", "vllm")
"""Extras of those who change soulkit, that only gather others, and that may be installed for
another interpreter (`vllm_line`)."""


def package_lines(needed: Collection[str] = (), home: Path = HOME) -> Iterator[CheckLine]:
    """Python, soulkit, and a line for each extra; one in `needed` may not be missing. `home` is the
    package folder of the installation."""
    pythons, core, extras = declared_requirements(home)
    yield _line("soulkit", "ok", __version__)
    here = platform.python_version()
    if SpecifierSet(pythons).contains(here, prereleases=True):
        yield _line("Python", "ok", here)
    else:
        yield _line("Python", "problem", f"{here}, and {pythons} is needed",
                    f"make an environment with Python {pythons}")  # fmt: skip
    yield from _core(core)
    for extra, packages in extras.items():
        if extra not in ELSEWHERE:
            yield _extra(extra, packages, needed=extra in needed)


def vllm_line(python: str | None = None) -> CheckLine:
    """The vLLM of the interpreter `python` (None: this one); it is not imported."""
    path = interpreter(python)
    try:
        install = vllm_version(path)
    except ConfigError as error:
        return CheckLine.of_error(PART, "vLLM", error)
    whose = "" if path == sys.executable else f" of {path}"
    if install is None:
        words = f"not installed{whose or ' here'}; --engine local samples without it"
        return _line("vLLM", "note", words, f"{install_line('vllm')}, or --vllm-python PATH")
    words = f"{install.distribution} {install.version}{whose}, "
    words += "on the GPU" if install.on_gpu else "on the CPU"
    if install.supported:
        return _line("vLLM", "ok", words)
    way = f"install vLLM {'.'.join(map(str, OLDEST))} or newer, below {'.'.join(map(str, NEWER))}"
    return _line("vLLM", "note", f"{words}: soulkit does not know this version", way)


def _core(packages: list[str]) -> Iterator[CheckLine]:
    """One line where all is as it should be, else one for each package that is not."""
    wrong = [words for text in packages if (words := _wrong(text))]
    if wrong:
        yield _line("core", "problem", "; ".join(wrong), "install soulkit again")
    elif packages:
        yield _line("core", "ok", f"{len(packages)} packages within their ranges")


def _extra(extra: str, packages: list[str], *, needed: bool) -> CheckLine:
    name, brings = f"[{extra}]", BRINGS.get(extra, "")
    here = {text: installed_version(text) for text in packages}
    missing = [_name(text) for text, number in here.items() if number is None]
    wrong = [words for text, number in here.items() if number and (words := _wrong(text))]
    way = install_line(extra)
    if missing and (needed or len(missing) < len(packages)):
        shown = f"not installed: {', '.join(missing)}; {brings}"
        return _line(name, "problem" if needed else "note", shown, way)
    if missing:
        return _line(name, "note", f"not installed; brings {brings}", way)
    if wrong:
        return _line(name, "problem", "; ".join(wrong), way)
    return _line(name, "ok", ", ".join(f"{_name(text)} {number}" for text, number in here.items()))


def installed_version(requirement: str) -> str | None:
    """The version that is here of the package a requirement names; None without one."""
    try:
        return version(_name(requirement))
    except PackageNotFoundError:
        return None


def _wrong(requirement: str) -> str:
    """What is wrong with the version that is here; empty where it is within its range."""
    number = installed_version(requirement)
    try:
        allowed = Requirement(requirement)
    except InvalidRequirement:  # of a later standard: whoever installed it could read it
        return ""
    if number is None:
        return f"{allowed.name} is not installed"
    if allowed.specifier.contains(number, prereleases=True):
        return ""
    return f"{allowed.name} {number} is outside {allowed.specifier}"


def _name(requirement: str) -> str:
    try:
        return Requirement(requirement).name
    except InvalidRequirement:
        return requirement.split()[0]


def _line(name: str, health: Health, words: str, way: str = "") -> CheckLine:
    return CheckLine(part=PART, name=name, health=health, words=words, way=way)
