"""Rows of `sim_doc`: invented writers who make an e-mail, a blog post or a story with an assistant.

The row is JSON text under `raw`, as in released files. Three kinds take turns: with all that a row
can carry, without target features, and with the bare minimum (no notes, profile or preferences
either). The recorded writer reveals the notes one message at a time, asks for one change of tone
and is content; how they write is the voice that profile and features speak of.

Example: {"raw": "{\\"document_type\\": \\"email\\", \\"intent\\": \\"Invite the neighbours ...\\",
\\"pre_writing_materials_text\\": \\"- When is it? ...\\", \\"human_user_queries\\": [...], ...}",
"index": 2}.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache

from soulkit.data.turns import alternate
from soulkit.tasks.made import Row
from soulkit.tasks.texts import Texts
from soulkit.tasks.voices import FAMILIES, FIRST_NAMES, VOICES, Feature, Voice


@dataclass(frozen=True, slots=True)
class Commission:
    """A kind of document: what it is for, and what its writer has to say, question by question."""

    kind: str
    intent: str
    """With a place for where it plays, or whom it is for."""
    notes: tuple[tuple[str, tuple[str, ...]], ...]
    """(question, possible answers); an answer is a sentence."""


TEXTS = Texts(__file__)

TONES = ("warmer", "shorter", "more formal", "funnier", "simpler")


@cache
def commissions() -> tuple[Commission, ...]:
    return tuple(Commission(**item) for item in TEXTS["plans"])


def rows(n: int, seed: int) -> list[Row]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(i, seed) for i in range(n)]


def _row(i: int, seed: int) -> Row:
    rng = random.Random(f"sim_doc/{seed}/{i}")
    commission = commissions()[i % len(commissions())]
    voice, tone = rng.choice(VOICES), rng.choice(TONES)
    intent = commission.intent.format(x=rng.choice(TEXTS["where"][commission.kind]))
    who = f"{rng.choice(FIRST_NAMES)} {rng.choice(FAMILIES)}"
    # By the round, not by the row: else a kind of row would always be the same kind of document.
    full = (i // len(commissions()) + i) % 3
    notes = [(question, rng.choice(answers)) for question, answers in commission.notes]
    messages = [voice.write(text) for text in _messages(intent, notes, tone)]
    packed = {
        "id": f"sd{seed}-{i}",
        "document_type": commission.kind,
        "intent": f"{intent} It is by {who}.",
        "human_user_queries": messages,
        "human_public_conversation": alternate(messages, _drafts(notes, tone)),
        **(_background(who, notes, voice, tone) if full != 2 else {}),
        **(_features(voice, tone) if full == 0 else {}),
    }
    return {"raw": json.dumps(packed), "index": i}


def _messages(intent: str, notes: list[tuple[str, str]], tone: str) -> list[str]:
    first, *rest = [answer for _, answer in notes]
    return [
        f"Hello, please help me with this: {intent[0].lower()}{intent[1:]} {first}",
        *rest,
        f"Could you make it {tone}, please.",
        "Thanks, I like it this way.",
    ]


def _drafts(notes: list[tuple[str, str]], tone: str) -> list[str]:
    drafts = []
    for count in range(1, len(notes) + 1):
        drafts.append("Here is a draft. " + " ".join(answer for _, answer in notes[:count]))
    return [*drafts, f"Here it is again, {tone}. {drafts[-1]}", "You are welcome."]


def _background(who: str, notes: list[tuple[str, str]], voice: Voice, tone: str) -> Row:
    """What the writer has in mind, who they are, and what they like."""
    profile = (who, f"This person {voice.trait}", "Tells things one message at a time")
    return {
        "pre_writing_materials_text": "\n".join(f"- {q}\n  {a}" for q, a in notes),
        "user_profile_text": "\n".join(f"- {line}" for line in profile),
        "target_document_preferences": f"- Tone: {tone} than a first draft\n- Uses all notes",
    }


def _features(voice: Voice, tone: str) -> Row:
    interaction = (
        ("Iterative and Incremental Refinement", "How does the document grow?",
         "By one more fact in every message."),
        ("Specificity and Goal Orientation in Feedback", "What does the user ask to change?",
         f"Only that it becomes {tone}."),
    )  # fmt: skip
    return {
        "target_writing_style_features": [_feature(one) for one in voice.features],
        "target_interaction_style_features": [_feature(one) for one in interaction],
    }


def _feature(one: Feature) -> dict[str, str]:
    return dict(
        zip(("Feature Name", "Feature Question", "Feature Question Answer"), one, strict=True)
    )
