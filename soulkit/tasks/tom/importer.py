"""Import ToMi, ParaToMi and Hi-ToM from their original files.

* `.txt` blocks, with the `.trace` file next to them if there is one; fixed ToMi, JSON lines;
* Percept-ToMi.csv, whose stories and candidates are list literals;
* Hi-ToM_data.json, with every question in a CoTP and a VP half; the default is CoTP, with which the
  tracker agrees.

Line i of a trace belongs to question i: events, question type and story type. An invalid block, or
one that contradicts its trace line, is a bad row; other blocks are kept. The candidates of ParaToMi
rows are the story's containers and rooms in alphabetical order, as read from the sentences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from soulkit.data.files import BadRow, RawRow, check_file, empty_file, text_lines
from soulkit.data.literals import join_sentences, literal_list, parse_candidates, parse_choices
from soulkit.tasks.kit.importing import BadRecord, Imported, import_records, need, wrong_shape
from soulkit.tasks.kit.made_rows import Row
from soulkit.tasks.tom.events import ContainerRoom, Enter, Move, Place, Story, read_question
from soulkit.tasks.tom.sentences import read_paraphrase, read_sentences, story_lines
from soulkit.text import with_stop

_NUMBERED_SENTENCE = re.compile(r"(\d+)[.)]?\s+(\S.*)")


@dataclass(frozen=True, slots=True)
class Block:
    """A question with its story."""

    sentences: tuple[str, ...]
    """The story's sentences, without their numbers."""
    question: str
    answer: str
    source: str
    """`file:line` of the block's first line."""
    steps: tuple[str, ...] = ()
    """The abstract events of the trace; empty without a trace."""
    question_type: str = ""
    story_type: str = ""


@dataclass(slots=True)
class _Draft:
    """A block that is still being read."""

    source: str
    lines: list[str] = field(default_factory=list)
    question: str = ""
    answer: str = ""
    flaw: str = ""

    def add(self, number: int, line: str | None) -> None:
        match = _NUMBERED_SENTENCE.fullmatch(line.strip()) if line is not None else None
        if match is None or line is None:
            self._blame(number, "is not a number and a sentence")
        elif int(match[1]) != len(self.lines) + 1:
            self._blame(number, f"is numbered {match[1]} where {len(self.lines) + 1} was expected")
        elif "\t" in match[2]:
            self._ask(number, match[2])
        else:
            self.lines.append(match[2].strip())

    def _ask(self, number: int, text: str) -> None:
        self.question, self.answer = (part.strip() for part in text.split("\t")[:2])
        if not self.question or not self.answer:
            self._blame(number, "has a question without an answer, or the reverse")
        if not self.lines:
            self._blame(number, "asks a question without a story")

    def _blame(self, number: int, flaw: str) -> None:
        self.flaw = self.flaw or f"line {number} {flaw}"

    def finish(self) -> Block | BadRow:
        flaw = self.flaw or ("" if self.question else "the block ends without a question")
        if flaw:
            return BadRow(self.source, flaw)
        return Block(tuple(self.lines), self.question, self.answer, self.source)


def read_blocks(path: Path) -> tuple[list[Block], list[BadRow]]:
    """The blocks of a .txt file, joined with `<name>.trace` if that file exists.

    DataError if the file is missing, unreadable or empty.
    """
    blocks = [draft.finish() for draft in _drafts(path)]
    if not blocks:
        raise empty_file(path)
    trace = path.with_suffix(".trace")
    extra: list[BadRow] = []
    if trace.is_file():
        blocks, extra = _traced(blocks, trace)
    good = [block for block in blocks if isinstance(block, Block)]
    return good, [block for block in blocks if isinstance(block, BadRow)] + extra


def _drafts(path: Path) -> Iterator[_Draft]:
    check_file(path)
    draft: _Draft | None = None
    for number, line in text_lines(path):
        if line is not None and not line.strip():
            continue
        starts = line is not None and re.match(r"\s*1[.)]?\s", line) is not None
        if draft is not None and starts:
            yield draft  # the previous block has no question
            draft = None
        draft = draft or _Draft(f"{path.name}:{number}")
        draft.add(number, line)
        if line is not None and "\t" in line:
            yield draft
            draft = None
    if draft is not None:
        yield draft


