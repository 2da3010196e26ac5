"""Lessons from a mixture of sources, endlessly, in an order that a position says all about.

    sources ──▶ turns by ratio × rows ──▶ a permuted window of one source ──▶ row ──▶ lesson

The order follows from the seed, the files and the settings of the sources alone. A position names
the window of every source and the place in it, so that a stream resumes without stored rows.

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
"""Of all windows of a stream together, about."""
LARGEST_WINDOW = 32 << 20
_SMALLEST_WINDOW = 1 << 20
_VERSION = 1


class LessonStream:
    """Endless lessons of a mixture; see `open`."""

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
        """Index every source; nothing but its size and places stays in memory.

        `window` rows are shuffled together; 1 keeps the order of the files. `side`, `strip_system`
        and `turns` hold for sources that do not say otherwise. `reporter` gets what takes long.
        DataError for a source that is missing, empty or unreadable, and where nothing says who in
        it is learned.
        """
        settings = [source_settings(source) for source in sources]
        if not settings:
            raise ConfigError(
                "There is no corpus to learn from.",
                "A stream of lessons needs at least one source.",
                "Name one: --data chats.jsonl --side human",
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
        alone = len(self._sources) == 1  # its turn comes anyway
        weights = [1.0 if alone else s.ratio * s.count() for s in self._sources]
        return SourceTurns(weights, self._seed, taken)

    # -- lessons ---------------------------------------------------------------------------------

    def take(self, count: int) -> list[Lesson]:
        """The next lessons, exactly `count`; DataError when a whole pass of a source has none."""
        lessons: list[Lesson] = []
        while len(lessons) < count:
            lesson = self._sources[self._turns.next()].next_row()
            if lesson is not None:
                lessons.append(lesson)
        return lessons

    def heads(self, count: int) -> dict[str, tuple[Lesson, ...]]:
        """Source → its first `count` lessons in the order of its files; the stream stands still.

        DataError for a source in which no row is a lesson.
        """
        return {s.label: tuple(islice(s.in_order(_unheard), count)) for s in self._sources}

    @property
    def unusable(self) -> dict[str, dict[str, int]]:
        """Source → why rows were left out → how many, each row counted once."""
        return {s.label: dict(s.unusable) for s in self._sources}

    @property
    def sizes(self) -> dict[str, int | None]:
        """Source → its rows, None where nobody knows; unusable ones count."""
        return {s.label: s.rows for s in self._sources}

    @property
    def passes(self) -> dict[str, float]:
        """Source → how often its rows (of a ratio below 1, its part) have been taken."""
        return {
            s.label: taken / max(s.rows_of_a_pass, 1)
            for s, taken in zip(self._sources, self._turns.taken, strict=True)
        }

    # -- position --------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """Where the stream stands, in plain JSON types: what `resume` needs to go on from here."""
        sources = [
            {**source.position(), "taken": taken}
            for source, taken in zip(self._sources, self._turns.taken, strict=True)
        ]
        return {
            "version": _VERSION, "seed": self._seed, "window": self._window, "sources": sources
        }  # fmt: skip

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on where a stream of the same sources stood.

        DataError, with its name, for a file that has changed, and for other sources or settings.
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
            raise _no_position(f"it has version {position['version']}, this program {_VERSION}")
        for name, value in (("seed", self._seed), ("window", self._window)):
            if position[name] != value:
                raise _no_position(f"its {name} was {position[name]}, now it is {value}")
        before = [(s["source"], s["ratio"]) for s in position["sources"]]
        now = [(s.label, s.ratio) for s in self._sources]
        if before != now:
            raise _no_position(f"its sources were {_listed(before)}, now they are {_listed(now)}")


def _unheard(why: str, key: str) -> None:
    """Nobody counts what is left out here: the stream does when it comes to it."""


def _listed(sources: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{label}:{ratio:g}" for label, ratio in sources)


def _no_position(why: str) -> DataError:
    return DataError(
        "The stream of lessons cannot go on where it stood.",
        f"The position belongs to another stream: {why}.",
        "Give the sources and settings of then, or start a new run.",
    )


def with_defaults(
    source: SourceSettings, side: str | None, strip_system: bool, turns: int | None
) -> SourceSettings:
    """`source` with the settings of the run where it has none of its own."""
    return source.model_copy(
        update={
            "side": source.side if source.side is not None else side,
            "strip_system": strip_system if source.strip_system is None else source.strip_system,
            "turns": source.turns if source.turns is not None else turns,
        }
    )


class LessonRows:
    """The lessons of one source, one pass in file order; iterating again reads again."""

    def __init__(self, source: LessonSource) -> None:
        self._source = source
        self.unusable: Counter[str] = Counter()
        """Why rows were left out → how many, after a whole pass; empty before."""
        self.examples: dict[str, str] = {}
        """Why → `file:row` of the first."""

    def __iter__(self) -> Iterator[Lesson]:
        self.unusable.clear()
        yield from self._source.in_order(self._left_out)

    def at(self, number: int) -> Lesson | str:
        """The lesson of the row `number`, counted from 1 over all files; or why it is none, which
        is empty where there is no such row.

        In the first file it is the number that messages name, in others it goes on from there.
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

    def _left_out(self, why: str, key: str) -> None:
        self.unusable[why] += 1
        self.examples.setdefault(why, key)


class _Places:
    def __init__(self) -> None:
        self._file, self._before, self._last = "", 0, 0

    def of(self, key: str) -> int:
        """The number of the row `file:row`; rows come in order."""
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
    """One pass over a source in file order, without shuffling; its ratio does not matter.

    What it gives is iterated over for Lessons; `unusable` then counts the rows that are none.
    DataError as in `LessonStream.open`, and where no row at all is a lesson.
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
