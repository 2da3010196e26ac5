"""A scene of a book: its row, what each character hears, who speaks next, and how it is played.

Each character has its own context with its profile, thoughts and memory. A message contains
thoughts in [brackets], actions in (parentheses) and speech; the other characters, the judges and
the environment get it without thoughts: "[He must not see it.] (closes the drawer) You are late."
becomes "(closes the drawer) You are late."

The environment is called with a fresh context at each of its turns, as is the next-speaker
predictor after every message. Without a usable name, a random speaker other than the last is drawn,
with a separate random stream per turn and rollout. Other characters see at most `heard_words` of a
message, judges at most `line_words`. All parsing is linear in the length of the text.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from typing import Protocol as Interface

from soulkit.data.literals import literal_list, structure
from soulkit.errors import RowError, UnreadableVerdict
from soulkit.judge.structured import JudgeMaterial, VerdictShape, read_shape
from soulkit.judge.verdict import remove_think, spoken, transcript
from soulkit.models.base import Cast, Player
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.kit.dialogue import Stage, others_view, partner_reply
from soulkit.tasks.kit.prompting import MARK, first_words, share_fairly
from soulkit.text import one_line
from soulkit.types import Completion, Example, Form, Kind, Line, Protocol, Role, Segment

_OPENING = re.compile(r"<\s*((?:system|role)?)[_ ]think(?:ing)?\s*>")
_ANY_OPENING = re.compile(_OPENING.pattern, re.IGNORECASE)
_CLOSINGS = {
    kind: re.compile(rf"</\s*{kind}[_ ]think(?:ing)?\s*>") for kind in ("", "system", "role")
}
_ANY_CLOSINGS = {kind: re.compile(c.pattern, re.IGNORECASE) for kind, c in _CLOSINGS.items()}


def audible(text: str, name: str, protocol: Protocol) -> str:
    """The part of `name`'s message that others hear; empty if there is none."""
    if protocol == "reference":
        return without_bracketed(remove_think(text, remove_unclosed=True))
    return _without_labels(one_line(without_thoughts(without_marked(spoken(text, "paper")))), name)


def words_out_loud(text: str, name: str) -> str:
    """The spoken part of an environment's message, which has no thoughts; without its name."""
    speech = one_line(spoken(text, "paper"))
    mark = _label(name).match(speech) if name else None
    return speech[mark.end() :] if mark else speech


def without_thoughts(text: str) -> str:
    """`text` without anything in brackets, at any nesting depth.

    An unclosed bracket hides the rest: a truncated thought is still a thought.
    """
    return "".join(piece for piece, depth in _by_depth(text) if not depth)


def bracketed(text: str) -> str:
    """The bracketed parts of `text`, one thought per line."""
    thoughts = (piece.strip() for piece, depth in _by_depth(text) if depth)
    return "\n".join(thought for thought in thoughts if thought)


def _by_depth(text: str) -> Iterator[tuple[str, int]]:
    """(piece, bracket depth) for each piece of text; an unmatched closing bracket is a piece."""
    depth = 0
    for piece in re.split(r"([\[\]])", text):
        if piece == "[":
            depth += 1
        elif piece == "]" and depth:
            depth -= 1
        else:
            yield piece, depth


def without_bracketed(text: str) -> str:
    """`text` as others hear it in the reference: without marked thinking and without brackets that
    close on their line; lines are trimmed, empty ones removed."""
    lines = (_unbracketed(line).strip() for line in without_closed(text).split("\n") if line)
    return "\n".join(line for line in lines if line)


def _unbracketed(line: str) -> str:
    """A line without everything between a bracket and the next closing one."""
    pieces, place = [], 0
    while (start := line.find("[", place)) >= 0 and (end := line.find("]", start)) >= 0:
        pieces.append(line[place:start])
        place = end + 1
    return "".join([*pieces, line[place:]])


def without_closed(text: str) -> str:
    """`text` without closed thinking marks, in the published spelling."""
    return "".join(_unmarked(text, _OPENING, _CLOSINGS, hide_rest=False))


def without_marked(text: str) -> str:
    """`text` without marked thinking, ignoring case; an unclosed mark hides the rest, as a bracket
    does."""
    return "".join(_unmarked(text, _ANY_OPENING, _ANY_CLOSINGS, hide_rest=True))


