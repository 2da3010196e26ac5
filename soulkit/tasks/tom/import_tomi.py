"""ToMi and ParaToMi from their several files.

* `.txt` blocks, with the `.trace` beside them when there is one (types come from the trace);
* fixed ToMi, JSON lines;
* Percept-ToMi.csv, whose stories and candidates are list literals.

ToMi rows keep the words of the file (`treasure_chest`). ParaToMi rows read like prose, with blanks
for underscores, and offer the story's containers and rooms as candidates, in alphabetical order so
that their order tells nothing. What is a container and what a room is decided by reading the
sentences, not by a word list: "pantry" can be either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from soulkit.data.files import BadRow, RawRow, read_rows
from soulkit.data.literals import join_sentences, literal_list, parse_candidates
from soulkit.tasks.importing import BadRecord, Imported, need, wrong_shape
from soulkit.tasks.made import Row
from soulkit.tasks.tom.blocks import Block, question_kind, read_blocks
from soulkit.tasks.tom.stories.events import ContainerRoom, Enter, Move, Place, Story
from soulkit.tasks.tom.stories.paraphrase import read_paraphrase
from soulkit.tasks.tom.stories.questions import read_question
from soulkit.tasks.tom.stories.read import read_sentences, story_lines

LICENCE = "CC-BY-NC-4.0 (ToMi, and what is derived from it)"

_ORDERS = {"memory": 0, "reality": 0, "first_order": 1, "second_order": 2}


def import_tomi(path: Path) -> Imported:
    """Rows of `tomi` from .txt blocks, fixed ToMi's .jsonl or Percept-ToMi.csv."""
    if path.suffix.lower() == ".txt":
        return _from_blocks(path, _tomi_from_block, number_stories=True)
    if path.suffix.lower() == ".csv":
        return _from_records(path, ("story", "question", "cands", "answer"), _tomi_from_percept)
    return _from_records(path, ("story", "question", "answer"), _tomi_from_fixed)


def import_paratomi(path: Path) -> Imported:
    """Rows of `paratomi` from .txt blocks or Percept-ToMi.csv."""
    if path.suffix.lower() == ".txt":
        return _from_blocks(path, _paratomi_from_block)
    fields = ("story", "question", "cands", "answer")
    return _from_records(path, fields, _paratomi_from_percept)


# -- files ---------------------------------------------------------------------------------------


def _from_blocks(
    path: Path, make: Callable[[Block], Row], number_stories: bool = False
) -> Imported:
    blocks, bad = read_blocks(path)
    if not blocks:
        what = ("numbered sentences with a question and its answer after them",)
        raise wrong_shape(path, what, f"The first block: {bad[0].source}: {bad[0].why}.")
    rows = []
    stories: dict[tuple[str, ...], int] = {}
    for index, block in enumerate(blocks):
        row = make(block)
        story = stories.setdefault(block.sentences, len(stories))
        row |= {"story_id": story} if number_stories else {"index": index}
        rows.append(row | _origin(block.source))
    notes = []
    if unread := sum("cands" not in row for row in rows):
        notes.append(f"{unread} of {len(rows)} rows have no candidates: a sentence was not read.")
    if not any(block.question_type for block in blocks):
        notes.append(f"There is no {path.stem}.trace: question types come from the questions.")
    return Imported(rows=tuple(rows), bad=tuple(bad), notes=tuple(notes))


def _from_records(path: Path, fields: Sequence[str], make: Callable[[RawRow], Row]) -> Imported:
    raw, bad = read_rows(path)
    if raw and not any(all(name in row.fields for name in fields) for row in raw):
        raise wrong_shape(path, fields, "See the formats of the task: soul tasks show NAME")
    rows = []
    for row in raw:
        try:
            rows.append(make(row) | _origin(row.source))
        except BadRecord as error:
            bad.append(BadRow(row.source, str(error)))
    return Imported(rows=tuple(rows), bad=tuple(bad))


def _origin(source: str) -> Row:
    return {"provenance": f"ToMi, {source}", "licence": LICENCE}


# -- tomi ----------------------------------------------------------------------------------------


def _tomi_from_block(block: Block) -> Row:
    kind = block.question_type or question_kind(block.question)
    return _tomi(block.sentences, block.question, block.answer, kind, block.story_type)


