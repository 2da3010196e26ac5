"""One source of a stream: the order of its windows, its rows as lessons, and its share.

Sources take turns by weight: row k of a source with weight w is due at (k + phase) / w, and the row
that is due first comes next. So every source has its share of any stretch to within one row; the
seed only sets the phases.

A ratio below 1 selects a fixed part of the rows, drawn by the seed from every thousand in file
order, and the same in every pass. A ratio above 1 draws nothing: passes follow one another.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, Self

from soulkit.data.corpora.file_rows import Window
from soulkit.data.corpora.lessons import (
    Lesson,
    LessonShape,
    conversation_of,
    lesson_from,
    sides_of,
)
from soulkit.data.corpora.settings import (
    ASSISTANT,
    HUMAN,
    CorpusPart,
    SourceSettings,
    hub_address,
    left_out_note,
    listed_rule,
    rule_for,
    source_files,
)
from soulkit.data.exports.reading import ROW_FORM, nearest_words
from soulkit.data.files import BadRecord, BadRow, SourcedRow
from soulkit.errors import ConfigError, DataError, nearest
from soulkit.reporting import SILENT, Reporter

BLOCK_ROWS = 1000


class SourceTurns:
    """The endless order of weighted sources; `taken` rows of each have been taken already."""

    def __init__(self, weights: Sequence[float], seed: int, taken: Sequence[int] = ()) -> None:
        rng = random.Random(f"{seed}/turns")
        self._weights = list(weights)
        self._phases = [rng.random() for _ in weights]
        self.taken = list(taken) or [0] * len(weights)

    def next(self) -> int:
        """Index of the source whose row comes next."""
        due = [
            (count + phase) / weight
            for count, phase, weight in zip(self.taken, self._phases, self._weights, strict=True)
        ]
        place = due.index(min(due))
        self.taken[place] += 1
        return place


class RowShare:
    """The part of a source that a ratio below 1 selects; all rows for a ratio from 1 on."""

    def __init__(self, ratio: float, span: int | None, salt: str) -> None:
        """Ordinals are below `span` (None: unknown). `salt` distinguishes sources and seeds.

        If a block contains ordinals without a row (blank lines at the end of a window), its part
        may have a few rows more or fewer.
        """
        self._ratio, self._span, self._salt = ratio, span, salt

    def __contains__(self, ordinal: int) -> bool:
        """Whether the row at this index of the source is selected."""
        if self._ratio >= 1:
            return True
        block, place = divmod(ordinal, BLOCK_ROWS)
        first = block * BLOCK_ROWS
        known = self._span is not None and ordinal < self._span
        rest = min((self._span or 0) - first, BLOCK_ROWS) if known else BLOCK_ROWS
        quota = int((first + rest) * self._ratio) - int(first * self._ratio)
        if block == 0:  # never select nothing from a short source
            quota = max(quota, 1)
        return place in _drawn(self._salt, block, rest, quota)


@lru_cache(maxsize=256)
def _drawn(salt: str, block: int, rows: int, quota: int) -> frozenset[int]:
    return frozenset(random.Random(f"{salt}/{block}").sample(range(rows), quota))


SPEAKERS = 12
"""Names that a message lists."""
COUNTED_ROWS = 20_000
"""Rows at the beginning of a source in which the messages of each speaker are counted."""
LONG_TO_READ = 1 << 30
"""Bytes of a source from which on reading it is announced."""
LeftOut = Callable[[str, str], None]
"""Called with (reason, `file:row`) for a row that is not a lesson."""


class RowStore(Protocol):
    """Access to the rows of a source: local files or a Hub dataset."""

    @property
    def rows(self) -> int | None:
        """Number of rows in one pass; None if unknown."""

    @property
    def span(self) -> int | None:
        """Upper bound of its row ordinals; None if unknown."""

    def count(self) -> int:
        """Number of rows in one pass, counted if necessary."""

    @property
    def data_sources(self) -> frozenset[str]:
        """The `data_source` names in its rows, if collected."""

    def first(self, epoch: int, shuffled: bool) -> Any:
        """Start of the first window of a pass, in plain JSON types."""

    def window(self, start: Any, epoch: int, shuffled: bool) -> tuple[Window, Any] | None:
        """The window at `start` and the start of the next one; None after the last."""

    def identity(self) -> Any:
        """Identifies its content, in plain JSON types."""

    def check(self, identity: Any) -> None:
        """DataError, naming the change, if `identity` belongs to other content."""


class LessonSource:
    """The rows of one source as lessons, pass after pass."""

    def __init__(
        self, settings: SourceSettings, store: RowStore, label: str, seed: int, window: int
    ) -> None:
        self.settings, self.label, self.ratio = settings, label, settings.ratio
        self.unusable: Counter[str] = Counter()
        """Reason → number of unusable rows, counted in the first pass only."""
        self._store, self._window_rows = store, window
        self._salt = f"{seed}/{label}"
        self._part = RowShare(settings.ratio, store.span, f"{self._salt}/part")
        self._shapes: dict[str, LessonShape] = {}
        self._odd: tuple[str, Any] | None = None
        """`file:row` and content of the first row that gave no lesson."""
        self._begin(0)
        for name in sorted(store.data_sources):
            self._shape(name, label)
        self._probe()

    @classmethod
    def open(
        cls, settings: SourceSettings, *, label: str, seed: int, window: int, limit: int,
        part: CorpusPart = "train", reporter: Reporter = SILENT,
    ) -> Self:  # fmt: skip
        """Open a source: index its files, or resolve its Hub dataset.

        `window` rows and about `limit` bytes are read at once. DataError if there are no rows.
        """
        from soulkit.data.corpora.file_rows import FileStore

        if window < 1:
            raise ConfigError(
                f"A window of {window} rows is too small.",
                "The rows of a window are read and shuffled together.",
                "Set the window to at least 1; 1 keeps the order of the files.",
            )
        size = window if window > 1 else 1024
        address = hub_address(settings.path)
        store: RowStore
        if address is not None:
            from soulkit.data.corpora.hub_rows import HubStore

            store = HubStore(address, size, limit, f"{seed}/{label}", part, reporter)
        else:
            files = source_files(settings.path, part)
            _announce(settings.path, files, reporter)
            if part == "train" and (note := left_out_note(settings.path)):
                reporter.note(note)
            store = FileStore(files, size, limit, f"{seed}/{label}", settings.side is None)
        return cls(settings, store, label, seed, window)

    def _probe(self) -> None:
        step = self._store.window(self._store.first(0, False), 0, False)
        if step is not None and len(step[0]):
            self._lesson(step[0].row(0), lambda why, key: None)

    @property
    def rows(self) -> int | None:
        return self._store.rows

    def speakers(self) -> Counter[str]:
        """Value of --side → number of messages that it selects, in the first rows."""
        counts: Counter[str] = Counter()
        start, seen = self._store.first(0, False), 0
        while seen < COUNTED_ROWS and (step := self._store.window(start, 0, False)) is not None:
            window, start = step
            seen += len(window)
            for _, row in map(window.row, range(len(window))):
                try:
                    lines = conversation_of(row).utterances
                except BadRecord:
                    continue
                spoken = (line for line in lines if line.text or line.marks)
                counts.update(side for line in spoken for side in sides_of(line))
        return counts

    def count(self) -> int:
        """Number of rows in one pass; without metadata, all rows are read to count them."""
        return self._store.count()

    @property
    def rows_of_a_pass(self) -> int:
        """Rows used in one pass; with a ratio below 1, the selected part."""
        return max(round((self.rows or 0) * min(self.ratio, 1)), 1)

    # -- one row after the other -------------------------------------------------------------------

    def next_row(self) -> Lesson | None:
        """The next row as a lesson; None if it is unusable."""
        while self._window is None or self._place >= len(self._order):
            self._advance()
        place = self._order[self._place]
        self._place += 1
        lesson = self._lesson(self._window.row(place), self._left_out)
        self._lessons += lesson is not None
        return lesson

    def _left_out(self, why: str, key: str) -> None:
        if self._epoch == 0:
            self.unusable[why] += 1

    def _begin(self, epoch: int) -> None:
        self._epoch, self._lessons, self._place = epoch, 0, 0
        self._start: Any = None
        self._next: Any = self._store.first(epoch, self._shuffled)
        self._window: Window | None = None
        self._order: list[int] = []

    @property
    def _shuffled(self) -> bool:
        return self._window_rows > 1

    def _advance(self) -> None:
        step = self._store.window(self._next, self._epoch, self._shuffled)
        if step is None:
            if not self._lessons:
                raise self._fruitless(self.unusable)
            self._begin(self._epoch + 1)
            return
        self._start = self._next
        self._window, self._next = step
        self._order = [n for n, row in enumerate(self._window.ordinals) if row in self._part]
        if self._shuffled:
            place = self._window.ordinals[0] if self._order else 0
            random.Random(f"{self._salt}/{self._epoch}/{place}").shuffle(self._order)
        self._place = 0

    def in_order(self, left_out: LeftOut) -> Iterator[Lesson]:
        """All lessons once, in file order; DataError if there are none."""
        reasons: Counter[str] = Counter()

        def counted(why: str, key: str) -> None:
            reasons[why] += 1
            left_out(why, key)

        count, start = 0, self._store.first(0, False)
        while (step := self._store.window(start, 0, False)) is not None:
            window, start = step
            for place in range(len(window)):
                sourced = window.row(place)
                lesson = self._lesson(sourced, counted)
                if lesson is not None:
                    count += 1
                    yield lesson
        if not count:
            raise self._fruitless(reasons)

    def _lesson(self, sourced: SourcedRow, left_out: LeftOut) -> Lesson | None:
        key, row = sourced
        if isinstance(row, BadRow):
            left_out(row.why.partition(":")[0], key)  # the general part of the reason
            return None
        try:
            conversation = conversation_of(row)
            mark = conversation.data_source
            source = self.settings.name or mark or self.label
            return lesson_from(conversation, self._shape(mark, key), source, key)
        except BadRecord as error:
            self._odd = self._odd or (key, row)
            left_out(str(error), key)
            return None

    def _shape(self, data_source: str, place: str) -> LessonShape:
        if data_source not in self._shapes:
            settings = self.settings
            side, rule = settings.side, listed_rule(data_source, settings.name)
            if side is None:
                side = self._side_of(data_source, place)
            elif side.strip().casefold() in (HUMAN, ASSISTANT):
                side = side.strip().casefold()  # like speaker names
            turns = settings.turns or (rule.turns if rule is not None else None)
            self._shapes[data_source] = LessonShape(side, bool(settings.strip_system), turns)
        return self._shapes[data_source]

    def _fruitless(self, reasons: Mapping[str, int]) -> DataError:
        often = ", ".join(f"{count} × {why}" for why, count in Counter(reasons).most_common(3))
        return DataError(
            f"The source '{self.label}' contains no usable conversation.",
            f"A complete pass found none: {often or 'every row is blank'}.",
            self._way_out(),
        )

    def _side_of(self, data_source: str, place: str) -> str:
        """The side that corpora.yaml declares; DataError with the sides if it has none."""
        try:
            return rule_for(data_source or None, self.settings.name, place).side
        except DataError as error:
            counts = self.speakers()
            if not counts or counts.keys() & {HUMAN, ASSISTANT}:
                raise
            why = "These chats are between people: the model learns the messages of one of them."
            raise DataError(error.what, why, side_hint(counts)) from error

    def _way_out(self) -> str:
        """The supported layouts if no row has one, else the available sides."""
        counts = self.speakers()
        if counts:
            return side_hint(counts, self.settings.side)
        odd, row = self._odd or ("a row", None)
        return f"Write one conversation per row: {ROW_FORM} {odd} {nearest_words([row])}"

    # -- position --------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """The current position: the start of the window and the index in it."""
        reading = self._window is not None
        return {
            "source": self.label, "ratio": self.ratio, "content": self._store.identity(),
            "epoch": self._epoch, "start": self._start if reading else self._next,
            "place": self._place if reading else 0, "lessons": self._lessons,
            "unusable": dict(self.unusable),
        }  # fmt: skip

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue at a position; DataError if the content has changed."""
        self._store.check(state["content"])
        self._begin(int(state["epoch"]))
        self._next = state["start"]
        self.unusable = Counter({str(k): int(v) for k, v in state["unusable"].items()})
        self._lessons = int(state["lessons"])
        if state["place"]:
            self._advance()
            self._place = int(state["place"])


