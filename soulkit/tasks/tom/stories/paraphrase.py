"""Events from paraphrased ToMi stories, with or without their traces.

Paraphrases vary the verb and the order of the nouns, so sentences are read by what they join: the
object with a container places it, a known container with another noun states its room, a person
with the object and a second noun moves it, a person with one noun arrives, leaves, or only has an
opinion. Happenings are in the past tense and opinions in the present; that and the preposition
decide the last case. A trace, where there is one, must agree event by event.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from soulkit.tasks.tom.stories.events import (
    ContainerRoom,
    Enter,
    Event,
    Exit,
    Move,
    Noise,
    Place,
    Story,
    decode,
    encode,
)

_PERSON = re.compile(r"\b(?!The\b|There\b|Inside\b|In\b|An?\b)[A-Z][a-z]+\b(?!_)")
_NOUN = re.compile(r"\b(?:[Tt]he|[Aa]n?) ([\w-]+)")
_MOVE = re.compile(r"([A-Z][a-z]+) [\w ]+? the ([\w-]+) (?:to|into|in) the ([\w-]+)")
_STEP = re.compile(r"([A-Z][a-z]+) (.+) the ([\w-]+)")
_IS_THERE = re.compile(r"is(?: (?!interested)\w+| to be found)? (?:in|inside|within)")
_HOUSES = re.compile(r"The ([\w-]+) (?:contains|has|holds|houses|shelters) ([A-Z][a-z]+)")
_ARRIVED = re.compile(r"approached|entered|visited|(?:\w+ ){1,2}(?:into|in|at|to|by)")
_LEFT = re.compile(r"left|exited|quit|departed|(?:\w+ ){1,2}(?:from|of)")
_PRESENT = re.compile(r"(?:is|has|would|can't|\w+s)\b")
_TRACE_STEPS = {
    "enter_agent_0": (Enter, 0),
    "enter_agent_1": (Enter, 1),
    "agent_0_moves_obj": (Move, 0),
    "agent_0_exits": (Exit, 0),
    "agent_1_exits": (Exit, 1),
    "agent_1_reenters_loc": (Enter, 1),
    "agent_1_reenters_alt_loc": (Enter, 1),
    "agent_2_enters": (Enter, 2),
    "agent_2_exits": (Exit, 2),
}


def read_paraphrase(
    lines: Sequence[str],
    obj: str,
    nouns: Iterable[str] = (),
    trace: Sequence[str] | None = None,
) -> Story | None:
    """The story of paraphrased sentences about `obj`; None when one cannot be read.

    `nouns` are words of the row that may hold a space ("treasure chest"). With a `trace` (the
    abstract steps, in order) the arrivals, exits and the move must be exactly those of the trace.
    """
    joined = _joiner([*nouns, obj])
    clean = [joined(line.strip().rstrip(".")) for line in lines]
    key = obj.replace(" ", "_")
    vocabulary = _vocabulary(clean, key)
    events: list[Event] = []
    for line in clean:
        event = _read(line, vocabulary)
        if event is None:
            return None
        events.append(event)
    if not events or (trace is not None and not _agrees(events, trace)):
        return None
    return Story.of([_spaced(e) if obj != key or nouns else e for e in events], lines)


def _joiner(nouns: Iterable[str]) -> Callable[[str], str]:
    pairs = [(n, n.replace(" ", "_")) for n in sorted(set(nouns), key=len, reverse=True)]
    long = [(n, joined) for n, joined in pairs if n != joined]

    def join(line: str) -> str:
        for noun, joined in long:
            line = re.sub(rf"\b{re.escape(noun)}\b", joined, line)
        return line

    return join


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The nouns whose part in the story is certain before its sentences are read in order."""

    obj: str
    containers: frozenset[str]
    rooms: frozenset[str]

    def room(self, word: str) -> str:
        """The room of a sentence about who is there: some of those lost a name's second half."""
        full = [room for room in self.rooms if room.startswith(word + "_")]
        return full[0] if len(full) == 1 and word not in self.rooms else word


