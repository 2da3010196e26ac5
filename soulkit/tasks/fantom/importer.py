"""FANToM from its original file, and what can be said about the tables that were derived from it.

* `fantom_v1.json`: one record a set, with its question-answer pairs under `factQA`, `beliefQAs`,
  `answerabilityQA_list` and so on. Each pair gives a row, a belief two (in free words, and with its
  two answers as options in an order that follows from the words); the questions on who can answer
  or has the information get what they are about in front of them. Rows say how large their
  set is.
* `flattened_fantom.csv` with `Percept-FANToM.csv` beside it (PercepToM): questions and a part of
  the conversations, but no answers. None of its records can be scored; each is listed, with why.

Example pair: {"question": "Does Ada know this information?", "question_type":
"tom:info_accessibility:binary", "correct_answer": "no", "missed_info_accessibility":
"inaccessible"}.

FANToM's authors ask that it be used to evaluate and never to train; the notes of an import say so.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow, RawRow, read_rows
from soulkit.tasks.fantom.sets import sized
from soulkit.tasks.importing import BadRecord, Imported, need, wrong_shape
from soulkit.tasks.made import Row

LICENCE = "MIT; its authors restrict FANToM to evaluation"
_SINGLE = ("answerabilityQA_list", "infoAccessibilityQA_list")
_SEVERAL = ("beliefQAs", "answerabilityQAs_binary", "infoAccessibilityQAs_binary")
_PERCEPTS = "Percept-FANToM.csv"
_UNGIVEN = "no gold answer is published with this file"


def import_fantom(path: Path) -> Imported:
    """Rows of `fantom_v1.json`; of `flattened_fantom.csv` only why there are none."""
    raw, bad = read_rows(path)
    if raw and all("question_type" in row.fields and "set_id" in row.fields for row in raw):
        return _without_gold(path, raw, bad)
    if not any("factQA" in row.fields and "set_id" in row.fields for row in raw):
        columns = ("set_id", "short_context", "factQA")
        raise wrong_shape(path, columns, "Give fantom_v1.json of the FANToM release.")
    rows: list[Row] = []
    for record in raw:
        try:
            good, broken = _rows(record)
            rows += good
            bad += broken
        except BadRecord as error:
            bad.append(BadRow(record.source, str(error)))
    return Imported(rows=tuple(rows), bad=tuple(bad), notes=(f"Licence: {LICENCE}.",))


# -- fantom_v1.json ------------------------------------------------------------------------------


def _rows(record: RawRow) -> tuple[list[Row], list[BadRow]]:
    """The rows of one set, and its pairs that cannot be one."""
    (context,) = need(record, "short_context")
    fact = record.fields.get("factQA")
    if not isinstance(fact, Mapping) or not fact.get("question") or not fact.get("correct_answer"):
        raise BadRecord("its factQA has no question with an answer, which others build on")
    shared = {
        "context": context,
        "fact_question": str(fact["question"]),
        "fact_answer": str(fact["correct_answer"]),
        **{k: record.fields.get(k) for k in ("set_id", "part_id")},
        "provenance": f"FANToM, {record.source}",
        "licence": LICENCE,
    }
    good: list[Row] = []
    bad: list[BadRow] = []
    for name, pair in _pairs(record.fields):
        try:
            good += [{**row, **shared} for row in _from_pair(pair, shared)]
        except BadRecord as error:
            bad.append(BadRow(record.source, f"{name}: {error}"))
    return sized(good), bad


def _pairs(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "factQA", {"question_type": "fact", **fields["factQA"]}
    for name in _SEVERAL:
        for i, pair in enumerate(fields.get(name) or ()):
            yield f"{name}[{i}]", pair
    yield from ((name, fields[name]) for name in _SINGLE if fields.get(name))


def _from_pair(pair: Any, shared: Mapping[str, Any]) -> list[Row]:
    if not isinstance(pair, Mapping):
        raise BadRecord("it is no question-answer pair")
    question, kind = str(pair.get("question") or ""), str(pair.get("question_type") or "")
    gold, wrong = pair.get("correct_answer"), pair.get("wrong_answer")
    if not question or not kind:
        raise BadRecord("it lacks a question or its type")
    if gold is None or gold == "" or gold == "error":
        raise BadRecord(f"its gold answer is {gold!r}")
    columns = ("tom_type", "missed_info_accessibility")
    row = {
        "question": question,
        "question_type": kind,
        "complete_question": complete_question(question, kind, shared),
        "correct_answer": gold,
        "wrong_answer": wrong,
        **{name: pair[name] for name in columns if pair.get(name) is not None},
    }
    if not kind.startswith("tom:belief:") or kind.endswith(":multiple-choice") or not wrong:
        return [row]
    return [row, {**row, **_lettered(question, kind, str(gold), str(wrong))}]


def complete_question(question: str, kind: str, shared: Mapping[str, Any]) -> str:
    """The question with what it is about before it, and how to answer behind it."""
    if "answerability" in kind:
        question = f"Question: {shared['fact_question']}\n{question}"
    if "info_accessibility" in kind:
        information = f"{shared['fact_question']} {shared['fact_answer']}"
        question = f"Information: {information}\n{question}"
    return f"{question} Answer yes or no." if kind.endswith(":binary") else question


def _lettered(question: str, kind: str, gold: str, wrong: str) -> Row:
    """The belief with two options; which comes first follows from the words, not from chance."""
    options = [gold, wrong]
    if hashlib.sha256(f"{question}\n{gold}".encode()).digest()[0] % 2:
        options.reverse()
    lines = "\n".join(f"({letter}) {text}" for letter, text in zip("ab", options, strict=True))
    return {
        "question_type": f"{kind}:multiple-choice",
        "complete_question": f"{question}\n{lines}",
        "correct_answer": options.index(gold),
    }


# -- the derived tables --------------------------------------------------------------------------


def _without_gold(path: Path, raw: list[RawRow], bad: list[BadRow]) -> Imported:
    parts = conversations(path.parent / _PERCEPTS)
    reasons = [BadRow(row.source, _why_not(row, parts)) for row in raw]
    kinds = Counter(str(row.fields["question_type"]) for row in raw)
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    placed = sum(reason.why == _UNGIVEN for reason in reasons)
    notes = (
        f"{path.name} has questions and no answers: {counted}. Nothing of it can be scored; "
        f"{placed} of {len(raw)} have a conversation in {_PERCEPTS}.",
        "The answers are in fantom_v1.json of the FANToM release.",
    )
    return Imported(rows=(), bad=(*bad, *reasons), notes=notes)


def _why_not(row: RawRow, parts: Mapping[str, str]) -> str:
    part = str(row.fields["set_id"]).rpartition("-")[0]
    return _UNGIVEN if part in parts else f"{_UNGIVEN}, nor the conversation '{part}'"


def conversations(path: Path) -> dict[str, str]:
    """Part → its utterances, one a line, from `Percept-FANToM.csv`; empty without the file."""
    if not path.is_file():
        return {}
    lines: dict[str, list[str]] = {}
    for row in read_rows(path)[0]:
        part, utterance = need(row, "part_id", "utterance")
        lines.setdefault(part, []).append(utterance)
    return {part: "\n".join(utterances) for part, utterances in lines.items()}