def _unmarked(
    text: str, opening: re.Pattern[str], closings: Mapping[str, re.Pattern[str]], hide_rest: bool
) -> Iterator[str]:
    """The pieces of `text` outside marks; each unclosed kind is searched for only once."""
    place, endless = 0, set[str]()
    for mark in opening.finditer(text):
        kind = mark[1].lower()
        if mark.start() < place or kind in endless:
            continue
        closing = closings[kind].search(text, mark.end())
        if closing is not None or hide_rest:
            yield text[place : mark.start()]
            place = len(text) if closing is None else closing.end()
        else:
            endless.add(kind)
    yield text[place:]


def with_label(text: str, name: str) -> str:
    """`text` after its speaker's name, unless a line already has it; empty text stays empty."""
    marks = (f"{name}:", f"{name}\uff1a")
    if not text or any(line.strip().startswith(marks) for line in text.split("\n")):
        return text
    return f"{name}: {text}"


def _without_labels(speech: str, name: str) -> str:
    """The speech after any number of repetitions of the speaker's own name and a colon."""
    place, label = 0, _label(name)
    while name and (mark := label.match(speech, place)):
        place = mark.end()
    return speech[place:]


def _label(name: str) -> re.Pattern[str]:
    return re.compile(rf"[*_]*{re.escape(name)}[*_]*\s*[:\uff1a][*_]*\s*")


UNCLEAR, END = "random", "<END CHAT>"
ENDS_FROM = 5
"""First round (counted from 0) after which a scene may end: it then has six messages."""

_LABEL = re.compile(r"next\s*speaker[ \t]*[*#]*[ \t]*(?:[:\-]|is)?[ \t]*([^*\n]+)", re.IGNORECASE)
_TAIL = " \t.,;!?\"'*"


class SpeakerChoice(VerdictShape):
    """What the predictor answers."""

    reason: str
    next_speaker: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """The possible next speakers after a message, and those among whom a random draw picks."""

    names: tuple[str, ...]
    drawn_from: tuple[str, ...]
    may_end: bool

    @property
    def answers(self) -> tuple[str, ...]:
        """All valid answers of the predictor."""
        return (*self.names, UNCLEAR, *((END,) if self.may_end else ()))

    def form(self) -> Form:
        """The answer's JSON Schema, with the names of this scene."""
        fields = {
            "reason": {"type": "string"},
            "next_speaker": {"type": "string", "enum": list(self.answers)},
        }
        schema = {
            "type": "object", "properties": fields, "required": list(fields),
            "additionalProperties": False,
        }  # fmt: skip
        return Form("SpeakerChoice", json.dumps(schema, sort_keys=True, separators=(",", ":")))

    def read(self, reply: str, prompt: str) -> str | None:
        """The answer in a reply, given as an object or a bare name; None if there is none.

        An object that already occurs in the prompt is a character's line, not an answer.
        """
        try:
            answer = read_shape(reply, SpeakerChoice, JudgeMaterial(prompt)).next_speaker
        except UnreadableVerdict:
            answer = words_out_loud(reply, "")
        return answer.strip() if answer.strip() in self.answers else None

    def draw(self, rng: random.Random) -> str:
        """A random candidate."""
        return rng.choice(self.drawn_from)


def candidates(
    speakers: Sequence[str], preferred: Sequence[str], current: str, round_index: int
) -> Candidates:
    """The possible next speakers after `current`; random draws pick from `preferred` if possible.

    Names keep the row's order, because the iteration order of a set would change results.
    """
    others = tuple(name for name in speakers if name != current)
    first = tuple(name for name in others if name in preferred)
    return Candidates(others, first or others, round_index >= ENDS_FROM)


def label_in(text: str) -> str | None:
    """The name after the last "Next Speaker" in a text, by the published pattern."""
    names = _LABEL.findall(text)
    return names[-1].rstrip(_TAIL).strip() or None if names else None


def speaker_in(text: str) -> str:
    """The predictor's answer as the reference parses it: the labelled name, else the text before
    the first colon, else the whole text."""
    return label_in(text) or (text.split(":")[0].strip() if ":" in text else text)


ENVIRONMENT = "Environment"
"""The speaker that is not a character: its name in rows, and its seat."""
READERS = ("judge", "coach", "gold")
"""Audience names that a seat must not have."""
THOUGHT_OF, OUTCOME_OF = "thought of ", "outcome of "
"""Prefixes of the names of a character's private fields; the character's name follows."""


def names_in(value: Any) -> list[str]:
    """The distinct names in a list; other items are left out."""
    values = literal_list(value) if isinstance(value, str) else value
    if not isinstance(values, Sequence) or isinstance(values, str):
        return []
    return list(dict.fromkeys(v.strip() for v in values if isinstance(v, str) and v.strip()))


