"""Checks of row files: columns, lengths and bad rows; shortcuts to the gold; wrong labels.

`check_rows` binds rows as an evaluation does, so a file that passes here loads there. `audit_rows`
finds rows that can be answered without understanding them: duplicates, contradicting golds, the
position and length of the gold among the options, golds that the prompt contains. A task's own
audit (`audit: audit:audit_labels`) checks whether labels are right and returns a `LabelAudit`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from soulkit.data.contamination import RenamedRows, find_renamed
from soulkit.data.files import BadRow, RawRow, read_rows, write_objects
from soulkit.data.rows import HUMAN, content_hash
from soulkit.errors import DataError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import named_options, plain
from soulkit.metrics.intervals import upper_tail
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.importing import chats_for_rows, explaining_originals
from soulkit.tasks.kit.loading import (
    LoadedExamples,
    row_texts,
    rows_with_tasks,
    sources,
    to_examples,
)
from soulkit.tasks.kit.registry import Registry
from soulkit.types import Example


@dataclass(frozen=True, slots=True)
class Agreement:
    """The number of checked rows, and how many have the label that the tracker computes."""

    agreed: int
    total: int

    @property
    def share(self) -> float | None:
        return self.agreed / self.total if self.total else None


@dataclass(frozen=True, slots=True)
class DisputedLabel:
    """A row whose label differs from the tracker's answer."""

    id: str
    question: str
    gold: str
    tracker: str | None
    """None: by the rules, no one in the chain ever formed that belief."""
    order: str
    deception: str
    length: str
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LabelAudit:
    """The result of a label audit."""

    overall: Agreement
    by: Mapping[str, Mapping[str, Agreement]]
    """Tag (`order`, `deception`, `length`, `prompting_type`, ...) → value → agreement."""
    disputed: tuple[DisputedLabel, ...]
    unread: tuple[str, ...]
    """Ids of the rows whose story or question is unreadable."""
    contradictions: int
    """Pairs of rows with the same story and question but different labels."""


def write_disputed(report: LabelAudit, path: Path, *, replace: bool = True) -> int:
    """Write the disputed rows as JSON lines; returns their number."""
    return write_objects(path, map(asdict, report.disputed), replace=replace)


@dataclass(frozen=True, slots=True)
class WordCounts:
    """Word counts of one field over the rows, as nearest-rank percentiles."""

    p50: int
    p95: int
    max: int
    over_budget: int
    """Rows whose field exceeds the column's `max_words` and will be cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCheck:
    """The check of one task's rows."""

    task: str
    rows: int
    """Rows of this task in the file, usable or not."""
    usable: int
    clusters: int
    duplicates: int
    columns: Mapping[str, int]
    """Column of the file → rows that have it."""
    ignored: tuple[str, ...]
    tags: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    words: Mapping[str, WordCounts] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    equal_up_to_names: RenamedRows | None = None
    bad: tuple[BadRow, ...] = ()


def check_row_file(
    registry: Registry, path: Path, task: str | None
) -> tuple[list[RowCheck], list[BadRow]]:
    """One check per task in a file (or only for `task`), and the rows that belong to no task."""
    live = None if task is None else registry.task(task)
    if path.is_dir() and (chats := chats_for_rows(live, path)):
        raise chats
    if live is not None:
        with explaining_originals(live, path):
            return [check_rows(live, *read_rows(path))], []
    try:
        rows, bad = read_rows(path)
        groups, strays = rows_by_task(rows, registry.by_source())
    except DataError as error:
        raise chats_for_rows(None, path) or error from None
    checks = []
    for name, group in groups.items():
        live = registry.task(name)
        with explaining_originals(live, path):
            checks.append(check_rows(live, group))
    return checks, [*bad, *strays]