def _traced(blocks: list[Block | BadRow], trace: Path) -> tuple[list[Block | BadRow], list[BadRow]]:
    lines = [line or "" for _, line in text_lines(trace)]
    while lines and not lines[-1].strip():
        lines.pop()
    joined = [
        _with_trace(block, lines[i] if i < len(lines) else "", f"{trace.name}:{i + 1}")
        for i, block in enumerate(blocks)
    ]
    surplus = len(lines) - len(blocks)
    extra = [BadRow(f"{trace.name}:{len(blocks) + 1}", f"{surplus} trace lines without a question")]
    return joined, extra if surplus > 0 else []


def _with_trace(block: Block | BadRow, line: str, where: str) -> Block | BadRow:
    if isinstance(block, BadRow):
        return block
    parts = [part.strip() for part in line.split(",")]
    if len(parts) < 3:
        return BadRow(block.source, f"its trace line {where} is missing or has no types")
    kind = question_kind(block.question)
    if kind and not parts[-2].startswith(kind):
        return BadRow(block.source, f"{where} says '{parts[-2]}', but the question is {kind}")
    return replace(block, steps=tuple(parts[:-2]), question_type=parts[-2], story_type=parts[-1])


def question_kind(question: str) -> str:
    """`memory`, `reality`, `first_order` or `second_order`; empty for any other form."""
    parsed = read_question(question)
    if parsed is None:
        return ""
    if parsed.kind != "belief":
        return parsed.kind
    return {1: "first_order", 2: "second_order"}.get(parsed.order, "")


TOMI_LICENCE = "CC-BY-NC-4.0 (ToMi, and what is derived from it)"

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
        what = ("numbered sentences followed by a question and its answer",)
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
        notes.append(f"{unread} of {len(rows)} rows have no candidates: a sentence is unreadable.")
    if not any(block.question_type for block in blocks):
        notes.append(f"There is no {path.stem}.trace: question types are taken from the questions.")
    return Imported(rows=tuple(rows), bad=tuple(bad), notes=tuple(notes))


def _from_records(path: Path, fields: Sequence[str], make: Callable[[RawRow], Row]) -> Imported:
    return import_records(
        path, lambda record, _: make(record) | _origin(record.source), fields=fields,
        way_out="See the formats of the task: soul tasks show NAME",
    )  # fmt: skip


def _origin(source: str) -> Row:
    return {"provenance": f"ToMi, {source}", "licence": TOMI_LICENCE}


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
    story = _read_story(sentences, question, nouns)
    row: Row = {
        "story": "\n".join(
            f"{i} {with_stop(s.strip(), ('.',))}" for i, s in enumerate(sentences, 1)
        ),
        "question": question.strip(),
        "answer": answer.strip(),
    }
    extras = {"question_type": kind, "story_type": story_type, "order": _order(kind),
              "cands": sorted(_containers(story)) if story else None}  # fmt: skip
    return {**row, **{k: v for k, v in extras.items() if v not in ("", None)}}


# -- paratomi ------------------------------------------------------------------------------------


def _paratomi_from_block(block: Block) -> Row:
    story = _read_story(block.sentences, block.question)
    row = _paratomi(
        join_sentences(_prose(s) for s in block.sentences),
        _prose(block.question),
        _prose(block.answer),
        block.question_type or question_kind(block.question),
    )
    if block.story_type:
        row["story_type"] = block.story_type
    if story is not None:
        rooms = {e.room for e in story.events if isinstance(e, Enter | ContainerRoom)}
        row["cands"] = sorted({_prose(place) for place in _containers(story) | rooms})
    return row


def _paratomi_from_percept(raw: RawRow) -> Row:
    question, answer = need(raw, "question", "answer")
    kind = str(raw.fields.get("qTypeRaw") or question_kind(question))
    row = _paratomi(join_sentences(_sentences(raw)), question.strip(), answer.strip(), kind)
    cands = parse_candidates(raw.fields.get("cands"))
    if answer.strip() not in cands:
        raise BadRecord(f"its answer '{answer:.40}' is not one of its candidates")
    percept_kind = raw.fields.get("qType")
    return {**row, "cands": cands, **({"qType": str(percept_kind)} if percept_kind else {}),
            "index": raw.fields.get("index")}  # fmt: skip


