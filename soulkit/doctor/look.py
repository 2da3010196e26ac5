"""Everything that is looked at without asking a model: this machine, and what settings need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from soulkit.doctor.checkup import CheckLine
from soulkit.doctor.machine import machine_lines
from soulkit.doctor.needs import Needs, needs_of, settings_file
from soulkit.doctor.outside import hub_line, key_lines, rows_lines
from soulkit.doctor.packages import package_lines
from soulkit.tasks.registry import load_registry


def settings_needs(path: Path, intended: str | None, *, yes: bool, trust: bool) -> Needs:
    """What the settings of `path`, a file or a run's folder, need; see `needs_of`."""
    flags: dict[str, Any] = {"yes": True} if yes else {}
    return needs_of(settings_file(path), flags, intended, trust=trust)


def look_around(needs: Needs | None = None, vllm_python: str | None = None) -> Iterator[CheckLine]:
    """Lines about what is here, and about what `needs` are not met."""
    yield from package_lines(needs.extras if needs else ())
    yield from machine_lines(connections=needs.connections if needs else 0)
    yield from key_lines(needs.keys if needs else ())
    yield hub_line()
    if needs is None:
        yield from rows_lines(load_registry())
    else:
        yield from needs.lines
