"""A character's action in one turn: parsed from a model's reply, and narrated to the others.

A turn is an action of a kind (speak, non-verbal communication, action, leave) with an argument,
requested as a JSON object. `none` is not offered: it stands for having done nothing.

Two parsers. `reference` reproduces the published one: strict JSON, else the largest JSON value that
starts anywhere in the reply, else the whole reply is speech, including JSON debris. `paper` repairs
replies: it accepts any spelling of kinds, keeps raw line breaks, removes fences and wrappers, reads
the argument of broken JSON (but not objects inside it), skips quoted actions of others, and treats
a reply with nothing left as silence. Pure functions.

    {"action_type": "speak", "argument": "Good evening."}  →  Ana said: "Good evening."
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from soulkit.judge.structured import LENIENT, JudgeMaterial, Scan, scan, whole_object
from soulkit.judge.verdict import remove_think, spoken, utterance
from soulkit.tasks.kit.prompting import MARK, first_words
from soulkit.text import sanitise
from soulkit.types import Protocol

SPEAK, GESTURE, ACT, LEAVE, NONE = "speak", "non-verbal communication", "action", "leave", "none"
KINDS = (SPEAK, GESTURE, ACT, LEAVE)
KINDS_WITH_TEXT = (SPEAK, GESTURE, ACT)
"""Kinds that need an argument."""

MAX_WORDS = 2048
"""Maximum words of a line as others hear it; under `reference` only for the partner."""
MAX_CHARS = 20_000
"""The same in characters, for text without spaces. Also limits how much of a reply is searched for
JSON."""
_READ_CHARS: dict[Protocol, int] = {"paper": 200_000, "reference": 60_000}
"""Limits for endless replies; the rest is not parsed. The reference's own limit is 8192 tokens."""

