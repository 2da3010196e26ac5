"""How far a run came: told from its files, without its players or its rows.

Episodes are counted by their keys, so that one which was played again counts once; those that have
a score are counted as well. No file is held in memory. What a run was to play stands in
`provenance.json` (rows) and `config.yaml` (repeats, steps).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from soulkit.errors import DataError, RunError
from soulkit.eval.batch import summary_terms
from soulkit.eval.controls import control_counts
from soulkit.eval.keeping import CLOCK
from soulkit.eval.provenance import read_provenance
from soulkit.eval.summary import Summary, summarise
from soulkit.models.ledger.view import View
from soulkit.runs.folder import is_run, read_config, read_environment
from soulkit.runs.packing import has_lines, lines_in
from soulkit.runs.records import KEY, load_controls, scored_keys, stream_records
from soulkit.tasks.base import Task
from soulkit.tasks.registry import load_registry
from soulkit.types import Protocol, Record

DISTILL = "distill"
EPISODES, METRICS, JUDGEMENTS = "episodes.jsonl", "metrics.jsonl", "judgements.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """So many of so many; `total` is None where the run does not say what it was to do."""

    done: int
    total: int | None
    unit: str
    """`episodes`, `steps`, `stages` or `judgements`."""
    scored: int | None = None
    """Of the episodes that are done, those with a score; None for other units."""

    def text(self) -> str:
        """`37 of 120 episodes`; with `, 12 scored` where some of these have no score."""
        unit = self.unit.removesuffix("s") if (self.total or self.done) == 1 else self.unit
        far = f"{self.done:,} {unit} so far" if self.total is None else (
            f"{self.done:,} of {self.total:,} {unit}"
        )  # fmt: skip
        return far if self.scored in (None, self.done) else f"{far}, {self.scored:,} scored"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def command_in(path: Path) -> str:
    """The command that began the run in folder `path`, such as `eval api`; empty when unknown.

    RunError when the folder's `environment.json` cannot be read.
    """
    return str(read_environment(path).get("command", "")) if is_run(path) else ""


def run_progress(path: Path, command: str) -> RunProgress:
    """How far the run in folder `path` came.

    DataError or RunError for files that cannot be read.
    """
    settings = read_config(path) if is_run(path) else {}
    if command == DISTILL:
        return _stages(path, settings)
    if (path / JUDGEMENTS).is_file() or command.startswith("judge"):
        return RunProgress(done=_keys(path / JUDGEMENTS), total=None, unit="judgements")
    if command.startswith("train") or (path / METRICS).is_file():
        return RunProgress(done=_steps(path / METRICS), total=_whole(settings.get("steps")),
                           unit="steps")  # fmt: skip
    played = scored_keys(path / EPISODES) if has_lines(path / EPISODES) else {}
    return RunProgress(done=len(played), total=_to_play(path, settings), unit="episodes",
                       scored=sum(played.values()))  # fmt: skip


def _stages(path: Path, settings: Mapping[str, Any]) -> RunProgress:
    """What of a distillation is finished; the experts are not sampled where they teach."""
    made = [path / "selection.json", path / "generalist" / "summary.json", path / "summary.json"]
    parts = made[1:] if settings.get("by") == "opd" else made
    done = sum(part.is_file() for part in parts)
    return RunProgress(done=done, total=len(parts), unit="stages")


def _to_play(path: Path, settings: Mapping[str, Any]) -> int | None:
    """Rows × repeats; None for a run without `provenance.json`, or with one that names no rows."""
    tasks = (read_provenance(path) or {}).get("tasks", {})
    rows = [entry.get("rows") for entry in tasks.values()]
    if not rows or any(not isinstance(one, dict) for one in rows):
        return None
    return sum(len(one) for one in rows) * (_whole(settings.get("repeats")) or 1)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _keys(path: Path) -> int:
    """Different keys of a file of records; 0 when there is no file yet."""
    return len(_distinct(lines_in(path), path)) if has_lines(path) else 0


def _distinct(lines: Iterable[bytes], path: Path) -> set[bytes]:
    keys: set[bytes] = set()
    for number, line in enumerate(lines, 1):
        start = KEY.match(line)
        if start and line.endswith(b"\n"):
            keys.add(start[1])
        elif key := _parsed_key(line):
            keys.add(key)
        elif line.endswith(b"\n") and line.strip():
            raise DataError(
                f"{path}:{number} is no record.",
                "The file was changed by hand or by another program.",
                "Mend or delete that line, or start a new run.",
            )
    return keys


def _parsed_key(line: bytes) -> bytes:
    """The key of a line that another program wrote; empty for a torn last line and other text."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return b""
    return str(value.get("key", "")).encode("utf-8", "replace") if isinstance(value, dict) else b""


def _steps(path: Path) -> int:
    from soulkit.train.state.lines import read_step_lines

    return len({line.step for line in read_step_lines(path) if not line.measures})


# -- what an unfinished evaluation comes to so far -------------------------------------------------


def summary_so_far(path: Path, command: str) -> Summary | None:
    """The means over the episodes that the run in folder `path` has; None before the first.

    What only a user's task can tell (its scale, its numbers over a batch) is left out: no code of
    a run is called to look at it.
    """
    if not has_lines(path / EPISODES):
        return None
    newest = {record.key: record for record in stream_records(path / EPISODES, light=True)}
    if not newest:
        return None
    records, settings = list(newest.values()), read_config(path) if is_run(path) else {}
    tasks = _built_in(settings, records)
    cost, unpriced = paid_so_far(path)
    controls = load_controls(path)
    model, adapter = str(settings.get("model") or ""), settings.get("adapter")
    summary = summarise(
        records,
        command=command,
        model=f"{model} + {adapter}" if adapter else model,
        protocol=str(settings.get("protocol") or ""),
        seconds=_seconds(path),
        cost=cost,
        **summary_terms(tasks.values(), controls),
    )
    return replace(summary, unpriced_calls=unpriced, controls=control_counts(controls))


def _built_in(settings: Mapping[str, Any], records: list[Record]) -> dict[str, Task]:
    """The live tasks among those of `records` that soulkit itself declares."""
    registry = load_registry()
    protocol: Protocol = "reference" if settings.get("protocol") == "reference" else "paper"
    names = dict.fromkeys(record.task for record in records)
    return {
        name: registry.task(name, protocol)
        for name in names
        if name in registry.specs and registry.specs[name].home.builtin_task
    }


def _seconds(path: Path) -> float:
    """Wall seconds so far; 0 where no clock was kept."""
    try:
        return float(json.loads((path / CLOCK).read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError, TypeError):  # only a time is lost
        return 0.0


def paid_so_far(path: Path) -> tuple[float | None, int]:
    """(US dollars of the calls with a price, calls without one) by the ledger of a run.

    (None, 0) without a ledger, or with one that cannot be read: `soul ledger verify` says why.
    """
    ledger = path / "ledger.sqlite"
    if not ledger.is_file():
        return None, 0
    try:
        with View(ledger) as view:
            groups = view.groups()
    except RunError:
        return None, 0
    costs = [group.cost for group in groups if group.cost is not None]
    return sum(costs) if costs else None, sum(group.calls - group.priced for group in groups)