def check_rows(task: Task, rows: Sequence[RawRow], bad: Iterable[BadRow] = ()) -> RowCheck:
    """Check `rows` as rows of `task`; `bad` are lines that were not rows at all.

    Raises ColumnsError if every row lacks required columns.
    """
    task_rows = [r for r in rows if str(r.fields.get("data_source") or task.name) in sources(task)]
    broken = tuple(bad)
    loaded = to_examples(task, rows, bad=broken)
    declared = {a for name, c in task.spec.columns.items() for a in (name, *c.aliases)}
    columns = Counter(name for row in task_rows for name in row.fields)
    to_judge = bool(task.spec.declaration and task.spec.declaration.judge)  # reads every other one
    return RowCheck(
        task=task.name,
        rows=len(task_rows) + len(broken),
        # A row with several forms counts once.
        usable=len({example.source for example in loaded.examples}),
        clusters=len({example.cluster for example in loaded.examples}),
        duplicates=loaded.duplicates,
        columns=dict(columns),
        ignored=tuple(
            sorted(
                name
                for name in set(columns) - declared - {"data_source", *task.spec.unpack}
                if not name.startswith(HUMAN) and not to_judge
            )
        ),
        tags=_tags(loaded.examples),
        words=field_words(task, loaded.examples),
        skipped=loaded.skipped,
        equal_up_to_names=find_renamed([row_texts(task, example) for example in loaded.examples]),
        bad=loaded.bad,
    )


def rows_by_task(
    rows: Sequence[RawRow], names: Mapping[str, str]
) -> tuple[dict[str, list[RawRow]], list[BadRow]]:
    """Rows grouped by the task that their `data_source` names, and the rows that name none.

    `names`: data_source → task. DataError if no row names a task.
    """
    pairs, bad = rows_with_tasks(rows, names)
    if not pairs:
        raise DataError(
            "The rows do not say which task they belong to.",
            f"{bad[0].source}: {bad[0].why}" if bad else "The file has no readable row.",
            "Name the task with --task.",
        )
    groups: dict[str, list[RawRow]] = {}
    for name, row in pairs:
        groups.setdefault(name, []).append(row)
    return groups, bad


def _tags(examples: Sequence[Example]) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for example in examples:
        for tag, value in example.tags.items():
            counts.setdefault(tag, Counter())[value] += 1
    return {tag: dict(sorted(values.items())) for tag, values in counts.items()}


def field_words(task: Task, examples: Sequence[Example]) -> dict[str, WordCounts]:
    """Word counts of every text column, over the examples that have it.

    Fields that a task derives and labels that it does not declare are left out.
    """
    lengths: dict[str, list[int]] = {}
    columns = task.spec.columns
    for example in examples:
        for name, value in example.fields.items():
            if name in columns and (count := count_words(value)) is not None:
                lengths.setdefault(name, []).append(count)
    return {name: word_counts(sorted(values), columns[name].max_words)
            for name, values in lengths.items()}  # fmt: skip


def count_words(value: Any) -> int | None:
    """Whitespace-separated words of a text or of a list of texts; None for anything else."""
    if isinstance(value, str):
        return len(value.split())
    if isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
        return sum(len(v.split()) for v in value)
    return None


def word_counts(values: Sequence[int], budget: int | None) -> WordCounts:
    """Percentiles of sorted word counts (at least one)."""

    def rank(share: float) -> int:
        return values[max(math.ceil(share * len(values)) - 1, 0)]

    over = 0 if budget is None else sum(value > budget for value in values)
    return WordCounts(rank(0.5), rank(0.95), values[-1], over)


ONLY_GOLD = "the text contains the gold but no other option"
NOTABLE = 0.01
"""A bias is reported if chance alone would produce it in less than this share of files."""

_WORDS = re.compile(r"[^\W\d_]{2}|[\u3040-\u30ff\u3400-\u9fff]")
_FORMULA = re.compile(r"[\\^{}=<>+*/]")


