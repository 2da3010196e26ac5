"""Story text: sentences rendered from events, and parsed back into events.

Each style maps an event type to templates; the plain style can be parsed back. Parsing is exact: if
one sentence fits no form, the result is None. Whether "The pantry is in the den" places an object
or a container depends on position: it states a room if its subject was a container before.

Paraphrases are parsed by their shape. A sentence without people says where something is; a person
with the object and another noun moves it; a person with one noun arrives, leaves, or has an opinion
(in the present tense). If there is a trace, it must agree event by event.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from soulkit.data.literals import python_literal
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.tom.events import (
    EVENT_TYPES,
    ContainerRoom,
    Enter,
    Event,
    Exit,
    Move,
    Noise,
    Place,
    PrivateTell,
    PublicClaim,
    Rules,
    Stay,
    Story,
    decode,
    encode,
    read_question,
)
from soulkit.text import join_and

TEXTS = Texts(__file__)
Style = Literal["plain", "paraphrase"]

ATTITUDES = ("enjoys", "fears", "admires", "avoids")
SIGHTS = ("heard", "lost", "drew", "bought")
THINGS = ("owl", "drone", "violin", "parade", "button", "ticket", "comb", "wallet")

STARTED_THERE = "{group} began the day in the {room}."

MEMORY = "Where was the {obj} at first?"
REALITY = "Where is the {obj} now?"
FIRST = "Where would {0} search for the {obj}?"
SECOND = "Where does {0} believe that {1} would search for the {obj}?"
NESTED = ("Where does {} believe", " {} believes", " the {obj} is?")


@cache
def templates(style: Style) -> Mapping[type[Any], Sequence[str]]:
    """The templates for each event type of the style."""
    return {EVENT_TYPES[name]: texts for name, texts in TEXTS[style].items()}


def render_events(events: Sequence[Event], style: Style, rng: random.Random) -> list[str]:
    """One sentence per event; `rng` picks among several templates."""
    return [sentence(event, style, rng) for event in events]


def sentence(event: Event, style: Style, rng: random.Random) -> str:
    if isinstance(event, Enter) and event.already and style == "plain":
        return STARTED_THERE.format(**template_values(event))
    return rng.choice(templates(style)[type(event)]).format(**template_values(event))


def template_values(event: Event) -> dict[str, str]:
    """The fields of an event as template values."""
    values = {name: getattr(event, name) for name in type(event).__slots__}
    return {k: join_and(v) if isinstance(v, tuple) else str(v) for k, v in values.items()}


def numbered(lines: Sequence[str]) -> str:
    """Sentences as numbered lines `1 ...`, `2 ...`."""
    return "\n".join(f"{i} {line}" for i, line in enumerate(lines, 1))


def nested_question(chain: Sequence[str], obj: str) -> str:
    """The question of a chapter story for a chain of 0 to 4 thinkers."""
    if not chain:
        return REALITY.format(obj=obj)
    head, link, tail = NESTED
    middle = "".join(link.format(name) for name in chain[1:])
    return head.format(chain[0]) + middle + tail.format(obj=obj)


_SLOT = {
    "agent": r"(?P<agent>[A-Z][A-Za-z]*)",
    "hearer": r"(?P<hearer>[A-Z][A-Za-z]*)",
    "group": r"(?P<group>[A-Z][A-Za-z]*(?:(?:, [A-Z][A-Za-z]*)* and [A-Z][A-Za-z]*)?)",
    "room": r"(?P<room>[\w-]+(?: [\w-]+)?)",
    "obj": r"(?P<obj>[\w-]+(?: [\w-]+)?)",
    "container": r"(?P<container>[\w-]+(?: [\w-]+)?)",
    "thing": r"(?P<thing>[\w-]+(?: [\w-]+)?)",
}
_PUBLISHED: tuple[tuple[str, type[Any]], ...] = (
    ("{group} entered the {room}", Enter),
    ("{agent} exited the {room}", Exit),
    ("{agent} moved the {obj} to the {container}", Move),
    (r"{agent} made no movements and stayed in the {room} for \d+ minutes?", Stay),
    ("{agent} publicly claimed that (?:the )?{obj} is in the {container}", PublicClaim),
    (
        "{agent} privately told {hearer} that (?:the )?{obj} is in the {container}",
        PrivateTell,
    ),
    (r"{agent} (?P<verb>likes|dislikes|loves|hates) the {thing}", Noise),
    (r"{agent} (?P<verb>saw) an? {thing}", Noise),
    (r"{agent} (?P<verb>lost) (?:his|her|their) {thing}", Noise),
)
_OWN_VERBS = "|".join((*ATTITUDES, *SIGHTS))
_IS_IN = re.compile(r"[Tt]he (?P<what>[\w-]+(?: [\w-]+)?) is in the (?P<where>[\w-]+(?: [\w-]+)?)")
_WAS_THERE = re.compile(_SLOT["group"] + r" is in the " + _SLOT["room"])
_NUMBER = re.compile(r"\d+[.)]?\s+")


def _form(template: str, cls: type[Any]) -> tuple[re.Pattern[str], type[Any]]:
    pattern = template
    for name, slot in _SLOT.items():
        pattern = pattern.replace("{" + name + "}", slot)
    return re.compile(pattern.replace("{verb}", f"(?P<verb>{_OWN_VERBS})")), cls


@cache
def _forms() -> tuple[tuple[re.Pattern[str], type[Any]], ...]:
    """The possible sentences: the published ones, then the plain ones of generated stories."""
    plain = ((t.rstrip("."), cls) for cls, texts in templates("plain").items() for t in texts)
    return tuple(_form(text, cls) for text, cls in (*_PUBLISHED, *plain))


_STARTED, _ = _form(STARTED_THERE.rstrip("."), Enter)


def story_lines(text: str) -> list[str]:
    """The sentences of a story, without their numbers."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line.replace("***", "").strip() for line in lines]
    lines = [line for line in lines if line]
    if lines and not _NUMBER.match(lines[0]) and any(_NUMBER.match(x) for x in lines[1:]):
        lines = lines[1:]
    return [_NUMBER.sub("", line, count=1) if _NUMBER.match(line) else line for line in lines]