def _vocabulary(lines: Sequence[str], obj: str) -> _Vocabulary:
    containers: set[str] = set()
    rooms: set[str] = set()
    for line in lines:
        nouns = _NOUN.findall(line)
        if obj in nouns and len(nouns) == 2 and (_MOVE.fullmatch(line) or not _PERSON.search(line)):
            containers.update(n for n in nouns if n != obj)
        elif _PERSON.match(line) and (match := _STEP.fullmatch(line)):
            rooms.update(() if _PRESENT.match(match[2]) else (match[3],))
        else:
            rooms.update(n for n in nouns if "_" in n)
    return _Vocabulary(obj, frozenset(containers), frozenset(rooms))


def _read(line: str, vocabulary: _Vocabulary) -> Event | None:
    if not _PERSON.search(line):
        return _statement(_NOUN.findall(line), vocabulary)
    if (match := _MOVE.fullmatch(line)) and match[2] == vocabulary.obj:
        return Move(match[1], vocabulary.obj, match[3])
    if match := _HOUSES.fullmatch(line):
        return Enter((match[2],), vocabulary.room(match[1]), already=True)
    if match := _STEP.fullmatch(line):
        who, verb, noun = match.groups()
        if _IS_THERE.fullmatch(verb):
            return Enter((who,), vocabulary.room(noun), already=True)
        if not _PRESENT.match(verb):
            return _step(who, verb, noun)
    return _opinion(line)


def _statement(nouns: Sequence[str], vocabulary: _Vocabulary) -> Event | None:
    if len(nouns) != 2:
        return None
    first, second = nouns
    if vocabulary.obj in nouns:
        return Place(vocabulary.obj, second if first == vocabulary.obj else first)
    pairs = {(c, r) for c, r in ((first, second), (second, first)) if c in vocabulary.containers}
    if len(pairs) > 1:  # one word may name a container and a room
        pairs = {(c, r) for c, r in pairs if r in vocabulary.rooms}
    return ContainerRoom(*pairs.pop()) if len(pairs) == 1 else None


def _step(who: str, verb: str, room: str) -> Event | None:
    if _LEFT.fullmatch(verb):
        return Exit(who, room)
    return Enter((who,), room) if _ARRIVED.fullmatch(verb) else None


def _opinion(line: str) -> Event | None:
    person = _PERSON.search(line)
    if person is None:
        return None
    rest = line[person.end() :].strip() if person.start() == 0 else line.split(" ", 2)[-1]
    return Noise(person[0], "", "") if _PRESENT.match(rest) else None


def _agrees(events: Sequence[Event], trace: Sequence[str]) -> bool:
    steps = [e for e in events if isinstance(e, Enter | Exit | Move)]
    movers = [e.agent for e in steps if isinstance(e, Move)]
    trace_steps = [_TRACE_STEPS[name] for name in trace if name in _TRACE_STEPS]
    if len(movers) != 1 or len(steps) != len(trace) or len(trace_steps) != len(trace):
        return False
    for absentee in {_who(e) for e in steps} - set(movers):
        roles = {movers[0]: 0, absentee: 1}
        story_steps = [(type(e), roles.get(_who(e), 2)) for e in steps]
        # Traces list the third person's steps in order, but not at their place among the others.
        if all(_only(story_steps, third) == _only(trace_steps, third) for third in (True, False)):
            return True
    return False


def _only(steps: Sequence[tuple[type, int]], third: bool) -> list[tuple[type, int]]:
    return [step for step in steps if (step[1] == 2) == third]


def _who(event: Enter | Exit | Move) -> str:
    return event.group[0] if isinstance(event, Enter) else event.agent


def _spaced(event: Event) -> Event:
    tag, *values = encode([event])[0]
    plain = [v.replace("_", " ") if isinstance(v, str) else v for v in values]
    return decode([[tag, *plain]])[0]
