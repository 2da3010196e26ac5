"""Faults of a simulated person that show without a judge: what a person would hardly write.

Fixed checks of the lines of one conversation. They ask no model, take linear time, and rather miss
a fault than name one that is none. Their phrases, in many languages, are in signs.yaml.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from soulkit.judge.leaks import SENTENCE_END, grams, words
from soulkit.judge.verdict import UNSPACED
from soulkit.parse import parse_yaml
from soulkit.tasks.kit.person.brief import END_MARK, START, Brief
from soulkit.text import one_line
from soulkit.types import Episode, Line

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
class PersonFault:
    """One fault of one line."""

    kind: str
    line: int
    """Index of the line in the conversation."""
    evidence: str
    """The words that show it."""


def find_faults(
    lines: Sequence[Line], seat: str, brief: Brief | None = None
) -> tuple[PersonFault, ...]:
    """The faults of the person at `seat`, in the order of the lines."""
    brief, prompt = brief or Brief(), brief.prompt("").text if brief else ""
    messages = [_Message(line.text[:READ].replace(END_MARK, " ")) for line in lines]
    places = [place for place, line in enumerate(lines) if line.seat == seat]
    loops, secrets, faults = _loops(lines, messages), _secrets(prompt, brief.persona), []
    for number, place in enumerate(places):
        message, earlier = messages[place], [messages[one] for one in places[:number]]
        heard = [messages[place - 1]] if place and place - 1 not in places else []
        opens = _opens_again(message, earlier)
        repeats = not opens and any(map(message.repeats, [*earlier, *heard]))
        evidence = {
            "role_flip": message.sign("role_flip"),
            "leaked_instructions": _quotation(message, *secrets),
            "leaked_reasoning": message.sign("leaked_reasoning"),
            "swallowed_last_line": ""
            if message.text.strip()
            else lines[place].text.strip() or "empty",
            "parroting": message.text if repeats else "",
            "two_first_turns": message.text if opens else "",
            "goodbye_loop": message.text if place in loops else "",
            "contradicts_persona": _contradiction(message.text, brief),
        }
        faults += [PersonFault(kind, place, one_line(evidence[kind], 80)) for kind in FAULTS
                   if evidence[kind]]  # fmt: skip
    return tuple(faults)


def fault_notes(lines: Sequence[Line], seat: str, brief: Brief) -> dict[str, Any]:
    """The faults of a conversation as a note of its episode; empty without faults."""
    faults = [asdict(fault) for fault in find_faults(lines, seat, brief)]
    return {"faults": faults} if faults else {}


def fault_kinds(episode: Episode) -> set[str]:
    """The kinds of fault in an episode's notes."""
    return {fault["kind"] for fault in episode.notes.get("faults", ())}


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


def _secrets(prompt: str, persona: str) -> tuple[int, set[tuple[str, ...]], list[str]]:
    """(length of a run, runs of words of the instructions, whole sentences of the persona)."""
    stems = words(prompt)
    size = _least(stems, RUN)
    runs = {run for run in grams(stems, size) if not _word_set("addressed").isdisjoint(run)}
    sentences = [
        x for x in map(words, SENTENCE_END.split(persona)) if len(x) >= _least(x, SENTENCE)
    ]
    secret = [*(x for x in sentences if _word_set("first_person").isdisjoint(x)), words(START)]
    return size, runs, [f" {' '.join(one)} " for one in secret]


def _quotation(
    message: _Message, size: int, runs: set[tuple[str, ...]], sentences: Sequence[str]
) -> str:
    quoted = grams(message.words, size) & runs
    whole = (one for one in sentences if one in message.joined)
    return " ".join(min(quoted)) if quoted else next(whole, "")


def _opens_again(message: _Message, earlier: Sequence[_Message]) -> bool:
    """Whether the second message is the first again, or both the first and a later one greet."""
    pair = (*earlier[:1], message)
    greets = all(len(one.words) > 3 and one.sign("greeting", first=True) for one in pair)
    return bool(earlier) and (greets or (len(earlier) == 1 and message.repeats(earlier[0])))


def _loops(lines: Sequence[Line], messages: Sequence[_Message]) -> set[int]:
    """The lines of loops of good-byes, from the second one of a side."""
    places, run = set[int](), list[int]()
    for place, message in enumerate([*messages, _Message("")]):
        short = 0 < len(message.words) <= CLOSING_WORDS
        if short and (message.sign("farewell") or (run and message.sign("thanks"))):
            run.append(place)
            continue
        seats = {lines[one].seat for one in run if messages[one].sign("farewell")}
        if len(run) >= LOOP and len(seats) > 1:
            places.update(run[2:])
        run = []
    return places


def _contradiction(text: str, brief: Brief) -> str:
    """What the person states about name, age or place that is not in the brief; in doubt, it is."""
    facts = {name.casefold(): value for name, value in brief.facts.items()}
    about = words(" ".join([brief.persona, brief.scenario, *facts.values()]))
    for subject, (names, patterns) in _statements().items():
        values = [facts[name] for name in names if name in facts]
        for match in (match for one in patterns for match in one.finditer(text) if values):
            stated = next(filter(None, match.groups()))
            heads = words(stated)
            if subject == "age":
                agrees = stated in values or not all(map(str.isdecimal, values))
            else:
                agrees = any(one[:4] == head[:4] for one in about for head in heads) or any(
                    value.isascii() != stated.isascii() for value in values
                )
            country = subject == "place" and not _word_set("countries").isdisjoint(heads)
            if not agrees and not country:
                return match[0]
    return ""


def _least(text: Sequence[str], number: int) -> int:
    """A minimum of words, doubled where most words are signs of a script without spaces."""
    signs = [re.match(f"[{UNSPACED}]", word) is not None for word in text[:COMPARED]]
    return number * 2 if sum(signs) * 2 > len(signs) else number


@cache
def _signs() -> Mapping[str, Any]:
    text = (files("soulkit.tasks.kit.person") / "signs.yaml").read_text(encoding="utf-8")
    return parse_yaml(text, ours=True)


@cache
def _phrases(group: str) -> list[tuple[str, bool]]:
    """(phrase between spaces, whether it only counts at the beginning)."""
    phrases = _signs()[group].split("/")
    return [(f" {' '.join(words(one))} ", "^" in one) for one in phrases]


@cache
def _word_set(group: str) -> frozenset[str]:
    return frozenset(words(_signs()[group]))


@cache
def _patterns(group: str) -> list[re.Pattern[str]]:
    return [re.compile(one, re.IGNORECASE) for one in _signs()["patterns"].get(group, ())]


@cache
def _statements() -> Mapping[str, tuple[list[str], list[re.Pattern[str]]]]:
    """Subject → (names of the facts about it, how a person states it)."""
    proper = r"\s([^\W\d_a-z][\w'\u2019-]{1,30}(?: [^\W\d_a-z][\w'\u2019-]{1,30}){0,2})"
    return {
        subject: (one["facts"], [re.compile(text.replace("PROPER", proper), re.MULTILINE)
                                 for text in one["patterns"]])
        for subject, one in _signs()["statements"].items()
    }  # fmt: skip
