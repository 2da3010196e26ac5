"""All episodes of a page: an index for the list and chunks with the full texts and raw calls.

    episodes.jsonl ── stream ──► chunks of texts ──┐   one file: <script> elements of the page
    ledger.sqlite ─── stream ──► chunks of calls ──┼─► a folder: episodes/texts-00001.js …
                                 index of the list ┘

The browser shows the list from the index and loads a chunk when a reader opens or searches its
episodes. Index and chunks are JSON, compressed and written in base64, which cannot end a script
element. One episode is in memory at a time, so the number of episodes is not limited by memory.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from soulkit.errors import RunError
from soulkit.eval.results.rescore import ledger_of
from soulkit.metrics.intervals import number
from soulkit.models.ledger.view import LedgerView, StoredCall
from soulkit.report.episode_search import shell_path
from soulkit.report.load import EPISODES, RunData
from soulkit.report.transcript import cuts, dimension, feedback_notes, verdict_head
from soulkit.runs.folder import is_run, read_config
from soulkit.runs.jsonl import has_lines, write_aside
from soulkit.runs.records import SAMPLED, SAMPLES, stream_records
from soulkit.text import one_line, sanitise
from soulkit.types import Episode, Feedback, Line, Record, Verdict

PORTABLE = 20_000_000
"""Largest size of the episodes in a page that is one file, in bytes."""
CHUNK = 1 << 20
"""A chunk ends after this many bytes of JSON."""
FIRST_WORDS = 110
"""Characters of the reply that the list shows."""
FOLDER = "episodes"
"""The folder of the chunks, next to the page."""
_NONE = math.nan


@dataclass(frozen=True, slots=True)
class Pack:
    """The packed episodes of a page."""

    total: int
    """Rows of the list: a draft and its refined episode are one row."""
    index: str
    chunks: Mapping[str, str]
    """Name → text of the chunks inside the page; empty if they are files."""


class TooLarge(Exception):
    """The episodes do not fit into a page that is one file."""


def pack_episodes(runs: Sequence[RunData], folder: Path | None = None) -> Pack:
    """The episodes of `runs` for a page. With `folder`, chunks become files in `folder/episodes`.

    RunError if the page must be one file and its episodes do not fit; DataError for damaged lines.
    """
    texts, calls = Chunks("texts", folder), Chunks("calls", folder)
    index = _Index(runs)
    try:
        for i, run in enumerate(runs):
            for record in _records(run):
                index.add(i, record, texts.add(_take(record)))
        texts.end()
    except TooLarge as error:
        paths = " ".join(shell_path(run.path) for run in runs)
        raise RunError(
            f"The episodes do not fit into one file: it would have more than {PORTABLE:,} bytes.",
            "A larger file opens slowly. In a folder, the texts are in many small files.",
            f"Write a folder: soul report {paths} --format html --out report",
        ) from error
    calls.room = texts.room
    try:
        for i, run in enumerate(runs):
            for key, entry in _calls(run):
                index.add_calls(i, key, calls.add(entry))
        calls.end()
    except TooLarge:
        index.forget_calls()
        calls = Chunks("calls", folder)
    if folder is not None:
        _remove_older(folder / FOLDER, {*texts.names, *calls.names})
    packed = index.packed({"texts": texts.places, "calls": calls.places})
    return Pack(len(index.rows), packed, {**texts.inside, **calls.inside})


def _records(run: RunData) -> Iterator[Record]:
    """The played episodes, else the sampled continuations of held-out conversations."""
    played, samples = run.path / EPISODES, run.path / SAMPLES
    file = played if has_lines(played) and next(stream_records(played), None) else samples
    return stream_records(file) if has_lines(file) else iter(())


# -- chunks ----------------------------------------------------------------------------------------


def packed(parts: Iterable[str]) -> str:
    """JSON text, compressed and in base64."""
    squeezer = zlib.compressobj(6)
    data = [squeezer.compress(part.encode("utf-8", "replace")) for part in parts]
    return base64.b64encode(b"".join([*data, squeezer.flush()])).decode()


@dataclass
class Chunks:
    """Collects JSON values in chunks of about CHUNK bytes."""

    kind: str
    folder: Path | None
    inside: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    places: list[tuple[int, str]] = field(default_factory=list)
    """For each chunk: the number of its first value, and the digest of its text."""
    room: int = PORTABLE
    _parts: list[str] = field(default_factory=list)
    _size: int = 0
    _count: int = 0

    def add(self, value: Any) -> int:
        """The number of the value. TooLarge if the page is one file without room for it."""
        part = _json(_safe(value))
        self._parts.append(part)
        self._size += len(part)
        self._count += 1
        if self._size >= CHUNK:
            self.end()
        return self._count - 1

    def end(self) -> None:
        """End the current chunk."""
        if not self._parts:
            return
        text = packed(["[", ",".join(self._parts), "]"])
        name = f"{self.kind}-{len(self.names) + 1:05d}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        self.places.append((self._count - len(self._parts), digest))
        self.names.append(name)
        self._parts, self._size = [], 0
        if self.folder is not None:
            line = f'soulkitChunk("{name}","{digest}","{text}");\n'
            write_aside(self.folder / FOLDER / f"{name}.js", line.encode())
            return
        self.room -= len(text)
        if self.room < 0:
            raise TooLarge
        self.inside[name] = text


def _remove_older(folder: Path, names: set[str]) -> None:
    """Delete chunks of an earlier, larger page."""
    for kind in ("texts", "calls"):
        for file in folder.glob(f"{kind}-[0-9]*.js"):
            if file.stem not in names:
                file.unlink()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _safe(value: Any) -> Any:
    """The value with sanitised texts, and null for numbers that JSON does not have."""
    if isinstance(value, str):
        return sanitise(value)
    if isinstance(value, Mapping):
        return {_safe(str(name)): _safe(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- the texts of an episode -----------------------------------------------------------------------


def _take(record: Record) -> dict[str, Any]:
    """What the page shows of one episode."""
    episode, score = record.episode, record.score
    detail = episode.failure.detail if episode.failure else ""
    said = record.received or record.given
    return {
        "kind": record.kind,
        "actors": [trace.seat for trace in episode.traces] or ["the actor"],
        "seen": _seen(record),
        "lines": list(_lines(episode)),
        "score": number(score.value),
        "reward": number(score.reward) if score.reward != score.value else "",
        "status": _status(record),
        "words": score.words,
        "failure": detail if detail != score.words else "",
        "metrics": [(name, number(value)) for name, value in score.metrics.items()],
        "verdicts": [_verdict(verdict) for verdict in score.verdicts],
        "notes": [block.text.plain for block in cuts(record)],
        "gold": record.gold,
        "gold_label": "What the person wrote" if score.reason == SAMPLED else "Gold answer",
        "feedback": _feedback(said) if said else None,
    }


def _status(record: Record) -> str:
    score = record.score
    return one_line(f"{score.status}: {score.reason}" if score.reason else score.status)


def _seen(record: Record) -> list[dict[str, Any]]:
    """The first prompt of every acted seat, without its feedback; else the recorded prompt."""
    seats = [
        {"seat": trace.seat, "segments": [(one.role, one.text if one.bare is None else one.bare)
                                          for one in trace.turns[0].context]}
        for trace in record.episode.traces if trace.turns and trace.turns[0].context
    ]  # fmt: skip
    if seats or not record.prompt:
        return seats
    return [{"seat": "the actor", "segments": [("user", record.prompt)]}]


def _lines(episode: Episode) -> Iterator[dict[str, Any]]:
    """The lines of the conversation, with the thinking and the raw reply behind an actor's line."""
    turns = {trace.seat: trace.turns for trace in episode.traces}
    final = episode.final
    lines = episode.transcript or ([Line(next(iter(turns)), final.text)] if final else [])
    spoken = Counter(line.seat for line in lines)
    place: Counter[str] = Counter()
    for line in lines:
        mine, at = turns.get(line.seat, ()), place[line.seat]
        place[line.seat] += 1
        shown: dict[str, Any] = {"seat": line.seat, "text": line.text}
        # Without one turn for each line, only the last of both belong together.
        turn = mine[at] if len(mine) == spoken[line.seat] else None
        if turn is None and mine and at == spoken[line.seat] - 1:
            turn = mine[-1]
        if turn is not None:
            reply = turn.completion
            shown["thinking"] = reply.reasoning
            shown["raw"] = "" if reply.text.strip() == line.text.strip() else reply.text
        yield {name: value for name, value in shown.items() if value or name == "text"}


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "judge": verdict.judge,
        "head": verdict_head(verdict),
        "problem": verdict.problem,
        "said": [(name, *dimension(name, value)) for name, value in verdict.said.items()],
    }


