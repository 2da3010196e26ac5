"""Faults of a simulated person that show without a judge: what a person would hardly write.

Fixed checks of the lines of one conversation. They ask no model, take linear time, and rather miss
a fault than name one that is none. Their phrases, in many languages, are in signs.yaml.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import yaml

from soulkit.judge.leaks import SENTENCE_END, grams, words
from soulkit.judge.verdict import UNSPACED
from soulkit.tasks.kit.person.brief import END_MARK, START, Brief
from soulkit.text import one_line
from soulkit.types import Line

FAULTS: Mapping[str, str] = {
    "role_flip": "The person speaks as the assistant, or writes the other side's lines.",
    "leaked_instructions": "The message has words of the instructions.",
    "leaked_reasoning": "The message has thoughts about how to play the person.",
    "swallowed_last_line": "The message is empty, or has only the mark of the end.",
    "parroting": "The message repeats the other side's last line or an earlier one of its own.",
    "two_first_turns": "The person opens the conversation a second time.",
    "goodbye_loop": "Both sides say good-bye again and again.",
    "contradicts_persona": "The person states a name, age or place that is not the persona's.",
}
"""Kind of a fault → what it means."""
READ, COMPARED = 20_000, 300
"""Maximum characters of a message that are read, and maximum words that are compared: they limit
the time for messages that do not end."""
RUN, SENTENCE, REPEATED = 10, 6, 8
"""Minimum words of a quotation from the instructions, of a sentence of the persona, and of a
repetition; in scripts without spaces twice as many signs."""
NEAR = 0.85
"""A repetition shares at least this part of the pairs of words."""
CLOSING_WORDS, LOOP = 30, 4
"""Maximum words of a good-bye, and minimum lines of a loop."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one line."""

    kind: str
    line: int
    """Index of the line in the conversation."""
    evidence: str
    """The words that show it."""


def find_faults(
    lines: Sequence[Line], seat: str, brief: Brief | None = None, instructions: str = "",
    end_mark: str = END_MARK,
) -> tuple[Fault, ...]:  # fmt: skip
    """The faults of the person at `seat`, in the order of the lines.

    `instructions` is the person's system prompt, if it is not the one of the brief.
    """
    talk = _Conversation(tuple(lines), seat, brief, instructions, end_mark)
    faults = (
        Fault(kind, place, one_line(check(talk, place), 80))
        for place in talk.places
        for kind, check in _CHECKS.items()
    )
    return tuple(fault for fault in faults if fault.evidence)


@dataclass(frozen=True)
class _Message:
    """A line as the checks read it."""

    text: str

    @cached_property
    def words(self) -> list[str]:
        return words(self.text)

    @cached_property
    def joined(self) -> str:
        return f" {' '.join(self.words)} "

    @cached_property
    def pairs(self) -> Counter[tuple[str, str]]:
        return Counter(zip(self.words[:COMPARED], self.words[1:COMPARED], strict=False))

    def sign(self, group: str, *, first: bool = False) -> str:
        """The pattern or phrase of a group that the message has (or begins with), or nothing."""
        for pattern in _patterns(group):
            if match := pattern.search(self.text):
                return match[0].strip()
        for phrase, anchored in _phrases(group):
            if self.joined.startswith(phrase) if first or anchored else phrase in self.joined:
                return phrase.strip()
        return ""

    def repeats(self, other: _Message) -> bool:
        """Whether it has (nearly) the same words in the same order."""
        size, limit = len(self.words), len(other.words)
        if size < _least(self.words, REPEATED) or min(size, limit) < NEAR * max(size, limit):
            return False
        longer = max(self.pairs.total(), other.pairs.total())
        return (self.pairs & other.pairs).total() >= NEAR * longer


