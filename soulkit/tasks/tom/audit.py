"""How far the labels of published story files agree with the symbolic tracker.

The tracker knows the clean rules and nothing about labels. Where it disagrees, the row is disputed:
either the label or the rules are off, and both sides are listed, so that a person can look. Rows
whose story cannot be read are counted, never judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soulkit.data.files import RawRow, read_rows
from soulkit.errors import DataError
from soulkit.tasks.kit.row_checks import Agreement, DisputedLabel, LabelAudit
from soulkit.tasks.tom.events import BeliefTracker, Question, Story, read_question, solve
from soulkit.tasks.tom.importer import read_blocks
from soulkit.tasks.tom.sentences import (
    events_of_row,
    read_paraphrase,
    read_sentences,
    rules_of,
)
from soulkit.types import Example

_TAG_COLUMNS = {
    "prompting_type": "prompting_type", "question_type": "qType", "order": "question_order",
    "deception": "deception", "length": "story_length",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoryItem:
    """One question about one story, as a file has it."""

    id: str
    story: Story | None
    question: Question | None
    text: str
    """The question as written."""
    gold: str
    tags: Mapping[str, str] = field(default_factory=dict)
    """Question type, order, deception, length and the like, where the file has them."""


def audit_labels(path: Path, examples: Iterable[Example], *, task: str) -> LabelAudit:
    """The tracker's view of the labels of a file.

    Original files are read whole: the importer leaves out rows and tags that are no column.
    """
    if task in ("tomi", "paratomi") and path.suffix == ".txt":
        return audit_items(items_of_blocks(path, task), task)
    if task == "tomi" and path.suffix == ".csv":
        return audit_items(items_of_rows(read_rows(path)[0], task), task)
    rows = read_rows(path)[0] if task == "hitom" and path.suffix in (".json", ".jsonl") else []
    if any("prompting_type" in row.fields for row in rows):  # the release, with both its halves
        return audit_items(items_of_rows(rows, task), task)
    items = (
        _item(example.source, example.fields, dict(example.tags), task) for example in examples
    )
    return audit_items(items, task)


def items_of_blocks(path: Path, task: str) -> Iterator[StoryItem]:
    """The questions of numbered blocks; with a trace, paraphrases must agree with it."""
    blocks, bad = read_blocks(path)
    for index, block in enumerate(blocks):
        question = read_question(block.question)
        story = None
        if task == "tomi":
            story = read_sentences(block.sentences)
        elif question is not None:
            story = read_paraphrase(block.sentences, question.obj, trace=block.steps or None)
        named = {"question_type": block.question_type, "story_type": block.story_type}
        tags = {name: value for name, value in named.items() if value}
        if question is not None:
            tags["order"] = str(question.order)
        yield StoryItem(str(index), story, question, block.question, block.answer, tags)
    for broken in bad:
        yield StoryItem(broken.source, None, None, "", "")


def items_of_rows(rows: Iterable[RawRow], task: str) -> Iterator[StoryItem]:
    """The questions of records; DataError for one without a story, a question or a label."""
    for index, row in enumerate(rows):
        fields = row.fields
        missing = [name for name in ("story", "question") if name not in fields]
        if not {"answer", "correct_answer"} & fields.keys():
            missing.append("answer")
        if missing:
            raise DataError(
                f"{row.source} has no {', '.join(missing)}.",
                "The file does not have the layout of the benchmark that it was read as.",
                "Give the original file, or fetch it again.",
            )
        tags = {tag: str(fields[c]) for tag, c in _TAG_COLUMNS.items() if c in fields}
        yield _item(str(fields.get("sample_id", fields.get("index", index))), fields, tags, task)


def _item(name: str, columns: Mapping[str, Any], tags: dict[str, str], task: str) -> StoryItem:
    fields = {column: value for column, value in columns.items() if value is not None}
    text = str(fields["question"])
    question = read_question(text)
    if question is not None:
        tags.setdefault("order", str(question.order))
    gold = str(fields["correct_answer" if "correct_answer" in fields else "answer"])
    return StoryItem(name, events_of_row(task, fields), question, text, gold, tags)


def audit_items(items: Iterable[StoryItem], task: str) -> LabelAudit:
    """Audit items of any source; DataError when there is none."""
    tracker = BeliefTracker(rules_of(task))
    read: list[tuple[StoryItem, bool]] = []
    disputed: list[DisputedLabel] = []
    unread: list[str] = []
    for item in items:
        if item.story is None or item.question is None:
            unread.append(item.id)
            continue
        answer = solve(tracker.run(item.story.events), item.question)
        agrees = answer is not None and _plain(answer) == _plain(item.gold)
        read.append((item, agrees))
        if not agrees:
            disputed.append(_dispute(item, answer))
    if not read and not unread:
        raise DataError(
            "The story file holds no rows.",
            "An audit of nothing would look like perfect agreement.",
            "Give the path of the whole file.",
        )
    return LabelAudit(
        overall=_agreement([agrees for _, agrees in read]),
        by=_break_down(read),
        disputed=tuple(disputed),
        unread=tuple(unread),
        contradictions=_contradictions(item for item, _ in read),
    )


def _plain(place: str) -> str:
    return place.replace("_", " ").strip()


def _dispute(item: StoryItem, answer: str | None) -> DisputedLabel:
    tags = dict(item.tags)
    main = {name: tags.pop(name, "") for name in ("order", "deception", "length")}
    return DisputedLabel(item.id, item.text, item.gold, answer, tags=tags, **main)


def _agreement(outcomes: list[bool]) -> Agreement:
    return Agreement(sum(outcomes), len(outcomes))


def _break_down(read: list[tuple[StoryItem, bool]]) -> dict[str, dict[str, Agreement]]:
    agreements: dict[str, dict[str, list[bool]]] = {}
    for item, agrees in read:
        for tag, value in item.tags.items():
            agreements.setdefault(tag, {}).setdefault(value, []).append(agrees)
    return {t: {v: _agreement(agreements[t][v]) for v in sorted(agreements[t])} for t in agreements}


def _contradictions(items: Iterable[StoryItem]) -> int:
    golds: dict[tuple[tuple[str, ...], str], set[str]] = {}
    for item in items:
        if item.story is not None:
            golds.setdefault((item.story.lines, item.text), set()).add(item.gold)
    return sum(len(labels) > 1 for labels in golds.values())