def _tomi_from_fixed(raw: RawRow) -> Row:
    story, question, answer = need(raw, "story", "question", "answer")
    kind = str(raw.fields.get("question_type") or question_kind(question))
    row = _tomi(story_lines(story), question, answer, kind, str(raw.fields.get("story_type", "")))
    containers = literal_list(raw.fields.get("containers"))
    return {**row, "cands": sorted(str(c) for c in containers)} if containers else row


def _tomi_from_percept(raw: RawRow) -> Row:
    question, answer = need(raw, "question", "answer")
    kind = str(raw.fields.get("qTypeRaw") or raw.fields.get("qType") or question_kind(question))
    nouns = parse_candidates(raw.fields.get("cands"))
    return {
        **_tomi(_sentences(raw), question, answer, kind, "", nouns),
        "story_id": raw.fields.get("index"),
    }


def _tomi(
    sentences: Sequence[str], question: str, answer: str, kind: str, story_type: str,
    nouns: Sequence[str] = (),
) -> Row:  # fmt: skip
    story = _read(sentences, question, nouns)
    row: Row = {
        "story": "\n".join(f"{i} {_stopped(s)}" for i, s in enumerate(sentences, 1)),
        "question": question.strip(),
        "answer": answer.strip(),
    }
    extras = {"question_type": kind, "story_type": story_type, "order": _order(kind),
              "cands": sorted(_containers(story)) if story else None}  # fmt: skip
    return {**row, **{k: v for k, v in extras.items() if v not in ("", None)}}


# -- paratomi ------------------------------------------------------------------------------------


def _paratomi_from_block(block: Block) -> Row:
    story = _read(block.sentences, block.question)
    row = _paratomi(
        join_sentences(_prose(s) for s in block.sentences),
        _prose(block.question),
        _prose(block.answer),
        block.question_type or question_kind(block.question),
    )
    if block.story_type:
        row["story_type"] = block.story_type
    if story is not None:
        row["cands"] = sorted({_prose(place) for place in _containers(story) | _rooms(story)})
    return row


def _paratomi_from_percept(raw: RawRow) -> Row:
    question, answer = need(raw, "question", "answer")
    kind = str(raw.fields.get("qTypeRaw") or question_kind(question))
    row = _paratomi(join_sentences(_sentences(raw)), question.strip(), answer.strip(), kind)
    cands = parse_candidates(raw.fields.get("cands"))
    if answer.strip() not in cands:
        raise BadRecord(f"its answer '{answer:.40}' is none of its candidates")
    percept_kind = raw.fields.get("qType")
    return {**row, "cands": cands, **({"qType": str(percept_kind)} if percept_kind else {}),
            "index": raw.fields.get("index")}  # fmt: skip


def _paratomi(story: str, question: str, answer: str, kind: str) -> Row:
    row = {"story": story, "question": question, "correct_answer": answer}
    # The digit names an agent by order of arrival; groups of questions go without it.
    return {**row, "qType": re.sub(r"_\d+(?=_)", "", kind), "qTypeRaw": kind} if kind else row


# -- shared --------------------------------------------------------------------------------------


def _sentences(raw: RawRow) -> list[str]:
    sentences = literal_list(raw.fields.get("story"))
    if not sentences or not all(isinstance(s, str) for s in sentences):
        raise BadRecord("its story is no list of sentences")
    return [str(s).strip() for s in sentences]


def _read(sentences: Sequence[str], question: str, nouns: Sequence[str] = ()) -> Story | None:
    """The story's events, plain or paraphrased; None when a sentence cannot be read."""
    plain = read_sentences(sentences)
    parsed = read_question(question)
    if plain is not None or parsed is None:
        return plain
    return read_paraphrase(sentences, parsed.obj, nouns)


def _containers(story: Story) -> set[str]:
    return {e.container for e in story.events if isinstance(e, Place | Move)}


def _rooms(story: Story) -> set[str]:
    return {e.room for e in story.events if isinstance(e, Enter | ContainerRoom)}


def _prose(text: str) -> str:
    return " ".join(text.replace("_", " ").split())


def _stopped(sentence: str) -> str:
    sentence = sentence.strip()
    return sentence if sentence.endswith(".") else f"{sentence}."


def _order(kind: str) -> int | None:
    return next((order for name, order in _ORDERS.items() if kind.startswith(name)), None)