def characters(fields: Mapping[str, Any]) -> list[str]:
    """Every possible speaker except the environment, in row order."""
    return [n for n in names_in(fields["speaking_characters_w_env"]) if n != ENVIRONMENT]


def first_speaker(fields: Mapping[str, Any]) -> str:
    """The first speaker in the row's list."""
    return names_in(fields["speaking_characters_w_env"])[0]


def speakers(fields: Mapping[str, Any]) -> list[str]:
    """The row's list of speakers, with the environment appended if it is missing."""
    listed = names_in(fields["speaking_characters_w_env"])
    return listed if ENVIRONMENT in listed else [*listed, ENVIRONMENT]


def seats_of(fields: Mapping[str, Any]) -> dict[str, Role]:
    """Seat → role: the actor plays every character."""
    seats: dict[str, Role] = dict.fromkeys(characters(fields), "actor")
    return {**seats, ENVIRONMENT: "environment"}


def dialogue(fields: Mapping[str, Any]) -> list[Line]:
    """The recorded messages, thoughts and actions included."""
    return [
        Line(message["character"].strip(), message["message"]) for message in fields["dialogues"]
    ]


def profiles(fields: Mapping[str, Any]) -> dict[str, str]:
    """Character → its public profile; characters without one are left out."""
    listed = _mapping(fields.get("character_profiles"))
    described = _by_name(_mapping(fields.get("plot")).get("key_characters"), "description")
    texts = {name: (described.get(name, ""), listed.get(name)) for name in characters(fields)}
    joined = {name: "\n\n".join(filter(None, map(_text, parts))) for name, parts in texts.items()}
    return {name: text for name, text in joined.items() if text}


def private_fields(fields: Mapping[str, Any]) -> dict[str, str]:
    """The private fields of each character: its thoughts and its outcome."""
    plot = _mapping(fields.get("plot"))
    thoughts = _by_name(fields.get("key_characters"), "motivation", "thought")
    outcomes = _by_name(plot.get("key_characters"), "summary", "experience")
    names = characters(fields)
    return {
        **{f"{THOUGHT_OF}{name}": thoughts[name] for name in names if name in thoughts},
        **{f"{OUTCOME_OF}{name}": outcomes[name] for name in names if name in outcomes},
    }


def plot_summary(fields: Mapping[str, Any]) -> str:
    """Summary of the part of the book that contains the scene."""
    return _text(_mapping(fields.get("plot")).get("summary"))


