"""The tracker's explanations of drafts, and its audit of labels in published files.

Feedback says who saw what, never where anything is. It may name people, the object, and events by
sentence number, but no option: a reader who does not know the story must learn nothing about the
answer. If a text would contain a candidate, it is reworded without the object or withheld.

The tracker follows the clean rules and ignores labels. If it disagrees with a published label, the
row is disputed and both answers are listed. Rows with an unreadable story are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soulkit.data.files import RawRow, read_rows
from soulkit.errors import DataError
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.kit.row_checks import Agreement, DisputedLabel, LabelAudit
from soulkit.tasks.tom.events import (
    Beliefs,
    BeliefTracker,
    Fact,
    Move,
    Place,
    PrivateTell,
    PublicClaim,
    Question,
    Story,
    read_question,
    solve,
)
from soulkit.tasks.tom.importer import read_blocks
from soulkit.tasks.tom.sentences import (
    events_of_row,
    literal,
    read_paraphrase,
    read_sentences,
    rules_of,
)
from soulkit.text import join_and
from soulkit.types import Example

TEXTS = Texts(__file__)


@dataclass(frozen=True, slots=True)
class _Case:
    story: Story
    question: Question
    beliefs: Beliefs
    truth: str
    candidates: tuple[str, ...]


def explain(
    task: str, row_fields: Mapping[str, Any], answer: str | None, *, terse: bool = False
) -> str | None:
    """The kind of error in `answer`, and what the character did or did not see.

    `row_fields` needs `story` and `question`, and `events`, `cands` or `choices` if the row has
    them; the gold answer is ignored. `answer` is an option's text or letter, None if the draft
    gave none. `terse` omits the remark on the draft. None if the story is unreadable, does not
    determine the answer, or cannot be explained without naming a candidate.
    """
    case = _case(task, row_fields)
    if case is None:
        return None
    fact = _chapter_fact(case) if task == "hitom" else _two_room_fact(case)
    text = fact if terse else f"{_diagnosis(case, _option(answer, row_fields))} {fact}"
    if _names(text, case.candidates):
        text = re.sub(rf"\b{re.escape(case.question.obj)}\b", "object", text)
    return None if _names(text, case.candidates) else text


def _case(task: str, row: Mapping[str, Any]) -> _Case | None:
    question = read_question(str(row.get("question", "")))
    story = events_of_row(task, row)
    if question is None or story is None:
        return None
    beliefs = BeliefTracker(rules_of(task)).run(story.events)
    truth = solve(beliefs, question)
    if truth is None:
        return None
    return _Case(story, question, beliefs, truth, _candidates(row, story))


def _two_room_fact(case: _Case) -> str:
    question, beliefs = case.question, case.beliefs
    if question.kind != "belief":
        return _fact(question.kind)
    moves = _moves(case)
    if not moves:
        return _fact("memory")
    move = moves[-1]
    fact = beliefs.last_fact(question.chain, question.obj)
    after = fact is not None and fact.event > move
    together = beliefs.witnesses[move].issuperset(question.chain)
    if question.order == 1:
        name = "saw" if together else "returned" if after else "missed"
        return _fact(name, x=question.chain[0])
    x, y = question.chain
    name = "both_saw" if together else "met_again" if after else "parted"
    absent = [thinker for thinker in question.chain if thinker not in beliefs.witnesses[move]]
    return _fact(name, x=x, y=y, z=join_and(tuple(absent or question.chain)))


def _chapter_fact(case: _Case) -> str:
    question, obj = case.question, case.question.obj
    if not question.chain:
        moves = _moves(case)
        name = "last_move" if moves else "no_move"
        placed = next(i for i, thing, _ in case.beliefs.places if thing == obj)
        last = moves[-1] if moves else placed
        return _fact(name, obj=obj, n=last + 1)
    fact = case.beliefs.last_fact(question.chain, obj)
    if fact is None:
        raise AssertionError("a belief has no fact that determines it")
    if fact.chain:
        return _trust_reason(case, fact)
    name = "last_saw" if question.order == 1 else "last_saw_together"
    text = _fact(name, x=join_and(question.chain), obj=obj, n=fact.event + 1)
    return " ".join([text, *_talk_without_effect(case, fact)])


def _trust_reason(case: _Case, fact: Fact) -> str:
    x = fact.chain[0]
    trusts = [t for t in case.beliefs.trusts if t.event == fact.event and t.hearer == x]
    if not trusts:
        return _fact("expects", x=x, y=fact.chain[1], n=fact.event + 1)
    name = "trusts_later" if trusts[0].was_there else "trusts_insider"
    y = trusts[0].speaker
    text = _fact(name, x=x, y=y, n=fact.event + 1)
    return text if len(fact.chain) == 1 else f"{text} {_fact('meant_it', x=x, y=y)}"


def _talk_without_effect(case: _Case, fact: Fact) -> list[str]:
    chain = case.question.chain
    about = {
        i
        for i, event in enumerate(case.story.events)
        if isinstance(event, PublicClaim | PrivateTell) and event.obj == case.question.obj
    }
    if len(chain) > 2:
        return [_fact("too_deep")] if about else []
    doubts = [
        t
        for t in case.beliefs.trusts
        if t.event in about and t.event > fact.event and t.hearer == chain[0] and not t.believed
    ]
    doubts = [t for t in doubts if len(chain) == 1 or t.speaker == chain[1]]
    speakers = dict.fromkeys(t.speaker for t in doubts)
    return [_fact("doubts", x=chain[0], y=y) for y in speakers]


def _fact(name: str, **values: Any) -> str:
    text: str = TEXTS["facts"][name]
    return text.format(**values)


def _diagnosis(case: _Case, answer: str | None) -> str:
    question = case.question
    x = question.chain[0] if question.chain else ""
    name = _mistake(case, answer)
    if name == "fits" and not x:
        name = "fits_story"
    text: str = TEXTS["diagnoses"][name]
    return text.format(x=x, y=question.chain[1] if question.order > 1 else "")


def _mistake(case: _Case, answer: str | None) -> str:
    if answer is None or not answer.strip():
        return "none"
    question, beliefs, obj = case.question, case.beliefs, case.question.obj
    plain_answer = _plain(answer)

    def is_at(container: str | None) -> bool:
        return container is not None and plain_answer == _plain(container)

    if is_at(case.truth):
        return "fits"
    if is_at(beliefs.where(obj)):
        return "took_end" if question.kind == "memory" else "took_reality"
    if question.order > 1 and is_at(beliefs.answer(question.chain[1:], obj)):
        return "stopped_early"
    talk = (e for e in case.story.events if isinstance(e, PublicClaim | PrivateTell))
    if any(e.obj == obj and is_at(e.container) for e in talk):
        return "took_talk"
    if is_at(beliefs.start(obj)):
        return "took_start"
    held = any(o == obj and is_at(c) for _, o, c in beliefs.places)
    return "other_moment" if held else "never"


def _moves(case: _Case) -> list[int]:
    obj = case.question.obj
    return [i for i, e in enumerate(case.story.events) if isinstance(e, Move) and e.obj == obj]


def _candidates(row: Mapping[str, Any], story: Story) -> tuple[str, ...]:
    row_candidates = literal(row.get("cands")) or literal(row.get("containers")) or ()
    offered = _options(row).values()
    named = [e.container for e in story.events if isinstance(e, Place | Move)]
    return tuple(dict.fromkeys([*map(str, row_candidates), *offered, *named]))


def _options(row: Mapping[str, Any]) -> dict[str, str]:
    pairs = (part.split(". ", 1) for part in str(row.get("choices", "")).split(", "))
    return {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}


def _option(answer: str | None, row: Mapping[str, Any]) -> str | None:
    if answer is None:
        return None
    letter = answer.strip().rstrip(".)").upper()
    return _options(row).get(letter, answer)


def _plain(text: str) -> str:
    text = re.sub(r"^[A-Z]\.\s+", "", text.strip())
    text = re.sub(r"^(?:in )?the ", "", text.lower().replace("_", " "))
    return text.strip(" .,;:!?\"'")


def _names(text: str, candidates: tuple[str, ...]) -> bool:
    words = text.lower().replace("_", " ")
    plain = (re.escape(c.lower().replace("_", " ")) for c in candidates if c)
    return any(re.search(rf"\b{c}\b", words) for c in plain)


_TAG_COLUMNS = {
    "prompting_type": "prompting_type", "question_type": "qType", "order": "question_order",
    "deception": "deception", "length": "story_length",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoryItem:
    """A question about a story, as the file has it."""

    id: str
    story: Story | None
    question: Question | None
    text: str
    """The question's original text."""
    gold: str
    tags: Mapping[str, str] = field(default_factory=dict)
    """Question type, order, deception, length and similar tags, if the file has them."""