@dataclass(frozen=True, slots=True)
class Bias:
    """How often the gold has a property, compared with chance."""

    rows: int
    hits: int
    chance: float
    """Expected share of hits if the gold were a random option."""
    p: float
    """Probability of at least as many hits by chance."""

    @property
    def share(self) -> float:
        return self.hits / self.rows

    @property
    def notable(self) -> bool:
        return self.p < NOTABLE


@dataclass(frozen=True, slots=True)
class AuditRemark:
    """A row that a person should inspect."""

    source: str
    what: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAudit:
    """The audit of one task's rows."""

    task: str
    rows: int
    duplicates: int
    words: Mapping[str, WordCounts]
    """Word counts of each field, of the whole `prompt` and of the `gold answer`."""
    with_options: int
    """Rows with known options; the figures below are about these."""
    positions: Mapping[str, int]
    """Letter → number of rows with this gold letter; empty for options without letters."""
    favourite: str
    """The letter that is the gold most often, relative to how often it could be."""
    position: Bias | None
    """The bias towards `favourite`; `p` is corrected for selecting that letter."""
    longest: Bias | None
    gold_in_prompt: int
    """Rows whose prompt contains the gold's words outside the list of options. This is expected if
    answers are quotations from a text."""
    remarks: tuple[AuditRemark, ...]
    bad: tuple[BadRow, ...] = ()

    def count(self, what: str) -> int:
        return sum(remark.what == what for remark in self.remarks)


def audit_rows(task: Task, loaded: LoadedExamples) -> RowAudit:
    """Audit the examples of one task."""
    examples = loaded.examples
    option_views = [(e, view) for e in examples if (view := task.leak_view(e)) and view.options]
    lettered = [view for _, view in option_views if view.letters and view.letter]
    favourite, position = _position_bias(lettered)
    prompts = {e.id: _first_prompts(task, e) for e in examples}
    seen = {e.id: {seat: e.visible(seat) for seat in task.acted_seats(e)} for e in examples}
    texts_by_id = {e.id: prompts[e.id] or content_hash("", seen[e.id]) for e in examples}
    exposed = {e.id: _exposed_options(prompts[e.id], view) for e, view in option_views}
    golds = {e.id: plain(view.gold) for e, view in option_views}
    leaks = [e for e, _ in option_views if exposed[e.id] == {golds[e.id]}]
    return RowAudit(
        task=task.name,
        rows=len(examples),
        duplicates=loaded.duplicates,
        words={**field_words(task, examples), **_answer_words(task, examples, prompts)},
        with_options=len(option_views),
        positions=dict(sorted(Counter(view.letter for view in lettered).items())),
        favourite=favourite,
        position=position,
        longest=_length_bias([view for _, view in option_views]),
        gold_in_prompt=sum(golds[key] in options for key, options in exposed.items()),
        remarks=(
            *(AuditRemark(e.source, "leak", f"{ONLY_GOLD}: {task.gold_text(e)}") for e in leaks),
            *_contradictions(task, examples, texts_by_id),
            *_twin_options(option_views),
        ),
        bad=loaded.bad,
    )


# -- position and length of the gold -------------------------------------------------------------


def _position_bias(views: Sequence[LeakView]) -> tuple[str, Bias | None]:
    hits = Counter(view.letter for view in views)
    expected: Counter[str] = Counter()
    for view in views:
        for letter in view.letters:
            expected[letter] += 1 / len(view.letters)  # type: ignore[assignment]
    if not hits or len(expected) < 2:
        return "", None
    biases = {k: bias(hits[k], len(views), expected[k] / len(views)) for k in hits}
    letter = min(sorted(biases), key=lambda k: biases[k].p)
    favourite = biases[letter]
    adjusted = min(1.0, favourite.p * len(expected))
    return letter, Bias(favourite.rows, favourite.hits, favourite.chance, adjusted)


