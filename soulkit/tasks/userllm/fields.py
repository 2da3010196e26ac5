"""Fields of a UserLLM row and its reply: intent, choices, conversation, truth values, end token.

Columns come in several spellings: choices as a list, a list of `{text}`, `{"text": [...]}`, or the
JSON text of any of these; a conversation as tagged lines or a list of messages; `is_last_turn` as a
boolean, a number or a word. The functions follow the published scores unless they take a protocol;
conversations are only used in prompts and are parsed the same way under both protocols.

Example: "You are a user chatting with an assistant language model to: book a table" has the intent
"book a table", and the reply "thanks <|endconversation|> bye" has the text "thanks" and ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soulkit.data.literals import structure
from soulkit.judge.verdict import spoken
from soulkit.parse import json_or_none
from soulkit.types import Protocol

END = "<|endconversation|>"
CSQA, NQ, PRISM = "commonsense_qa", "natural_questions", "prism"
SOURCES = (CSQA, NQ, PRISM)
METRICS: dict[str, tuple[str, ...]] = {
    CSQA: ("role_adherence",),
    NQ: ("intent_adherence",),
    PRISM: ("ai_detector_score", "first_turn_diversity", "intent_decomposition", "termination_f1"),
}
"""The metrics of each subset, under the names that rows use."""

_PREAMBLE = "you are a user chatting with an assistant language model to"
_DASHES = " \t\n\r:-\u2013\u2014"
_TAG = re.compile(r"^\s*<user>:\s*", re.IGNORECASE)
_WHO = "(user|human|you|ai|assistant|model|bot)"
_MARKED = re.compile(rf"^[ \t]*<{_WHO}>:[ \t]*", re.I | re.M)
_PLAIN = re.compile(rf"^[ \t]*{_WHO}:[ \t]*", re.I | re.M)
_MINE = ("user", "human", "you")
_TRUTH = {"true": True, "yes": True, "y": True, "1": True,
          "false": False, "no": False, "n": False, "0": False}  # fmt: skip


@dataclass(frozen=True, slots=True)
class UserMessage:
    """A reply without its thinking: the text before the end token, and whether there was one."""

    text: str
    ended: bool

    @property
    def output(self) -> str:
        """The text on which the published scores are computed."""
        return self.text + END if self.ended else self.text


def read_reply(text: str | None, protocol: Protocol) -> UserMessage:
    """The message in a completion; None (no completion) is an empty message.

    `paper` also drops unclosed thinking, and marks that only wrap the end token.
    """
    before, end, _ = spoken(text or "", protocol).partition(END)
    message = before.strip()
    if protocol == "paper" and end and not message.strip("`\"'*_\u201c\u201d "):
        message = ""
    return UserMessage(message, bool(end))


def normalize_intent(text: Any) -> str:
    """The intent without its introductory sentence."""
    intent = "" if text is None else str(text).strip()
    place = intent.lower().find(_PREAMBLE)
    rest = intent[place + len(_PREAMBLE) :].strip(" \t\n\r").lstrip(_DASHES) if place >= 0 else ""
    return rest.strip() or intent


def extract_intent(row: Mapping[str, Any]) -> str:
    """The first non-empty field of `intent`, `intent_summary` and `opening_prompt`, else the first
    line of a conversation given as text."""
    for name in ("intent", "intent_summary", "opening_prompt"):
        if intent := normalize_intent(row.get(name)):
            return intent
    history = row.get("conversation_history")
    lines = history.strip().splitlines() if isinstance(history, str) else []
    return normalize_intent(_TAG.sub("", lines[0])) if lines else ""


def extract_choices(value: Any) -> tuple[str, ...]:
    """The non-blank texts of the choices; empty if there are none or they are unreadable."""
    if isinstance(value, str):
        value = json_or_none(value)
    if isinstance(value, Mapping):
        value = value.get("text")
    if not isinstance(value, Sequence) or isinstance(value, str):
        return ()
    texts = (item.get("text") if isinstance(item, Mapping) else item for item in value)
    return tuple(text for item in texts if item and (text := str(item).strip()))


def to_optional_bool(value: Any) -> bool | None:
    """True or False from a boolean, the numbers 1 and 0, or a word; None for anything else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return bool(value) if value in (0, 1) else None
    return _TRUTH.get(value.strip().lower()) if isinstance(value, str) else None


def read_source(value: Any) -> str:
    """One of SOURCES, or the text itself if it names none of them."""
    source = "" if value is None else str(value).strip().lower()
    return PRISM if "prism" in source else source


def related_metrics(row: Mapping[str, Any]) -> set[str]:
    """The metrics that a row names, else those of its source."""
    named = row.get("related_metrics") or row.get("related_metric")
    listed = [named] if isinstance(named, str) else named
    listed = listed if isinstance(listed, list | tuple) else ()
    all_metrics = {name for names in METRICS.values() for name in names}
    row_metrics = {name for name in listed if isinstance(name, str)} & all_metrics
    return row_metrics or set(METRICS.get(read_source(row.get("source")), ()))


# -- conversations -------------------------------------------------------------------------------


def read_conversation(value: Any) -> tuple[dict[str, str], ...] | None:
    """A list of `{"speaker": "user" | "assistant", "text"}`; None if the value is unreadable.

    None, a blank text and an empty list are an empty conversation: the empty tuple. Text without
    tags is the user's.
    """
    value = structure(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        return ()
    if isinstance(value, str):
        return _tagged(value)
    if not isinstance(value, list | tuple):
        return None
    turns = [_message(item) for item in value]
    return None if None in turns else tuple(turn for turn in turns if turn and turn["text"])


def _tagged(text: str) -> tuple[dict[str, str], ...]:
    # If tags are in brackets, a line that begins with "Model:" is part of a text.
    marks = list(_MARKED.finditer(text)) or list(_PLAIN.finditer(text))
    if not marks or text[: marks[0].start()].strip():
        return ({"speaker": "user", "text": text.strip()},) if not marks else _headless(text, marks)
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    pairs = [(mark.group(1), text[mark.end() : end].strip())
             for mark, end in zip(marks, ends, strict=True)]  # fmt: skip
    return tuple(_turn(speaker, words) for speaker, words in pairs if words)


def _headless(text: str, marks: Sequence[re.Match[str]]) -> tuple[dict[str, str], ...]:
    """Lines before the first tag belong to the speaker that is not tagged first."""
    first = "assistant" if marks[0].group(1).lower() in _MINE else "user"
    start = marks[0].start()
    return ({"speaker": first, "text": text[:start].strip()}, *_tagged(text[start:]))


def _message(item: Any) -> dict[str, str] | None:
    if not isinstance(item, Mapping):
        return None
    speaker = next(
        (item[k] for k in ("speaker", "role", "from") if isinstance(item.get(k), str)), None
    )
    text = next((item[k] for k in ("text", "content", "value") if isinstance(item.get(k), str)), "")
    return None if speaker is None else _turn(speaker, text.strip())


def _turn(speaker: str, text: str) -> dict[str, str]:
    return {"speaker": "user" if speaker.strip().lower() in _MINE else "assistant", "text": text}
