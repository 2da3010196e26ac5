"""SimulatorArena's annotations: recorded lessons and recorded work on documents.

Both are `.json` lists with `user_queries` and `ai_responses`. What else a row needs stands in files
of the same repository, looked for beside the annotations under the names of the release (the
profiles also in its folder `user_simulator_profiles/`):

| what | file | gives |
|---|---|---|
| MATH | folder `MATH` with `train/` and `test/` | `problem`, `correct_answer` of redacted lessons |
| knowledge | `knowledge_state.json` | how well the student knows each concept |
| styles | `writing_style.json`, `interaction_style.json` | target features; the profile |
| background | `document_creation_user_simulator_background.json` | notes, and facts said later |
| preferences | `preferences.json` | what the writer wants of the document |

Styles are not part of the repository; without them a row has no target features. The publisher
removed the problems of the lessons for their copyright: without `MATH`, or a file restored with it,
every lesson is a bad row, because nothing else says what was asked. A lesson goes on with a second,
similar problem; a row holds the first, `problem_1_turns` messages long.

Example of a lesson: {"problem_id": 4, "question_location": "test/algebra/7.json", "math_expertise":
"9-12", "why_ask_tutor": "I've written some steps, but now I'm stuck", "user_queries": ["i got 3?"],
"ai_responses": ["Check the sign."], "problem_1_turns": 1, "workerId": "w1", "model": "m"}.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from soulkit.data.files import RawRow, parse_row_json, read_bytes, unreadable
from soulkit.data.turns import ChatMessage, alternate, blank_message
from soulkit.tasks.importing import BadRecord, Imported, need, of_shape, rows_from
from soulkit.tasks.made import Row

Table = Mapping[str, Any]
"""Key of a record → what a file beside the annotations says of it; empty without the file."""

LICENCE = "MIT (SimulatorArena)"
MATH_LICENCE = "MIT (SimulatorArena); the problem is MATH's, whose terms are its own"
MATH_FOLDER = "MATH"
_FILES = {
    "knowledge": ("knowledge_state.json", "knowledge_state_sample.json"),
    "writing": ("writing_style.json",),
    "interaction": ("interaction_style.json",),
    "preferences": ("preferences.json", "preferences_sample.json"),
    "background": ("document_creation_user_simulator_background.json",
                   "document_background_sample.json"),
}  # fmt: skip
_PROFILES = "user_simulator_profiles"
_SCHOOL = {
    "k-5": "elementary school",
    "6-8": "middle school",
    "9-12": "high school",
    "undergrad": "university, undergraduate",
    "grad": "university, graduate",
    "research": "does research",
}
_TALK = ("user_queries", "ai_responses")


def import_lessons(path: Path) -> Imported:
    """Rows of the file of mathematics lessons."""
    names = ("knowledge", "writing", "interaction")
    tables = {name: _table(path, "math_tutoring", name) for name in names}
    make = partial(_lesson, tables=tables, math=path.parent / MATH_FOLDER)
    return _imported(path, ("problem_id", *_TALK), make, tables)


def import_documents(path: Path) -> Imported:
    """Rows of the file of document creation."""
    names = ("background", "preferences", "writing", "interaction")
    tables = {name: _table(path, "document_creation", name) for name in names}
    return _imported(path, ("document_type", "intent", *_TALK), partial(_document, tables=tables),
                     tables)  # fmt: skip


def _imported(
    path: Path, columns: Sequence[str], make: Callable[[RawRow], Row], tables: Mapping[str, Table]
) -> Imported:
    raw, bad = of_shape(path, columns, "Give a file of annotations of SimulatorArena.")
    rows = rows_from(raw, bad, lambda record, index: {**make(record), "index": index})
    absent = [_FILES[name][0] for name, table in tables.items() if not table]
    notes = (f"Not found beside it, and so not part of the rows: {', '.join(absent)}.",)
    return Imported(rows=tuple(rows), bad=tuple(bad), notes=notes if absent else ())


def _table(path: Path, kind: str, name: str) -> Table:
    """The object in the first file of that name, empty when there is none; DataError if broken."""
    folders = (path.parent / _PROFILES / kind, path.parent)
    places = (folder / file for folder in folders for file in _FILES[name])
    file_path = next((place for place in places if place.is_file()), None)
    if file_path is None:
        return {}
    value = _json(file_path)
    if not isinstance(value, Mapping):
        raise unreadable(file_path, "it is no JSON object")
    return value


def _json(path: Path) -> Any:
    try:
        return parse_row_json(read_bytes(path).decode("utf-8-sig"))
    except ValueError as error:
        raise unreadable(path, f"not JSON: {error}") from error


# -- the conversation ----------------------------------------------------------------------------


def _talk(record: RawRow, turns: int | None = None) -> tuple[list[str], list[ChatMessage]]:
    """(what the user said, the conversation), its first `turns` rounds."""
    queries, replies = (record.fields.get(name) for name in _TALK)
    if not isinstance(queries, list) or not isinstance(replies, list) or not queries:
        raise BadRecord("it holds no conversation")
    if len(replies) not in (len(queries), len(queries) - 1):
        raise BadRecord(f"its {len(queries)} messages and {len(replies)} replies do not alternate")
    queries, replies = queries[:turns], replies[:turns]
    for who, texts in (("user", queries), ("assistant", replies)):
        odd = next((n for n, text in enumerate(texts, 1) if not isinstance(text, str)), None)
        if odd is not None:
            raise BadRecord(f"message {odd} of its {who} is no text (an upload, or a lost reply)")
    messages = alternate(queries, replies)
    place = blank_message(messages)
    if place is not None:
        raise BadRecord(f"message {place} of its conversation ({messages[place - 1]['role']}) is "
                        "blank")  # fmt: skip
    return list(queries), messages


# -- lessons -------------------------------------------------------------------------------------


def _lesson(record: RawRow, tables: Mapping[str, Table], math: Path) -> Row:
    turns = record.fields.get("problem_1_turns")
    first = turns if isinstance(turns, int) and turns > 0 else None
    queries, messages = _talk(record, first)
    problem, answer = _problem(record, math)
    fields, key = record.fields, _lesson_key(record.fields, tables["knowledge"])
    styles = _styles(tables, key)
    profile = [*_student(fields, tables["knowledge"].get(key)), *_style_lines(styles)]
    return {
        "problem": problem,
        "correct_answer": answer,
        "user_profile_text": "\n".join(f"- {line}" for line in profile) or None,
        "human_user_queries": queries,
        "human_public_conversation": messages,
        "target_interaction_style_features": styles.get("interaction"),
        "level": fields.get("level"),
        "subject": fields.get("type"),
        "id": f"{fields.get('problem_id')}/{fields.get('workerId')}/{fields.get('model')}",
        "provenance": f"SimulatorArena, {record.source}",
        "licence": MATH_LICENCE,
    }


def _lesson_key(fields: Row, knowledge: Table) -> str:
    """The key of a lesson in the files of profiles: worker or user, whichever they go by."""
    names = [fields.get("workerId"), fields.get("user_id")]
    keys = [str((fields.get("problem_id"), name, fields.get("model"))) for name in names]
    return next((key for key in keys if key in knowledge), keys[0])


def _problem(record: RawRow, math: Path) -> tuple[str, str | None]:
    """(problem, answer) from a restored record, else from MATH; BadRecord without either."""
    fields = record.fields
    if str(fields.get("question") or "").strip():
        answer = str(fields.get("problem_1_gold_final_answer") or "").strip()
        return str(fields["question"]).strip(), answer or boxed(fields.get("solution"))
    place = str(fields.get("question_location") or "")
    file = math / place
    if not place or not file.is_file():
        raise BadRecord(
            "its problem was removed by the publisher; put the MATH data set into a folder "
            f"'{MATH_FOLDER}' beside the file, so that it holds '{place or 'the problem'}'"
        )
    if not file.resolve().is_relative_to(math.resolve()):
        raise BadRecord(f"its problem '{place}' lies outside of {MATH_FOLDER}")
    held = _json(file)
    problem = str(held.get("problem") or "").strip() if isinstance(held, Mapping) else ""
    if not problem:
        raise BadRecord(f"'{place}' of {MATH_FOLDER} holds no problem")
    return problem, boxed(held.get("solution"))


def boxed(solution: Any) -> str | None:
    r"""What stands in the last `\boxed{...}` of a solution, None without one."""
    _, mark, tail = str(solution or "").rpartition("\\boxed{")
    depth = 1
    for end, sign in enumerate(tail if mark else ""):
        escaped = end > 0 and tail[end - 1] == "\\"
        depth += 0 if escaped else {"{": 1, "}": -1}.get(sign, 0)
        if depth == 0:
            return tail[:end].strip() or None
    return None


def _student(fields: Row, knowledge: Any) -> list[str]:
    """Lines on schooling, on where the student is stuck, and on what they know."""
    school = _SCHOOL.get(str(fields.get("math_expertise")))
    lines = [f"Schooling: {school}"] if school else []
    why = str(fields.get("why_ask_tutor") or "").strip()
    lines += [f"Says of the problem: “{why}”"] if why else []
    concepts = knowledge.get("concepts") if isinstance(knowledge, Mapping) else None
    return lines + [
        f"{concept['Concept Name']}: {str(concept['Status']).lower()}"
        for concept in _listed(concepts)
        if isinstance(concept, Mapping) and concept.get("Concept Name") and concept.get("Status")
    ]


# -- documents -----------------------------------------------------------------------------------


def _document(record: RawRow, tables: Mapping[str, Table]) -> Row:
    kind, intent = need(record, "document_type", "intent")
    queries, messages = _talk(record)
    fields = record.fields
    key = f"{fields.get('model')}_{fields.get('workerId')}_{kind}_{intent}"
    styles = _styles(tables, key)
    profile = _style_lines(styles)
    liked = _answered(
        tables["preferences"].get(key), "Preference Name", "Preference Question Answer"
    )
    return {
        "document_type": kind.strip(),
        "intent": intent.strip(),
        "pre_writing_materials_text": _notes_of(fields, tables["background"].get(key)),
        "user_profile_text": "\n".join(f"- {line}" for line in profile) or None,
        "human_user_queries": queries,
        "human_public_conversation": messages,
        "target_writing_style_features": styles.get("writing"),
        "target_interaction_style_features": styles.get("interaction"),
        "target_document_preferences": "\n".join(f"- {line}" for line in liked) or None,
        "id": key,
        "provenance": f"SimulatorArena, {record.source}",
        "licence": LICENCE,
    }


def _notes_of(fields: Row, background: Any) -> str | None:
    """Questions and answers from the background file, else those in the record itself."""
    questions, answers = (_listed(fields.get(f"bullet_points{end}")) for end in ("", "_responses"))
    pairs = [
        (item.get("question"), item.get("answer"))
        for item in _listed(background)
        if isinstance(item, Mapping)
    ] or list(zip(questions, answers, strict=False))
    notes = [(str(question).strip(), _joined(answer)) for question, answer in pairs]
    return "\n".join(f"- {question}\n  {answer}" for question, answer in notes if answer) or None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _joined(answer: Any) -> str:
    parts = answer if isinstance(answer, list) else [answer]
    return " ".join(str(part).strip() for part in parts if part is not None).strip()


# -- styles --------------------------------------------------------------------------------------


def _styles(tables: Mapping[str, Table], key: str) -> dict[str, list[Row]]:
    """`writing` and `interaction` → the features of one record, where a file tells them."""
    listed = {name: tables[name].get(key) for name in ("writing", "interaction")}
    return {
        name: list(features)
        for name, features in listed.items()
        if isinstance(features, list) and features
    }


def _style_lines(styles: Mapping[str, list[Row]]) -> list[str]:
    return [
        line
        for features in styles.values()
        for line in _answered(features, "Feature Name", "Feature Question Answer")
    ]


def _answered(items: Any, name: str, answer: str) -> list[str]:
    """`name: answer` of every item that has both."""
    return [
        f"{item[name]}: {item[answer]}"
        for item in _listed(items)
        if isinstance(item, Mapping) and item.get(name) and item.get(answer)
    ]
