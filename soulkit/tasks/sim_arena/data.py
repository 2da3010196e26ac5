"""Rows of `sim_math` and `sim_doc`: made here, or imported from SimulatorArena's annotations.

Made rows hold JSON text under `raw`, as released files do. `lesson_rows`: invented students, each
stuck on one problem whose answer is computed; without target features, with answered ones, and with
some that only ask (and one that says nothing, which a reader has to leave out) in turn.
`document_rows`: invented writers who make an e-mail, a blog post or a story with an assistant; with
all that a row can carry, without target features, and with the bare minimum in turn. The profile
tells what the recorded messages show: how the person writes, how far they get alone.

    {"raw": "{\\"problem\\": \\"A pen costs 3 coins ...\\", \\"correct_answer\\": \\"12\\",
    \\"user_profile_text\\": \\"- School: grade 8 ...\\", \\"human_user_queries\\": [...],
    \\"human_public_conversation\\": [...]}", "index": 4}

Imported: both files are `.json` lists with `user_queries` and `ai_responses`. What else a row needs
stands in files of the same repository, looked for beside the annotations under the names of the
release (the profiles also in its folder `user_simulator_profiles/`):

| what | file | gives |
|---|---|---|
| MATH | folder `MATH` with `train/` and `test/` | `problem`, `correct_answer` of redacted lessons |
| knowledge | `knowledge_state.json` | how well the student knows each concept |
| styles | `writing_style.json`, `interaction_style.json` | target features; the profile |
| background | `document_creation_user_simulator_background.json` | notes, and facts said later |
| preferences | `preferences.json` | what the writer wants of the document |

Styles are not part of the repository; without them a row has no target features. The publisher
removed the problems of the lessons for their copyright: without `MATH`, or a file restored with it,
every lesson is a bad row. A lesson goes on with a second, similar problem; a row holds the first,
`problem_1_turns` messages long.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from soulkit.data.chats import ChatMessage, alternate, blank_message
from soulkit.data.files import RawRow, parse_row_json, read_bytes, unreadable_file
from soulkit.tasks.kit.importing import BadRecord, Imported, need, records_with, rows_of_records
from soulkit.tasks.kit.made_rows import FAMILY_NAMES, FIRST_NAMES, VOICES, Feature, Row, Voice
from soulkit.tasks.kit.prompting import Texts

GRADES = ("grade 6", "grade 7", "grade 8", "grade 9", "grade 10", "evening school")
_THINGS = ("pens", "ferry tickets", "bolts", "postcards", "lemons", "tram tickets")


@dataclass(frozen=True, slots=True)
class _Problem:
    """A problem with its steps; a step is what the tutor asks and the right short answer."""

    subject: str
    level: str
    text: str
    topic: str
    steps: tuple[tuple[str, str], ...]

    @property
    def answer(self) -> str:
        return self.steps[-1][1]


def _prices(rng: random.Random) -> _Problem:
    many, price, more = rng.randint(3, 9), rng.randint(2, 12), rng.randint(2, 8)
    thing, total = rng.choice(_THINGS), many * price
    text = (f"{many} {thing} cost {total} coins in all. How many coins do {many + more} {thing} "
            "cost at the same price?")  # fmt: skip
    return _Problem("Prealgebra", "Level 2", text, "unit prices", (
        (f"What does one of the {thing} cost?", str(price)),
        ("Now multiply by the new number. What do you get?", str(price * (many + more))),
    ))  # fmt: skip


def _equation(rng: random.Random) -> _Problem:
    factor, root, add = rng.randint(2, 9), rng.randint(2, 15), rng.randint(1, 20)
    right = factor * root + add
    text = f"Find x if {factor}x + {add} = {right}."
    return _Problem("Algebra", "Level 3", text, "linear equations", (
        (f"What is {right} minus {add}?", str(right - add)),
        (f"Which number times {factor} gives that?", str(root)),
    ))  # fmt: skip


def _rectangle(rng: random.Random) -> _Problem:
    short, longer = rng.randint(2, 9), rng.randint(1, 9)
    long = short + longer
    text = (f"A garden is {longer} metres longer than it is wide. Its fence is "
            f"{2 * (short + long)} metres long. What is its area in square metres?")  # fmt: skip
    return _Problem("Geometry", "Level 4", text, "perimeter and area", (
        ("Length and width together make half of the fence. How much is that?", str(short + long)),
        (f"They differ by {longer}. How wide is the garden?", str(short)),
        ("So what is width times length?", str(short * long)),
    ))  # fmt: skip


def _choices(rng: random.Random) -> _Problem:
    caps, scarves, gloves = (rng.randint(2, 7) for _ in range(3))
    text = (f"Mira owns {caps} caps, {scarves} scarves and {gloves} pairs of gloves. In how many "
            "ways can she wear one of each?")  # fmt: skip
    return _Problem("Counting & Probability", "Level 3", text, "counting by multiplying", (
        ("How many ways are there for cap and scarf alone?", str(caps * scarves)),
        ("And with the gloves?", str(caps * scarves * gloves)),
    ))  # fmt: skip


def _remainder(rng: random.Random) -> _Problem:
    by, rest, times = rng.randint(5, 12), rng.randint(1, 4), rng.randint(7, 60)
    number, add = by * times + rest, rng.randint(3, 30)
    text = f"What is the remainder when {number} + {add} is divided by {by}?"
    return _Problem("Number Theory", "Level 4", text, "remainders", (
        (f"What remains of {number} when it is divided by {by}?", str(rest)),
        (f"Add {add} to that and divide by {by}. What remains?", str((rest + add) % by)),
    ))  # fmt: skip


PROBLEMS: tuple[Callable[[random.Random], _Problem], ...] = (
    _prices, _equation, _rectangle, _choices, _remainder,
)  # fmt: skip
_OPENERS = {
    "lost": "I do not understand this problem at all. Where do I begin?",
    "start": "I understand the question but do not know how to start. Can you give me a hint?",
    "method": "Is this about {topic}? I am not sure which step comes first.",
}
STUCK = {
    "lost": "is lost and does not see what the problem asks",
    "start": "understands the question and does not know where to start",
    "method": "guesses the right method and doubts it",
}


def lesson_rows(n: int, seed: int) -> list[Row]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_lesson_row(i, seed) for i in range(n)]


def _lesson_row(i: int, seed: int) -> Row:
    rng = random.Random(f"sim_math/{seed}/{i}")
    problem = PROBLEMS[i % len(PROBLEMS)](rng)
    voice, stuck, slips = rng.choice(VOICES), rng.choice(sorted(STUCK)), rng.random() < 0.5
    grade, who = rng.choice(GRADES), f"{rng.choice(FIRST_NAMES)} {rng.choice(FAMILY_NAMES)}"
    messages, replies = _lesson_messages(problem, voice, stuck, slips)
    profile = [f"{who}, {grade}", f"This student {STUCK[stuck]}",
               f"{problem.topic.capitalize()}: partly understood", f"This student {voice.trait}",
               "Makes a slip in the first step" if slips else "Computes carefully"]  # fmt: skip
    packed = {
        "id": f"sm{seed}-{i}",
        "problem": problem.text,
        "correct_answer": problem.answer,
        "user_profile_text": "\n".join(f"- {line}" for line in profile),
        "human_user_queries": messages,
        "human_public_conversation": alternate(messages, replies),
        **_lesson_features(i, slips, stuck),
        "level": problem.level,
        "subject": problem.subject,
    }
    return {"raw": json.dumps(packed), "index": i}


def _lesson_messages(
    problem: _Problem, voice: Voice, stuck: str, slips: bool
) -> tuple[list[str], list[str]]:
    """What the student says and what the tutor replies; the student thanks at the end."""
    messages = [voice.write(_OPENERS[stuck].format(topic=problem.topic))]
    replies = [f"Let us go step by step. {problem.steps[0][0]}"]
    for place, (_, right) in enumerate(problem.steps):
        if slips and place == 0:
            messages.append(voice.write(f"I think it is {int(right) + 1}."))
            replies.append(f"Not quite, look again. {problem.steps[0][0]}")
            messages.append(voice.write(f"Oh, I see my mistake. It is {right}."))
        else:
            messages.append(voice.write(f"I get {right}."))
        rest = problem.steps[place + 1 :]
        replies.append(f"Right. {rest[0][0]}" if rest else "Yes, that is the answer.")
    return [*messages, voice.write("Thanks, now I understand it.")], [*replies, "You are welcome."]


def _lesson_features(i: int, slips: bool, stuck: str) -> Row:
    """Target features: none, answered, or asked only with one entry that says nothing."""
    entries = (
        ("Message Length", "How long are the messages?", "One or two short sentences."),
        ("Error Handling", "What happens after a mistake?",
         "Sees it and corrects it." if slips else "No mistake occurs."),
        ("Seeking Guidance", "What does the first message ask for?",
         "A hint." if stuck == "start" else "A place to begin."),
    )  # fmt: skip
    if i % 3 == 0:
        return {}
    listed = [
        {"Feature Name": name, "Feature Question": question,
         **({"Feature Question Answer": answer} if i % 3 == 1 else {})}
        for name, question, answer in entries
    ]  # fmt: skip
    empty = [{"Feature Name": "Topic Coherence", "Feature Question": ""}] if i % 3 == 2 else []
    return {"target_interaction_style_features": [*listed, *empty]}


@dataclass(frozen=True, slots=True)
class Commission:
    """A kind of document: what it is for, and what its writer has to say, question by question."""

    kind: str
    intent: str
    """With a place for where it plays, or whom it is for."""
    notes: tuple[tuple[str, tuple[str, ...]], ...]
    """(question, possible answers); an answer is a sentence."""


TEXTS = Texts(__file__)

TONES = ("warmer", "shorter", "more formal", "funnier", "simpler")


@cache
def commissions() -> tuple[Commission, ...]:
    return tuple(Commission(**item) for item in TEXTS["plans"])


def document_rows(n: int, seed: int) -> list[Row]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_document_row(i, seed) for i in range(n)]


def _document_row(i: int, seed: int) -> Row:
    rng = random.Random(f"sim_doc/{seed}/{i}")
    commission = commissions()[i % len(commissions())]
    voice, tone = rng.choice(VOICES), rng.choice(TONES)
    intent = commission.intent.format(x=rng.choice(TEXTS["where"][commission.kind]))
    who = f"{rng.choice(FIRST_NAMES)} {rng.choice(FAMILY_NAMES)}"
    # By the round, not by the row: else a kind of row would always be the same kind of document.
    full = (i // len(commissions()) + i) % 3
    notes = [(question, rng.choice(answers)) for question, answers in commission.notes]
    messages = [voice.write(text) for text in _writer_messages(intent, notes, tone)]
    packed = {
        "id": f"sd{seed}-{i}",
        "document_type": commission.kind,
        "intent": f"{intent} It is by {who}.",
        "human_user_queries": messages,
        "human_public_conversation": alternate(messages, _drafts(notes, tone)),
        **(_background(who, notes, voice, tone) if full != 2 else {}),
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


def _background(who: str, notes: list[tuple[str, str]], voice: Voice, tone: str) -> Row:
    """What the writer has in mind, who they are, and what they like."""
    profile = (who, f"This person {voice.trait}", "Tells things one message at a time")
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
        "target_writing_style_features": [_feature_entry(one) for one in voice.features],
        "target_interaction_style_features": [_feature_entry(one) for one in interaction],
    }


def _feature_entry(one: Feature) -> dict[str, str]:
    return dict(
        zip(("Feature Name", "Feature Question", "Feature Question Answer"), one, strict=True)
    )


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
    raw, bad = records_with(path, columns, "Give a file of annotations of SimulatorArena.")
    rows = rows_of_records(raw, bad, lambda record, index: {**make(record), "index": index})
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
        raise unreadable_file(file_path, "it is no JSON object")
    return value


def _json(path: Path) -> Any:
    try:
        return parse_row_json(read_bytes(path).decode("utf-8-sig"))
    except ValueError as error:
        raise unreadable_file(path, f"not JSON: {error}") from error


# -- the conversation ----------------------------------------------------------------------------


def _recorded_talk(record: RawRow, turns: int | None = None) -> tuple[list[str], list[ChatMessage]]:
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
