"""Records on disk: one JSON line per episode or control, read back as dataclasses.

A later line replaces an earlier one with the same key, for example after an unscored episode is
played again. Light reading skips contexts, token ids and log-probs, which take most of the file and
of the time and memory to read it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from soulkit.errors import DataError
from soulkit.runs.jsonl import (
    CONTROLS_SCHEMA,
    EPISODES_SCHEMA,
    SCHEMA,
    JsonlWriter,
    damaged,
    first_problem,
    form_of,
    has_lines,
    parsed_object,
    placed_objects,
    placed_values,
    refuse_other_schema,
)
from soulkit.runs.record_lines import (
    ControlLine,
    EpisodeHead,
    EpisodeLine,
    KeyFacts,
    RecordFacts,
    RecordHead,
    RecordLine,
    cut_lines,
    cut_turns,
    first_prompts,
    short_traces,
    whole_lines,
    whole_traces,
)
from soulkit.types import COACH_FAILURE, ControlRecord, Episode, Record, Trace, Turn

DEV_EPISODES, DEV_JUDGED = "dev.jsonl", "dev_judged.jsonl"
"""Files with a training run's episodes on held-out rows, the second with --dev-judge's scores."""
SAMPLES = "samples.jsonl"
"""File with a supervised training run's continuations of held-out conversations."""
SAMPLED = "sampled"
"""Unscored reason of these samples, which are for reading only."""
CONTROLS = "controls.jsonl"
"""File with the scored controls of an evaluation."""
F = TypeVar("F")
_REFINED = "/refined"
_MARK = f'"{SCHEMA}":"{EPISODES_SCHEMA}"'.encode()
KEY = re.compile(rb'\{"key": ?"((?:[^"\\]|\\.)*)"')
"""A line starts with its key, so it can be counted or skipped without parsing."""
_REPEATED = ("example_id", "task", "kind", "rollout", "step")
"""Fields that an episode shares with its record."""
_RECORD = tuple(one.name for one in fields(RecordHead) if one.name not in (SCHEMA, "prompt"))
_EPISODE = tuple(
    one.name for one in fields(EpisodeHead) if one.name not in ("transcript", *_REPEATED)
)


