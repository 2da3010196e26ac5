"""How far the labels of published story files agree with the symbolic tracker.

The tracker knows the clean rules and nothing about labels. Where it disagrees, the row is disputed:
either the label or the rules are off, and both sides are listed, so that a person can look. Rows
whose story cannot be read are counted, never judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from soulkit.data.files import write_lines
from soulkit.data.stories.questions import read_question, solve
from soulkit.data.stories.sources import (
    StoryItem,
    events_of_row,
    read_fixed_tomi,
    read_hitom_json,
    read_paratomi_txt,
    read_percept_tomi,
    read_tomi_txt,
    rules_of,
)
from soulkit.data.stories.tracker import Rules, Tracker
from soulkit.errors import DataError
from soulkit.types import Example


@dataclass(frozen=True, slots=True)
class Agreement:
    """Rows on which label and tracker agree, of those that were read."""

    agreed: int
    total: int

    @property
    def share(self) -> float | None:
        return self.agreed / self.total if self.total else None


@dataclass(frozen=True, slots=True)
class Dispute:
    """A row whose label is not the tracker's answer."""

    id: str
    question: str
    gold: str
    tracker: str | None
    """None: by the rules nobody in the chain ever formed that belief."""
    order: str
    deception: str
    length: str
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found."""

    overall: Agreement
    by: Mapping[str, Mapping[str, Agreement]]
    """Tag (`order`, `deception`, `length`, `prompting_type`, ...) → value → agreement."""
    disputed: tuple[Dispute, ...]
    unread: tuple[str, ...]
    """Ids of the rows whose story or question could not be read."""
    contradictions: int
    """Pairs of one story and one question that carry different labels within the file."""


def audit_hitom(path: Path | str) -> AuditReport:
    """Audit the Hi-ToM release, or a JSON-lines copy of its rows."""
    return audit_items(read_hitom_json(path), "hitom")


def audit_tomi(path: Path | str, trace: Path | str | None = None) -> AuditReport:
    """Audit ToMi: `.jsonl` is read as fixed ToMi, `.csv` as Percept-ToMi, else as the release."""
    readers = {".jsonl": read_fixed_tomi, ".csv": read_percept_tomi}
    reader = readers.get(Path(path).suffix)
    return audit_items(reader(path) if reader else read_tomi_txt(path, trace), "tomi")


def audit_paratomi(path: Path | str, trace: Path | str | None = None) -> AuditReport:
    """Audit ParaToMi; with a trace, only stories that agree with it count as read."""
    return audit_items(read_paratomi_txt(path, trace), "tomi")


def audit_examples(task: str, examples: Iterable[Example]) -> AuditReport:
    """Audit rows of `tomi`, `paratomi` or `hitom` in whatever file they were found."""
    return audit_items((_item(task, example) for example in examples), rules_of(task))


def _item(task: str, example: Example) -> StoryItem:
    fields = {name: value for name, value in example.fields.items() if value is not None}
    text = str(fields["question"])
    question = read_question(text)
    tags = dict(example.tags)
    if question is not None:
        tags.setdefault("order", str(question.order))
    gold = str(fields["answer" if "answer" in fields else "correct_answer"])
    story = events_of_row(task, fields)
    return StoryItem(example.source, story, question, text, gold, tags)


def audit_items(items: Iterable[StoryItem], rules: Rules) -> AuditReport:
    """Audit items of any source; DataError when there is none."""
    tracker = Tracker(rules)
    read: list[tuple[StoryItem, bool]] = []
    disputed: list[Dispute] = []
    unread: list[str] = []
    for item in items:
        if item.story is None or item.question is None:
            unread.append(item.id)
            continue
        found = solve(tracker.run(item.story.events), item.question)
        agrees = found is not None and _same(found, item.gold)
        read.append((item, agrees))
        if not agrees:
            disputed.append(_dispute(item, found))
    if not read and not unread:
        raise _empty()
    return AuditReport(
        overall=_agreement([agrees for _, agrees in read]),
        by=_break_down(read),
        disputed=tuple(disputed),
        unread=tuple(unread),
        contradictions=_contradictions(item for item, _ in read),
    )


def write_disputed(report: AuditReport, path: Path, *, replace: bool = True) -> int:
    """Write the disputed rows as JSON lines; returns how many."""
    return write_lines(path, map(asdict, report.disputed), replace=replace)


def _same(one: str, other: str) -> bool:
    return one.replace("_", " ").strip() == other.replace("_", " ").strip()


def _dispute(item: StoryItem, found: str | None) -> Dispute:
    tags = dict(item.tags)
    main = {name: tags.pop(name, "") for name in ("order", "deception", "length")}
    return Dispute(item.id, item.text, item.gold, found, tags=tags, **main)


def _agreement(outcomes: list[bool]) -> Agreement:
    return Agreement(sum(outcomes), len(outcomes))


def _break_down(read: list[tuple[StoryItem, bool]]) -> dict[str, dict[str, Agreement]]:
    found: dict[str, dict[str, list[bool]]] = {}
    for item, agrees in read:
        for tag, value in item.tags.items():
            found.setdefault(tag, {}).setdefault(value, []).append(agrees)
    return {t: {v: _agreement(found[t][v]) for v in sorted(found[t])} for t in found}


def _contradictions(items: Iterable[StoryItem]) -> int:
    golds: dict[tuple[tuple[str, ...], str], set[str]] = {}
    for item in items:
        if item.story is not None:
            golds.setdefault((item.story.lines, item.text), set()).add(item.gold)
    return sum(len(labels) > 1 for labels in golds.values())


def _empty() -> DataError:
    return DataError(
        "The story file holds no rows.",
        "An audit of nothing would look like perfect agreement.",
        "Give the path of the whole file.",
    )
