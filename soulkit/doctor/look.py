"""Everything that is looked at without asking a model: this machine, and what settings need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.doctor.checkup import CheckLine
from soulkit.doctor.machine import machine_lines
from soulkit.doctor.outside import hub_line, key_lines, rows_lines
from soulkit.doctor.packages import package_lines, vllm_line
from soulkit.tasks.registry import load_registry

if TYPE_CHECKING:  # it imports all that plays, which takes longer than the look itself
    from soulkit.doctor.needs import Needs


def settings_needs(
    path: Path, intended: str | None, *, yes: bool, trust: bool, vllm_python: str | None = None
) -> Needs:
    """What the settings of `path`, a file or a run's folder, need; see `needs_of`."""
    from soulkit.doctor.needs import needs_of, settings_file

    flags: dict[str, Any] = {"yes": True if yes else None, "vllm_python": vllm_python}
    return needs_of(settings_file(path), flags, intended, trust=trust)


def look_around(needs: Needs | None = None, vllm_python: str | None = None) -> Iterator[CheckLine]:
    """Lines about what is here, and about what `needs` are not met."""
    yield from package_lines(needs.extras if needs else ())
    named = needs.config.vllm_python if needs and needs.config else None
    yield vllm_line(vllm_python or named)
    yield from machine_lines(connections=needs.connections if needs else 0)
    yield from key_lines(needs.keys if needs else ())
    yield hub_line()
    if needs is None:
        yield from rows_lines(load_registry())
    else:
        yield from needs.lines
