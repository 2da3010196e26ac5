"""All episodes of a page: an index for the list and chunks with the full texts and raw calls.

    episodes.jsonl ── stream ──► chunks of texts ──┐   one file: <script> elements of the page
    ledger.sqlite ─── stream ──► chunks of calls ──┼─► a folder: episodes/00001.js, …
                                 index of the list ┘

The browser shows the list from the index and loads a chunk when a reader opens or searches its
episodes. Index and chunks are JSON, compressed and written in base64, which cannot end a script
element. Only one chunk and the index are in memory.
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
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, groupby
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
from soulkit.types import Episode, Line, Record, Verdict

PORTABLE = 20_000_000
"""Maximum size of the texts in a page that is one file, in bytes."""
CHUNK = 1 << 20
"""A chunk ends after this many characters of JSON."""
FIRST_WORDS = 110
"""Characters of the reply that the list shows."""
FOLDER = "episodes"
"""The folder of the chunks, next to the page."""


@dataclass(frozen=True, slots=True)
class EpisodePack:
    """The packed episodes of a page."""

    total: int
    """Rows of the list: a draft and its refined episode are one row."""
    index: str
    chunks: Mapping[str, str]
    """Name → text of the chunks inside the page."""
    files: bool
    """Whether chunks are files next to the page instead."""


def pack_episodes(runs: Sequence[RunData], folder: Path | None = None) -> EpisodePack:
    """The episodes of `runs` for a page. With `folder`, chunks become files in `folder/episodes`.

    RunError if the page must be one file and its episodes do not fit; DataError for damaged lines.
    """
    index = _Index(runs)
    takes = (index.add(i, one) for i, run in enumerate(runs) for one in _records(run))
    texts = Chunks("", folder, PORTABLE, takes)
    if texts.room < 0:
        raise RunError(
            f"The page would be larger than {PORTABLE // 1_000_000} MB.",
            "One file cannot hold the texts of all episodes.",
            f"Write a folder instead: soul report {' '.join(shell_path(run.path) for run in runs)} "
            "--format html --out DIR",
        )
    entries = (index.add_calls(i, *one) for i, run in enumerate(runs) for one in _calls(run))
    calls = Chunks("calls-", folder, texts.room, entries)
    if calls.room < 0:  # the page names the command that shows them
        index.columns = {k: v for k, v in index.columns.items() if not k.endswith("calls")}
        calls = Chunks("calls-", None, 0, ())
    for file in (folder / FOLDER).glob("*[0-9].js") if folder is not None else ():
        earlier = file.stem not in {*texts.places, *calls.places}
        if earlier and file.read_bytes().startswith(b"soulkitChunk("):  # not a user's file
            file.unlink()
    places = {"texts": list(texts.places.values()), "calls": list(calls.places.values())}
    inside = {**texts.inside, **calls.inside}
    return EpisodePack(len(index.examples), _packed(index.json(places)), inside, folder is not None)


def _records(run: RunData) -> Iterator[Record]:
    """The played episodes, else the sampled continuations of held-out conversations."""
    played, samples = run.path / EPISODES, run.path / SAMPLES
    file = played if has_lines(played) and any(stream_records(played)) else samples
    return stream_records(file) if has_lines(file) else iter(())


# -- chunks ----------------------------------------------------------------------------------------


def _packed(parts: Iterable[str]) -> str:
    """JSON text, compressed and in base64."""
    squeezer = zlib.compressobj(6)
    data = [squeezer.compress(part.encode("utf-8", "replace")) for part in parts]
    return base64.b64encode(b"".join([*data, squeezer.flush()])).decode()


def _json(value: Any) -> str:
    """JSON with sanitised texts, and null for numbers that JSON does not have."""
    text = _write(value)
    usual = not any(sign in text for sign in _DOUBTFUL) and sanitise(text) == text
    return text if usual else _write(_safe(value))


_write = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_DOUBTFUL = ("\\u", "\\b", "\\f", "\\r", "NaN", "Infinity")
"""What JSON has for control characters and for other numbers. Few episodes have them."""
_name = lru_cache(10_000)(one_line)


def _safe(value: Any) -> Any:
    if isinstance(value, str):
        return sanitise(value)
    if isinstance(value, Mapping):
        return {_safe(str(name)): _safe(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Chunks:
    """JSON values in chunks of about CHUNK characters, inside a page or as files."""

    def __init__(self, prefix: str, folder: Path | None, room: int, values: Iterable[Any]) -> None:
        """The names are `prefix` and a number. Without `folder`, `room` is the bytes left inside
        the page; it gets negative when there is none left, and the rest is dropped."""
        self.prefix, self.folder, self.room = prefix, folder, room
        self.inside: dict[str, str] = {}
        self.places: dict[str, tuple[int, str]] = {}
        """Name → number of the first value, and the digest of the text."""
        parts, size, first = list[str](), 0, 0
        for value in values:
            parts.append(_json(value))
            size += len(parts[-1])
            if size >= CHUNK:
                self._add(first, parts)
                parts, size, first = [], 0, first + len(parts)
            if self.room < 0:
                return
        if parts:
            self._add(first, parts)

    def _add(self, first: int, parts: Sequence[str]) -> None:
        text = _packed(["[", ",".join(parts), "]"])
        name = f"{self.prefix}{len(self.places) + 1:05d}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        self.places[name] = (first, digest)
        if self.folder is None:
            self.room -= len(text)
            self.inside[name] = text
        else:
            line = f'soulkitChunk("{name}","{digest}","{text}");\n'
            write_aside(self.folder / FOLDER / f"{name}.js", line.encode())


# -- the texts of an episode -----------------------------------------------------------------------


def _take(record: Record) -> dict[str, Any]:
    """What the page shows of one episode."""
    episode, score = record.episode, record.score
    detail = episode.failure.detail if episode.failure else ""
    told = record.received or record.given
    head, notes = feedback_notes(told) if told else ("", [])
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
        "verdicts": [
            {"head": verdict_head(one), "problem": one.problem,
             "said": [(name, *dimension(name, value)) for name, value in one.said.items()]}
            for one in score.verdicts
        ],
        "notes": [block.text.plain for block in cuts(record)],
        "gold": record.gold,
        "gold_label": "What the person wrote" if score.reason == SAMPLED else "Gold answer",
        "feedback": told and {"text": told.text, "head": head, "notes": notes,
                              "shown": told.usable},
    }  # fmt: skip


def _status(record: Record) -> str:
    score = record.score
    return _name(f"{score.status}: {score.reason}" if score.reason else score.status)


def _seen(record: Record) -> list[dict[str, Any]]:
    """The first prompt of every acted seat, without its feedback; else the recorded prompt."""
    first = {trace.seat: trace.turns[0].context for trace in record.episode.traces if trace.turns}
    seats = [
        {"seat": seat, "segments": [(s.role, s.text if s.bare is None else s.bare) for s in given]}
        for seat, given in first.items() if given
    ]  # fmt: skip
    if seats or not record.prompt:
        return seats
    return [{"seat": "the actor", "segments": [("user", record.prompt)]}]


def _lines(episode: Episode) -> Iterator[dict[str, Any]]:
    """The lines of the conversation, with the thinking and the raw reply behind an actor's line."""
    turns = {trace.seat: trace.turns for trace in episode.traces if trace.turns}
    final = episode.final
    lines = episode.transcript or ([Line(next(iter(turns)), final.text)] if final else [])
    left = Counter(line.seat for line in lines)
    whole = {seat for seat, mine in turns.items() if len(mine) == left[seat]}
    for line in lines:
        shown = {"seat": line.seat, "text": line.text}
        # Without one turn for each line, only the last of both certainly belong together.
        if line.seat in whole or (line.seat in turns and left[line.seat] == 1):
            reply = turns[line.seat][-left[line.seat]].completion
            shown["thinking"] = reply.reasoning
            shown["raw"] = "" if reply.text.strip() == line.text.strip() else reply.text
        left[line.seat] -= 1
        yield shown


