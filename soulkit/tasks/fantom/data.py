"""Rows of `fantom`: generated conversations, or FANToM's `fantom_v1.json`.

A conversation is generated as a list of moments (someone speaks, leaves, returns, or repeats what
the others missed); who was there for which part determines the gold of every question. Each piece
of information gives one set of questions.

    {"context": "Ada: I cooked paella. ...", "question_type": "tom:info_accessibility:list",
     "complete_question": "...", "correct_answer": "['Ada', 'Ben']", "wrong_answer": "['Cleo']",
     "missed_info_accessibility": "inaccessible", "set_id": "0-0-1", "set_size": 7, ...}

`set_size` counts the questions in ALL, `set_beliefs` those that ALL* adds. Facts belong to no set.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from soulkit.data.files import BadRow, RawRow
from soulkit.tasks.kit.importing import BadRecord, Imported, import_records, need
from soulkit.tasks.kit.made_rows import Row
from soulkit.tasks.kit.prompting import Texts


def set_part(row: Mapping[str, Any]) -> Literal["strict", "belief"] | None:
    """The part of a set that a row belongs to: `strict` (ALL), `belief` (only in ALL*), or None."""
    kind = str(row["question_type"])
    if kind.startswith("fact") or str(row.get("correct_answer")) == "no:long":
        return None
    if kind.startswith("tom:belief:") and not kind.endswith(":multiple-choice"):
        return "belief" if row.get("wrong_answer") else None
    return "strict"


def with_set_sizes(rows: Sequence[Row]) -> list[Row]:
    """The rows, each with the sizes of its set; identical rows count once."""
    members: dict[tuple[str, str | None], set[str]] = defaultdict(set)
    for row in rows:
        content = repr(
            (row.get("complete_question"), row["question_type"], row.get("correct_answer"))
        )
        members[str(row.get("missed_info_accessibility")), set_part(row)].add(content)

    def size(row: Row, part: str) -> int:
        return len(members[str(row.get("missed_info_accessibility")), part])

    return [{**row, "set_size": size(row, "strict"), "set_beliefs": size(row, "belief")}
            for row in rows]  # fmt: skip


TEXTS = Texts(__file__)


# -- generated -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Piece:
    """A piece of information and who heard it."""

    topic: Mapping[str, str]
    """Its wordings."""
    speaker: str
    value: str
    line: int
    hearers: set[str]
    retold: list[int] = field(default_factory=list)
    overview: set[str] = field(default_factory=set)
    """Those who were there each time it was told, and so saw who else was."""

    def word(self, wording: str) -> str:
        return self.topic[wording].format(s=self.speaker, v=self.value)

    @property
    def sentence(self) -> str:
        text = self.word("fact")
        return f"{text[0].upper()}{text[1:]}."


@dataclass(slots=True)
class Talk:
    """A conversation so far."""

    rng: random.Random
    people: list[str]
    present: set[str]
    lines: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def say(self, who: str, text: str) -> int:
        """Add a line; returns its number, counted from 1."""
        self.lines.append(f"{who}: {text}")
        return len(self.lines)

    def other(self, *but: str) -> str:
        """A random person who is present and not among those named."""
        return self.rng.choice([p for p in self.people if p in self.present and p not in but])

    def tell(self, topic: Mapping[str, Any]) -> None:
        """Add a piece of information and two replies."""
        speaker = self.other()
        value = self.rng.choice(topic["values"])
        line = self.say(speaker, topic["statement"].format(v=value))
        listeners = set(self.present)
        self.pieces.append(Piece(topic, speaker, value, line, listeners, overview=set(listeners)))
        reply, more = self.rng.sample(TEXTS["replies"], 2)
        self.say(self.other(speaker), reply)
        if self.rng.random() < 0.5:
            self.say(self.other(speaker), more)

    def leave(self, who: str) -> None:
        self.say(who, self.rng.choice(TEXTS["leaving"]))
        self.say(self.other(who), self.rng.choice(TEXTS["farewells"]).format(x=who))
        self.present.discard(who)

    def come(self, who: str, greetings: tuple[str, ...]) -> None:
        self.present.add(who)
        self.say(who, self.rng.choice(greetings))
        self.say(self.other(who), self.rng.choice(TEXTS["welcomes"]).format(x=who))

    def retell(self, who: str) -> None:
        """Someone who knows the latest piece tells it to `who` and all others present."""
        piece = self.pieces[-1]
        teller = self.other(who) if piece.speaker not in self.present else piece.speaker
        if teller not in piece.hearers:
            return
        sentence = piece.topic["statement"].format(v=piece.value)
        text = sentence if teller == piece.speaker else piece.sentence
        lead = self.rng.choice(TEXTS["retelling"]).format(x=who)
        piece.retold.append(self.say(teller, f"{lead} {text}"))
        piece.hearers |= self.present
        piece.overview &= self.present


def rows(n: int, seed: int) -> list[Row]:
    """`n` rows in whole sets; fewer rows are a prefix of more."""
    rows: list[Row] = []
    conversation = 0
    while len(rows) < n:
        rows += _conversation(random.Random(f"fantom/{seed}/{conversation}"), conversation)
        conversation += 1
    return rows[:n]


def _conversation(rng: random.Random, number: int) -> Iterator[Row]:
    talk = _made_talk(rng)
    context = "\n".join(talk.lines)
    for i, piece in enumerate(talk.pieces):
        shared = {
            "context": context,
            "set_id": f"{number}-0-{i}",
            "part_id": f"{number}-0",
            "events": {"told": piece.line, "retold": piece.retold},
        }
        for row in with_set_sizes(list(_questions(rng, talk, piece))):
            yield {**row, **shared}


# -- conversations -------------------------------------------------------------------------------


def _made_talk(rng: random.Random) -> Talk:
    people = rng.sample(TEXTS["names"], rng.randint(3, 6))
    late = people[3:5] if rng.random() < 0.8 else []
    talk = Talk(rng, people, set(people) - set(late))
    chosen = rng.sample(TEXTS["topics"], 3)
    # Everyone speaks at the start: the conversation must show who is there.
    for who, greeting in zip(sorted(talk.present), rng.sample(TEXTS["greetings"], 6), strict=False):
        talk.say(who, greeting)
    if rng.random() < (0.5 if late else 0.15):  # without late arrivals no one would miss it
        talk.tell(chosen[0])
    away = rng.sample(sorted(talk.present), min(len(talk.present) - 2, rng.randint(1, 3)))
    for who in away:
        talk.leave(who)
    talk.tell(chosen[1])
    for who in away:
        _someone_comes(talk, who, TEXTS["returning"])
    for who in late:
        _someone_comes(talk, who, TEXTS["coming"])
    if rng.random() < 0.12:
        talk.tell(chosen[2])
    return talk


def _someone_comes(talk: Talk, who: str, greetings: tuple[str, ...]) -> None:
    talk.come(who, greetings)
    if talk.rng.random() < 0.2:
        talk.retell(who)


# -- questions -----------------------------------------------------------------------------------


def _questions(rng: random.Random, talk: Talk, piece: Piece) -> Iterator[Row]:
    """The set of one piece: fact, beliefs, who can answer, who has the information."""
    yield _question_row(piece.word("question"), "fact", piece.sentence, "", _access(talk, piece))
    others = [p for p in talk.people if p != piece.speaker]
    absent = [p for p in others if p not in piece.hearers]
    present = [p for p in others if p in piece.hearers]
    subjects = [rng.choice(group) for group in (absent, present) if group]
    for who in subjects:
        yield from _beliefs(rng, piece, (who,))
    if absent and piece.overview:
        inner = rng.choice(absent)
        seer = rng.choice([p for p in talk.people if p in piece.overview])
        yield from _beliefs(rng, piece, (seer, inner))
    yield from _knowledge_questions(rng, talk, piece, "answerability", "question")
    yield from _knowledge_questions(rng, talk, piece, "info_accessibility")


def _beliefs(rng: random.Random, piece: Piece, chain: tuple[str, ...]) -> Iterator[Row]:
    """One belief, as a free question and with two options in random order."""
    inner, clause = chain[-1], piece.word("clause")
    knows = inner in piece.hearers
    knowledge = f"{inner} knows that {piece.word('fact')}."
    unknown = f"{inner} was not there and does not know {clause}."
    texts = [f"{chain[0]} thinks: {t}" if len(chain) > 1 else t for t in (knowledge, unknown)]
    right, wrong = texts if knows else reversed(texts)
    question = (
        f"What does {inner} believe about {clause}?"
        if len(chain) == 1
        else f"What does {chain[0]} think that {inner} believes about {clause}?"
    )
    access = "accessible" if knows else "inaccessible"
    tom = "first-order" if len(chain) == 1 else "second-order"
    kind = f"tom:belief:{access}"
    yield _question_row(question, kind, right, wrong, access, tom=tom)
    options = [right, wrong] if rng.random() < 0.5 else [wrong, right]
    lettered = "\n".join(f"({'ab'[i]}) {text}" for i, text in enumerate(options))
    index = str(options.index(right))
    yield _question_row(
        f"{question}\n{lettered}", f"{kind}:multiple-choice", index, wrong, access, question, tom
    )


def _knowledge_questions(
    rng: random.Random, talk: Talk, piece: Piece, kind: str, question: str = ""
) -> Iterator[Row]:
    """The list question, and yes-or-no questions with balanced golds.

    With `question` they are about that question, otherwise about the information itself.
    """
    knowing = [p for p in talk.people if p in piece.hearers]
    others = [p for p in talk.people if p not in piece.hearers]
    access = _access(talk, piece)
    subject = piece.word(question) if question else piece.sentence
    lead = f"{'Question' if question else 'Information'}: {subject}\n"
    what = " the right answer to this question" if question else " this"
    list_question = f"Who of those in the conversation knows{what}? Name all of them."
    yield _question_row(
        lead + list_question, f"tom:{kind}:list", repr(knowing), repr(others), access, list_question
    )
    some = rng.sample(knowing, min(len(knowing), max(len(others), 1)))
    for who in (p for p in talk.people if p in others or p in some):
        question_text = f"Does {who} know{what}?"
        gold = "yes" if who in piece.hearers else "no"
        full = f"{lead}{question_text} Answer yes or no."
        yield _question_row(full, f"tom:{kind}:binary", gold, "", access, question_text)


def _question_row(
    complete: str, kind: str, gold: str, wrong: str, access: str, question: str = "", tom: str = ""
) -> Row:
    row = {
        "complete_question": complete,
        "question": question or complete,
        "question_type": kind,
        "correct_answer": gold,
        "wrong_answer": wrong,
        "missed_info_accessibility": access,
    }
    return {**row, "tom_type": tom} if tom else row


def _access(talk: Talk, piece: Piece) -> str:
    return "accessible" if piece.hearers >= set(talk.people) else "inaccessible"


# -- imported ------------------------------------------------------------------------------------

LICENCE = "MIT; its authors restrict FANToM to evaluation"
_SINGLE = ("answerabilityQA_list", "infoAccessibilityQA_list")
_SEVERAL = ("beliefQAs", "answerabilityQAs_binary", "infoAccessibilityQAs_binary")


def import_fantom(path: Path) -> Imported:
    """Rows of `fantom_v1.json`; the tables of PercepToM have no answers."""
    return import_records(
        path, _rows_of_set, fields=("set_id", "factQA"), origin="FANToM", licence=LICENCE,
        way_out="Give fantom_v1.json of the FANToM release; files derived from it have no answers.",
        notes=lambda rows, bad: [f"Licence: {LICENCE}."],
    )  # fmt: skip


# -- fantom_v1.json ------------------------------------------------------------------------------


def _rows_of_set(record: RawRow, _: int) -> list[Row | BadRow]:
    (context,) = need(record, "short_context")
    fact = record.fields.get("factQA")
    if not isinstance(fact, Mapping) or not fact.get("question") or not fact.get("correct_answer"):
        raise BadRecord("its factQA has no question with an answer, which other questions need")
    shared = {
        "context": context,
        "fact_question": str(fact["question"]),
        "fact_answer": str(fact["correct_answer"]),
        **{k: record.fields.get(k) for k in ("set_id", "part_id")},
    }
    good: list[Row] = []
    bad: list[BadRow] = []
    for name, pair in _pairs(record.fields):
        try:
            good += [{**row, **shared} for row in _from_pair(pair, shared)]
        except BadRecord as error:
            bad.append(BadRow(record.source, f"{name}: {error}"))
    return [*with_set_sizes(good), *bad]


def _pairs(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "factQA", {"question_type": "fact", **fields["factQA"]}
    for name in _SEVERAL:
        for i, pair in enumerate(fields.get(name) or ()):
            yield f"{name}[{i}]", pair
    yield from ((name, fields[name]) for name in _SINGLE if fields.get(name))


def _from_pair(pair: Any, shared: Mapping[str, Any]) -> list[Row]:
    if not isinstance(pair, Mapping):
        raise BadRecord("it is not a question-answer pair")
    question, kind = str(pair.get("question") or ""), str(pair.get("question_type") or "")
    gold, wrong = pair.get("correct_answer"), pair.get("wrong_answer")
    if not question or not kind:
        raise BadRecord("it lacks a question or its type")
    if gold is None or gold == "" or gold == "error":
        raise BadRecord(f"its gold answer is {gold!r}")
    columns = ("tom_type", "missed_info_accessibility")
    row = {
        "question": question,
        "question_type": kind,
        "complete_question": complete_question(question, kind, shared),
        "correct_answer": gold,
        "wrong_answer": wrong,
        **{name: pair[name] for name in columns if pair.get(name) is not None},
    }
    if not kind.startswith("tom:belief:") or kind.endswith(":multiple-choice") or not wrong:
        return [row]
    return [row, {**row, **_lettered(question, kind, str(gold), str(wrong))}]


def complete_question(question: str, kind: str, shared: Mapping[str, Any]) -> str:
    """The question with its introduction, and with instructions for the answer."""
    if "answerability" in kind:
        question = f"Question: {shared['fact_question']}\n{question}"
    if "info_accessibility" in kind:
        information = f"{shared['fact_question']} {shared['fact_answer']}"
        question = f"Information: {information}\n{question}"
    return f"{question} Answer yes or no." if kind.endswith(":binary") else question


def _lettered(question: str, kind: str, gold: str, wrong: str) -> Row:
    """The belief with two options; their order depends on the words, not on chance."""
    options = [gold, wrong]
    if hashlib.sha256(f"{question}\n{gold}".encode()).digest()[0] % 2:
        options.reverse()
    lines = "\n".join(f"({letter}) {text}" for letter, text in zip("ab", options, strict=True))
    return {
        "question_type": f"{kind}:multiple-choice",
        "complete_question": f"{question}\n{lines}",
        "correct_answer": options.index(gold),
    }