def _length_bias(views: Sequence[LeakView]) -> Bias | None:
    """How often the gold alone is the longest option, among rows with a single longest option."""
    hits, chances = 0, []
    for view in views:
        lengths = sorted((len(plain(option)) for option in view.options), reverse=True)
        if len(lengths) > 1 and lengths[0] > lengths[1]:
            hits += len(plain(view.gold)) == lengths[0]
            chances.append(1 / len(lengths))
    return bias(hits, len(chances), sum(chances) / len(chances)) if chances else None


def bias(hits: int, rows: int, chance: float) -> Bias:
    """The bias of `hits` in `rows`; `chance` is in [0, 1], the probability one-sided binomial."""
    return Bias(rows, hits, chance, upper_tail(hits, rows, chance))


# -- golds in the prompt -------------------------------------------------------------------------


def _exposed_options(prompt: str, view: LeakView) -> frozenset[str]:
    """The options that the prompt contains outside its list; no numbers, letters or formulas."""
    rest = without_options(prompt, view.options)
    near = [option for option in view.options if plain(option) in rest]
    return named_options(rest, [o for o in near if _WORDS.search(o) and not _FORMULA.search(o)])


def without_options(prompt: str, options: Sequence[str]) -> str:
    """The plain words of a prompt without its list of options.

    A list is all options in order with at most their letters between them, or whole lines with only
    an option and its letter.
    """
    every = [plain(option) for option in options]
    gap = r"(?: option| choice)?(?: \w{1,2})? "
    inline = re.compile(rf"(?<!\w){gap.join(map(re.escape, every))}(?!\w)")
    rest, count = inline.subn(" | ", plain(prompt))
    if count:
        return rest
    text = _plain_lines(prompt)
    for option in sorted(options, key=len, reverse=True):
        block = re.escape(_plain_lines(option))
        text = re.sub(rf"(?m)^(?:(?:option |choice )?\w{{1,2}} )?{block}$", "|", text)
    return " ".join(text.splitlines())


def _plain_lines(text: str) -> str:
    return "\n".join(line for line in map(plain, text.splitlines()) if line)


# -- contradicting rows --------------------------------------------------------------------------


def _first_prompts(task: Task, example: Example) -> str:
    contexts = task.previews(example).values()
    return "\n".join(segment.text for context in contexts for segment in context)


def _contradictions(
    task: Task, examples: Sequence[Example], texts_by_id: Mapping[str, str]
) -> Iterable[AuditRemark]:
    groups: dict[str, list[Example]] = {}
    for example in examples:
        groups.setdefault(texts_by_id[example.id], []).append(example)
    for group in groups.values():
        golds = {_gold_id(task, example): example for example in group}
        if len(golds) > 1:
            texts = " / ".join(task.gold_text(e) or e.source for e in golds.values())
            for example in group:
                yield AuditRemark(
                    example.source, "contradiction", f"the same question has the golds {texts}"
                )


def _gold_id(task: Task, example: Example) -> str:
    columns, seats = task.spec.columns, set(example.seats)
    hidden = {
        name: value
        for name, value in example.visible("gold").items()
        if columns[name].identity and not set(example.audience[name]) & seats
    }
    return content_hash(task.name, hidden)


def _twin_options(option_views: Iterable[tuple[Example, LeakView]]) -> Iterable[AuditRemark]:
    for example, view in option_views:
        counts = Counter(" ".join(option.split()).casefold() for option in view.options)
        twice = [option for option, count in counts.items() if count > 1]
        if view.letters and twice:
            yield AuditRemark(
                example.source, "twin_options", f"two options are equal: {', '.join(twice)}"
            )


def _answer_words(
    task: Task, examples: Sequence[Example], prompts: Mapping[str, str]
) -> dict[str, WordCounts]:
    lengths = {
        "prompt": [count_words(prompts[e.id]) or 0 for e in examples],
        "gold answer": [count_words(task.gold_text(e)) or 0 for e in examples],
    }
    return {
        name: word_counts(sorted(values), None) for name, values in lengths.items() if any(values)
    }
