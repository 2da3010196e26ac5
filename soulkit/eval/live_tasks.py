"""The tasks of a recorded run, with their code as it is now.

Built-in tasks and those of installed packages are always at hand. The tasks file that a run names
is code that lies somewhere: it is imported only for a run whose settings are known to be the
user's own (trust.py), or when the user trusts it. Relative paths are those of the folder that the
run was started in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.errors import DataError, UserError
from soulkit.eval.provenance import working_folder
from soulkit.eval.summary import Cells, recorded_summary, summary_line
from soulkit.runs.folder import CONFIG
from soulkit.tasks.registry import Registry, load_registry
from soulkit.trust import inside_runs, run_settings
from soulkit.types import Protocol

if TYPE_CHECKING:
    from soulkit.tasks.base import Task


def live_tasks(folder: Path, names: Iterable[str], *, trust: bool = False) -> dict[str, Task]:
    """Name → task, for those of `names` whose code can be had; RunError for a damaged folder."""
    settings, sealed = run_settings(folder) if (folder / CONFIG).is_file() else ({}, False)
    protocol: Protocol = "reference" if settings.get("protocol") == "reference" else "paper"
    registry = _registry(folder, settings, trust=trust, sealed=sealed)
    # Options may name files, and a stranger's run is to name none here.
    recorded = settings.get("option") if trust or sealed else None
    options = dict(recorded) if isinstance(recorded, Mapping) else {}
    live: dict[str, Task] = {}
    for name in names:
        try:
            live[name] = registry.task(name, protocol, options=options)
        except UserError:  # of another version, or not to be imported: its episodes are still there
            continue
    return live


def recorded_cells(folder: Path) -> Cells:
    """Task → metric → its cell, as the summary of a run has them; none of an unfinished run, nor
    of a damaged summary: the episodes say all that is needed."""
    try:
        return recorded_summary(folder).tasks
    except DataError:
        return {}


def summary_steps(folder: Path) -> int:
    """Over how many of its last steps the summary of a training is; 0 where it does not say."""
    try:
        steps = summary_line(folder).get("summary_steps")
    except DataError:
        return 0
    return steps if isinstance(steps, int) and steps > 0 else 0


def _registry(
    folder: Path, settings: Mapping[str, Any], *, trust: bool, sealed: bool
) -> Registry:  # fmt: skip
    named = settings.get("tasks_file")
    if not named:
        return load_registry()
    file = (working_folder(folder) or Path()) / str(named)
    if not trust and (not sealed or inside_runs({"tasks_file": file})):
        return load_registry()
    try:
        return load_registry(file)
    except UserError:
        return load_registry()