def side_hint(counts: Counter[str], side: str | None = None) -> str:
    """What to set --side to, most frequent first. `side` was given and selects nothing."""
    near = nearest(side, counts) if side else None
    numbers = [f"{name} ({count})" for name, count in counts.most_common(SPEAKERS)]
    unit = "message" if numbers[0].endswith("(1)") else "messages"
    numbers[0] = f"{numbers[0][:-1]} {unit})"
    more = f" and {len(counts) - SPEAKERS} more" if len(counts) > SPEAKERS else ""
    hint = f"Did you mean '{near}'? " if near and near != side else ""
    return f"{hint}Set --side to one of: {', '.join(numbers)}{more}."


def _announce(path: str, files: Sequence[Path], reporter: Reporter) -> None:
    size = sum(f.stat().st_size for f in files if f.suffix.lower() == ".jsonl" and f.is_file())
    if size >= LONG_TO_READ:
        reporter.note(f"reading {size / 1e9:.1f} GB of {path} to count rows and compute a checksum")


def source_labels(sources: Sequence[SourceSettings]) -> list[str]:
    """Unique labels of the sources: the name, else the file name, with the path if ambiguous."""
    short = [s.name or _stem(s.path) for s in sources]
    labels = [
        label if short.count(label) == 1 else f"{label} ({s.path})"
        for label, s in zip(short, sources, strict=True)
    ]
    return [
        label if labels.count(label) == 1 else f"{label} {number}"
        for number, label in enumerate(labels, 1)
    ]


def _stem(path: str) -> str:
    address = hub_address(path)
    if address is not None:
        return address["repo"]
    place = Path(path)
    return place.stem if place.suffix else PurePosixPath(place.as_posix()).name or path