def audit_labels(path: Path, examples: Iterable[Example], *, task: str) -> LabelAudit:
    """The tracker's audit of the labels in a file.

    Original files are read in full, including the rows and tags that the importer drops.
    """
    if task in ("tomi", "paratomi") and path.suffix == ".txt":
        return audit_items(items_of_blocks(path, task), task)
    if task == "tomi" and path.suffix == ".csv":
        return audit_items(items_of_rows(read_rows(path)[0], task), task)
    rows = read_rows(path)[0] if task == "hitom" and path.suffix in (".json", ".jsonl") else []
    if any("prompting_type" in row.fields for row in rows):  # the release, with both halves
        return audit_items(items_of_rows(rows, task), task)
    items = (
        _item(example.source, example.fields, dict(example.tags), task) for example in examples
    )
    return audit_items(items, task)


def items_of_blocks(path: Path, task: str) -> Iterator[StoryItem]:
    """The questions of numbered blocks; paraphrases must agree with the trace if there is one."""
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
    """The questions of records; DataError for a record without a story, question or label."""
    for index, row in enumerate(rows):
        fields = row.fields
        missing = [name for name in ("story", "question") if name not in fields]
        if not {"answer", "correct_answer"} & fields.keys():
            missing.append("answer")
        if missing:
            raise DataError(
                f"{row.source} has no {', '.join(missing)}.",
                "The file does not have the layout of this benchmark.",
                "Give the original file, or download it again.",
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
    """Audit items from any source; DataError if there are none."""
    tracker = BeliefTracker(rules_of(task))
    read: list[tuple[StoryItem, bool]] = []
    disputed: list[DisputedLabel] = []
    unread: list[str] = []
    for item in items:
        if item.story is None or item.question is None:
            unread.append(item.id)
            continue
        answer = solve(tracker.run(item.story.events), item.question)
        agrees = answer is not None and _plain_place(answer) == _plain_place(item.gold)
        read.append((item, agrees))
        if not agrees:
            disputed.append(_dispute(item, answer))
    if not read and not unread:
        raise DataError(
            "The story file has no rows.",
            "There is nothing to audit.",
            "Give the path of the complete file.",
        )
    return LabelAudit(
        overall=_agreement([agrees for _, agrees in read]),
        by=_break_down(read),
        disputed=tuple(disputed),
        unread=tuple(unread),
        contradictions=_contradictions(item for item, _ in read),
    )


def _plain_place(place: str) -> str:
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