def _feedback(said: Feedback) -> dict[str, Any]:
    head, notes = feedback_notes(said)
    return {"text": said.text, "head": head, "notes": notes, "shown": said.usable}


def _disagreement(verdicts: Sequence[Verdict]) -> float:
    """The largest difference between two verdicts' grades of one dimension; different labels count
    as 1. NaN if no dimension has two grades."""
    grades: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        for name, value in verdict.said.items():
            grades.setdefault((verdict.purpose, name), []).append(dimension(name, value)[0])
    return max((_spread(given) for given in grades.values() if len(given) > 1), default=_NONE)


def _spread(grades: Sequence[str]) -> float:
    try:
        numbers = [float(grade) for grade in grades]
    except ValueError:
        return float(len(set(grades)) > 1)
    return max(numbers) - min(numbers)


# -- raw calls -------------------------------------------------------------------------------------

CallKey = tuple[int, str, int, str]
"""Step, example, rollout and kind of an episode."""


def _calls(run: RunData) -> Iterator[tuple[CallKey, list[dict[str, Any]]]]:
    """The recorded calls of each episode; none if the ledger is missing or damaged, which `soul
    ledger verify` explains."""
    try:
        path = ledger_of(run.path, read_config(run.path) if is_run(run.path) else {})
        if path is None:
            return
        with LedgerView(path) as view:
            for key, stored in groupby(view.entries(), _call_key):
                yield key, [_call(one) for one in stored]
    except RunError:
        return


