"""The published story files, each read into the same items.

An item is one question: the story as events (None when a sentence cannot be read), what is asked,
and the gold label of the file. Labels are kept as they are; `soulkit.tasks.tom.audit` says
which ones the tracker disputes. Files that are missing or of another shape raise
DataError with the line.
"""

from __future__ import annotations

import ast
import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from soulkit.errors import DataError
from soulkit.tasks.tom.stories.events import Story, decode
from soulkit.tasks.tom.stories.paraphrase import read_paraphrase
from soulkit.tasks.tom.stories.questions import Question, read_question
from soulkit.tasks.tom.stories.read import read_sentences, story_lines
from soulkit.tasks.tom.stories.tracker import Rules

_FIXED_TAGS = {"question_type": "question_type", "story_type": "story_type"}


@dataclass(frozen=True, slots=True)
class StoryItem:
    """One question about one story, as a file has it."""

    id: str
    story: Story | None
    question: Question | None
    text: str
    """The question as written."""
    gold: str
    tags: Mapping[str, str] = field(default_factory=dict)
    """Question type, order, deception, length and the like, where the file has them."""


def rules_of(task: str) -> Rules:
    """The tracker's rules for a story task."""
    return "hitom" if task == "hitom" else "tomi"


def events_of_row(task: str, row: Mapping[str, Any]) -> Story | None:
    """The story of a row of `tomi`, `paratomi` or `hitom`; None when it cannot be read.

    A row's `events` are used when it has them, else its text is read.
    """
    lines = _lines(row.get("story", ""))
    packed = literal(row.get("events"))
    if packed:
        events = decode(packed)
        return Story.of(events, lines if len(lines) == len(events) else ())
    story = read_sentences(lines)
    question = read_question(str(row.get("question", "")))
    if story is None and task == "paratomi" and question is not None:
        nouns = [str(c) for c in literal(row.get("cands")) or ()]
        return read_paraphrase(lines, question.obj, nouns)
    return story


def read_fixed_tomi(path: Path | str) -> Iterator[StoryItem]:
    """Fixed ToMi: one JSON object a line."""
    for number, line in enumerate(_open(path).splitlines(), 1):
        if line.strip():
            row = _json(line, f"{path}:{number}")
            yield _item(f"{number - 1}", row, "answer", path, **_FIXED_TAGS)


def read_tomi_txt(path: Path | str, trace: Path | str | None = None) -> Iterator[StoryItem]:
    """ToMi as released: numbered blocks that end in `question TAB answer TAB 1`."""
    for index, lines, text, gold, tags, _ in _blocks(path, trace):
        yield StoryItem(str(index), read_sentences(lines), read_question(text), text, gold, tags)


def read_paratomi_txt(path: Path | str, trace: Path | str | None) -> Iterator[StoryItem]:
    """ParaToMi: the same blocks, paraphrased, whose events must agree with the trace."""
    for index, lines, text, gold, tags, steps in _blocks(path, trace):
        question = read_question(text)
        story = read_paraphrase(lines, question.obj, trace=steps) if question else None
        yield StoryItem(str(index), story, question, text, gold, tags)


def read_percept_tomi(path: Path | str) -> Iterator[StoryItem]:
    """Percept-ToMi: a CSV whose stories are list literals without numbers."""
    for number, row in enumerate(csv.DictReader(io.StringIO(_open(path))), 2):
        if "qType" not in row or "story" not in row:
            raise _shape(f"{path}:{number}", "has no columns qType and story")
        yield _item(row.get("index", ""), row, "answer", path, question_type="qType")


def read_hitom_json(path: Path | str) -> Iterator[StoryItem]:
    """Hi-ToM as released: `{"data": [...]}`; a JSON-lines copy is read too."""
    names = {"order": "question_order", "deception": "deception", "length": "story_length"}
    for index, row in enumerate(_hitom_rows(path), 1):
        gold = "correct_answer" if "correct_answer" in row else "answer"
        row_id = row.get("sample_id", row.get("index", index))
        yield _item(str(row_id), row, gold, path, prompting_type="prompting_type", **names)


def _item(id_: str, row: Mapping[str, Any], gold: str, path: Path | str, **tags: str) -> StoryItem:
    missing = [name for name in ("story", "question", gold) if name not in row]
    if missing:
        raise _shape(f"{path}, row {id_}", f"has no {', '.join(missing)}")
    text = str(row["question"])
    tag_values = {name: str(row[column]) for name, column in tags.items() if column in row}
    question = read_question(text)
    if question is not None:
        tag_values.setdefault("order", str(question.order))
    return StoryItem(
        id_, read_sentences(_lines(row["story"])), question, text, str(row[gold]), tag_values
    )


def _lines(story: Any) -> list[str]:
    if isinstance(story, str) and story.lstrip().startswith("["):
        story = literal(story) or story
    if isinstance(story, str):
        return story_lines(story)
    return [str(line).strip() for line in story]


def literal(value: Any) -> Any:
    """Text read as a Python literal (None when it is none); any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return None


def _blocks(
    path: Path | str, trace: Path | str | None
) -> Iterator[tuple[int, list[str], str, str, dict[str, str], list[str] | None]]:
    traces = _open(trace).splitlines() if trace is not None else None
    blocks = list(_split(path))
    if traces is not None and len(traces) != len(blocks):
        raise _shape(str(trace), f"has {len(traces)} lines for {len(blocks)} questions")
    for index, ((lines, text, gold), steps) in enumerate(zip_longest(blocks, traces or ())):
        parts = steps.split(",") if steps else None
        tags = {"question_type": parts[-2], "story_type": parts[-1]} if parts else {}
        if (question := read_question(text)) is not None:
            tags["order"] = str(question.order)
        yield index, lines, text, gold, tags, parts[:-2] if parts else None


def _split(path: Path | str) -> Iterator[tuple[list[str], str, str]]:
    lines: list[str] = []
    for number, line in enumerate(_open(path).splitlines(), 1):
        if not line.strip():
            continue
        body = line.split(" ", 1)[-1]
        if "\t" not in body:
            lines.append(body.strip())
            continue
        parts = body.split("\t")
        if len(parts) < 2 or not lines:
            raise _shape(f"{path}:{number}", "has a question without a story or an answer")
        yield lines, parts[0].strip(), parts[1].strip()
        lines = []


def _hitom_rows(path: Path | str) -> Sequence[Mapping[str, Any]]:
    text = _open(path)
    if text.lstrip().startswith('{"data"') or text.lstrip().startswith("{\n"):
        rows = _json(text, str(path)).get("data")
    elif text.lstrip().startswith("["):
        rows = _json(text, str(path))
    else:
        rows = [_json(x, f"{path}:{i}") for i, x in enumerate(text.splitlines(), 1) if x.strip()]
    if not isinstance(rows, list):
        raise _shape(str(path), "has no list of rows under 'data'")
    return rows


def _open(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"The story file {path} cannot be read: {error}.",
            "Stories are read from a local file in UTF-8.",
            "Check the path, or fetch the file again.",
        ) from error


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _shape(where, f"is not JSON ({error.msg})") from error


def _shape(where: str, what: str) -> DataError:
    return DataError(
        f"{where} {what}.",
        "The file does not have the layout of the benchmark that it was read as.",
        "Choose the reader that fits the file, or fetch the file again.",
    )
