"""A scene of a book as a row has it: who is there, what everybody may know, what only one does.

    names      who may speak, most talkative first; the environment is always among them
    profiles   what is generally known of a character: what the plot says it is, and its profile
    thoughts   what a character has on its mind when the scene begins; for its seat alone
    outcomes   what the plot has become of a character by its end; for judges alone, because
               whoever played it with that in hand would recite the book

Newer rows say `thought` and `summary` where older ones say `motivation` and `experience`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from soulkit.data.literals import literal_list, structure
from soulkit.errors import DataError
from soulkit.tasks.coser.speakers import END, UNCLEAR
from soulkit.types import Line, Role

ENVIRONMENT = "Environment"
"""The one speaker who is nobody: its name in rows, and its seat."""
READERS = ("judge", "coach", "gold")
"""Words that say who may read a field: no seat can be called so."""
MENTAL, OUTCOME = "thought of ", "outcome of "
"""What the names of a character's private fields begin with; the character's name follows."""


def names_in(value: Any) -> list[str]:
    """The names of a list, each once; anything else in it is left out."""
    values = literal_list(value) if isinstance(value, str) else value
    if not isinstance(values, Sequence) or isinstance(values, str):
        return []
    return list(dict.fromkeys(v.strip() for v in values if isinstance(v, str) and v.strip()))


def characters(fields: Mapping[str, Any]) -> list[str]:
    """Everybody who may speak but the environment, in the row's order."""
    return [n for n in names_in(fields["speaking_characters_w_env"]) if n != ENVIRONMENT]


def opener(fields: Mapping[str, Any]) -> str:
    """Who speaks first: the first of the row's list."""
    return names_in(fields["speaking_characters_w_env"])[0]


def speakers(fields: Mapping[str, Any]) -> list[str]:
    """The row's list, with the environment at its end where the row does not list it."""
    listed = names_in(fields["speaking_characters_w_env"])
    return listed if ENVIRONMENT in listed else [*listed, ENVIRONMENT]


def seats_of(fields: Mapping[str, Any]) -> dict[str, Role]:
    """Seat → role: the actor plays every character."""
    seats: dict[str, Role] = dict.fromkeys(characters(fields), "actor")
    return {**seats, ENVIRONMENT: "environment"}


def dialogue(fields: Mapping[str, Any]) -> list[Line]:
    """The recorded messages, thoughts and actions included."""
    return [Line(one["character"].strip(), one["message"]) for one in fields["dialogues"]]


def profiles(fields: Mapping[str, Any]) -> dict[str, str]:
    """Character → what is generally known of it; nothing is no entry."""
    listed = _mapping(fields.get("character_profiles"))
    described = _by_name(_mapping(fields.get("plot")).get("key_characters"), "description")
    texts = {name: (described.get(name, ""), listed.get(name)) for name in characters(fields)}
    joined = {name: "\n\n".join(filter(None, map(_text, parts))) for name, parts in texts.items()}
    return {name: text for name, text in joined.items() if text}


def private_fields(fields: Mapping[str, Any]) -> dict[str, str]:
    """The fields that belong to one character each: its thoughts, and what becomes of it."""
    plot = _mapping(fields.get("plot"))
    thoughts = _by_name(fields.get("key_characters"), "motivation", "thought")
    outcomes = _by_name(plot.get("key_characters"), "summary", "experience")
    names = characters(fields)
    return {
        **{f"{MENTAL}{name}": thoughts[name] for name in names if name in thoughts},
        **{f"{OUTCOME}{name}": outcomes[name] for name in names if name in outcomes},
    }


def plot_summary(fields: Mapping[str, Any]) -> str:
    """What happens in the part of the book that the scene is from."""
    return _text(_mapping(fields.get("plot")).get("summary"))


def checked_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """A row that can be played; DataError for any other."""
    names = characters(fields)
    if not names:
        raise _unusable("nobody speaks in it", "speaking_characters_w_env names no character.")
    if reserved := [name for name in names if name in READERS]:
        raise _unusable(
            f"a character is called '{reserved[0]}'",
            "The word says who may read a field, so that nobody at the table can be called so.",
        )
    if taken := [name for name in names if name in (UNCLEAR, END)]:
        raise _unusable(
            f"a character is called '{taken[0]}'",
            "So the model that names the next speaker says something else, and nobody could be "
            "called by that name.",
        )
    if not names_in(fields["major_characters"]):
        raise _unusable("it has no major_characters", "Their fidelity is what is judged.")
    lines = fields["dialogues"]
    if not lines or not all(map(_is_message, lines)):
        raise _unusable(
            "its dialogues are no list of messages",
            "Each message needs a 'character' and a 'message', both text.",
        )
    if not _filled_object(fields.get("plot")):
        raise _unusable(
            "its plot is no object, or an empty one", "Its summary is what judges compare with."
        )
    if not _filled_object(fields.get("character_profiles")):
        raise _unusable(
            "its character_profiles are no object, or an empty one",
            "A character that nobody describes cannot be played.",
        )
    replayed = fields.get("continue_from") or 0
    if not 0 <= replayed < len(lines):
        raise _unusable(
            f"it continues from message {replayed}",
            f"It has {len(lines)} messages, and somebody must be left to say one.",
        )
    following = lines[replayed]["character"].strip()
    if replayed and following not in speakers(fields):
        raise _unusable(
            f"it continues from message {replayed}, and {following} would be next",
            "speaking_characters_w_env does not list that name, so that nobody can play it.",
        )
    return fields


def _unusable(what: str, why: str) -> DataError:
    return DataError(f"The row cannot be used: {what}.", why, "Mend the row, or leave it out.")


def _filled_object(value: Any) -> bool:
    inner = structure(value)
    return isinstance(inner, Mapping) and bool(inner)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(value.get(key), str) and value[key].strip() for key in ("character", "message")
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    opened = structure(value) if isinstance(value, str) else value
    return opened if isinstance(opened, Mapping) else {}


def _by_name(value: Any, *keys: str) -> dict[str, str]:
    """Name → the first non-empty text under `keys`, of a list of objects with a `name`."""
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
