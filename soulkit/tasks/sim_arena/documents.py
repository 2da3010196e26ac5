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
from typing import Any

from soulkit.data.turns import alternate
from soulkit.tasks.voices import FAMILIES, NAMES, VOICES, Feature, Voice

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """A kind of document: what it is for, and what its writer has to say, question by question."""

    kind: str
    intent: str
    """With a place for where it plays, or whom it is for."""
    notes: tuple[tuple[str, tuple[str, ...]], ...]
    """(question, possible answers); an answer is a sentence."""


PLANS = (
    Plan("email", "Invite the neighbours to a small party {x}.", (
        ("When is it?", ("It is on Saturday at five.", "It is on the first of May.",
                         "It is next Friday after work.")),
        ("What should people bring?", ("Everybody brings a chair.", "Bring food for the grill.",
                                       "Nothing, there is enough of all.")),
        ("Is there anything to know?", ("The gate will be open.", "Dogs are welcome.",
                                        "We stop at ten for the little ones.")),
    )),
    Plan("email", "Complain to a shop {x} about a delivery that went wrong.", (
        ("What was ordered?", ("I ordered a desk lamp.", "I ordered two oak shelves.",
                               "I ordered a set of pans.")),
        ("What went wrong?", ("It came with a broken foot.", "Half of it is missing.",
                              "It is the wrong colour.")),
        ("What do you want?", ("I want my money back.", "I want the missing part.",
                               "I want it exchanged this week.")),
    )),
    Plan("blog post", "Tell beginners {x} how to take up a craft.", (
        ("Which craft is it?", ("It is about binding books.", "It is about carving spoons.",
                                "It is about dyeing wool.")),
        ("What went wrong at first?", ("My first try fell apart.", "I bought far too many tools.",
                                       "I did not measure anything.")),
        ("What is your best advice?", ("Start with scraps.", "Work slowly and stop when tired.",
                                       "Ask somebody to show you once.")),
    )),
    Plan("blog post", "Describe a walk {x} that few people know.", (
        ("Where does it lead?", ("It leads along the old canal.", "It leads up to the lighthouse.",
                                 "It leads through the rope maker's quarter.")),
        ("What is there to see?", ("There are herons on the locks.", "There is a bakery in a ruin.",
                                   "One sees all of the bay.")),
        ("How long does it take?", ("It takes an hour.", "It takes a whole morning.",
                                    "It takes as long as the tide allows.")),
    )),
    Plan("creative writing", "Begin a story {x} about a clock that runs backwards.", (
        ("Who finds it?", ("A ferry captain finds it.", "Twin sisters find it.",
                           "A night watchman finds it.")),
        ("What does it do?", ("It undoes the last hour.", "It makes the old young for a day.",
                              "It only runs while nobody looks.")),
        ("How does it go wrong?", ("They lose a memory each time.", "The wrong person is undone.",
                                   "It stops at the worst moment.")),
    )),
    Plan("creative writing", "Write a short comic scene {x} that plays in a waiting room.", (
        ("Who is waiting?", ("A magician with a cough waits there.", "Two chess rivals wait there.",
                             "A man with a goose waits there.")),
        ("What happens?", ("The lamp goes out.", "Somebody calls the wrong name.",
                           "The goose escapes.")),
        ("How does it end?", ("Nobody gets to see the doctor.", "They all leave as friends.",
                              "The doctor waits with them.")),
    )),
)  # fmt: skip
WHERE: dict[str, tuple[str, ...]] = {
    "email": ("in the yard", "by the river", "in Dorne", "near the station", "on the island"),
    "blog post": ("by the sea", "in the hills", "in a large city", "up north", "near a border"),
    "creative writing": (
        "for children",
        "for grown-ups",
        "in letters",
        "in verse",
        "for the stage",
    ),
}
TONES = ("warmer", "shorter", "more formal", "funnier", "simpler")


def rows(n: int, seed: int) -> list[Row]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(i, seed) for i in range(n)]


def _row(i: int, seed: int) -> Row:
    rng = random.Random(f"sim_doc/{seed}/{i}")
    plan = PLANS[i % len(PLANS)]
    voice, tone = rng.choice(VOICES), rng.choice(TONES)
    wanted = plan.intent.format(x=rng.choice(WHERE[plan.kind]))
    who = f"{rng.choice(NAMES)} {rng.choice(FAMILIES)}"
    # By the round, not by the row: else a kind of row would always be the same kind of document.
    full = (i // len(PLANS) + i) % 3
    notes = [(question, rng.choice(answers)) for question, answers in plan.notes]
    said = [voice.write(text) for text in _messages(wanted, notes, tone)]
    packed = {
        "id": f"sd{seed}-{i}",
        "document_type": plan.kind,
        "intent": f"{wanted} It is by {who}.",
        "human_user_queries": said,
        "human_public_conversation": alternate(said, _drafts(notes, tone)),
        **(_background(who, notes, voice, tone) if full != 2 else {}),
        **(_features(voice, tone) if full == 0 else {}),
    }
    return {"raw": json.dumps(packed), "index": i}


def _messages(wanted: str, notes: list[tuple[str, str]], tone: str) -> list[str]:
    first, *rest = [answer for _, answer in notes]
    return [
        f"Hello, please help me with this: {wanted[0].lower()}{wanted[1:]} {first}",
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
    profile = (who, f"This person {voice.told}", "Tells things one message at a time")
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
