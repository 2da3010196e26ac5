"""What the symbolic coach says about a draft on a FANToM question: where to look, never what is so.

Example: "The draft does not fit the conversation. The information is given in utterance 7. Check
whether the person asked about had come in by then and had not left." Whom the question is about,
who was there and which answer is right stays unsaid: with two options, any of it would decide.
Rows made here know the utterance (`events`: {"told": 7, "retold": [15]}); others get the same
advice without a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soulkit.types import Score

FITS = "The draft fits the conversation."
MISSES = "The draft does not fit the conversation."
PARTLY = "The draft has a part of it."
SHAPE = {
    "choice": "Put the letter of one option between the answer tags, and nothing else.",
    "names": "Put names alone between the answer tags, with commas between them.",
    "yes_no": "Put a single clear word of agreement or denial between the answer tags.",
    "fact": "Put one short sentence between the answer tags.",
    "belief": "Put one short sentence between the answer tags.",
}
FIRST_MENTION = "The information is given in utterance {n}."
SECOND_MENTION = "It is given again in utterance {n}, and whoever is there then learns it as well."
UNPLACED = "Find the utterance that gives the information, and whether a later one repeats it."
_ADVICE = {
    "choice": "Check whether the person asked about had come in by then and had not left.",
    "names": "Go through everyone: who had come in by then and had not left? Count the speaker in.",
    "fact": "Say what stands there in one short sentence, with its details and nothing else.",
}
_NESTED = "Ask what the first of the two people could see of the other at that moment."


def advice_on(fields: Mapping[str, Any], score: Score | None) -> str:
    """One to four sentences on a draft with this score, or on none.

    `fields` needs `form`, and `events` and `tom_type` where the row has them; the gold is not used.
    """
    form = str(fields["form"])
    nested = str(fields.get("tom_type") or "").startswith("second-order")
    advice = _NESTED if nested else _ADVICE.get(form, _ADVICE["choice"])
    return " ".join(part for part in (_opening(form, score), *_place(fields), advice) if part)


def _opening(form: str, score: Score | None) -> str:
    if score is None:
        return ""
    if score.status not in ("ok", "salvaged"):
        return SHAPE[form]
    if score.value == 1:
        return FITS
    return PARTLY if score.value else MISSES


def _place(fields: Mapping[str, Any]) -> list[str]:
    events = fields.get("events")
    if not isinstance(events, Mapping) or not events.get("told"):
        return [UNPLACED]
    again = [SECOND_MENTION.format(n=n) for n in events.get("retold") or ()]
    return [FIRST_MENTION.format(n=events["told"]), *again]
