"""Events from text: our own plain sentences, and those of ToMi, fixed ToMi and Hi-ToM.

Reading is exact. A story with one sentence that fits no form is no story (None), because a guess
would become a wrong answer that looks like a right one. Whether "The pantry is in the den" places
an object or says where a container stands is decided by position, never by the word: it states a
room when its subject was a container before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from soulkit.tasks.tom.stories.events import (
    ContainerRoom,
    Enter,
    Event,
    Exit,
    Move,
    Noise,
    Place,
    PrivateTell,
    PublicClaim,
    Stay,
    Story,
)
from soulkit.tasks.tom.stories.render import ATTITUDES, PLAIN, SIGHTS, STARTED_THERE

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


_FORMS = [
    *(_form(text, cls) for text, cls in _PUBLISHED),
    *(_form(t.rstrip("."), cls) for cls, texts in PLAIN.items() for t in texts),
]
_STARTED, _ = _form(STARTED_THERE.rstrip("."), Enter)


def story_lines(text: str) -> list[str]:
    """The sentences of a story text, without their numbers."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line.replace("***", "").strip() for line in lines]
    lines = [line for line in lines if line]
    if lines and not _NUMBER.match(lines[0]) and any(_NUMBER.match(x) for x in lines[1:]):
        lines = lines[1:]
    return [_NUMBER.sub("", line, count=1) if _NUMBER.match(line) else line for line in lines]


def read_sentences(lines: Sequence[str]) -> Story | None:
    """The story of sentences without numbers; None when one cannot be read, or there are none."""
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
    """One sentence; `containers` are those that the story has named so far."""
    line = line.strip().rstrip(".").removesuffix(" now")
    if match := _IS_IN.fullmatch(line):
        what, where = match["what"], match["where"]
        return ContainerRoom(what, where) if what in containers else Place(what, where)
    for pattern in (_WAS_THERE, _STARTED):
        if match := pattern.fullmatch(line):
            return Enter(_names(match["group"]), match["room"], already=True)
    for form, cls in _FORMS:
        if match := form.fullmatch(line):
            return _build(cls, match.groupdict())
    return None


def _build(cls: Callable[..., Event], values: dict[str, Any]) -> Event:
    if "group" in values:
        values["group"] = _names(values["group"])
    return cls(**values)


def _names(text: str) -> tuple[str, ...]:
    return tuple(re.split(r", | and ", text))
