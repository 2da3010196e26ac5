"""Personas and scenarios drafted from people's conversations, for serving and simulating.

    {"id": "u7", "person": "u7", "persona": "Writes short messages without capitals. ...",
     "source": "chats.jsonl:3", ...}                                      one for each person
    {"id": "chats.jsonl:3", "person": "u7", "scenario": "You want to ...", "about": "a loud radio",
     "source": "chats.jsonl:3", ...}                                      one for each conversation

A model drafts them from a bounded excerpt, and another keeps or rejects each draft
(`eval/drafted_rows.py`). A draft with a private item or a speaker's name is rejected before that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from soulkit.data.corpora.settings import ASSISTANT, HUMAN
from soulkit.data.privacy.finders import counts_line, private_counts
from soulkit.judge.structured import VerdictShape
from soulkit.judge.verdict import fence, transcript
from soulkit.people.turns import PersonTurn, by_chat, by_person, read_turns
from soulkit.tasks.kit.made_rows import (
    Drafts,
    Review,
    Row,
    Sketch,
    draft_problem,
    draft_question,
    review_question,
)
from soulkit.tasks.kit.prompting import PromptFolder
from soulkit.types import Line, Segment

MESSAGES = 30
"""Most messages of an excerpt."""
WORDS, WORDS_OF_OTHERS = 60, 20
"""Most words of a message of the person, and of one before it or of somebody else."""
SHARED_WORDS = 6
"""A draft must not share this many consecutive words with the person's messages."""
_LABEL = re.compile(r"^(\w[^\n:]{0,39}): ", re.MULTILINE)


class Persona(VerdictShape):
    """A drafted persona."""

    persona: str = Field(min_length=1)


class Scenario(VerdictShape):
    """A drafted scenario and its subject."""

    scenario: str = Field(min_length=1)
    about: str = Field(min_length=1, max_length=100)


class PeopleReview(Review):
    """A filter's word on a persona or a scenario."""

    fault: Literal["none", "identifies", "invents", "misses", "too_vague", "quotes", "unsafe"]


def _writing(turns: Sequence[PersonTurn]) -> list[Segment]:
    """Messages of a person from all their conversations, each with the message before it."""
    chosen = turns[:: -(-2 * len(turns) // MESSAGES)]
    return [s for turn in chosen for s in (*turn.context[-1:], Segment("assistant", turn.text))]


def _conversation(turns: Sequence[PersonTurn]) -> list[Segment]:
    """The first messages of a conversation."""
    before = [segment for segment in turns[-1].context if segment.role != "system"]
    return [*before, Segment("assistant", turns[-1].text)][:MESSAGES]


def _line(segment: Segment) -> Line:
    words, most = segment.text.split(), WORDS if segment.role == "assistant" else WORDS_OF_OTHERS
    return Line(segment.role, " ".join(words[:most]) + " …" * (len(words) > most))


class Kind(NamedTuple):
    """What is drafted for each group of turns."""

    field: str
    shape: type[VerdictShape]
    lengths: range
    groups: Callable[[Sequence[PersonTurn]], Mapping[str, Sequence[PersonTurn]]]
    excerpt: Callable[[Sequence[PersonTurn]], list[Segment]]


KINDS = {
    "personas": Kind("persona", Persona, range(12, 121), by_person, _writing),
    "scenarios": Kind("scenario", Scenario, range(8, 81), by_chat, _conversation),
}


def people_drafts(kind: str, source: str, side: str) -> Drafts:
    """The sketches of a kind; DataError if the source has no usable conversation."""
    prompts, turns = PromptFolder("people", Path(__file__).parent), read_turns(source, side)
    unknown = len({turn.chat for turn in turns if turn.person == turn.chat})
    notes = (f"{unknown} conversations name no person; each counts as one person.",)
    return Drafts(
        sketches=tuple(_sketch(kind, key, group, prompts, side)
                       for key, group in KINDS[kind].groups(turns).items()),
        prompts=prompts.hashes(f"draft_{kind}", f"filter_{kind}"), notes=notes if unknown else (),
    )  # fmt: skip


def _sketch(
    kind: str, key: str, turns: Sequence[PersonTurn], prompts: PromptFolder, side: str
) -> Sketch:
    first, what = turns[0], KINDS[kind]
    lines, names = [*map(_line, what.excerpt(turns))], {first.person}
    shown = transcript(lines, {"assistant": "Person", "user": "Other", "system": "Setting"})
    replies = [line.text for line in lines if line.seat == "assistant"]
    if side not in (HUMAN, ASSISTANT):  # several others speak with labels
        texts = (part.text for turn in turns for part in turn.context if part.role == "user")
        names.update(name for text in texts for name in _LABEL.findall(text))

    def problem(draft: Any) -> str:
        text = getattr(draft, what.field)
        return draft_problem(what.field, text, what.lengths, replies, SHARED_WORDS)

    def review(draft: Any) -> Any:
        drafted = fence("\n".join(draft.model_dump().values()), what.field)
        prompt = prompts.render(f"filter_{kind}", material=shown, draft=drafted)
        return review_question(prompt, PeopleReview)

    def rows(draft: Any) -> list[Row]:
        texts = {name: " ".join(text.split()) for name, text in draft.model_dump().items()}
        return [{"id": key, "person": first.person, **texts, "source": first.chat}]

    return Sketch(
        key=f"{kind}/{key}", source=first.chat, review=review, rows=rows,
        draft=draft_question(prompts.render(f"draft_{kind}", material=shown), what.shape, problem),
        private=lambda draft: telling("\n".join(draft.model_dump().values()), names),
    )  # fmt: skip


def telling(text: str, names: Collection[str]) -> str:
    """Why a text says who somebody is; empty if it does not. The reason does not repeat it."""
    if counts := private_counts([text]):
        return f"it holds {counts_line(counts)}"
    for name in filter(re.compile(r"(?=.*[^\W\d_]).{3}").match, names):
        parts = [re.escape(part) for part in re.findall(r"[^\W\d_]{3,}", name) if part[0].isupper()]
        if re.search(rf"\b{re.escape(name)}\b", text, re.IGNORECASE):
            return "it holds the id or name of a speaker"
        if parts and re.search(rf"\b({'|'.join(parts)})\b", text):
            return "it holds a part of a speaker's name"
    return ""
