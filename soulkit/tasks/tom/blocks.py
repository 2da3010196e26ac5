"""The numbered text blocks of ToMi and its paraphrases, with the trace file beside them.

    1 Ada entered the attic.
    2 The apple is in the box.
    3 Where is the apple really?<TAB>box<TAB>1

Numbers restart at 1 with every block, and a block ends with its question. Line i of the trace
belongs to question i: events, question type and story type, separated by commas. A block that
breaks one of these rules is a bad row with its line; the blocks around it stay good. Because one
lost block would shift every later trace line, a trace line must fit its question, or the block is
bad too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from soulkit.data.files import BadRow, check_file, empty, text_lines
from soulkit.tasks.tom.stories.questions import read_question

_NUMBERED = re.compile(r"(\d+)[.)]?\s+(\S.*)")


@dataclass(frozen=True, slots=True)
class Block:
    """One question with its story."""

    sentences: tuple[str, ...]
    """The story's sentences, without their numbers."""
    question: str
    answer: str
    source: str
    """`file:line` of the block's first line."""
    steps: tuple[str, ...] = ()
    """The abstract events of the trace; empty without one."""
    question_type: str = ""
    story_type: str = ""


@dataclass(slots=True)
class _Draft:
    """A block while its lines are read."""

    source: str
    lines: list[str] = field(default_factory=list)
    question: str = ""
    answer: str = ""
    flaw: str = ""

    def add(self, number: int, line: str | None) -> None:
        match = _NUMBERED.fullmatch(line.strip()) if line is not None else None
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
            self._blame(number, "asks about no story")

    def _blame(self, number: int, flaw: str) -> None:
        self.flaw = self.flaw or f"line {number} {flaw}"

    def finish(self) -> Block | BadRow:
        flaw = self.flaw or ("" if self.question else "the block ends without a question")
        if flaw:
            return BadRow(self.source, flaw)
        return Block(tuple(self.lines), self.question, self.answer, self.source)


def read_blocks(path: Path) -> tuple[list[Block], list[BadRow]]:
    """The blocks of a .txt file, joined with `<name>.trace` when that lies beside it.

    DataError when the file is missing, unreadable or empty.
    """
    blocks = [draft.finish() for draft in _drafts(path)]
    if not blocks:
        raise empty(path)
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
            yield draft  # the block before this one never asked its question
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