_SPELLINGS = {
    "speak": SPEAK, "say": SPEAK, "speech": SPEAK,
    "nonverbalcommunication": GESTURE, "nonverbal": GESTURE, "gesture": GESTURE,
    "action": ACT, "act": ACT,
    "leave": LEAVE, "none": NONE, "nothing": NONE,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Action:
    """One turn. `status` says how it was parsed."""

    kind: str
    argument: str = ""
    status: str = "ok"
    """`ok`; `salvaged`: readable, but not in the required form; `empty`, `malformed`: nothing."""
    cut: bool = False
    """Whether the argument was truncated."""

    def json(self) -> str:
        """The action in the required form."""
        return json.dumps({"action_type": self.kind, "argument": self.argument}, ensure_ascii=False)


def read_action(text: str, protocol: Protocol, name: str = "", words: str = "") -> Action:
    """The action in a model's reply; a character (`name`) may narrate in the third person.

    `words` are the others' lines so far: an action that only repeats them is a quotation. Control
    characters are removed and, under `paper`, the argument is cut at MAX_WORDS.
    """
    text = _shortened(text, _READ_CHARS[protocol])
    if protocol == "reference":
        action = parse_action(remove_think(text, remove_unclosed=True))
        argument = sanitise(action.argument)
    else:
        action = _read(text, name, JudgeMaterial("", words))
        argument = _shortened(first_words(sanitise(action.argument), MAX_WORDS), MAX_CHARS)
        if action.kind in KINDS_WITH_TEXT and not argument.strip():
            return Action(NONE, "", "malformed")  # only inaudible characters
    return replace(action, argument=argument, cut=argument.endswith(MARK))


def _read(text: str, name: str, shown: JudgeMaterial) -> Action:
    """The action in a reply. If the whole reply is one object, its action counts even if it
    contains <think> or repeats another's action word for word."""
    alone = whole_object(text.strip(), LENIENT)
    if alone is not None:
        return _action_in(alone) or _from_prose(text.strip(), name)
    reply = spoken(text, "paper")
    objects = scan(reply[:MAX_CHARS], LENIENT)
    return (
        _from_objects(reply, objects, shown)
        or _from_pieces(reply, objects, shown)
        or _from_prose(reply, name, objects)
    )


def _shortened(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[:chars].rstrip()} {MARK}"


# -- narrating -------------------------------------------------------------------------------------


def narrate(name: str, action: Action) -> str:
    """The line that everyone hears."""
    if action.kind == LEAVE:
        return f"{name} left the conversation"
    if action.kind == NONE:
        return f"{name} did nothing"
    if action.kind in (GESTURE, ACT):
        return f"{name} [{action.kind}] {action.argument}"
    return f'{name} said: "{action.argument}"'


def line_of(name: str, action: Action, protocol: Protocol) -> str:
    """The line that everyone hears under `protocol`; `paper` keeps text from forging another
    line."""
    if protocol == "reference":
        return narrate(name, action)
    return narrate(name, replace(action, argument=utterance(action.argument)))


def parse_line(name: str, line: str) -> Action:
    """The action in a line of `narrate`; other text is speech."""
    rest = line.removeprefix(name).strip() if line.startswith(f"{name} ") else line
    if rest == "left the conversation":
        return Action(LEAVE)
    if rest == "did nothing":
        return Action(NONE)
    for kind in (GESTURE, ACT):
        if rest.startswith(f"[{kind}]"):
            return Action(kind, rest.removeprefix(f"[{kind}]").strip())
    quoted = re.fullmatch(r'said:\s*"(.*)"', rest, re.DOTALL)
    return Action(SPEAK, quoted.group(1) if quoted else rest)


# Scripts without spaces have no word boundaries; Agent1 is a separate word there, too.
_PLACE = re.compile(r"(?<![A-Za-z0-9_])[Aa]gent[12](?![A-Za-z0-9_])")


def with_names(text: str, name1: str, name2: str, protocol: Protocol) -> str:
    """`text` with Agent1 and Agent2 replaced by the two names. `reference` also replaces inside
    words, so that Agent12 becomes the first name followed by a 2.
    """
    names = {"Agent1": name1, "agent1": name1, "Agent2": name2, "agent2": name2}
    if protocol == "paper":  # in one pass, because a name may itself be Agent2
        return _PLACE.sub(lambda match: names[match.group()], text)
    for place, name in names.items():
        text = text.replace(place, name)
    return text


# -- reading, paper --------------------------------------------------------------------------------

_FENCE = re.compile(r"```[A-Za-z]*")
_PIECE_KIND = re.compile(r"""["']action_type["']\s*:\s*["']([^"'\n]{0,40})["']""")
_PIECE_TEXT = re.compile(
    r"""["']argument["']\s*:\s*(["'])(.*?)(?:\1\s*\}|\1\s*,\s*["']action_type["']|\1?\Z)""",
    re.DOTALL,
)
_ESCAPED = re.compile(r"""\\(["'\\/nt])""")


def _from_objects(reply: str, objects: Scan, shown: JudgeMaterial) -> Action | None:
    """The first action among a reply's objects that is not a quotation; of a reply that plays both
    sides, the first counts."""
    for span in objects.spans:
        action = None if shown.holds(span.value) else _action_in(span.value)
        if action is not None:
            around = reply[: span.start] + reply[span.end :]
            return (
                replace(action, status=_worse(action)) if _FENCE.sub("", around).strip() else action
            )
    return None


def _worse(action: Action) -> str:
    return "salvaged" if action.status == "ok" else action.status


def _action_in(value: Any, depth: int = 3) -> Action | None:
    if isinstance(value, list):
        inner: list[Any] = value
    elif not isinstance(value, Mapping):
        return None
    elif "action_type" in value or "argument" in value:
        return _action(value)
    else:
        inner = list(value.values())
        if (action := _renamed(inner)) is not None:
            return action
    candidates = (_action_in(item, depth - 1) for item in inner if depth > 0)
    inner_action = next((action for action in candidates if action is not None), None)
    return None if inner_action is None else replace(inner_action, status=_worse(inner_action))


def _renamed(values: Sequence[Any]) -> Action | None:
    """The action of an object with other keys: a text, a kind and a text, or leaving."""
    texts = [item for item in values if isinstance(item, str) and item.strip()]
    if len(values) == len(texts) == 1 and _kind(texts[0]) != LEAVE:
        return Action(SPEAK, texts[0], "salvaged")
    kinds = [kind for text in texts if (kind := _kind(text)) is not None]
    speech = [text for text in texts if _kind(text) is None]
    if len(texts) != len(values) or len(speech) > 1 or len(kinds) > 1 or NONE in kinds:
        return None
    if speech:
        return Action(kinds[0] if kinds else SPEAK, speech[0], "salvaged")
    return Action(LEAVE, "", "salvaged") if kinds == [LEAVE] else None


def _action(value: Mapping[str, Any]) -> Action | None:
    kind_name, argument = value.get("action_type"), value.get("argument")
    kind, text = _kind(kind_name), _text(argument)
    if kind in KINDS_WITH_TEXT and "argument" not in value:
        named = _renamed(list(value.values())) if len(value) > 1 else None
        return named or Action(NONE, "", "salvaged")
    if kind is None and not text.strip():
        return None
    # The argument may state that the character leaves or does nothing; then it is not a line.
    if kind == NONE:
        return Action(NONE)
    if kind in KINDS_WITH_TEXT and not text.strip():
        return Action(NONE, "", "salvaged")
    exact = kind_name in KINDS and (isinstance(argument, str) or kind == LEAVE)
    return Action(kind or SPEAK, text, "ok" if exact else "salvaged")


def _kind(name: Any) -> str | None:
    letters = "".join(c for c in str(name).casefold() if c.isalpha()) if name else ""
    return _SPELLINGS.get(letters)


def _text(argument: Any) -> str:
    if isinstance(argument, str):
        return argument
    if isinstance(argument, list):
        return "; ".join(item for item in argument if isinstance(item, str))
    if argument is None or isinstance(argument, Mapping):
        return ""
    return json.dumps(argument)


def _from_pieces(reply: str, objects: Scan, shown: JudgeMaterial) -> Action | None:
    """The action of an object that is not valid JSON: unescaped quotes, single quotes, truncated.

    Its argument is speech, whatever it looks like; quotations are ignored.
    """
    action = _pieced(reply[objects.broken or 0 : MAX_CHARS])
    among_words = _FENCE.sub("", reply[: objects.broken or 0]).strip()
    if action is None or (among_words and shown.holds(json.loads(action.json()))):
        return None
    return action


def _pieced(reply: str) -> Action | None:
    reply = reply.rstrip("` \t\r\n")
    text = _PIECE_TEXT.search(reply)
    outside = reply if text is None else f"{reply[: text.start()]}\n{reply[text.end() - 1 :]}"
    kind_name = _PIECE_KIND.search(outside)
    kind = _kind(kind_name.group(1)) if kind_name else None
    if kind in (LEAVE, NONE):
        return Action(kind, "", "salvaged")
    if text is None:
        return Action(NONE, "", "malformed") if kind_name else None
    argument = _ESCAPED.sub(_unescaped, _FENCE.sub("", text.group(2))).strip()
    if not argument:
        return Action(NONE, "", "malformed")
    return Action(kind or SPEAK, argument, "salvaged")


def _unescaped(mark: re.Match[str]) -> str:
    return {"n": "\n", "t": "\t"}.get(mark.group(1), mark.group(1))


def _from_prose(reply: str, name: str, objects: Scan | None = None) -> Action:
    """The rest without JSON and fences, as speech or as the action that it narrates."""
    if not reply:
        return Action(NONE, "", "empty")
    pieces, end = [], 0
    for span in objects.spans if objects else scan(reply[:MAX_CHARS], LENIENT).spans:
        pieces.append(reply[end : span.start])
        end = span.end
    rest = _FENCE.sub("", " ".join([*pieces, reply[end:]])).strip()
    for speaker in (name, name.partition(" ")[0]):  # as in a play's script
        rest = rest.removeprefix(f"{speaker}:").strip() if speaker else rest
    action = parse_line(name, rest)
    text = _bare(action.argument) if action.kind == SPEAK else action.argument
    if action.kind in KINDS_WITH_TEXT and not text:
        return Action(NONE, "", "malformed")
    return Action(action.kind, text, "salvaged")


def _bare(text: str) -> str:
    """The text without the braces of a broken object and without surrounding quotation marks."""
    text = text.strip("{} \n\t,:")
    for mark in ('"', "'"):
        if text.startswith(mark) and text.count(mark) <= 2:
            text = text.strip(mark)
    return text.strip()


# -- reading, reference ----------------------------------------------------------------------------

# The closing mark is optional, so that no text is scanned twice; text without one is unchanged.
_STRING = re.compile(r'"(?:[^"\\]|\\.)*("?)', re.DOTALL)


def parse_action(text: str | None) -> Action:
    """The action as the reference parses it: if all else fails, the trimmed reply is speech."""
    if text is None or not text.strip():
        return Action(NONE)
    value = action_json(text)
    if value and isinstance(value, dict):  # an empty object counts as none and becomes speech
        kind = value.get("action_type", SPEAK)
        if kind in KINDS:
            return Action(kind, str(value.get("argument", "")))
    return Action(SPEAK, text.strip())


def action_json(text: str) -> Any:
    """A JSON value in `text` as the reference finds it; None without one.

    The value is the whole text, or else the longest (when serialised) of the consecutive values in
    it; on a tie, the first. Values inside a string are not considered. A raw line break in quotes
    becomes a backslash and an n.
    """
    escaped = _STRING.sub(_escaped, text)
    try:
        return json.loads(escaped)
    except (ValueError, RecursionError):
        return _largest(escaped[:MAX_CHARS])


def _escaped(string: re.Match[str]) -> str:
    text = string.group(0)
    return text.replace("\n", "\\\\n") if string.group(1) else text


_BOTTOMLESS = 100
"""The number of too deeply nested values after which the search stops: each costs time."""


def _largest(text: str) -> Any:
    decoder, best, length, end = json.JSONDecoder(), None, 0, 0
    bottomless, endless = 0, False
    for start in re.finditer(r'[\[{"\-0-9tfnNI]', text):
        if start.start() < end or (endless and start[0] == '"'):
            continue  # inside a value, or no string ends after an unterminated one
        try:
            value, end = decoder.raw_decode(text, start.start())
            size = len(json.dumps(value))
        except RecursionError:
            bottomless += 1
            if bottomless > _BOTTOMLESS:
                break
            continue
        except ValueError as error:
            endless |= start[0] == '"' and str(error).startswith("Unterminated string")
            continue
        if size > length:
            best, length = value, size
    return best
