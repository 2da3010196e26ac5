"""How far the labels of published story files agree with the symbolic tracker.

The tracker knows the clean rules and nothing about labels. Where it disagrees, the row is disputed:
either the label or the rules are off, and both sides are listed, so that a person can look. Rows
whose story cannot be read are counted, never judged.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from soulkit.data.files import read_rows
from soulkit.errors import DataError
from soulkit.tasks.kit.row_checks import Agreement, DisputedLabel, LabelAudit
from soulkit.tasks.tom.events import BeliefTracker, Rules, read_question, solve
from soulkit.tasks.tom.sentences import (
    StoryItem,
    events_of_row,
    read_fixed_tomi,
    read_hitom_json,
    read_paratomi_txt,
    read_percept_tomi,
    read_tomi_txt,
    rules_of,
)
from soulkit.types import Example


def audit_labels(path: Path, examples: Iterable[Example], *, task: str) -> LabelAudit:
    """The tracker's view of labels; original files by their own readers, which know more of them.

    They keep rows that the importer leaves out, and tags that are no column of the task.
    """
    trace = path.with_suffix(".trace")
    beside = trace if trace.is_file() else None
    if task == "hitom" and _has_halves(path):
        return audit_hitom(path)
    if task == "tomi" and path.suffix in (".txt", ".csv"):
        return audit_tomi(path, beside)
    if task == "paratomi" and path.suffix == ".txt":
        return audit_paratomi(path, beside)
    return audit_examples(task, examples)


def _has_halves(path: Path) -> bool:
    """Whether the file has the layout of the Hi-ToM release, with its two prompting types."""
    if path.suffix not in (".json", ".jsonl"):
        return False
    rows, _ = read_rows(path)
    return any("prompting_type" in row.fields for row in rows)


def audit_hitom(path: Path | str) -> LabelAudit:
    """Audit the Hi-ToM release, or a JSON-lines copy of its rows."""
    return audit_items(read_hitom_json(path), "hitom")


def audit_tomi(path: Path | str, trace: Path | str | None = None) -> LabelAudit:
    """Audit ToMi: `.jsonl` is read as fixed ToMi, `.csv` as Percept-ToMi, else as the release."""
    readers = {".jsonl": read_fixed_tomi, ".csv": read_percept_tomi}
    reader = readers.get(Path(path).suffix)
    return audit_items(reader(path) if reader else read_tomi_txt(path, trace), "tomi")


def audit_paratomi(path: Path | str, trace: Path | str | None = None) -> LabelAudit:
    """Audit ParaToMi; with a trace, only stories that agree with it count as read."""
    return audit_items(read_paratomi_txt(path, trace), "tomi")


def audit_examples(task: str, examples: Iterable[Example]) -> LabelAudit:
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


def audit_items(items: Iterable[StoryItem], rules: Rules) -> LabelAudit:
    """Audit items of any source; DataError when there is none."""
    tracker = BeliefTracker(rules)
    read: list[tuple[StoryItem, bool]] = []
    disputed: list[DisputedLabel] = []
    unread: list[str] = []
    for item in items:
        if item.story is None or item.question is None:
            unread.append(item.id)
            continue
        answer = solve(tracker.run(item.story.events), item.question)
        agrees = answer is not None and _same(answer, item.gold)
        read.append((item, agrees))
        if not agrees:
            disputed.append(_dispute(item, answer))
    if not read and not unread:
        raise _empty()
    return LabelAudit(
        overall=_agreement([agrees for _, agrees in read]),
        by=_break_down(read),
        disputed=tuple(disputed),
        unread=tuple(unread),
        contradictions=_contradictions(item for item, _ in read),
    )


def _same(one: str, other: str) -> bool:
    return one.replace("_", " ").strip() == other.replace("_", " ").strip()


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


def _empty() -> DataError:
    return DataError(
        "The story file holds no rows.",
        "An audit of nothing would look like perfect agreement.",
        "Give the path of the whole file.",
    )
