"""Rows of `sim_math` and `sim_doc`: generated, or imported from SimulatorArena's annotations.

Generated rows hold JSON text under `raw`, as released files do: {"raw": "{...}", "index": 4}.
Annotations are `.json` lists; other data is read from files next to them:

    MATH/train, MATH/test                                problem and answer of removed lessons
    knowledge_state.json                                 how well the student knows each concept
    writing_style.json, interaction_style.json           target features; the profile
    document_creation_user_simulator_background.json     notes, and facts said later
    preferences.json                                     the writer's wishes for the document
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from soulkit.data.chats import ChatMessage, alternate, conversation
from soulkit.data.files import RawRow, read_json, unreadable_file
from soulkit.data.literals import structure
from soulkit.errors import RowError
from soulkit.tasks.kit.importing import BadRecord, Imported, import_records, need, without_blanks
from soulkit.tasks.kit.made_rows import FAMILY_NAMES, FIRST_NAMES, VOICES, Row, Voice
from soulkit.tasks.kit.prompting import Texts
from soulkit.types import Line

TEXTS = Texts(__file__)
_FEATURE_KEYS = ("Feature Name", "Feature Question", "Feature Question Answer")


# -- generated lessons ---------------------------------------------------------------------------

_Numbers = tuple[dict[str, Any], tuple[int, ...]]
"""(the values in a problem's text, the right answer of each step)."""


def _prices(rng: random.Random) -> _Numbers:
    many, price, more = rng.randint(3, 9), rng.randint(2, 12), rng.randint(2, 8)
    thing, wanted = rng.choice(TEXTS["things"]), many + more
    values = {"many": many, "thing": thing, "total": many * price, "wanted": wanted}
    return values, (price, price * wanted)


def _equation(rng: random.Random) -> _Numbers:
    factor, root, add = rng.randint(2, 9), rng.randint(2, 15), rng.randint(1, 20)
    return {"factor": factor, "add": add, "right": factor * root + add}, (factor * root, root)


def _rectangle(rng: random.Random) -> _Numbers:
    short, longer = rng.randint(2, 9), rng.randint(1, 9)
    half = 2 * short + longer
    return {"longer": longer, "fence": 2 * half}, (half, short, short * (short + longer))


def _choices(rng: random.Random) -> _Numbers:
    caps, scarves, gloves = (rng.randint(2, 7) for _ in range(3))
    values = {"caps": caps, "scarves": scarves, "gloves": gloves}
    return values, (caps * scarves, caps * scarves * gloves)


def _remainder(rng: random.Random) -> _Numbers:
    by, rest, times = rng.randint(5, 12), rng.randint(1, 4), rng.randint(7, 60)
    number, add = by * times + rest, rng.randint(3, 30)
    return {"number": number, "add": add, "by": by}, (rest, (rest + add) % by)


_PROBLEMS: tuple[tuple[str, Callable[[random.Random], _Numbers]], ...] = (
    ("prices", _prices), ("equation", _equation), ("rectangle", _rectangle),
    ("choices", _choices), ("remainder", _remainder),
)  # fmt: skip


def lesson_rows(n: int, seed: int) -> list[Row]:
    """`n` rows; row i depends only on (seed, i), so fewer rows are a prefix of more."""
    return [_lesson_row(i, seed) for i in range(n)]


def _lesson_row(i: int, seed: int) -> Row:
    rng = random.Random(f"sim_math/{seed}/{i}")
    name, draw_numbers = _PROBLEMS[i % len(_PROBLEMS)]
    problem, (values, answers) = TEXTS["problems"][name], draw_numbers(rng)
    voice, place, slips = rng.choice(VOICES), rng.choice(sorted(TEXTS["stuck"])), rng.random() < 0.5
    grade, student = (
        rng.choice(TEXTS["grades"]),
        f"{rng.choice(FIRST_NAMES)} {rng.choice(FAMILY_NAMES)}",
    )
    stuck = TEXTS["stuck"][place]
    steps = [(step.format(**values), answer)
             for step, answer in zip(problem["steps"], answers, strict=True)]  # fmt: skip
    messages, replies = _lesson_talk(stuck["opener"].format(**problem), steps, slips)
    messages = [voice.write(message) for message in messages]
    profile = [f"{student}, {grade}", f"This student {stuck['profile']}",
               f"{problem['topic'].capitalize()}: partly understood", f"This student {voice.trait}",
               "Makes a slip in the first step" if slips else "Computes carefully"]  # fmt: skip
    packed = {
        "id": f"sm{seed}-{i}",
        "problem": problem["text"].format(**values),
        "correct_answer": str(answers[-1]),
        "user_profile_text": "\n".join(f"- {line}" for line in profile),
        "human_user_queries": messages,
        "human_public_conversation": alternate(messages, replies),
        **_lesson_features(i, slips, place),
        "level": problem["level"],
        "subject": problem["subject"],
    }
    return {"raw": json.dumps(packed), "index": i}


def _lesson_talk(
    opener: str, steps: Sequence[tuple[str, int]], slips: bool
) -> tuple[list[str], list[str]]:
    messages, replies = [opener], [f"Let us go step by step. {steps[0][0]}"]
    for place, (_, right) in enumerate(steps):
        if slips and place == 0:
            messages += [f"I think it is {right + 1}.", f"Oh, I see my mistake. It is {right}."]
            replies.append(f"Not quite, look again. {steps[0][0]}")
        else:
            messages.append(f"I get {right}.")
        rest = steps[place + 1 :]
        replies.append(f"Right. {rest[0][0]}" if rest else "Yes, that is the answer.")
    return [*messages, "Thanks, now I understand it."], [*replies, "You are welcome."]


def _lesson_features(i: int, slips: bool, stuck: str) -> Row:
    """Target features: none, answered ones, or questions with one entry that says nothing."""
    entries = (
        ("Message Length", "How long are the messages?", "One or two short sentences."),
        ("Error Handling", "What happens after a mistake?",
         "Sees it and corrects it." if slips else "No mistake occurs."),
        ("Seeking Guidance", "What does the first message ask for?",
         "A hint." if stuck == "start" else "A place to begin."),
    )  # fmt: skip
    if i % 3 == 0:
        return {}
    shown = _FEATURE_KEYS[: 3 if i % 3 == 1 else 2]
    listed = [dict(zip(shown, entry, strict=False)) for entry in entries]
    empty = [{"Feature Name": "Topic Coherence", "Feature Question": ""}] if i % 3 == 2 else []
    return {"target_interaction_style_features": [*listed, *empty]}


# -- generated documents -------------------------------------------------------------------------


def document_rows(n: int, seed: int) -> list[Row]:
    """`n` rows; row i depends only on (seed, i), so fewer rows are a prefix of more."""
    return [_document_row(i, seed) for i in range(n)]


def _document_row(i: int, seed: int) -> Row:
    rng = random.Random(f"sim_doc/{seed}/{i}")
    plans = TEXTS["plans"]
    plan = plans[i % len(plans)]
    voice, tone = rng.choice(VOICES), rng.choice(TEXTS["tones"])
    intent = plan["intent"].format(x=rng.choice(TEXTS["where"][plan["kind"]]))
    writer = f"{rng.choice(FIRST_NAMES)} {rng.choice(FAMILY_NAMES)}"
    # By round, not by row: otherwise each kind of row would always have the same document type.
    full = (i // len(plans) + i) % 3
    notes = [(question, rng.choice(answers)) for question, answers in plan["notes"]]
    messages = [voice.write(text) for text in _writer_messages(intent, notes, tone)]
    packed = {
        "id": f"sd{seed}-{i}",
        "document_type": plan["kind"],
        "intent": f"{intent} It is by {writer}.",
        "human_user_queries": messages,
        "human_public_conversation": alternate(messages, _drafts(notes, tone)),
        **(_background(writer, notes, voice, tone) if full != 2 else {}),
        **(_document_features(voice, tone) if full == 0 else {}),
    }
    return {"raw": json.dumps(packed), "index": i}


def _writer_messages(intent: str, notes: list[tuple[str, str]], tone: str) -> list[str]:
    first, *rest = [answer for _, answer in notes]
    return [
        f"Hello, please help me with this: {intent[0].lower()}{intent[1:]} {first}",
        *rest,
        f"Could you make it {tone}, please.",
        "Thanks, I like it this way.",
    ]


def _drafts(notes: list[tuple[str, str]], tone: str) -> list[str]:
    drafts = []
    for count in range(1, len(notes) + 1):
        drafts.append("Here is a draft. " + " ".join(answer for _, answer in notes[:count]))
    return [*drafts, f"Here it is again, {tone}. {drafts[-1]}", "You are welcome."]


def _background(writer: str, notes: list[tuple[str, str]], voice: Voice, tone: str) -> Row:
    profile = (writer, f"This person {voice.trait}", "Tells things one message at a time")
    return {
        "pre_writing_materials_text": "\n".join(f"- {q}\n  {a}" for q, a in notes),
        "user_profile_text": "\n".join(f"- {line}" for line in profile),
        "target_document_preferences": f"- Tone: {tone} than a first draft\n- Uses all notes",
    }


def _document_features(voice: Voice, tone: str) -> Row:
    interaction = (
        ("Iterative and Incremental Refinement", "How does the document grow?",
         "By one more fact in every message."),
        ("Specificity and Goal Orientation in Feedback", "What does the user ask to change?",
         f"Only that it becomes {tone}."),
    )  # fmt: skip
    return {
        f"target_{style}_style_features": [
            dict(zip(_FEATURE_KEYS, e, strict=True)) for e in entries
        ]
        for style, entries in (("writing", voice.features), ("interaction", interaction))
    }


# -- imported ------------------------------------------------------------------------------------

Table = Mapping[str, Any]
"""Key of a record → its entry in a file next to the annotations; empty without the file."""

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
_TALK = ("user_queries", "ai_responses")


def import_lessons(path: Path) -> Imported:
    """Rows of the file of math lessons."""
    names = ("knowledge", "writing", "interaction")
    tables = {name: _table(path, "math_tutoring", name) for name in names}
    make = partial(_lesson, tables=tables, math=path.parent / MATH_FOLDER)
    return _imported(path, ("problem_id", *_TALK), make, tables)


def import_documents(path: Path) -> Imported:
    """Rows of the file of documents."""
    names = ("background", "preferences", "writing", "interaction")
    tables = {name: _table(path, "document_creation", name) for name in names}
    return _imported(path, ("document_type", "intent", *_TALK), partial(_document, tables=tables),
                     tables)  # fmt: skip


def _imported(
    path: Path, columns: Sequence[str], make: Callable[[RawRow], Row], tables: Mapping[str, Table]
) -> Imported:
    absent = [_FILES[name][0] for name, table in tables.items() if not table]
    notes = [f"Files not found next to it, so their data is missing: {', '.join(absent)}."]
    return import_records(
        path, lambda record, index: make(record), fields=columns,
        way_out="Give a SimulatorArena annotation file.", licence=LICENCE,
        notes=lambda rows, bad: notes if absent else (),
    )  # fmt: skip


def _table(path: Path, kind: str, name: str) -> Table:
    """The object in the first file of that name; empty without a file. DataError if unreadable."""
    folders = (path.parent / _PROFILES / kind, path.parent)
    places = (folder / file for folder in folders for file in _FILES[name])
    file_path = next((place for place in places if place.is_file()), None)
    if file_path is None:
        return {}
    value = read_json(file_path)
    if not isinstance(value, Mapping):
        raise unreadable_file(file_path, "it is not a JSON object")
    return value


# -- the conversation ----------------------------------------------------------------------------


def _recorded_talk(record: RawRow, turns: int | None = None) -> tuple[list[str], list[ChatMessage]]:
    """(the user's messages, the conversation), limited to its first `turns` rounds."""
    queries, replies = (record.fields.get(name) for name in _TALK)
    if not isinstance(queries, list) or not isinstance(replies, list) or not queries:
        raise BadRecord("it has no conversation")
    if len(replies) not in (len(queries), len(queries) - 1):
        raise BadRecord(f"its {len(queries)} messages and {len(replies)} replies do not alternate")
    queries, replies = queries[:turns], replies[:turns]
    for role, texts in (("user", queries), ("assistant", replies)):
        odd = next((n for n, text in enumerate(texts, 1) if not isinstance(text, str)), None)
        if odd is not None:
            raise BadRecord(f"message {odd} of its {role} is not text (an upload, or a lost reply)")
    return list(queries), without_blanks(alternate(queries, replies))


# -- lessons -------------------------------------------------------------------------------------


def _lesson(record: RawRow, tables: Mapping[str, Table], math: Path) -> Row:
    turns = record.fields.get("problem_1_turns")
    first = turns if isinstance(turns, int) and turns > 0 else None
    queries, messages = _recorded_talk(record, first)
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
    """The key of a lesson in the profile files, by worker or by user id."""
    names = [fields.get("workerId"), fields.get("user_id")]
    keys = [str((fields.get("problem_id"), name, fields.get("model"))) for name in names]
    return next((key for key in keys if key in knowledge), keys[0])


def _problem(record: RawRow, math: Path) -> tuple[str, str | None]:
    """(problem, answer) from the record itself or from MATH; BadRecord if neither has them."""
    fields = record.fields
    if str(fields.get("question") or "").strip():
        answer = str(fields.get("problem_1_gold_final_answer") or "").strip()
        return str(fields["question"]).strip(), answer or boxed(fields.get("solution"))
    place = str(fields.get("question_location") or "")
    file = math / place
    if not place or not os.path.isfile(file):  # also False for a name that is too long
        raise BadRecord(
            "its problem was removed by the publisher; put the MATH data set into a folder "
            f"'{MATH_FOLDER}' next to the file, so that it holds '{place or 'the problem':.200}'"
        )
    if not file.resolve().is_relative_to(math.resolve()):
        raise BadRecord(f"its problem '{place}' is outside of {MATH_FOLDER}")
    held = read_json(file)
    problem = str(held.get("problem") or "").strip() if isinstance(held, Mapping) else ""
    if not problem:
        raise BadRecord(f"'{place}' in {MATH_FOLDER} contains no problem")
    return problem, boxed(held.get("solution"))


def boxed(solution: Any) -> str | None:
    r"""The content of the last `\boxed{...}` in a solution; None if there is none."""
    _, mark, tail = str(solution or "").rpartition("\\boxed{")
    depth = 1
    for end, sign in enumerate(tail if mark else ""):
        escaped = end > 0 and tail[end - 1] == "\\"
        depth += 0 if escaped else {"{": 1, "}": -1}.get(sign, 0)
        if depth == 0:
            return tail[:end].strip() or None
    return None


def _student(fields: Row, knowledge: Any) -> list[str]:
    school = TEXTS["schooling"].get(str(fields.get("math_expertise")))
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
    queries, messages = _recorded_talk(record)
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
    """Questions and answers from the background file, or from the record itself."""
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
    """`writing` and `interaction` → features of one record, for the files that have them."""
    listed = {name: _listed(tables[name].get(key)) for name in ("writing", "interaction")}
    return {name: features for name, features in listed.items() if features}


def _style_lines(styles: Mapping[str, list[Row]]) -> list[str]:
    return [
        line
        for features in styles.values()
        for line in _answered(features, "Feature Name", "Feature Question Answer")
    ]


def _answered(items: Any, name: str, answer: str) -> list[str]:
    return [
        f"{item[name]}: {item[answer]}"
        for item in _listed(items)
        if isinstance(item, Mapping) and item.get(name) and item.get(answer)
    ]


# -- reading rows ----------------------------------------------------------------------------------

NAME, ANSWER, QUESTION = "Feature Name", "Feature Question Answer", "Feature Question"
WRITING, INTERACTION = "target_writing_style_features", "target_interaction_style_features"
FEATURES = (WRITING, INTERACTION)


@dataclass(frozen=True, slots=True)
class Target:
    """A feature that the simulated person should show."""

    label: str
    """Its name; numbered if another feature of the row has the same name."""
    text: str
    """Its answer, or else its question."""
    column: str
    """WRITING or INTERACTION."""


def read_arena_row(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The parsed fields of a row, normalised. DataError if there is nothing to compare with.

    `features` says whether the row has target features.
    """
    lists = {name: features(fields[name], name) for name in FEATURES if name in fields}
    return {
        **fields,
        **lists,
        "human_user_queries": _queries(fields["human_user_queries"]),
        "human_public_conversation": _talk(fields["human_public_conversation"]),
        "features": "with" if any(lists.values()) else "without",
    }


def features(value: Any, column: str) -> list[dict[str, str]] | None:
    """The non-empty features, in order; None if there are none. DataError unless the value is a
    list."""
    if value is None or value == "":
        return None
    items = structure(value)
    if not isinstance(items, list | tuple):
        what = f"row: '{column}' should hold a list of objects."
        raise RowError(what, f"It holds {type(items).__name__} {items!r:.60}.")
    return [feature for item in items if (feature := _feature(item))] or None


def _feature(item: Any) -> dict[str, str]:
    if not isinstance(item, Mapping):
        return {}
    texts = {k: str(item[k]).strip() for k in (NAME, ANSWER, QUESTION) if item.get(k) is not None}
    feature = {k: text for k, text in texts.items() if text}
    return feature if NAME in feature and len(feature) > 1 else {}


def targets(fields: Mapping[str, Any]) -> tuple[Target, ...]:
    """The target features of a row, writing features first, each with a unique label."""
    listed: list[Target] = []
    for column in FEATURES:
        for feature in fields.get(column) or ():
            label = _free_label(feature[NAME], {target.label for target in listed})
            listed.append(Target(label, feature.get(ANSWER) or feature[QUESTION], column))
    return tuple(listed)


def _free_label(name: str, taken: Iterable[str]) -> str:
    """`name` on one line, numbered if the label is already in use."""
    label, number, used = " ".join(name.split()), 1, {other.casefold() for other in taken}
    free = label
    while free.casefold() in used:
        number += 1
        free = f"{label} ({number})"
    return free


def human_lines(fields: Mapping[str, Any], actor: str, partner: str) -> list[Line]:
    """The recorded conversation as lines of the two seats; empty if the record is a single text."""
    recorded = fields["human_public_conversation"]
    if isinstance(recorded, str):
        return []
    seats = {"user": actor, "assistant": partner}
    return [Line(seats[m["role"]], m["content"]) for m in recorded if m["role"] in seats]


def human_messages(fields: Mapping[str, Any]) -> list[str]:
    """The person's non-blank messages."""
    return [text for text in fields["human_user_queries"] if text.strip()]


def _queries(value: Any) -> list[str]:
    messages = [value] if isinstance(value, str) else value
    if not isinstance(messages, list | tuple) or not all(
        isinstance(message, str) for message in messages
    ):
        what = "row: 'human_user_queries' should hold the person's messages."
        raise RowError(what, f"It holds {type(value).__name__} {value!r:.60}.")
    if not any(message.strip() for message in messages):
        what = "row: 'human_user_queries' has no text."
        raise RowError(what, "There is no human text to compare the simulated person with.")
    return list(messages)


def _talk(value: Any) -> Any:
    """The conversation as messages; a transcript in one text stays unchanged."""
    if isinstance(value, str) and value.strip():
        return value.strip()
    return conversation(value, "human_public_conversation")
