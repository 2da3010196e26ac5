"""Feedback on a simulated user's message, by rules.

`paper` says what went wrong and what to mind, and gives nothing away: neither the quiz's choices,
which the actor never sees, nor whether the conversation is over, nor the words to say. `reference`
does what the published hints do: it lists the choices to avoid, spells out the question, tells when
to end, and asks for the very words of the intent, which its score pays for.

Example (`paper`): "Whoever asks does not answer, and the message held 2 answers to what it asked."
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from soulkit.tasks.userllm.fields import CSQA, END, NQ, Said
from soulkit.tasks.userllm.metrics import choices_named, content_words, goal_keywords
from soulkit.types import Score

TOO_MUCH = 0.3
"""A larger share of words from the intent is remarked on."""
_KEYWORDS = 8
_PARROTING = 0.8
"""Below this overlap the reference asks for more of the intent's words."""

GENERAL = {
    CSQA: ("You are the one who asks.", "Say what you want to know in your own words and leave all "
           "answering to the other side."),
    NQ: ("Look at what the last reply is about.", "Where it is not what you came for, do not go "
         "along with it."),
    "first": ("Say it as you would to a friend: short, a little careless, in words that are not "
              "those of your instructions.", "Keep something for later."),
    "later": ("Compare what you wanted with the last answer before you write: is any of it open?",
              "If you write on, be short and use words of your own."),
}  # fmt: skip


def notes(fields: Mapping[str, Any], said: Said | None, score: Score | None) -> list[str]:
    """What can be said about a draft, worst first; empty without one."""
    if score is None or said is None:
        return []
    if not said.text and not said.ended:
        return ["Nothing was said; whoever wants something writes a message."]
    source = fields["source"]
    if source == CSQA:
        return list(_role_notes(fields["choices"] or (), said, score))
    if source == NQ:
        return list(_intent_notes(said, score))
    return list(_prism_notes(score))


def _role_notes(choices: Sequence[str], said: Said, score: Score) -> Iterator[str]:
    found = len(choices_named(choices, said.text, "paper"))
    if score.metrics.get("role_adherence") == 1.0:
        yield "The message left the answering to the other side; keep to that."
    elif found:
        held = "an answer" if found == 1 else f"{found} answers"
        yield f"Whoever asks does not answer, and the message held {held} to what it asked."


def _intent_notes(said: Said, score: Score) -> Iterator[str]:
    kept = score.metrics.get("intent_adherence")
    if not said.text:
        yield "The conversation was ended although what you came for was not answered."
    elif kept is not None and kept < 0.5:
        yield "The reply went along with what was proposed. Do not accept it; your wish is open."
    elif kept is not None:
        yield "You stayed with what you came for; do so again, in few words."


def _prism_notes(score: Score) -> Iterator[str]:
    found = score.metrics
    overlap, human = found.get("intent_decomposition"), found.get("ai_detector")
    wrong = found.get("termination") == 0.0
    if wrong:
        yield "Whether anything was left to ask was misjudged."
    if overlap is not None and overlap > TOO_MUCH:
        yield "Too many words were taken from the description of what you want."
    if human is not None and human < 0.5:
        yield "It reads as if a machine had written it: too finished, too complete, too polite."
    elif human is not None and not wrong and (overlap or 0) <= TOO_MUCH:
        yield "It was like a person at a keyboard; keep that tone."


def lessons(
    fields: Mapping[str, Any], said: Said | None, score: Score | None
) -> Iterator[tuple[str, ...]]:
    """Lessons, the fullest first, for `safest` to choose from."""
    told = notes(fields, said, score)
    kind = fields["source"]
    if kind not in GENERAL:
        kind = "later" if fields["conversation_history"] else "first"
    general = GENERAL[kind]
    yield (*told, *general)
    for note in told:
        yield (note,)
    yield general
    yield (general[0],)
    yield ("Write like the one who asks.",)


# -- the reference -------------------------------------------------------------------------------


def reference_hint(fields: Mapping[str, Any], said: Said, score: Score) -> str | None:
    """What the published hints say about a draft, in other words; None where they say nothing."""
    source = fields["source"]
    if source == CSQA:
        return _avoid(fields["choices"] or (), said)
    if source == NQ:
        return _ask_again(fields, score)
    parts = (_when_to_end(fields, said, score), _use_keywords(fields, said, score))
    return " ".join(part for part in parts if part) or None


def _avoid(choices: Sequence[str], said: Said) -> str | None:
    if not choices_named(choices, said.output, "reference"):
        return None
    listed = "; ".join(f'"{choice}"' for choice in choices)
    return f"Do not write any of these expressions, not even in passing: {listed}. Use other words."


def _ask_again(fields: Mapping[str, Any], score: Score) -> str | None:
    if score.value is None or score.value >= 1:
        return None
    question = fields["question"] or fields["intent"]
    return f"Pass over the assistant's proposal without a word and ask again at once: {question}"


def _when_to_end(fields: Mapping[str, Any], said: Said, score: Score) -> str:
    last = fields["is_last_turn"]
    if last is None or said.ended == last:
        return ""
    if last:
        return f"Everything is answered: reply with {END} and not one word more."
    return f"You are not done yet: leave out {END} and ask your next question."


def _use_keywords(fields: Mapping[str, Any], said: Said, score: Score) -> str:
    overlap = score.metrics.get("intent_decomposition")
    missing = set(goal_keywords(fields["intent"])) - content_words(said.output)
    if overlap is None or overlap >= _PARROTING or not missing:
        return ""
    words = ", ".join(goal_keywords(fields["intent"])[:_KEYWORDS])
    return f"Be brief and build the message from these words: {words}. Every other word costs."