@dataclass(frozen=True)
class _Conversation:
    """The lines, and what the person was given to play. A check returns its evidence or nothing."""

    lines: tuple[Line, ...]
    seat: str
    brief: Brief | None
    instructions: str
    end_mark: str

    @cached_property
    def messages(self) -> list[_Message]:
        texts = (line.text[:READ] for line in self.lines)
        mark = self.end_mark
        return [_Message(text.replace(mark, " ") if mark else text) for text in texts]

    @cached_property
    def places(self) -> list[int]:
        """The person's lines."""
        return [place for place, line in enumerate(self.lines) if line.seat == self.seat]

    def earlier(self, place: int) -> list[_Message]:
        """The person's messages before a line."""
        return [self.messages[one] for one in self.places if one < place]

    @cached_property
    def secrets(self) -> tuple[int, set[tuple[str, ...]], list[str]]:
        """(length of a run, runs of words of the instructions, whole sentences of the persona)."""
        prompt = self.instructions or (self.brief.prompt("").text if self.brief else "")
        stems, sentences = (
            words(prompt),
            SENTENCE_END.split(self.brief.persona if self.brief else ""),
        )
        size = _least(stems, RUN)
        runs = {run for run in grams(stems, size) if not _word_set("addressed").isdisjoint(run)}
        long = [x for x in map(words, sentences) if len(x) >= _least(x, SENTENCE)]
        quoted = [*(x for x in long if _word_set("first_person").isdisjoint(x)), words(START)]
        return size, runs, [f" {' '.join(one)} " for one in quoted]

    def leaked_instructions(self, place: int) -> str:
        size, runs, sentences = self.secrets
        message = self.messages[place]
        quoted = grams(message.words, size) & runs
        whole = (one for one in sentences if one in message.joined)
        return " ".join(min(quoted)) if quoted else next(whole, "")

    def swallowed_last_line(self, place: int) -> str:
        return (
            "" if self.messages[place].text.strip() else self.lines[place].text.strip() or "empty"
        )

    def parroting(self, place: int) -> str:
        message, before = self.messages[place], self.earlier(place)
        if place and place - 1 not in self.places:
            before.append(self.messages[place - 1])
        repeated = any(map(message.repeats, before))
        return message.text if repeated and not self.two_first_turns(place) else ""

    def two_first_turns(self, place: int) -> str:
        """The second message is the first again, or both the first and a later one greet."""
        message, before = self.messages[place], self.earlier(place)
        if not before:
            return ""
        pair = (before[0], message)
        greets = all(len(one.words) > 3 and one.sign("greeting", first=True) for one in pair)
        return message.text if greets or (len(before) == 1 and message.repeats(before[0])) else ""

    @cached_property
    def loops(self) -> set[int]:
        """The lines of a loop, from the second good-bye of a side."""
        places, run = set[int](), list[int]()
        for place, message in enumerate([*self.messages, _Message("")]):
            short = 0 < len(message.words) <= CLOSING_WORDS
            if short and (message.sign("farewell") or (run and message.sign("thanks"))):
                run.append(place)
                continue
            seats = {self.lines[one].seat for one in run if self.messages[one].sign("farewell")}
            if len(run) >= LOOP and len(seats) > 1:
                places.update(run[2:])
            run = []
        return places

    def goodbye_loop(self, place: int) -> str:
        return self.messages[place].text if place in self.loops else ""

    def contradicts_persona(self, place: int) -> str:
        brief = self.brief or Brief()
        facts = {name.casefold(): value for name, value in brief.facts.items()}
        about = words(" ".join([brief.persona, brief.scenario, *facts.values()]))
        for subject, (names, patterns) in _statements().items():
            values = [facts[name] for name in names if name in facts]
            for pattern in patterns if values else ():
                for match in pattern.finditer(self.messages[place].text):
                    if not _agrees(subject, next(filter(None, match.groups())), values, about):
                        return match[0]
        return ""


def _by_sign(kind: str) -> Callable[[_Conversation, int], str]:
    return lambda talk, place: talk.messages[place].sign(kind)


_CHECKS = {kind: getattr(_Conversation, kind, _by_sign(kind)) for kind in FAULTS}


def _agrees(subject: str, stated: str, values: Sequence[str], about: Sequence[str]) -> bool:
    """Whether what a person states may be true of the persona; in doubt, it may."""
    if subject == "age":
        return stated in values or not all(map(str.isdecimal, values))
    heads = words(stated)
    if subject == "place" and not _word_set("countries").isdisjoint(heads):
        return True
    alike = any(one[:4] == head[:4] for one in about for head in heads)
    return alike or any(value.isascii() != stated.isascii() for value in values)


def _least(text: Sequence[str], number: int) -> int:
    """A minimum of words, doubled where most words are signs of a script without spaces."""
    some = text[:COMPARED]
    signs = sum(re.match(f"[{UNSPACED}]", word) is not None for word in some)
    return number * 2 if signs * 2 > len(some) else number


_PROPER = r"\s([^\W\d_a-z][\w'\u2019-]{1,30}(?: [^\W\d_a-z][\w'\u2019-]{1,30}){0,2})"


@cache
def _signs() -> Mapping[str, Any]:
    text = (files("soulkit.tasks.kit.person") / "signs.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


@cache
def _phrases(group: str) -> list[tuple[str, bool]]:
    """(phrase between spaces, whether it only counts at the beginning)."""
    return [(f" {' '.join(words(one))} ", one.startswith("^")) for one in _signs()[group]]


@cache
def _patterns(group: str) -> list[re.Pattern[str]]:
    return [re.compile(one, re.IGNORECASE) for one in _signs()["patterns"].get(group, ())]


@cache
def _statements() -> Mapping[str, tuple[list[str], list[re.Pattern[str]]]]:
    """Subject → (names of the facts about it, how a person states it)."""
    return {
        subject: (one["facts"], [
            re.compile(rf"(?<!\w)(?:{text.replace('PROPER', _PROPER)})" if "(?i)" not in text
                       else text, re.MULTILINE)
            for text in one["patterns"]
        ])
        for subject, one in _signs()["statements"].items()
    }  # fmt: skip


@cache
def _word_set(group: str) -> frozenset[str]:
    return frozenset(words(" ".join(_signs()[group])))