def _call_key(stored: StoredCall) -> CallKey:
    call = stored.entry.call
    return call.step, call.example_id, call.rollout, call.kind


def _call(stored: StoredCall) -> dict[str, Any]:
    entry, answer = stored.entry, stored.answer()
    sent = stored.request.messages if stored.request is not None else ()
    return {
        "head": f"{entry.call.role} {entry.model}",
        "facts": " · ".join(filter(None, (
            entry.call.seat, entry.call.purpose, f"turn {entry.call.turn + 1}",
            f"{entry.prompt_tokens} + {entry.completion_tokens} tokens", f"{entry.seconds:.2f} s",
            answer.stop_reason if answer else "", stored.problem,
        ))),
        "messages": [(message["role"], message["content"]) for message in sent],
        "reasoning": answer.reasoning if answer else "",
        "reply": answer.text if answer else str(entry.reply),
    }  # fmt: skip


# -- the index -------------------------------------------------------------------------------------


class _Index:
    """The rows of the list, by column. A draft and its refined episode share a row."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        self.runs = runs
        self.rows: dict[tuple[int, str], int] = {}
        self.examples: list[str] = []
        self.words: list[str] = []
        self.columns: dict[str, array[float]] = {}
        self.names: dict[str, dict[str, int]] = {}
        """Column → its texts, which the column stores as numbers."""

    def add(self, run: int, record: Record, take: int) -> None:
        """Add an episode whose texts are at `take`, or replace an older one with the same key."""
        refined = record.kind == "refined"
        row, new = self._row(run, record)
        if refined:
            self._set(row, "refined", record.score.value)
            self._set(row, "twin", take)
        if not refined or new:
            self._describe(row, run, record)
        if not refined:
            self._set(row, "score", record.score.value)
            self._set(row, "take", take)

    def _row(self, run: int, record: Record) -> tuple[int, bool]:
        pair = record.kind in ("draft", "refined")
        slot = record.key.removesuffix(f"/{record.kind}") if pair else record.key
        row = self.rows.setdefault((run, slot), len(self.examples))
        new = row == len(self.examples)
        if new:
            self.examples.append(one_line(record.example_id))
            self.words.append("")
        return row, new

    def _describe(self, row: int, run: int, record: Record) -> None:
        lines, final = record.episode.transcript, record.episode.final
        actors = {trace.seat for trace in record.episode.traces}
        own = next((line.text for line in reversed(lines) if line.seat in actors), "")
        self.words[row] = one_line(own or (final.text if final else ""), FIRST_WORDS)
        for name, text in (
            ("task", record.task),
            ("kind", record.kind),
            ("status", _status(record)),
            *((f"tag:{tag}", str(value)) for tag, value in record.tags.items()),
        ):
            known = self.names.setdefault(one_line(name), {})
            self._set(row, one_line(name), known.setdefault(one_line(text), len(known)))
        numbers = {
            "run": run,
            "step": record.step,
            "rollout": record.rollout,
            "apart": _disagreement(record.score.verdicts),
            **{f"metric:{one_line(k)}": v for k, v in record.score.metrics.items()},
        }
        for name, value in numbers.items():
            self._set(row, name, value)

    def add_calls(self, run: int, key: CallKey, place: int) -> None:
        step, example, rollout, kind = key
        slot = f"{step}/{example}/{rollout}"
        row = self.rows.get((run, slot), self.rows.get((run, f"{slot}/{kind}")))
        if row is not None:
            self._set(row, "twin_calls" if kind == "refined" else "calls", place)

    def forget_calls(self) -> None:
        for name in ("calls", "twin_calls"):
            self.columns.pop(name, None)

    def _set(self, row: int, name: str, value: float | None) -> None:
        column = self.columns.setdefault(name, array("d"))
        if row >= len(column):
            column.extend([_NONE] * (row + 1 - len(column)))
        column[row] = _NONE if value is None else value

    def packed(self, chunks: Mapping[str, Sequence[tuple[int, str]]]) -> str:
        """The index as the page reads it."""
        head = {
            "runs": [(one_line(run.name), shell_path(run.path)) for run in self.runs],
            "names": {name: list(texts) for name, texts in self.names.items()},
            "chunks": chunks, "count": len(self.examples), "example": self.examples,
        }  # fmt: skip
        return packed(self._parts(head))

    def _parts(self, head: Mapping[str, Any]) -> Iterator[str]:
        yield _json(_safe(head))[:-1]
        yield f',"words":{_json(self.words)},"columns":{{'
        for i, (name, column) in enumerate(self.columns.items()):
            yield f"{',' if i else ''}{_json(name)}:{_json([_short(value) for value in column])}"
        yield "}}"


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.4g}")
