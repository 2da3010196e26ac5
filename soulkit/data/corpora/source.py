"""One source of a stream: its windows in the order of a pass, its rows as lessons, its share.

Sources take turns by their weights: row k of a source with weight w is due at (k + phase) / w, and
whatever is due first comes next. So over any stretch every source has its share to within a row,
whatever the seed; the seed only sets the phases.

A ratio below 1 is a fixed part of the rows: of every thousand in file order the same ones, drawn by
the seed, in every pass. A ratio above 1 needs no draw: passes follow one another.
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
    LAYOUTS,
    Lesson,
    LessonShape,
    conversation_of,
    lesson_from,
    nearest_layout,
)
from soulkit.data.corpora.settings import (
    ASSISTANT,
    HUMAN,
    CorpusPart,
    SourceSettings,
    hub_address,
    listed_rule,
    rule_for,
    source_files,
)
from soulkit.data.files import BadRecord, BadRow, SourcedRow
from soulkit.errors import ConfigError, DataError
from soulkit.reporting import SILENT, Reporter
from soulkit.text import one_line

BLOCK_ROWS = 1000


class SourceTurns:
    """The endless order of sources with these weights; `taken` rows of each are out already."""

    def __init__(self, weights: Sequence[float], seed: int, taken: Sequence[int] = ()) -> None:
        rng = random.Random(f"{seed}/turns")
        self._weights = list(weights)
        self._phases = [rng.random() for _ in weights]
        self.taken = list(taken) or [0] * len(weights)

    def next(self) -> int:
        """The place of the source whose row comes next."""
        due = [
            (count + phase) / weight
            for count, phase, weight in zip(self.taken, self._phases, self._weights, strict=True)
        ]
        place = due.index(min(due))
        self.taken[place] += 1
        return place


class RowShare:
    """The fixed part of a source that a ratio below 1 leaves; everything from 1 on."""

    def __init__(self, ratio: float, span: int | None, salt: str) -> None:
        """Ordinals lie below `span`, None where nobody knows; `salt` tells sources and seeds apart.

        Among ordinals that no row has (the end of a window with blank lines) a block's part may
        hold a few rows more or fewer.
        """
        self._ratio, self._span, self._salt = ratio, span, salt

    def __contains__(self, ordinal: int) -> bool:
        """Whether the row at this place (from 0) of the source is in it."""
        if self._ratio >= 1:
            return True
        block, place = divmod(ordinal, BLOCK_ROWS)
        first = block * BLOCK_ROWS
        known = self._span is not None and ordinal < self._span
        rest = min((self._span or 0) - first, BLOCK_ROWS) if known else BLOCK_ROWS
        quota = int((first + rest) * self._ratio) - int(first * self._ratio)
        if block == 0:  # a part of few rows is never empty
            quota = max(quota, 1)
        return place in _drawn(self._salt, block, rest, quota)


@lru_cache(maxsize=256)
def _drawn(salt: str, block: int, rows: int, quota: int) -> frozenset[int]:
    return frozenset(random.Random(f"{salt}/{block}").sample(range(rows), quota))


SPEAKERS = 12
LONG_TO_READ = 1 << 30
"""Bytes of a source whose reading is announced."""
LeftOut = Callable[[str, str], None]
"""Hears (why, `file:row`) of a row that is no lesson."""


class RowStore(Protocol):
    """Where the rows of a source are: files here, or a data set of the hub."""

    @property
    def rows(self) -> int | None:
        """Of one pass; None where nobody knows."""

    @property
    def span(self) -> int | None:
        """The ordinals of its rows lie below; None where nobody knows."""

    def count(self) -> int:
        """The rows of one pass, whatever it takes to know."""

    @property
    def data_sources(self) -> frozenset[str]:
        """Names that are in its rows, where they were looked for."""

    def first(self, epoch: int, shuffled: bool) -> Any:
        """Where the first window of a pass begins, in plain JSON types."""

    def window(self, start: Any, epoch: int, shuffled: bool) -> tuple[Window, Any] | None:
        """The window that begins there, and where the next one does; None after the last."""

    def identity(self) -> Any:
        """What tells it from one with other content, in plain JSON types."""

    def check(self, identity: Any) -> None:
        """DataError, by name, when `identity` is that of other content."""


class LessonSource:
    """The rows of one source as lessons, pass after pass."""

    def __init__(
        self, settings: SourceSettings, store: RowStore, label: str, seed: int, window: int
    ) -> None:
        self.settings, self.label, self.ratio = settings, label, settings.ratio
        self.unusable: Counter[str] = Counter()
        """Why rows were left out → how many; rows of the first pass alone, so each once."""
        self._store, self._window_rows = store, window
        self._salt = f"{seed}/{label}"
        self._part = RowShare(settings.ratio, store.span, f"{self._salt}/part")
        self._shapes: dict[str, LessonShape] = {}
        self._speakers: set[str] = set()
        self._odd: tuple[str, Any] | None = None
        """`file:row` and the first row that could not be learned from."""
        self._begin(0)
        for name in sorted(store.data_sources):
            self._shape(name, label)
        self._probe()

    @classmethod
    def open(
        cls, settings: SourceSettings, *, label: str, seed: int, window: int, limit: int,
        part: CorpusPart = "train", reporter: Reporter = SILENT,
    ) -> Self:  # fmt: skip
        """Look at what there is: files are indexed, a data set of the hub is resolved.

        `window` rows and about `limit` bytes are read at once. DataError when there is nothing.
        """
        from soulkit.data.corpora.file_rows import FileStore

        if window < 1:
            raise ConfigError(
                f"A window of {window} rows holds nothing to shuffle.",
                "A window is read as a whole, and its rows come out in another order.",
                "Give the number of rows, or 1 to keep the order of the files.",
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
            store = FileStore(files, size, limit, f"{seed}/{label}", settings.side is None)
        return cls(settings, store, label, seed, window)

    def _probe(self) -> None:
        step = self._store.window(self._store.first(0, False), 0, False)
        if step is not None and len(step[0]):
            self._lesson(step[0].row(0), lambda why, key: None)

    @property
    def rows(self) -> int | None:
        return self._store.rows

    def count(self) -> int:
        """The rows of one pass; of a data set that does not say, all are read for it."""
        return self._store.count()

    @property
    def rows_of_a_pass(self) -> int:
        """Rows that one pass takes: of a ratio below 1, its part."""
        return max(round((self.rows or 0) * min(self.ratio, 1)), 1)

    # -- one row after the other -------------------------------------------------------------------

    def next_row(self) -> Lesson | None:
        """The next row as a lesson; None where it is unusable."""
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
        """Every lesson, once, in the order of the files; DataError when there is none."""
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
            left_out(row.why.partition(":")[0], key)  # without what differs from row to row
            return None
        try:
            conversation = conversation_of(row, key)
            mark = conversation.data_source
            source = self.settings.name or mark or self.label
            if len(self._speakers) < SPEAKERS:
                self._speakers.update(one_line(u.speaker, 40) for u in conversation.utterances)
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
                side = rule_for(data_source or None, settings.name, place).side
            elif side.strip().casefold() in (HUMAN, ASSISTANT):
                side = side.strip().casefold()  # names of speakers are read so, too
            turns = settings.turns or (rule.turns if rule is not None else None)
            self._shapes[data_source] = LessonShape(side, bool(settings.strip_system), turns)
        return self._shapes[data_source]

    def _fruitless(self, reasons: Mapping[str, int]) -> DataError:
        often = ", ".join(f"{count} × {why}" for why, count in Counter(reasons).most_common(3))
        return DataError(
            f"No row of the source '{self.label}' can be learned from.",
            f"A whole pass had none: {often or 'every row is blank'}.",
            self._way_out(),
        )

    def _way_out(self) -> str:
        """The layouts that are read where no row is one, else the sides there are."""
        near = nearest_layout(self._odd[1]) if self._odd else ""
        if self._odd and near:
            return f"{LAYOUTS} {self._odd[0]}: {near}"
        if not self._speakers:
            return LAYOUTS
        names = ", ".join(sorted(self._speakers)[:SPEAKERS])
        return f"Give --side human, or one who speaks there: {names}."

    # -- position --------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """Where it stands: the beginning of its window, and the place in it."""
        reading = self._window is not None
        return {
            "source": self.label, "ratio": self.ratio, "content": self._store.identity(),
            "epoch": self._epoch, "start": self._start if reading else self._next,
            "place": self._place if reading else 0, "lessons": self._lessons,
            "unusable": dict(self.unusable),
        }  # fmt: skip

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from there; DataError when its content is not what it was."""
        self._store.check(state["content"])
        self._begin(int(state["epoch"]))
        self._next = state["start"]
        self.unusable = Counter({str(k): int(v) for k, v in state["unusable"].items()})
        self._lessons = int(state["lessons"])
        if state["place"]:
            self._advance()
            self._place = int(state["place"])


def _announce(path: str, files: Sequence[Path], reporter: Reporter) -> None:
    size = sum(f.stat().st_size for f in files if f.suffix.lower() == ".jsonl" and f.is_file())
    if size >= LONG_TO_READ:
        reporter.note(f"reading {size / 1e9:.1f} GB of {path} once, for its rows and its checksum")


def source_labels(sources: Sequence[SourceSettings]) -> list[str]:
    """What each is called, all different: its name, else its file's, else the path as it stands."""
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
