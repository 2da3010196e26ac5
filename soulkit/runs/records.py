"""Records on disk: one JSON line an episode or control, read back as the dataclasses they were.

Later lines with the same key replace earlier ones: an unscored episode that was played again, say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from soulkit.errors import DataError
from soulkit.runs.contexts import cut_contexts, note_counts, whole_contexts
from soulkit.runs.jsonl import JsonlWriter, placed_objects
from soulkit.types import ControlRecord, Record, Trace, Turn

DEV_EPISODES = "dev.jsonl"
"""Where a training keeps what it played on the rows it held out."""
CONTROLS = "controls.jsonl"
"""Where an evaluation keeps what its judges made of controls."""
R = TypeVar("R", Record, ControlRecord)


@cache
def _episode_form() -> TypeAdapter[Record]:
    return TypeAdapter(Record)


@cache
def _control_form() -> TypeAdapter[ControlRecord]:
    return TypeAdapter(ControlRecord)


class RecordWriter:
    """Appends records to `episodes.jsonl` or `controls.jsonl`; what `write` was given is on disk
    when it returns."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonlWriter(path)

    def write(self, *records: Record | ControlRecord) -> None:
        self._lines.write_all(_line_of(record) for record in records)

    @property
    def offset(self) -> int:
        return self._lines.offset

    def cut_to(self, offset: int) -> None:
        self._lines.cut_to(offset)

    def close(self) -> None:
        self._lines.close()


def _line_of(record: Record | ControlRecord) -> dict[str, Any]:
    line: dict[str, Any]
    if isinstance(record, ControlRecord):
        line = _control_form().dump_python(record, mode="json")
        return line
    episode, counts = cut_contexts(record.episode)
    line = _episode_form().dump_python(replace(record, episode=episode), mode="json")
    note_counts(line["episode"], counts)
    return line


def load_records(path: Path) -> list[Record]:
    """The records of an `episodes.jsonl`, in the order their keys first appear.

    A later line with the same key replaces the earlier one. A last line that was cut in the middle
    of writing is left out: resuming the run writes it again. Raises DataError when the file is
    missing or another line cannot be read.
    """
    if not path.is_file():
        raise DataError(
            f"There are no episodes at '{path}'.",
            "Every number of a run comes from this file.",
            "Name a folder that `soul eval` or `soul train` wrote, or run that command first.",
        )
    records: dict[str, Record] = {}
    for record in stream_records(path):
        records[record.key] = record
    return list(records.values())


def load_controls(folder: Path) -> list[ControlRecord]:
    """The controls of the run in `folder`, in the order their keys first appear, as `load_records`
    reads episodes; none where none were asked about. DataError for a line that cannot be read."""
    path = folder / CONTROLS
    lines = enumerate(placed_objects(path), 1) if path.is_file() else ()
    controls = [
        _of_line(_control_form(), "a control", line, path, number) for number, (_, line) in lines
    ]
    return list({control.key: control for control in controls}.values())


def stream_records(path: Path) -> Iterator[Record]:
    """Every line of an `episodes.jsonl`, one at a time, replaced ones as well.

    DataError for a line that cannot be read.
    """
    for number, (_, line) in enumerate(placed_objects(path), 1):
        yield record_of_line(line, path, number)


def record_of_line(line: Mapping[str, Any], path: Path, number: int) -> Record:
    """The record in a parsed line, which DataError calls object `number` of `path`."""
    record = _of_line(_episode_form(), "an episode", line, path, number)
    try:
        return replace(record, episode=whole_contexts(record.episode, line["episode"]))
    except ValueError as error:
        raise _unreadable(path, number, "an episode", str(error)) from error


def _of_line(
    form: TypeAdapter[R], what: str, line: Mapping[str, Any], path: Path, number: int
) -> R:  # fmt: skip
    try:
        return form.validate_python(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the line"
        raise _unreadable(path, number, what, f"{where}: {first['msg']}") from error


def _unreadable(path: Path, number: int, what: str, why: str) -> DataError:
    return DataError(
        f"Object {number} of '{path}' is no record of {what} ({why}).",
        "The file was edited, damaged, or written by another version of soulkit.",
        "Restore the file, or remove that line and run the same command again to replay it.",
    )


def newest_dev(folder: Path) -> list[Record]:
    """The episodes of the newest dev evaluation in a training run's folder; empty without any."""
    path = folder / DEV_EPISODES
    records = load_records(path) if path.is_file() else []
    last = max((record.step for record in records), default=0)
    return [record for record in records if record.step == last]


def measured_records(folder: Path) -> list[Record]:
    """The episodes that a run's headline is over: of a training that held rows out, the newest on
    those; else all that it played. DataError when they cannot be read."""
    return newest_dev(folder) or load_records(folder / "episodes.jsonl")


def without_tokens(record: Record) -> Record:
    """What a summary reads of a record; what its turns saw, ids and log-probs are nearly all of its
    memory."""
    traces = tuple(
        Trace(trace.seat, tuple(
            Turn((), replace(turn.completion, prompt_ids=(), token_ids=(), logprobs=()))
            for turn in trace.turns
        ))
        for trace in record.episode.traces
    )  # fmt: skip
    return replace(record, prompt="", episode=replace(record.episode, traces=traces))


def drafts(records: Sequence[Record]) -> list[Record]:
    """The records that a headline is made of: the drafts, or all where there is none."""
    return [r for r in records if r.kind == "draft"] or list(records)
