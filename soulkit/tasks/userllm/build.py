"""What a model drafts for rows of `userllm`: what a person was after, from what they said.

* Recorded chats, PRISM's or others (`data/chats.py`): the intent of the whole conversation. It is
  in other words than the person's, since a row is scored by how little of the intent is echoed.
* CommonsenseQA: the intent of somebody who asks the quiz question, without any of its choices.
* NQ-open: the intent, and the turn in which the assistant proposes something else instead.

The filter then says whether the intent is what the person wanted, no more and no less, and whether
the row could be shown to anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from soulkit.data.chats import Chat, read_chats
from soulkit.data.files import BadRow, read_rows
from soulkit.errors import DataError
from soulkit.judge.fence import fence
from soulkit.judge.structured import VerdictShape
from soulkit.judge.transcripts import transcript
from soulkit.tasks.drafting import Drafts, Review, Sketch, drafted, quotation, reviewed
from soulkit.tasks.made import Row
from soulkit.tasks.prompting import PromptFolder
from soulkit.tasks.userllm.fields import CSQA, NQ
from soulkit.tasks.userllm.importer import import_userllm, is_question
from soulkit.tasks.userllm.metrics import choices_named
from soulkit.tasks.userllm.prism import Turns, from_prism, rows_of, turn_names
from soulkit.types import Line

ECHO = 6
"""Words in a row that an intent may not share with its person."""
WORDS = range(3, 41)
"""Of an intent."""
PROMPTS = {
    "chat": ("drafting/draft_intent", "drafting/filter_intent"),
    NQ: ("drafting/draft_search", "drafting/filter_search"),
    CSQA: ("drafting/draft_quiz", "drafting/filter_intent"),
}
"""Kind of record → its templates: the drafter's, the filter's."""


class Intent(VerdictShape):
    """A drafted intent."""

    intent: str = Field(min_length=1)


class SearchIntent(Intent):
    """An intent, and what an assistant says that leads away from it."""

    suggestion: str = Field(min_length=1)


class IntentReview(Review):
    """A filter's word on an intent."""

    fault: Literal[
        "none", "not_theirs", "too_vague", "gives_words", "gives_answer", "several_aims", "unsafe"
    ]


class SearchReview(Review):
    """A filter's word on an intent and on the proposal that leads away from it."""

    fault: Literal[
        "none", "not_theirs", "too_vague", "gives_answer", "no_detour", "suggestion_answers",
        "unsafe",
    ]  # fmt: skip


def intent_drafts(path: Path, prompts: PromptFolder, *, turns: Turns = "all") -> Drafts:
    """The sketches of a file of chats, of NQ-open or of CommonsenseQA; DataError for any other."""
    raw, _ = read_rows(path)
    if any(is_question(record) for record in raw):
        imported = import_userllm(path)
        sketches = [_question(row, f"{path.name}, row {i}", prompts)
                    for i, row in enumerate(imported.rows, 1)]  # fmt: skip
        return Drafts(sketches=tuple(sketches), bad=imported.bad, prompts=_hashes(prompts))
    chats, bad = read_chats(path)
    sketches = [_chat(chat, prompts, turns) for chat in chats if turn_names(chat, turns)]
    short = [chat for chat in chats if not turn_names(chat, turns)]
    bad += [BadRow(chat.source, f"its chat has no turn of the kind '{turns}'") for chat in short]
    if not sketches:
        raise DataError(
            f"No chat of '{path}' has a turn of the kind '{turns}'.",
            f"{bad[0].source}: {bad[0].why}.",
            "Give --turns all, or another file.",
        )
    return Drafts(sketches=tuple(sketches), bad=tuple(bad), prompts=_hashes(prompts))


def _hashes(prompts: PromptFolder) -> dict[str, str]:
    return prompts.hashes(*sorted({name for pair in PROMPTS.values() for name in pair}))


def _chat(chat: Chat, prompts: PromptFolder, turns: Turns) -> Sketch:
    lines = [Line(message["role"], message["content"]) for message in chat.messages]
    shown = transcript(lines, {"user": "Person", "assistant": "Assistant"})
    draft_prompt, filter_prompt = PROMPTS["chat"]

    def review(draft: Intent) -> Any:
        prompt = prompts.render(filter_prompt, material=shown, intent=fence(draft.intent, "intent"))
        return reviewed(prompt, IntentReview)

    return Sketch(
        key=chat.key,
        source=chat.source,
        draft=drafted(
            prompts.render(draft_prompt, material=shown), Intent, _problem(chat.user_messages)
        ),
        review=review,
        rows=lambda draft: rows_of(chat, " ".join(draft.intent.split()), turns),
        count=len(turn_names(chat, turns)),
        published=from_prism(chat),
    )


def _question(row: Row, source: str, prompts: PromptFolder) -> Sketch:
    """A sketch of an imported question; what the importer wrote from templates is drafted anew."""
    draft_prompt, filter_prompt = PROMPTS[row["source"]]
    question, choices = str(row["intent"]), tuple(row.get("choices", ()))
    material = fence(question, "question")
    listed = fence("\n".join(choices), "choices") if choices else ""
    is_search = row["source"] == NQ

    def review(draft: Any) -> Any:
        about = {"suggestion": fence(draft.suggestion, "suggestion")} if is_search else {}
        prompt = prompts.render(
            filter_prompt, material=material, intent=fence(draft.intent, "intent"), **about
        )
        return reviewed(prompt, SearchReview if is_search else IntentReview)

    values = {} if is_search else {"choices": listed}
    return Sketch(
        key=f"{row['source']}/{row.get('id') or question}",
        source=source,
        draft=drafted(
            prompts.render(draft_prompt, material=material, **values),
            SearchIntent if is_search else Intent,
            _problem([question], choices),
        ),
        review=review,
        rows=lambda draft: [_with_draft(row, draft)],
        published=True,
    )


def _with_draft(row: Row, draft: Intent) -> Row:
    """The row with what was drafted in place of the importer's."""
    origin = str(row["provenance"])
    whole: Row = {**row, "intent": " ".join(draft.intent.split())}
    if isinstance(draft, SearchIntent):
        whole["assistant_suggestion_turn"] = draft.suggestion.strip()
        origin = origin.partition(";")[0]  # no longer written from a template
    return {**whole, "provenance": origin}


def _problem(originals: list[str], choices: tuple[str, ...] = ()) -> Callable[[Intent], str]:
    """What is wrong with an intent, in words for its author."""

    def problem(draft: Intent) -> str:
        count = len(draft.intent.split())
        if count not in WORDS:
            return f"the intent has {count} words, not {WORDS.start} to {WORDS.stop - 1}"
        if echo := quotation(draft.intent, originals, ECHO):
            return f"the intent repeats the person's own words: “{echo}”"
        if named := choices_named(choices, draft.intent, "paper"):
            return f"the intent names a choice: “{named[0]}”"
        return ""

    return problem
