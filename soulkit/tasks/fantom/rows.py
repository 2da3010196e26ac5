"""Rows of `fantom`: short conversations that people leave and join, and who knows what in the end.

A conversation is made as a list of moments (someone speaks, leaves, comes, or tells again what the
others missed); who was there for which part follows, and with it the gold of every question. Each
piece of information gives one set of questions: the fact, what absent and present people believe
(free, with options, and one inside of another), and lists and yes-or-no questions on who can answer
and who has the information. Yes-or-no questions are asked about everybody who lacks the information
and about as many who have it, so that neither answer is the better guess. Sets follow one another,
so that a hundred rows hold about seven whole ones.

Example: {"context": "Ada: I cooked paella.\\n...", "complete_question": "...", "question_type":
"tom:info_accessibility:list", "correct_answer": "['Ada', 'Ben']", "wrong_answer": "['Cleo']",
"missed_info_accessibility": "inaccessible", "set_id": "0-0-1", "set_size": 7, "set_beliefs": 1,
"part_id": "0-0", "events": {"told": 7, "retold": []}}.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from soulkit.tasks.fantom.sets import sized
from soulkit.tasks.made import Row
from soulkit.tasks.texts import Texts

TEXTS = Texts(__file__)


@dataclass(frozen=True, slots=True)
class _Topic:
    """A piece of information in its several wordings; {s} is who it is about, {v} what varies."""

    statement: str
    fact: str
    question: str
    clause: str
    """What the question asks, inside of a sentence: `what {s} cooked`."""
    values: tuple[str, ...]


FAREWELLS = ("See you later, {x}.", "Of course, {x}.", "Take your time, {x}.")
COMING = ("Hello, everyone. Sorry that I am late.", "Hi! The bus did not come. Here I am at last.")
RETURNING = ("I am back. What are you talking about?", "Here I am again. Go on, please.")
WELCOMES = ("Welcome, {x}. Sit down.", "There you are, {x}. We were just chatting.")
RETELLING = ("{x}, you missed something:", "For {x}, who was not here:")


@dataclass(slots=True)
class Piece:
    """One piece of information and who got it."""

    topic: _Topic
    speaker: str
    value: str
    line: int
    hearers: set[str]
    retold: list[int] = field(default_factory=list)
    overview: set[str] = field(default_factory=set)
    """Who was there each time it was told, and so saw who else was."""

    def word(self, text: str) -> str:
        return text.format(s=self.speaker, v=self.value)


@dataclass(slots=True)
class Talk:
    """A conversation as far as it has got."""

    rng: random.Random
    people: list[str]
    present: set[str]
    lines: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def say(self, who: str, text: str) -> int:
        """Its number, from 1."""
        self.lines.append(f"{who}: {text}")
        return len(self.lines)

    def other(self, *but: str) -> str:
        """Someone who is there, beside those named."""
        return self.rng.choice([p for p in self.people if p in self.present and p not in but])

    def tell(self, topic: _Topic) -> None:
        """A piece of information and two replies."""
        speaker = self.other()
        value = self.rng.choice(topic.values)
        line = self.say(speaker, topic.statement.format(v=value))
        listeners = set(self.present)
        self.pieces.append(Piece(topic, speaker, value, line, listeners, overview=set(listeners)))
        reply, more = self.rng.sample(TEXTS["replies"], 2)
        self.say(self.other(speaker), reply)
        if self.rng.random() < 0.5:
            self.say(self.other(speaker), more)

    def leave(self, who: str) -> None:
        self.say(who, self.rng.choice(TEXTS["leaving"]))
        self.say(self.other(who), self.rng.choice(FAREWELLS).format(x=who))
        self.present.discard(who)

    def come(self, who: str, greetings: tuple[str, ...]) -> None:
        self.present.add(who)
        self.say(who, self.rng.choice(greetings))
        self.say(self.other(who), self.rng.choice(WELCOMES).format(x=who))

    def retell(self, who: str) -> None:
        """Someone who knows the latest piece tells it to `who`, and to all who are there."""
        piece = self.pieces[-1]
        teller = self.other(who) if piece.speaker not in self.present else piece.speaker
        if teller not in piece.hearers:
            return
        sentence = piece.topic.statement.format(v=piece.value)
        text = sentence if teller == piece.speaker else f"{_capital(piece.word(piece.topic.fact))}."
        lead = self.rng.choice(RETELLING).format(x=who)
        piece.retold.append(self.say(teller, f"{lead} {text}"))
        piece.hearers |= self.present
        piece.overview &= self.present


@cache
def _topics() -> tuple[_Topic, ...]:
    return tuple(_Topic(**item) for item in TEXTS["topics"])


def rows(n: int, seed: int) -> list[Row]:
    """`n` rows, whole sets one after another; the first rows of a longer list are the same."""
    rows: list[Row] = []
    conversation = 0
    while len(rows) < n:
        rows += _conversation(random.Random(f"fantom/{seed}/{conversation}"), conversation)
        conversation += 1
    return rows[:n]


def _conversation(rng: random.Random, number: int) -> Iterator[Row]:
    talk = _talk(rng)
    context = "\n".join(talk.lines)
    for i, piece in enumerate(talk.pieces):
        shared = {
            "context": context,
            "set_id": f"{number}-0-{i}",
            "part_id": f"{number}-0",
            "events": {"told": piece.line, "retold": piece.retold},
        }
        for row in sized(list(_questions(rng, talk, piece))):
            yield {**row, **shared}


# -- conversations -------------------------------------------------------------------------------


def _talk(rng: random.Random) -> Talk:
    """Two or three pieces, with people who leave, come late or come back between them."""
    people = rng.sample(TEXTS["names"], rng.randint(3, 6))
    late = people[3:5] if rng.random() < 0.8 else []
    talk = Talk(rng, people, set(people) - set(late))
    chosen = rng.sample(_topics(), 3)
    # Everybody says something at once: who is there must be readable from the conversation.
    for who, greeting in zip(sorted(talk.present), rng.sample(TEXTS["greetings"], 6), strict=False):
        talk.say(who, greeting)
    if rng.random() < (0.5 if late else 0.15):  # without late ones nobody would miss it
        talk.tell(chosen[0])
    away = rng.sample(sorted(talk.present), min(len(talk.present) - 2, rng.randint(1, 3)))
    for who in away:
        talk.leave(who)
    talk.tell(chosen[1])
    for who in away:
        _someone_comes(talk, who, RETURNING)
    for who in late:
        _someone_comes(talk, who, COMING)
    if rng.random() < 0.12:
        talk.tell(chosen[2])
    return talk


def _someone_comes(talk: Talk, who: str, greetings: tuple[str, ...]) -> None:
    talk.come(who, greetings)
    if talk.rng.random() < 0.2:
        talk.retell(who)


# -- questions -----------------------------------------------------------------------------------


def _questions(rng: random.Random, talk: Talk, piece: Piece) -> Iterator[Row]:
    """The set of one piece, in the order fact, beliefs, who can answer, who has it."""
    yield _row(piece.word(piece.topic.question), "fact", _sentence(piece), "", _access(talk, piece))
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
    yield from _who(rng, talk, piece, "answerability", piece.topic.question)
    yield from _who(rng, talk, piece, "info_accessibility")


def _beliefs(rng: random.Random, piece: Piece, chain: tuple[str, ...]) -> Iterator[Row]:
    """One belief in free words and with two options in random order."""
    inner, clause = chain[-1], piece.word(piece.topic.clause)
    knows = inner in piece.hearers
    knowledge = f"{inner} knows that {piece.word(piece.topic.fact)}."
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
    yield _row(question, kind, right, wrong, access, tom=tom)
    options = [right, wrong] if rng.random() < 0.5 else [wrong, right]
    lettered = "\n".join(f"({'ab'[i]}) {text}" for i, text in enumerate(options))
    index = str(options.index(right))
    yield _row(
        f"{question}\n{lettered}", f"{kind}:multiple-choice", index, wrong, access, question, tom
    )


def _who(
    rng: random.Random, talk: Talk, piece: Piece, kind: str, question: str = ""
) -> Iterator[Row]:
    """The list question, and yes-or-no questions with as many golds of either sort as can be.

    With `question` they are about the question, without it about the information itself.
    """
    knowing = [p for p in talk.people if p in piece.hearers]
    rest = [p for p in talk.people if p not in piece.hearers]
    access = _access(talk, piece)
    subject = piece.word(question) if question else _sentence(piece)
    lead = f"{'Question' if question else 'Information'}: {subject}\n"
    what = " the right answer to this question" if question else " this"
    every = f"Who of those in the conversation knows{what}? Name all of them."
    yield _row(lead + every, f"tom:{kind}:list", repr(knowing), repr(rest), access, every)
    some = rng.sample(knowing, min(len(knowing), max(len(rest), 1)))
    for who in (p for p in talk.people if p in rest or p in some):
        one = f"Does {who} know{what}?"
        gold = "yes" if who in piece.hearers else "no"
        full = f"{lead}{one} Answer yes or no."
        yield _row(full, f"tom:{kind}:binary", gold, "", access, one)


def _row(
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


def _sentence(piece: Piece) -> str:
    return f"{_capital(piece.word(piece.topic.fact))}."


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