def _disagreement(verdicts: Sequence[Verdict]) -> float | None:
    """The largest difference between two verdicts' grades of one dimension; different labels count
    as 1. None if no dimension has two grades."""
    grades: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        for name, value in verdict.said.items():
            grades.setdefault((verdict.purpose, name), []).append(dimension(name, value)[0])
    apart = []
    for given in filter(lambda given: len(given) > 1, grades.values()):
        try:
            apart.append(max(map(float, given)) - min(map(float, given)))
        except ValueError:
            apart.append(float(len(set(given)) > 1))
    return max(apart, default=None)


# -- raw calls -------------------------------------------------------------------------------------


Calls = list[dict[str, Any]]


def _calls(run: RunData) -> Iterator[tuple[str, str, Calls]]:
    """(key without kind, kind, calls) of each episode; none if the ledger is missing or damaged,
    which `soul ledger verify` explains."""

    def episode(stored: StoredCall) -> tuple[str, str]:
        call = stored.entry.call
        return f"{call.step}/{call.example_id}/{call.rollout}", call.kind

    with suppress(RunError):
        path = ledger_of(run.path, read_config(run.path) if is_run(run.path) else {})
        if path is not None:
            with LedgerView(path) as view:
                for key, stored in groupby(view.entries(), episode):
                    yield *key, [_call(one) for one in stored]