def read_sentences(lines: Sequence[str]) -> Story | None:
    """The story that unnumbered sentences tell; None if one is unreadable or there are none."""
    events: list[Event] = []
    containers: set[str] = set()
    for line in lines:
        event = read_sentence(line, containers)
        if event is None:
            return None
        if isinstance(event, Place | Move):
            containers.add(event.container)
        events.append(event)
    return Story.of(events, lines) if events else None


def read_sentence(line: str, containers: set[str]) -> Event | None:
    """The event that a sentence states; `containers` are those that the story has named so far."""
    line = line.strip().rstrip(".").removesuffix(" now")
    if match := _IS_IN.fullmatch(line):
        what, where = match["what"], match["where"]
        return ContainerRoom(what, where) if what in containers else Place(what, where)
    for pattern in (_WAS_THERE, _STARTED):
        if match := pattern.fullmatch(line):
            return Enter(_names(match["group"]), match["room"], already=True)
    for form, cls in _forms():
        if match := form.fullmatch(line):
            return _build(cls, match.groupdict())
    return None


def _build(cls: Callable[..., Event], values: dict[str, Any]) -> Event:
    if "group" in values:
        values["group"] = _names(values["group"])
    return cls(**values)


def _names(text: str) -> tuple[str, ...]:
    return tuple(re.split(r", | and ", text))


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
    """The story that paraphrased sentences about `obj` tell; None if one is unreadable.

    `nouns` are words of the row that may contain a space ("treasure chest"). With a `trace` (the
    abstract steps, in order), arrivals, exits and the move must match the trace exactly.
    """
    joined = _joiner([*nouns, obj])
    clean = [joined(line.strip().rstrip(".")) for line in lines]
    key = obj.replace(" ", "_")
    vocabulary = _vocabulary(clean, key)
    events: list[Event] = []
    for line in clean:
        event = _read_paraphrased(line, vocabulary)
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
    """The nouns whose role is certain before the sentences are parsed in order."""

    obj: str
    containers: frozenset[str]
    rooms: frozenset[str]

    def room(self, word: str) -> str:
        """The full name of a room; some paraphrases contain only the first half of it."""
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


def _read_paraphrased(line: str, vocabulary: _Vocabulary) -> Event | None:
    if not _PERSON.search(line):
        return _statement(_NOUN.findall(line), vocabulary)
    if (match := _MOVE.fullmatch(line)) and match[2] == vocabulary.obj:
        return Move(match[1], vocabulary.obj, match[3])
    if match := _HOUSES.fullmatch(line):
        return Enter((match[2],), vocabulary.room(match[1]), already=True)
    if match := _STEP.fullmatch(line):
        person, verb, noun = match.groups()
        if _IS_THERE.fullmatch(verb):
            return Enter((person,), vocabulary.room(noun), already=True)
        if not _PRESENT.match(verb):
            return _step(person, verb, noun)
    return _opinion(line)


def _statement(nouns: Sequence[str], vocabulary: _Vocabulary) -> Event | None:
    if len(nouns) != 2:
        return None
    first, second = nouns
    if vocabulary.obj in nouns:
        return Place(vocabulary.obj, second if first == vocabulary.obj else first)
    pairs = {(c, r) for c, r in ((first, second), (second, first)) if c in vocabulary.containers}
    if len(pairs) > 1:  # a word may name both a container and a room
        pairs = {(c, r) for c, r in pairs if r in vocabulary.rooms}
    return ContainerRoom(*pairs.pop()) if len(pairs) == 1 else None


def _step(person: str, verb: str, room: str) -> Event | None:
    if _LEFT.fullmatch(verb):
        return Exit(person, room)
    return Enter((person,), room) if _ARRIVED.fullmatch(verb) else None


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
        # Traces list the third person's steps in order, but separately from the others.
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


def rules_of(task: str) -> Rules:
    """The tracker's rules for a story task."""
    return "hitom" if task == "hitom" else "tomi"


def events_of_row(task: str, row: Mapping[str, Any]) -> Story | None:
    """The story in a row of `tomi`, `paratomi` or `hitom`; None if it is unreadable.

    A row's `events` are used if it has them, else its text is parsed.
    """
    lines = _lines(row.get("story", ""))
    packed = literal(row.get("events"))
    if packed:
        events = decode(packed)
        return Story.of(events, lines if len(lines) == len(events) else ())
    story = read_sentences(lines)
    question = read_question(str(row.get("question", "")))
    if story is None and task == "paratomi" and question is not None:
        nouns = [str(c) for c in literal(row.get("cands")) or ()]
        return read_paraphrase(lines, question.obj, nouns)
    return story


def _lines(story: Any) -> list[str]:
    if isinstance(story, str) and story.lstrip().startswith("["):
        story = literal(story) or story
    if isinstance(story, str):
        return story_lines(story)
    return [str(line).strip() for line in story]


def literal(value: Any) -> Any:
    """Text parsed as a Python literal (None if it is not one); any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return python_literal(value)
    except (ValueError, SyntaxError):
        return None
