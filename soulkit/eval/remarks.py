"""What a summary says beside its numbers: words that budgets cut, replies that ran into their
limit, parameters that a server took and did not follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from soulkit.runs.records import drafts
from soulkit.types import Record

TRUNCATED = "truncated"
TELLING = 0.01
"""A larger share of truncated episodes is said aloud."""

Counts = Mapping[str, Mapping[str, int]]
"""Task → what → how many."""


def word_cuts(records: Sequence[Record]) -> dict[str, int]:
    """The `episodes` whose texts were cut to their budgets, and the `words` they lost; empty where
    nothing was cut. A row that is played again is counted again."""
    notes = [r.episode.notes.get("cut_words") or {} for r in drafts(records)]
    lost = [sum(words.values()) for words in notes]
    episodes = sum(words > 0 for words in lost)
    return {"episodes": episodes, "words": sum(lost)} if episodes else {}


def ignored_parameters(records: Sequence[Record]) -> dict[str, int]:
    """`actor seed` → episodes, `judge form` → verdicts in which it was ignored."""
    counts: Counter[str] = Counter()
    for record in drafts(records):
        counts.update(f"actor {name}" for name in record.episode.notes.get("ignored", ()))
        for verdict in record.score.verdicts:
            counts.update(f"{verdict.judge} {name}" for name in verdict.ignored)
    return dict(sorted(counts.items()))


def truncated_counts(statuses: Counts) -> dict[str, tuple[int, int]]:
    """Task → (truncated episodes, all of them), where there are any."""
    numbers = {  # a summary on disk may hold anything
        task: {status: n for status, n in counts.items() if isinstance(n, int)}
        for task, counts in statuses.items()
    }
    return {
        task: (counts[TRUNCATED], sum(counts.values()))
        for task, counts in numbers.items()
        if counts.get(TRUNCATED)
    }


def truncated_total(statuses: Counts) -> int:
    """Episodes of all tasks that are truncated."""
    return sum(cut for cut, _ in truncated_counts(statuses).values())


def truncation_text(statuses: Counts) -> str:
    """`TASK 30 of 60 (50 %)` for the tasks in which more than TELLING are; else empty."""
    return ", ".join(
        f"{task} {cut} of {total} ({cut / total:.0%})".replace("%", " %")
        for task, (cut, total) in truncated_counts(statuses).items()
        if cut / total > TELLING
    )


def cuts_text(cuts: Counts) -> str:
    """`TASK 12 episodes, 3,400 words`, or empty."""
    return "; ".join(
        f"{task} {one['episodes']:,} episode{'s' * (one['episodes'] != 1)}, {one['words']:,} words"
        for task, one in cuts.items()
        if {"episodes", "words"} <= one.keys()
    )


def ignored_text(ignored: Counts) -> str:
    """`TASK judge form 30`, or empty."""
    return "; ".join(
        f"{task} {', '.join(f'{what} {n}' for what, n in counts.items())}"
        for task, counts in ignored.items()
    )
