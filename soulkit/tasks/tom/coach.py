"""What the symbolic coach says about a draft: who saw what, never where anything is.

The text may name people, the object, and events by their sentence number, and nothing that stands
among the options. A reader who knows question, options and this text, but not the story, must
stay as clueless as before; so the kind of mistake is told, not the place. A text in which a
candidate would occur (an object may be one) is worded without the object, or not given at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from soulkit.tasks.kit.prompting import Texts
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
from soulkit.tasks.tom.sentences import events_of_row, literal, rules_of
from soulkit.text import join_and

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
    """What was right or wrong in kind about `answer`, and what the character did or did not see.

    `row_fields` needs `story` and `question`, and `events`, `cands` or `choices` where the row
    has them; the gold answer is not used. `answer` is an option text or letter, None when the
    draft gave none. `terse` leaves the remark on the draft out. None when the story cannot be read,
    does not settle the question, or cannot be explained without naming a candidate.
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
        raise AssertionError("a belief without the fact that settles it")
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
    about = {i for i, e in enumerate(case.story.events) if _talks_of(e, case.question.obj)}
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


def _talks_of(event: object, obj: str) -> bool:
    return isinstance(event, PublicClaim | PrivateTell) and event.obj == obj


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
    """The option text that a letter stands for; any other answer as it is."""
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