def _paratomi(story: str, question: str, answer: str, kind: str) -> Row:
    row = {"story": story, "question": question, "correct_answer": answer}
    # The digit is an agent's order of arrival; question types are grouped without it.
    return {**row, "qType": re.sub(r"_\d+(?=_)", "", kind), "qTypeRaw": kind} if kind else row


# -- shared --------------------------------------------------------------------------------------


def _sentences(raw: RawRow) -> list[str]:
    sentences = literal_list(raw.fields.get("story"))
    if not sentences or not all(isinstance(s, str) for s in sentences):
        raise BadRecord("its story is not a list of sentences")
    return [str(s).strip() for s in sentences]


def _read_story(sentences: Sequence[str], question: str, nouns: Sequence[str] = ()) -> Story | None:
    plain = read_sentences(sentences)
    parsed = read_question(question)
    if plain is not None or parsed is None:
        return plain
    return read_paraphrase(sentences, parsed.obj, nouns)


def _containers(story: Story) -> set[str]:
    return {e.container for e in story.events if isinstance(e, Place | Move)}


def _prose(text: str) -> str:
    return " ".join(text.replace("_", " ").split())


def _order(kind: str) -> int | None:
    return next((order for name, order in _ORDERS.items() if kind.startswith(name)), None)


Half = Literal["cotp", "vp", "all"]
"""Which half of the questions: one of the two prompts, or both."""
HITOM_LICENCE = "Apache-2.0 (Hi-ToM)"

_NUMBERED_LINE = re.compile(r"\s*\d+\s")
_HITOM_COLUMNS = ("story", "question", "choices")


def import_hitom(path: Path, *, half: Half = "cotp") -> Imported:
    """Rows of `Hi-ToM_data.json`, or of JSON lines with the same fields."""
    made: list[tuple[Row, str]] = []

    def row(record: RawRow, _: int) -> list[Row]:
        made.append((_hitom_row(record), str(record.fields.get("prompting_type", "")).lower()))
        return [row for row, name in made[-1:] if half == "all" or name in (half, "")]

    return import_records(
        path, row, fields=_HITOM_COLUMNS, origin="Hi-ToM", licence=HITOM_LICENCE,
        way_out="Give Hi-ToM_data.json of the Hi-ToM release.",
        notes=lambda rows, _: _hitom_notes(made, half, len(rows)),
    )  # fmt: skip


def _hitom_row(raw: RawRow) -> dict[str, Any]:
    story, question, choices = need(raw, *_HITOM_COLUMNS)
    (gold,) = need(raw, "correct_answer" if "correct_answer" in raw.fields else "answer")
    options = parse_choices(choices)
    if len(options) < 2 or len(set(options.values())) < len(options):
        raise BadRecord("its choices are not a list of distinct lettered options")
    if gold.strip() not in options.values():
        raise BadRecord(f"its answer '{gold:.40}' is not one of its choices")
    columns = ("deception", "story_length", "question_order")
    return {
        "story": clean_story(story),
        "question": question.strip(),
        "choices": choices.strip(),
        "correct_answer": gold.strip(),
        **{name: raw.fields[name] for name in columns if name in raw.fields},
        "index": raw.fields.get("sample_id", raw.fields.get("index")),
    }


def clean_story(text: str) -> str:
    """The numbered lines of a story, without a preceding instruction and stray marks."""
    lines = [line.replace("***", "").strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    if any(_NUMBERED_LINE.match(line) for line in lines):
        lines = [line for line in lines if _NUMBERED_LINE.match(line)]
    return "\n".join(lines)


def _hitom_notes(made: Sequence[tuple[Row, str]], half: Half, count: int) -> tuple[str, ...]:
    golds: dict[tuple[str, str], dict[str, str]] = {}
    for row, name in made:
        golds.setdefault((row["story"], row["question"]), {})[name] = row["correct_answer"]
    pairs = [g for g in golds.values() if {"cotp", "vp"} <= set(g)]
    if not pairs:
        return ()
    differ = sum(g["cotp"] != g["vp"] for g in pairs)
    what = "Both halves are kept" if half == "all" else f"Only the half '{half}' is kept"
    return (
        f"{what} ({count} of {len(made)} rows). The file asks {len(pairs)} questions twice, and "
        f"the halves have different golds for {differ} of them. The CoTP half is the default "
        "because a belief tracker agrees with it far more often; see: soul data audit hitom FILE",
    )
