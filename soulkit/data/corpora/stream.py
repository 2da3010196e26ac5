"""Endless lessons from a mixture of sources, in an order that a position fully describes.

    sources ──▶ turns by ratio × rows ──▶ a shuffled window of one source ──▶ row ──▶ lesson

The order depends only on the seed, the files and the source settings. A position holds the window
of every source and the index in it, so a stream resumes without stored rows.

    stream = LessonStream.open(["chats.jsonl:1.5", "more/"], seed=0, side="human")
    stream.take(32); position = stream.position()
    stream = LessonStream.open([...], seed=0, side="human"); stream.resume(position)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Self

from soulkit.data.corpora.lessons import Lesson
from soulkit.data.corpora.settings import AnySource, CorpusPart, SourceSettings, source_settings
from soulkit.data.corpora.source import LessonSource, SourceTurns, source_labels
from soulkit.errors import ConfigError, DataError
from soulkit.reporting import SILENT, Reporter

WINDOW = 10_000
WINDOW_BYTES = 128 << 20
"""Approximate total size of all windows of a stream."""
LARGEST_WINDOW = 32 << 20
_SMALLEST_WINDOW = 1 << 20
_VERSION = 1


class LessonStream:
    """An endless stream of lessons from a mixture; see `open`."""

    def __init__(self, sources: Sequence[LessonSource], seed: int, window: int) -> None:
        self._sources, self._seed, self._window = sources, seed, window
        self._turns = self._new_turns([0] * len(sources))

    @classmethod
    def open(
        cls,
        sources: Sequence[AnySource],
        *,
        seed: int = 0,
        window: int = WINDOW,
        side: str | None = None,
        strip_system: bool = False,
        turns: int | None = None,
        part: CorpusPart = "train",
        reporter: Reporter = SILENT,
    ) -> Self:
        """Index every source. Only sizes and offsets stay in memory.

        `window` rows are shuffled together; 1 keeps the file order. `side`, `strip_system` and
        `turns` apply to sources that do not set them. `reporter` announces slow steps. DataError if
        a source is missing, empty or unreadable, or if its side is unknown.
        """
        settings = [source_settings(source) for source in sources]
        if not settings:
            raise ConfigError(
                "No training data is given.",
                "A stream of lessons needs at least one source.",
                "Add one: --data chats.jsonl --side human",
            )
        limit = max(min(WINDOW_BYTES // len(settings), LARGEST_WINDOW), _SMALLEST_WINDOW)
        opened = [
            LessonSource.open(
                with_defaults(setting, side, strip_system, turns), label=label, seed=seed,
                window=window, limit=limit, part=part, reporter=reporter,
            )
            for setting, label in zip(settings, source_labels(settings), strict=True)
        ]  # fmt: skip
        return cls(opened, seed, window)

    def _new_turns(self, taken: Sequence[int]) -> SourceTurns:
        alone = len(self._sources) == 1  # no turns with a single source
        weights = [1.0 if alone else s.ratio * s.count() for s in self._sources]
        return SourceTurns(weights, self._seed, taken)

    # -- lessons ---------------------------------------------------------------------------------

    def take(self, count: int) -> list[Lesson]:
        """The next `count` lessons; DataError if a whole pass over a source has none."""
        lessons: list[Lesson] = []
        while len(lessons) < count:
            lesson = self._sources[self._turns.next()].next_row()
            if lesson is not None:
                lessons.append(lesson)
        return lessons

    def heads(self, count: int) -> dict[str, tuple[Lesson, ...]]:
        """Source → its first `count` lessons in file order. The stream does not advance.

        DataError for a source without lessons.
        """
        return {s.label: tuple(islice(s.in_order(_unheard), count)) for s in self._sources}

    @property
    def unusable(self) -> dict[str, dict[str, int]]:
        """Source → reason → number of unusable rows, each row counted once."""
        return {s.label: dict(s.unusable) for s in self._sources}

    @property
    def sizes(self) -> dict[str, int | None]:
        """Source → number of rows, unusable ones included; None if unknown."""
        return {s.label: s.rows for s in self._sources}

    @property
    def passes(self) -> dict[str, float]:
        """Source → number of passes over its rows; with a ratio below 1, over the selected part."""
        return {
            s.label: taken / max(s.rows_of_a_pass, 1)
            for s, taken in zip(self._sources, self._turns.taken, strict=True)
        }

    # -- position --------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """The position of the stream in plain JSON types, for `resume`."""
        sources = [
            {**source.position(), "taken": taken}
            for source, taken in zip(self._sources, self._turns.taken, strict=True)
        ]
        return {
            "version": _VERSION, "seed": self._seed, "window": self._window, "sources": sources
        }  # fmt: skip

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continue from the position of a stream over the same sources.

        DataError if sources or settings differ, or if a file has changed; the error names the file.
        """
        try:
            self._check(position)
            for source, state in zip(self._sources, position["sources"], strict=True):
                source.resume(state)
            self._turns = self._new_turns([int(s["taken"]) for s in position["sources"]])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _no_position(f"it cannot be read: {type(error).__name__}: {error}") from error

    def _check(self, position: Mapping[str, Any]) -> None:
        if position["version"] != _VERSION:
            raise _no_position(f"it has version {position['version']}; expected {_VERSION}")
        for name, value in (("seed", self._seed), ("window", self._window)):
            if position[name] != value:
                raise _no_position(f"its {name} was {position[name]} and is now {value}")
        before = [(s["source"], s["ratio"]) for s in position["sources"]]
        now = [(s.label, s.ratio) for s in self._sources]
        if before != now:
            raise _no_position(f"its sources were {_listed(before)} and are now {_listed(now)}")


