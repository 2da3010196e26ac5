"""Which packages are here, in which versions, and what the missing ones would bring.

What soulkit asks for is read from its own metadata; nothing that is looked at is imported.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from soulkit.doctor.checkup import CheckLine, Health
from soulkit.extras import declared_requirements, install_line
from soulkit.version import __version__

PART = "packages"
BRINGS = {
    "train": "models on this machine, and training",
    "vllm": "vLLM, which samples faster",
    "report": "figures in reports",
    "contamination": "near-duplicates in soul data contamination",
    "metrics": "BLEU, ROUGE and other measures of texts",
    "tensorboard": "--track tensorboard",
    "trackio": "--track trackio",
    "wandb": "--track wandb",
}
"""Extra → what a user gets from it."""
FOR_OTHERS = ("dev", "track")
"""Extras of those who change soulkit, and those that only gather others."""


def package_lines(needed: Collection[str] = ()) -> Iterator[CheckLine]:
    """Python, soulkit, and a line for each extra; one in `needed` may not be missing."""
    pythons, core, extras = declared_requirements()
    yield _line("soulkit", "ok", __version__)
    here = platform.python_version()
    if SpecifierSet(pythons).contains(here, prereleases=True):
        yield _line("Python", "ok", here)
    else:
        yield _line("Python", "problem", f"{here}, and {pythons} is needed",
                    f"make an environment with Python {pythons}")  # fmt: skip
    yield from _core(core)
    for extra, packages in extras.items():
        if extra not in FOR_OTHERS:
            yield _extra(extra, packages, needed=extra in needed)


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
