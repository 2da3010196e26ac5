"""What a model drafts for rows of MirrorBench: who the person was, from what they really said.

The file holds recorded chats in any layout that is read (`data/chats.py`), or conversations that
the importer knows (MirrorBench's own, ClariQ's, Qulac's). Their words become the row's `turns` as
they are. The description is drafted from them: aim and manner, in other words than the person's,
because an actor who copied it would be compared with its own source. The filter looks at both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from soulkit.data.chats import Chat, read_chats
from soulkit.data.files import BadRow
from soulkit.data.turns import ChatMessage
from soulkit.errors import DataError
from soulkit.judge.fence import fence
from soulkit.judge.structured import VerdictShape
from soulkit.judge.transcripts import transcript
from soulkit.tasks.drafting import Drafts, Review, Sketch, drafted, quotation, reviewed
from soulkit.tasks.made import Row
from soulkit.tasks.mirrorbench.importer import LICENCES, import_mirrorbench
from soulkit.tasks.mirrorbench.subsets import subset_of
from soulkit.tasks.prompting import PromptFolder
from soulkit.types import Line

ECHO = 8
"""Words in a row that a description may not share with a message of the person."""
WORDS = range(15, 161)
"""Of a description."""
PROMPTS = ("drafting/draft_description", "drafting/filter_description")
OTHER = "recorded"
"""The subset of chats that are of none of the published ones."""
UNKNOWN = "not stated with the chats"


class Description(VerdictShape):
    """A drafted description."""

    task_description: str = Field(min_length=1)


class DescriptionReview(Review):
    """A filter's word on a description."""

    fault: Literal[
        "none", "invents", "misses_aim", "quotes", "gives_answer", "no_manner", "unsafe"
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recording:
    """A conversation that a row is to be made of."""

    key: str
    source: str
    turns: tuple[ChatMessage, ...]
    row: Row
    """The row without a description and its turns."""
    aim: str = ""
    """What the file itself says the person was after."""
    published: bool = False
    """Whether it is one of a published set."""


def description_drafts(path: Path, prompts: PromptFolder) -> Drafts:
    """The sketches of a file of conversations; DataError when it holds none."""
    recordings, bad = _recordings(path)
    return Drafts(
        sketches=tuple(_sketch(recording, prompts) for recording in recordings),
        prompts=prompts.hashes(*PROMPTS),
        bad=tuple(bad),
    )


def _recordings(path: Path) -> tuple[list[Recording], list[BadRow]]:
    try:
        imported = import_mirrorbench(path)
    except DataError:  # none of the importer's files: chats of another layout, or none at all
        chats, bad = read_chats(path)
        return [_of_chat(chat) for chat in chats], bad
    recordings = [_of_row(row, f"{path.name}, row {row['index'] + 1}") for row in imported.rows]
    return recordings, list(imported.bad)


def _of_row(row: Row, source: str) -> Recording:
    own = row["provenance"].startswith("MirrorBench")
    rest = {k: v for k, v in row.items() if k not in ("task_description", "turns", "index")}
    key = str(row.get("conversation_id") or source)
    aim = "" if own else str(row["task_description"])
    return Recording(key, source, tuple(row["turns"]), rest, aim, published=True)


def _of_chat(chat: Chat) -> Recording:
    about = {name: chat.fields[name] for name in ("dataset", "conversation_id", "metadata")
             if chat.fields.get(name) is not None}  # fmt: skip
    row: Row = {"conversation_id": chat.key, **about}
    # Trees are laid out by one published set alone; ids like its own stand in many other files.
    published = bool(about.get("dataset")) or chat.layout == "tree"
    if not published or subset_of(row) is None:
        row["dataset"] = OTHER
    row |= {"person": chat.person} if chat.person else {}
    licence = chat.fields.get("licence") or LICENCES.get(subset_of(row) or "", UNKNOWN)
    row |= {"provenance": f"recorded chat, {chat.source}", "licence": str(licence)}
    return Recording(chat.key, chat.source, chat.messages, row, published=published)


def _sketch(recording: Recording, prompts: PromptFolder) -> Sketch:
    lines = [Line(turn["role"], turn["content"]) for turn in recording.turns]
    shown = transcript(lines, {"user": "User", "assistant": "Assistant"})
    aim = fence(recording.aim, "aim") if recording.aim else ""
    draft_prompt, filter_prompt = PROMPTS

    def review(draft: Description) -> Any:
        described = fence(draft.task_description, "description")
        prompt = prompts.render(filter_prompt, material=shown, description=described)
        return reviewed(prompt, DescriptionReview)

    def rows(draft: Description) -> list[Row]:
        description = " ".join(draft.task_description.split())
        turns = [dict(turn) for turn in recording.turns]
        return [{"task_description": description, "turns": turns, **recording.row}]

    return Sketch(
        key=recording.key,
        source=recording.source,
        draft=drafted(
            prompts.render(draft_prompt, material=shown, aim=aim),
            Description,
            _problem([t["content"] for t in recording.turns if t["role"] == "user"]),
        ),
        review=review,
        rows=rows,
        published=recording.published,
    )


def _problem(originals: list[str]) -> Callable[[Description], str]:
    """What is wrong with a description, in words for its author."""

    def problem(draft: Description) -> str:
        count = len(draft.task_description.split())
        if count not in WORDS:
            return f"the description has {count} words, not {WORDS.start} to {WORDS.stop - 1}"
        if echo := quotation(draft.task_description, originals, ECHO):
            return f"the description repeats the person's own words: “{echo}”"
        return ""

    return problem