def _call(stored: StoredCall) -> dict[str, Any]:
    entry, call = stored.entry, stored.entry.call
    tokens = f"{entry.prompt_tokens} + {entry.completion_tokens} tokens, {entry.seconds:.2f} s"
    facts = (call.seat, call.purpose, f"turn {call.turn + 1}", tokens, stored.problem)
    return {"head": f"{call.role} {entry.model}", "facts": " · ".join(filter(None, facts)),
            "texts": stored.texts()}  # fmt: skip


# -- the index -------------------------------------------------------------------------------------


class _Index:
    """The rows of the list, by column. A draft and its refined episode share a row."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        self.runs, self.takes, self.entries = runs, count(), count()
        self.rows: dict[tuple[int, str], int] = {}
        self.examples: list[str] = []
        self.words: list[str] = []
        self.columns: dict[str, array[float]] = {}
        self.recorded: set[int] = set()
        """The runs with recorded calls."""
        self.names: dict[str, dict[str, int]] = {}
        """Column → its texts, which the column stores as numbers."""

    def add(self, run: int, record: Record) -> dict[str, Any]:
        """Add an episode, which replaces one with the same key; returns what the page shows."""
        pair = record.kind in ("draft", "refined")
        slot = record.key.removesuffix(f"/{record.kind}") if pair else record.key
        row = self.rows.setdefault((run, slot), len(self.examples))
        new = row == len(self.examples)
        if new:
            self.examples.append(one_line(record.example_id))
            self.words.append("")
        score, place = ("refined", "twin") if record.kind == "refined" else ("score", "take")
        numbers: dict[str, float | None] = {score: record.score.value, place: next(self.takes)}
        if new or place == "take":  # of a pair, the list describes the draft
            older = [
                name for name in self.columns if not new and name.startswith(("metric:", "tag:"))
            ]
            numbers = {**dict.fromkeys(older), **numbers, **self._described(row, run, record)}
        for name, value in numbers.items():
            self._set(row, name, value)
        return _take(record)

    def _described(self, row: int, run: int, record: Record) -> dict[str, float | None]:
        actors, final = {trace.seat for trace in record.episode.traces}, record.episode.final
        lines = [line.text for line in record.episode.transcript if line.seat in actors]
        self.words[row] = one_line(lines[-1] if lines else final.text if final else "", FIRST_WORDS)
        texts = {"task": record.task, "kind": record.kind, "status": _status(record),
                 **{f"tag:{tag}": str(value) for tag, value in record.tags.items()}}  # fmt: skip
        codes: dict[str, float | None] = {}
        for name, text in texts.items():
            known = self.names.setdefault(_name(name), {})
            codes[_name(name)] = known.setdefault(_name(text), len(known))
        metrics = {f"metric:{_name(name)}": v for name, v in record.score.metrics.items()}
        return {**codes, **metrics, "run": run, "step": record.step, "rollout": record.rollout,
                "apart": _disagreement(record.score.verdicts)}  # fmt: skip

    def add_calls(self, run: int, slot: str, kind: str, calls: Calls) -> Calls:
        self.recorded.add(run)
        place = next(self.entries)
        row = self.rows.get((run, slot), self.rows.get((run, f"{slot}/{kind}")))
        if row is not None:
            self._set(row, "twin_calls" if kind == "refined" else "calls", place)
        return calls

    def _set(self, row: int, name: str, value: float | None) -> None:
        column = self.columns.setdefault(name, array("d"))
        column.extend([math.nan] * (row + 1 - len(column)))
        column[row] = math.nan if value is None else value

    def json(self, chunks: Mapping[str, Sequence[tuple[int, str]]]) -> Iterator[str]:
        """The index as the page reads it, in parts."""
        runs = [(one_line(run.name), shell_path(run.path), i in self.recorded)
                for i, run in enumerate(self.runs)]  # fmt: skip
        names = {name: list(texts) for name, texts in self.names.items()}
        head = {"runs": runs, "names": names, "chunks": chunks, "count": len(self.examples)}
        yield f'{_json(head)[:-1]},"example":{_json(self.examples)}'
        yield f',"words":{_json(self.words)},"columns":{{"":[]'
        for name, column in self.columns.items():
            column.extend([math.nan] * (len(self.examples) - len(column)))
            yield f",{_json(name)}:{_json([_short(value) for value in column])}"
        yield "}}"


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.4g}")
