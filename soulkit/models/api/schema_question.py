"""The schema question: does a server hold a reply to the form that it is sent?

Some take a schema with HTTP 200 and do nothing about it; every verdict is then as well-formed as
the model happens to be. One reply shows which it is: the only text that the schema allows is a word
that answers nothing and that no model would say by chance. The form is the word alone, not an
object around it, because a model may fill an object's white space for ever.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from soulkit.models.api.wire import json_or_none
from soulkit.types import Call, Form, Sampling, Segment

WORD = "qvx7zk"
FORM = Form("schema_question", json.dumps({"enum": [WORD]}, separators=(",", ":")))
MAX_TOKENS = 32
ASKED_FOR_FORMS = ("judge", "auditor", "coach", "environment", "filter", "drafter")
"""Roles whose replies may be asked for in a form."""


def schema_question() -> tuple[Sequence[Segment], Sampling, Call]:
    """What is asked, how, and as which call: greedily, and without thinking before it."""
    context = [Segment("user", "Which day comes after Monday? Reply with one word.")]
    sampling = Sampling(temperature=0.0, max_tokens=MAX_TOKENS, seed=0, thinking=False, form=FORM)
    return context, sampling, Call(role="judge", example_id=FORM.name)


def follows_schema(text: str) -> bool | None:
    """Whether a reply's text shows that the schema was followed; None where it says nothing."""
    answer = text.rpartition("</think>")[2].strip()
    if not answer:
        return None
    return bool(json_or_none(answer) == WORD)


def schema_line(holds: bool, who: str) -> str:
    """One line on the outcome."""
    if holds:
        return f"{who} holds replies to a schema"
    return f"{who} does not hold replies to a schema: whoever reads them checks their form"
