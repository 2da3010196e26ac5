"""Scripted people and judges of SimulatorArena: for self-checks and canaries.

The gold is what the recorded person wrote; what it is worth only a judge can say, and the verdicts
here stand for one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from soulkit.tasks.sim_arena.judging import LIKERT, MATCH, NO_MATCH, RATING
from soulkit.types import Form

UNLIKE = (
    "Greetings. I require comprehensive assistance with the matter at hand, if you would be so "
    "kind as to furnish it in full detail.",
    "I appreciate your exceptionally thorough elaboration. Kindly elaborate further.",
    "I appreciate your exceptionally thorough elaboration. Kindly elaborate further.",
)
"""A person that nobody is: an assistant's own manner in the user's place."""
NEUTRAL = (
    "All right. What would you do first?",
    "I see. Go on from there.",
    "Yes, that is one way. What comes next?",
    "Let us look at it once more.",
    "Good. Is anything still open?",
)
"""An assistant that says nothing in particular; the last line again and again."""
NEUTRAL_DOCUMENT = "This is the document, as far as we have come with it."
CANARY_TURNS = 2


def neutral(count: int) -> list[str]:
    """So many lines of an assistant that says nothing in particular."""
    return [NEUTRAL[min(index, len(NEUTRAL) - 1)] for index in range(count)]


def scripted_answer(form: Form | None, perfect: bool) -> str | None:
    """The reply of a judge that is asked for `form`: the top of every scale, or the bottom.

    Features are named in the form itself; a form that leaves their names open gets none.
    """
    end = int(perfect)
    match form.name if form is not None else "":
        case "Likert" | "LooseLikert":
            return json.dumps({"key_differences": ["as scripted"], "similarity_score": LIKERT[end]})
        case "DocumentRating" | "LooseRating":
            return json.dumps({"analysis": "as scripted", "rating": RATING[end]})
        case "Fulfilment" | "LooseFulfilment":
            assert form is not None
            return json.dumps({"results": _results(form, perfect)})
    return None


def _results(form: Form, perfect: bool) -> list[dict[str, str]]:
    names = next(_enumerations(json.loads(form.schema)), ("any feature",))
    verdict = MATCH if perfect else NO_MATCH
    return [
        {"feature_name": name, "analysis": "as scripted", "classification": verdict}
        for name in names
    ]


def _enumerations(node: Any) -> Iterator[Sequence[str]]:
    """What a schema allows as the name of a feature."""
    if isinstance(node, Mapping):
        names = node.get("properties", {}).get("feature_name", {})
        if "enum" in names or "const" in names:
            yield names.get("enum") or [names["const"]]
        for part in node.values():
            yield from _enumerations(part)
