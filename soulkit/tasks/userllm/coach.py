"""Feedback on a simulated user's message, by rules.

It says what went wrong and what to mind, and gives nothing away: neither the quiz's choices, which
the actor never sees, nor whether the conversation is over, nor the words to say. The published
hints do all of that; they stand in `reference.py`.

Example: "Whoever asks does not answer, and the message held 2 answers to what it asked."
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.userllm.fields import CSQA, NQ, UserMessage
from soulkit.tasks.userllm.metrics import choices_named
from soulkit.types import Score

TEXTS = Texts(__file__)
TOO_MUCH = 0.3
"""A larger share of words from the intent is remarked on."""


def message_notes(
    fields: Mapping[str, Any], message: UserMessage | None, score: Score | None
) -> list[str]:
    """What can be said about a draft, worst first; empty without one."""
    if score is None or message is None:
        return []
    if not message.text and not message.ended:
        return ["Nothing was said; whoever wants something writes a message."]
    source = fields["source"]
    if source == CSQA:
        return list(_role_notes(fields["choices"] or (), message, score))
    if source == NQ:
        return list(_intent_notes(message, score))
    return list(_prism_notes(score))


def _role_notes(choices: Sequence[str], message: UserMessage, score: Score) -> Iterator[str]:
    count = len(choices_named(choices, message.text, "paper"))
    if score.metrics.get("role_adherence") == 1.0:
        yield "The message left the answering to the other side; keep to that."
    elif count:
        held = "an answer" if count == 1 else f"{count} answers"
        yield f"Whoever asks does not answer, and the message held {held} to what it asked."


def _intent_notes(message: UserMessage, score: Score) -> Iterator[str]:
    adherence = score.metrics.get("intent_adherence")
    if not message.text:
        yield "The conversation was ended although what you came for was not answered."
    elif adherence is not None and adherence < 0.5:
        yield "The reply went along with what was proposed. Do not accept it; your wish is open."
    elif adherence is not None:
        yield "You stayed with what you came for; do so again, in few words."


def _prism_notes(score: Score) -> Iterator[str]:
    metrics = score.metrics
    overlap, human = metrics.get("intent_decomposition"), metrics.get("ai_detector")
    wrong = metrics.get("termination") == 0.0
    if wrong:
        yield "Whether anything was left to ask was misjudged."
    if overlap is not None and overlap > TOO_MUCH:
        yield "Too many words were taken from the description of what you want."
    if human is not None and human < 0.5:
        yield "It reads as if a machine had written it: too finished, too complete, too polite."
    elif human is not None and not wrong and (overlap or 0) <= TOO_MUCH:
        yield "It was like a person at a keyboard; keep that tone."


def lesson_choices(
    fields: Mapping[str, Any], message: UserMessage | None, score: Score | None
) -> Iterator[tuple[str, ...]]:
    """Lessons, the fullest first, for `first_safe_lesson` to choose from."""
    remarks = message_notes(fields, message, score)
    kind = fields["source"]
    if kind not in TEXTS["lessons"]:
        kind = "later" if fields["conversation_history"] else "first"
    general: tuple[str, ...] = TEXTS["lessons"][kind]
    yield (*remarks, *general)
    for note in remarks:
        yield (note,)
    yield general
    yield (general[0],)
    yield ("Write like the one who asks.",)