class RecordWriter:
    """Appends records to `episodes.jsonl` or `controls.jsonl`; records are on disk when `write`
    returns."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonlWriter(path, compact=True)

    def write(self, *records: Record | ControlRecord) -> None:
        self._lines.write_all(record_line(record) for record in records)

    @property
    def offset(self) -> int:
        return self._lines.offset

    def cut_to(self, offset: int) -> None:
        self._lines.cut_to(offset)

    def close(self) -> None:
        self._lines.close()


# -- from a record to its line ---------------------------------------------------------------------


def record_line(record: Record | ControlRecord) -> dict[str, Any]:
    """The JSON object of a record or control, without fields that have their default."""
    line: dict[str, Any]
    if isinstance(record, ControlRecord):
        control = {one.name: getattr(record, one.name) for one in fields(record)}
        kept_line = ControlLine(schema=CONTROLS_SCHEMA, **control)  # type: ignore[arg-type]
        line = form_of(ControlLine).dump_python(kept_line, mode="json", exclude_defaults=True)
        return line
    prompt = None if record.prompt == first_prompts(record.episode) else record.prompt
    whole = RecordLine(
        schema=EPISODES_SCHEMA,  # type: ignore[arg-type]
        prompt=prompt, episode=_episode_line(record),
        **{name: getattr(record, name) for name in _RECORD},
    )  # fmt: skip
    line = form_of(RecordLine).dump_python(whole, mode="json", exclude_defaults=True)
    return line


def _episode_line(record: Record) -> EpisodeLine:
    episode = record.episode
    messages, traces = cut_turns(episode)
    return EpisodeLine(
        messages=tuple(messages), traces=tuple(traces),
        transcript=tuple(cut_lines(episode.transcript, messages)),
        **{name: getattr(episode, name) for name in _EPISODE},
        **{
            name: getattr(episode, name)
            for name in _REPEATED
            if getattr(episode, name) != getattr(record, name)
        },
    )  # fmt: skip


# -- and back --------------------------------------------------------------------------------------


def load_records(path: Path, *, light: bool = False) -> list[Record]:
    """The records of an `episodes.jsonl`, in order of the first lines of their keys; `light`
    records are `without_tokens`.

    A later line replaces an earlier one with the same key. An incomplete last line is skipped;
    resuming the run writes it again. DataError if the file is missing or a line cannot be read.
    """
    if not has_lines(path):
        raise DataError(
            f"There are no episodes at '{path}'.",
            "All results of a run are computed from this file.",
            "Give a folder that `soul eval` or `soul train` wrote, or run that command first.",
        )
    records: dict[str, Record] = {}
    for record in stream_records(path, light=light):
        records[record.key] = record
    return list(records.values())


def load_controls(folder: Path) -> list[ControlRecord]:
    """The controls of the run in `folder`, read like episodes in `load_records`; empty if none were
    asked. DataError if a line cannot be read."""
    path = folder / CONTROLS
    lines = enumerate(placed_objects(path), 1) if path.is_file() else ()
    controls = [_control_of(line, path, number) for number, (_, line) in lines]
    return list({control.key: control for control in controls}.values())


def _control_of(line: Mapping[str, Any], path: Path, number: int) -> ControlRecord:
    refuse_other_schema(line, CONTROLS_SCHEMA, f"Line {number} of '{path}'")
    made = _of_line(form_of(ControlLine), "a control", line, path, number)
    return ControlRecord(**{one.name: getattr(made, one.name) for one in fields(ControlRecord)})


def stream_records(
    path: Path, *, light: bool = False, keys: Container[str] | None = None
) -> Iterator[Record]:
    """The record of every line of an `episodes.jsonl`, including replaced ones; `light` records are
    `without_tokens`. With `keys`, only lines with one of these keys.

    DataError if a line cannot be read.
    """
    form: TypeAdapter[Any] = form_of(RecordFacts) if light else form_of(RecordLine)

    def parse(line: bytes) -> RecordHead | dict[str, Any] | None:
        if keys is not None and _begins_with_other(line, keys):
            return {}
        if _MARK in line[:400]:
            try:
                head: RecordHead = form.validate_json(line)
            except ValidationError:  # incomplete or damaged: the full parser reports it
                pass
            else:
                return head
        return parsed_object(line)

    lines: Iterator[tuple[int, RecordHead | dict[str, Any]]] = placed_values(path, parse)
    for number, (_, value) in enumerate(lines, 1):
        if isinstance(value, RecordHead):
            yield _record_of(value, path, number)
        elif keys is None or value.get("key") in keys:
            record = record_of_line(value, path, number)
            yield without_tokens(record) if light else record


def _begins_with_other(line: bytes, keys: Container[str]) -> bool:
    """Whether a complete line starts with a key that is not in `keys`."""
    start = KEY.match(line)
    if start is None or not line.endswith(b"\n"):
        return False
    try:
        return json.loads(b'"%s"' % start[1]) not in keys
    except ValueError:  # damaged: the full parser reports it
        return False


def scored_drafts(path: Path) -> dict[str, bool]:
    """Key of a draft → whether it and all replies to its feedback have a score, and no coach
    failed. Nothing else is parsed. DataError as for `scored_keys`."""
    keys = scored_keys(path)
    drafts = {key: done for key, done in keys.items() if not key.endswith(_REFINED)}
    for key, done in keys.items():
        draft = f"0/{key.partition('/')[2].removesuffix(_REFINED)}/draft"
        if draft in drafts and not done:
            drafts[draft] = False
    return drafts


def scored_keys(path: Path) -> dict[str, bool]:
    """Key → whether its newest line has a score and its coach did not fail, in order of first
    lines. DataError if a line cannot be read or has another schema."""
    form = form_of(KeyFacts)

    def parse(line: bytes) -> KeyFacts | dict[str, Any] | None:
        try:
            return form.validate_json(line) if _MARK in line[:400] else parsed_object(line)
        except ValidationError:
            return parsed_object(line)

    scored: dict[str, bool] = {}
    lines: Iterator[tuple[int, KeyFacts | dict[str, Any]]] = placed_values(path, parse)
    for number, (_, value) in enumerate(lines, 1):
        if isinstance(value, KeyFacts):
            failed = COACH_FAILURE in value.episode.notes
            scored[value.key] = value.score.value is not None and not failed
        else:
            record = record_of_line(value, path, number)
            failed = COACH_FAILURE in record.episode.notes
            scored[record.key] = record.score.scored and not failed
    return scored


def record_of_line(line: Mapping[str, Any], path: Path, number: int) -> Record:
    """The record in a parsed line; `number` and `path` are for error messages."""
    refuse_other_schema(line, EPISODES_SCHEMA, f"Line {number} of '{path}'")
    return _record_of(_of_line(form_of(RecordLine), "an episode", line, path, number), path, number)


def _record_of(line: RecordHead, path: Path, number: int) -> Record:
    """The record of a line; a light one for RecordFacts."""
    assert isinstance(line, RecordLine | RecordFacts)
    head, light = line.episode, isinstance(line, RecordFacts)
    try:
        traces = short_traces(head) if not isinstance(head, EpisodeLine) else whole_traces(head)
        transcript = whole_lines(head)
    except ValueError as error:
        raise _unreadable(path, number, "an episode", str(error)) from error
    repeated = {name: getattr(head, name) for name in _REPEATED}
    episode = Episode(
        traces=traces, transcript=transcript, **{name: getattr(head, name) for name in _EPISODE},
        **{n: getattr(line, n) if value is None else value for n, value in repeated.items()},
    )  # fmt: skip
    prompt = line.prompt
    if light:
        prompt = ""
    elif prompt is None:
        prompt = first_prompts(episode)
    return Record(episode=episode, prompt=prompt, **{name: getattr(line, name) for name in _RECORD})


def _of_line(
    form: TypeAdapter[F], what: str, line: Mapping[str, Any], path: Path, number: int
) -> F:  # fmt: skip
    try:
        return form.validate_python(line)
    except ValidationError as error:
        raise _unreadable(path, number, what, first_problem(error, "the line")) from error


def _unreadable(path: Path, number: int, what: str, why: str) -> DataError:
    return damaged(
        f"Line {number} of '{path}' is not a record of {what} ({why}).",
        "Restore the file, or delete that line and run the same command again to replace it.",
    )


def newest_dev(folder: Path, *, light: bool = False) -> list[Record]:
    """The episodes of the newest dev evaluation of a training run; empty if there is none."""
    records = _dev_records(folder, light)
    last = max((record.step for record in records), default=0)
    return [record for record in records if record.step == last]


def dev_after(folder: Path, steps: int, *, light: bool = False) -> list[Record]:
    """The episodes of the dev evaluation after `steps` steps; empty if there is none."""
    return [record for record in _dev_records(folder, light) if record.step == steps - 1]


def _dev_records(folder: Path, light: bool) -> list[Record]:
    path = folder / DEV_EPISODES
    return load_records(path, light=light) if path.is_file() else []


def without_tokens(record: Record) -> Record:
    """The record without contexts, token ids and log-probs, which take most of its memory."""
    traces = tuple(
        Trace(trace.seat, tuple(
            Turn((), replace(turn.completion, prompt_ids=(), token_ids=(), logprobs=()))
            for turn in trace.turns
        ))
        for trace in record.episode.traces
    )  # fmt: skip
    return replace(record, prompt="", episode=replace(record.episode, traces=traces))


def drafts(records: Sequence[Record]) -> list[Record]:
    """The records for a headline: the drafts, or all records if there are no drafts."""
    return [r for r in records if r.kind == "draft"] or list(records)