def checked_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a playable row; DataError for any other."""
    names = characters(fields)
    if not names:
        why = "speaking_characters_w_env names no character."
        raise RowError("The row has no speakers.", why)
    if reserved := [name for name in names if name in READERS]:
        what = f"A character of the row is named '{reserved[0]}'."
        raise RowError(what, "That word is reserved for an audience and cannot name a seat.")
    if taken := [name for name in names if name in (UNCLEAR, END)]:
        what = f"A character of the row is named '{taken[0]}'."
        raise RowError(what, "That word is reserved for replies that choose the next speaker.")
    if not names_in(fields["major_characters"]):
        raise RowError("The row has no major_characters.", "The judge rates their fidelity.")
    lines = fields["dialogues"]
    if not lines or not all(map(is_message, lines)):
        why = "Each message needs a 'character' and a 'message', both text."
        raise RowError("The row's dialogues are not a list of messages.", why)
    if not _filled_object(fields.get("plot")):
        what = "The row's plot is empty or not an object."
        raise RowError(what, "Judges compare the scene with the plot's summary.")
    if not _filled_object(fields.get("character_profiles")):
        what = "The row's character_profiles are empty or not an object."
        raise RowError(what, "A character without a profile cannot be played.")
    replayed = fields.get("continue_from") or 0
    if not 0 <= replayed < len(lines):
        what = f"The row continues from message {replayed}."
        raise RowError(
            what, f"It has {len(lines)} messages, and at least one must be left to play."
        )
    following = lines[replayed]["character"].strip()
    if replayed and following not in speakers(fields):
        what = f"The row continues from message {replayed}, and the next speaker is {following}."
        raise RowError(what, "speaking_characters_w_env does not list that name.")
    return fields


def _filled_object(value: Any) -> bool:
    inner = structure(value)
    return isinstance(inner, Mapping) and bool(inner)


def is_message(value: Any) -> bool:
    """Whether `value` is a message with a character and a text."""
    return isinstance(value, Mapping) and all(
        isinstance(value.get(key), str) and value[key].strip() for key in ("character", "message")
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    opened = structure(value) if isinstance(value, str) else value
    return opened if isinstance(opened, Mapping) else {}


def _by_name(value: Any, *keys: str) -> dict[str, str]:
    """Name → the first non-empty text under `keys`, from a list of objects with a `name`."""
    entries = literal_list(value) if isinstance(value, str) else value
    people: Iterable[Any] = entries if isinstance(entries, Sequence) else ()
    texts: dict[str, str] = {}
    for person in people:
        if isinstance(person, Mapping) and isinstance(person.get("name"), str):
            text = next((t for key in keys if (t := _text(person.get(key)))), "")
            if text:
                texts.setdefault(person["name"].strip(), text)
    return texts


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


PROFILES, SUMMARY = "profiles", "plot_summary"
"""Derived fields: the public profile of each character, and the plot."""


def fitted_view(
    fields: Mapping[str, Any], seat: str, own_words: int, others_words: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """(values for a character's prompt, words cut from each part), from the fields it may see."""
    public, cuts = fields[PROFILES], {}
    parts = {"profile": public.get(seat, ""), "thought": fields.get(f"{THOUGHT_OF}{seat}", "")}
    texts: dict[str, str] = {}
    for part, text in parts.items():
        (item,), cuts[part] = share_fairly([{part: text}], own_words)
        texts[part] = item[part]
    names = [name for name in public if name != seat]
    items, cuts["others"] = share_fairly([{"profile": public[n]} for n in names], others_words)
    others = [{"name": n, "profile": i["profile"]} for n, i in zip(names, items, strict=True)]
    view = {
        "name": seat, **texts, "others": others, "book": fields["book"],
        "scenario": fields["scenario"], "plot": fields.get(SUMMARY, ""),
        "thoughts": not fields["wo_thought"],
    }  # fmt: skip
    return view, {part: count for part, count in cuts.items() if count}


START = "(The scene begins.)"
PREDICTIONS = 2
"""How often the predictor is asked for a usable name."""
WORD_LENGTH = 12
"""Average characters per word that a budget allows, including spaces."""


def within_words(text: str, count: int) -> str:
    """The beginning of `text` within a word budget; its number of characters is limited, too."""
    fitted, most = first_words(text, count), count * WORD_LENGTH
    return fitted if len(fitted) <= most else f"{fitted[:most]} {MARK}"


class SceneTask(Interface):
    """The interface between a scene and its task."""

    protocol: Protocol
    heard_words: int
    line_words: int

    def rounds(self, kind: Kind) -> int: ...

    def surroundings_prompt(self, example: Example) -> str: ...

    def predictor_prompt(
        self, example: Example, so_far: str, names: Sequence[str], answers: Sequence[str] = ()
    ) -> str: ...


@dataclass
class SceneBook:
    """The messages of a scene so far, and how each character hears them."""

    task: SceneTask
    example: Example
    stage: Stage

    def replay(self) -> tuple[int, str]:
        """Add the recorded messages that the row continues from to every table. Returns (the first
        round to play, its speaker)."""
        fields = self.example.fields
        lines, count = dialogue(fields), int(fields.get("continue_from") or 0)
        for line in lines[:count]:
            self.record(line.seat, self.audible_text(line.seat, line.text), line.text)
        if not count:
            return 0, first_speaker(fields)
        self.stage.notes["replayed"] = count
        return count, lines[count].seat

    def audible_text(self, seat: str, text: str) -> str:
        """The part of `seat`'s message that others hear."""
        if seat == ENVIRONMENT:
            return words_out_loud(text, seat)
        return audible(text, seat, self.task.protocol)

    def public_text(self, line: Line) -> str:
        """A line as the other tables see it; empty if they hear nothing."""
        return f"{line.seat}: {self._short(line.text)}" if line.text else ""

    def record(self, seat: str, text: str, memory: str | None = None) -> None:
        line = Line(seat, within_words(text, self.task.line_words))
        if self._short(text) != text:
            counts = self.stage.notes.setdefault("cut_lines", {})
            counts[seat] = counts.get(seat, 0) + 1
        self.stage.record(line, memory=memory, shown=self.public_text(line))

    def _short(self, text: str) -> str:
        return within_words(text, self.task.heard_words)


@dataclass
class BookScene(SceneBook):
    """A scene in progress."""

    cast: Cast
    rollout: Rollout
    silence: str = field(default="empty", init=False)
    """The stop reason after a silent turn."""

    async def play(self) -> str:
        """Play all rounds and return the stop reason."""
        first, speaker = self.replay()
        rounds = self.task.rounds(self.rollout.kind)
        for index in range(first, rounds):
            turn = self.surroundings if speaker == ENVIRONMENT else partial(self.character, speaker)
            if not await turn(index):
                return self.silence
            self.stage.notes["rounds"] = index + 1
            if index + 1 == rounds:
                break
            following = await self.following(speaker, index)
            if following is None:
                return "silence"
            if following == END:
                return "ended"
            speaker = following
        return "max_rounds"

    # -- turns ------------------------------------------------------------------------------------

    async def character(self, seat: str, index: int) -> bool:
        """The actor's turn as one of the characters; False if a silent turn ends the scene."""
        call = self.rollout.call("actor", self.example, index, seat=seat)
        actor = self.actor(seat)
        if actor is None:
            self.silence = "length"
            return False
        reply = await self.stage.speak(seat, actor, call)
        if not self.words_left(reply):
            return False
        self.record(seat, self.audible_text(seat, reply.text), self._memory(reply))
        return True

    def actor(self, seat: str) -> Player | None:
        """The player for a character's turn; None if no tokens are left."""
        return self.cast.actor

    def words_left(self, reply: Completion) -> str:
        """A reply without thinking; the character's own thoughts stay."""
        return spoken(reply.text, "paper")

    def _memory(self, reply: Completion) -> str:
        """A reply as its author sees it later: text with token ids unchanged, other text cut."""
        return reply.text if reply.token_ids else within_words(reply.text, self.task.line_words)

    async def surroundings(self, index: int) -> bool:
        """The environment's turn; PartnerError if two attempts give nothing."""
        call = self.rollout.call("environment", self.example, index, purpose="environment")
        text, usage = await partner_reply(
            self.cast.player("environment"), self.surroundings_context(), call,
            lambda reply: words_out_loud(reply, ENVIRONMENT) or None, "the environment",
        )  # fmt: skip
        self.stage.usage += usage
        self.record(ENVIRONMENT, text)
        return True

    def surroundings_context(self) -> tuple[Segment, ...]:
        """The scene as the environment sees it."""
        prompt = self.task.surroundings_prompt(self.example)
        lines = [
            line if line.seat == ENVIRONMENT else Line(line.seat, self.public_text(line))
            for line in self.stage.lines if line.text
        ]  # fmt: skip
        return others_view(ENVIRONMENT, [Segment("system", prompt), Segment("user", START)], lines)

    # -- the next speaker -------------------------------------------------------------------------

    def candidates(self, current: str, index: int) -> Candidates:
        fields = self.example.fields
        preferred = [*fields["major_characters"], ENVIRONMENT]
        return candidates(speakers(fields), preferred, current, index)

    async def following(self, current: str, index: int) -> str | None:
        """The next speaker, or END; None if a silent turn ends the scene."""
        options = self.candidates(current, index)
        answer = await self._predicted(options, index)
        return self.settled(answer, options, index)

    def settled(self, answer: str | None, options: Candidates, index: int) -> str:
        """The predictor's answer, or a random name; a draw that it did not request counts as
        unusable."""
        counts = self.stage.notes.setdefault("next_speaker", {"asked": 0, "fallback": 0})
        counts["asked"] += 1
        if answer in (*options.names, *((END,) if options.may_end else ())):
            return str(answer)
        counts["fallback"] += answer != UNCLEAR
        return options.draw(self.rollout.rng(self.example, f"next_speaker/{index}"))

    async def _predicted(self, options: Candidates, index: int) -> str | None:
        prompt = self.task.predictor_prompt(
            self.example, self.heard_so_far(), speakers(self.example.fields), options.answers
        )
        player = self.cast.player("environment").with_form(options.form())
        for sample in range(PREDICTIONS):
            call = self.rollout.call(
                "environment", self.example, index, sample, purpose="next_speaker"
            )
            reply = await player.complete((Segment("user", prompt),), call)
            self.stage.usage += reply.usage
            answer = options.read(reply.text, prompt)
            if answer is not None:
                return answer
        return None

    def heard_so_far(self) -> str:
        """The fenced transcript so far, each message as others heard it."""
        lines = [Line(line.seat, self._short(line.text)) for line in self.stage.lines if line.text]
        return transcript(lines)