def _unheard(why: str, key: str) -> None:
    """Ignores unusable rows here; the stream counts them when it reaches them."""


def _listed(sources: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{label}:{ratio:g}" for label, ratio in sources)


def _no_position(why: str) -> DataError:
    return DataError(
        "The training data cannot be resumed from the saved position.",
        f"The position belongs to another stream: {why}.",
        "Use the original sources and settings, or start a new run.",
    )


def with_defaults(
    source: SourceSettings, side: str | None, strip_system: bool, turns: int | None
) -> SourceSettings:
    """`source` with the run's settings for those it does not set."""
    return source.model_copy(
        update={
            "side": source.side if source.side is not None else side,
            "strip_system": strip_system if source.strip_system is None else source.strip_system,
            "turns": source.turns if source.turns is not None else turns,
        }
    )


class LessonRows:
    """The lessons of one source, one pass in file order; each iteration reads the files again."""

    def __init__(self, source: LessonSource) -> None:
        self._source = source
        self.unusable: Counter[str] = Counter()
        """Reason → number of unusable rows; complete after a whole pass."""
        self.examples: dict[str, str] = {}
        """Reason → `file:row` of the first such row."""

    def __iter__(self) -> Iterator[Lesson]:
        self.unusable.clear()
        yield from self._source.in_order(self._left_out)

    def at(self, number: int) -> Lesson | str:
        """The lesson of row `number`, or the reason why it has none (empty: no such row).

        Rows are counted from 1 over all files; in the first file, this is the number in messages.
        """
        self.unusable.clear()
        places, whys = _Places(), dict[int, str]()

        def left_out(why: str, key: str) -> None:
            self._left_out(why, key)
            whys[places.of(key)] = why

        for lesson in self._source.in_order(left_out):
            place = places.of(lesson.key)
            if place == number:
                return lesson
            if place > number:
                break
        return whys.get(number, "")

    def speakers(self) -> Counter[str]:
        """Value of --side → number of messages that it selects, in the first rows."""
        return self._source.speakers()

    def _left_out(self, why: str, key: str) -> None:
        self.unusable[why] += 1
        self.examples.setdefault(why, key)


class _Places:
    def __init__(self) -> None:
        self._file, self._before, self._last = "", 0, 0

    def of(self, key: str) -> int:
        """The number of the row with key `file:row`; call it in row order."""
        file, _, row = key.rpartition(":")
        if file != self._file:
            self._file, self._before = file, self._before + self._last
        self._last = int(row)
        return self._before + self._last


def read_lessons(
    source: AnySource,
    *,
    side: str | None = None,
    strip_system: bool = False,
    turns: int | None = None,
    reporter: Reporter = SILENT,
) -> LessonRows:
    """One pass over a source in file order, without shuffling; its ratio is ignored.

    Iterating over the result yields Lessons; `unusable` then counts the other rows. DataError as in
    `LessonStream.open`, and if no row is a lesson.
    """
    settings = with_defaults(source_settings(source), side, strip_system, turns)
    (label,) = source_labels([settings])
    return LessonRows(
        LessonSource.open(
            settings,
            label=label,
            seed=0,
            window=1024,
            limit=_SMALLEST_WINDOW << 3,
            reporter=reporter,
        )
    )
