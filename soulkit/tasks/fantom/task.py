"""FANToM: who knows what in a conversation that people leave and rejoin.

{"context": "Ada: Excuse me, the phone. ...", "question_type": "tom:info_accessibility:binary",
"complete_question": "Does Ada know what Ben cooked? Answer yes or no.", "correct_answer": "no",
"missed_info_accessibility": "inaccessible", "set_id": "0-0-0"}

The type determines how an answer is parsed and scored: a letter, names, yes or no, or a sentence
(F1 of its words). The headline is the accuracy over all questions without sentence answers. ALL
requires every letter, list and yes-or-no question of a set, ALL* also the free beliefs. The
symbolic coach says where to look ("utterance 7"), never who was there.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from soulkit.data.literals import parse_candidates
from soulkit.errors import RowError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import has_word, named_options, plain, tagged_letter, tagged_text
from soulkit.metrics.text import answer_words, token_f1
from soulkit.runs.records import drafts
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.kit.scoring import mean_of
from soulkit.types import BatchMetric, Completion, Episode, Example, Kind, Record, Score, Segment

TEXTS = Texts(__file__)
AnswerForm = Literal["choice", "names", "yes_no", "fact", "belief"]
"""The form of an answer: a letter, a list of names, yes or no, a sentence (two kinds)."""

STRICT: tuple[AnswerForm, ...] = ("choice", "names", "yes_no")
FREE: tuple[AnswerForm, ...] = ("fact", "belief")
"""Forms that are right or wrong, and forms whose words are compared."""
NOBODY = "nobody"
NO_CHOICE = "none of these rows has a choice question"
"""Why there is no headline: letters, lists, and yes or no are choices, sentences are not."""
_SIZES = ("set_size", "set_beliefs")
MARKS = "[]'\" \t\r\n"
_OPTION = re.compile(r"^\s*\(([a-z])\)\s*(.*\S)", re.MULTILINE)
_TYPE = re.compile(
    r"fact(?::.+)?|tom:belief:(?:in)?accessible(?::multiple-choice)?"
    r"|tom:(?:answerability|info_accessibility):(?:list|binary)"
)
"""The benchmark's question types."""
ASSENT, DENIAL = ("yes", "true"), ("no", "false")
_HEDGES = ("not", "never", "nobody", "none", "unsure", "maybe", "perhaps", "or")
_LEADING = re.compile(r"\W*(?:yes|no|true|false)\W*(?:[^\w\s]|\n)", re.IGNORECASE)
_NOT_KNOWING = re.compile(r"\b(?:does not|doesn t|did not|didn t) know\b")
_NAME_WORDS = 3
_STEM = 4
_FEW = 6
_COMMON = ("about", "does", "know", "that", "their", "there", "they", "this", "unaware", "were",
           "with")  # fmt: skip


def answer_form(question_type: str, *, free: bool = True) -> AnswerForm | None:
    """The form of answer for a question type; None for an unknown type.

    `free`: whether beliefs may be asked without options; then only the benchmark's own types are
    known.
    """
    if free and not _TYPE.fullmatch(question_type):
        return None
    belief = question_type.startswith("tom:belief:")
    if belief and question_type.endswith(":multiple-choice"):
        return "choice"
    if question_type.endswith(":list"):
        return "names"
    if question_type.endswith(":binary"):
        return "yes_no"
    if question_type.startswith("fact"):
        return "fact"
    return "belief" if belief and free else None


def advice_on(fields: Mapping[str, Any], score: Score | None) -> str:
    """One to four sentences of feedback on a draft with this score; None: there is no draft yet.

    `fields` needs `form`, and `events` and `tom_type` if the row has them; the gold is not used.
    """
    form, advice = str(fields["form"]), TEXTS["advice"]
    nested = str(fields.get("tom_type") or "").startswith("second-order")
    last = advice["nested"] if nested else advice.get(form, advice["choice"])
    return " ".join([*_on_draft(form, score), *_utterances(fields), last])


def _on_draft(form: str, score: Score | None) -> Iterator[str]:
    if score is None:
        return
    if score.status not in ("ok", "salvaged"):
        yield TEXTS["shape"][form]
    else:
        name = "fits" if score.value == 1 else "partly" if score.value else "misses"
        yield TEXTS["draft"][name]


def _utterances(fields: Mapping[str, Any]) -> Iterator[str]:
    mentions, events = TEXTS["mentions"], fields.get("events")
    if not isinstance(events, Mapping) or not events.get("told"):
        yield mentions["unplaced"]
        return
    yield mentions["first"].format(n=events["told"])
    yield from (mentions["second"].format(n=n) for n in events.get("retold") or ())


class Fantom(ChoiceTask):
    free_beliefs = True
    """Whether beliefs may be asked without options."""

    # -- rows ---------------------------------------------------------------------------------

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        question = fields.get("complete_question") or fields.get("question")
        kind = str(fields["question_type"])
        form = answer_form(kind, free=self.free_beliefs)
        if form is None:
            raise RowError(
                f"The question type '{kind}' is unknown.", "The type determines the scoring."
            )
        if not question:
            raise RowError("The row has no question.", "Fill in 'complete_question' or 'question'.")
        prepared = {**fields, "complete_question": str(question), "form": form}
        self.check(prepared, form)
        return prepared

    def check(self, fields: Mapping[str, Any], form: AnswerForm) -> None:
        """DataError for a row that has no right answer."""
        _check(fields, form)

    def read(self, example: Example, text: str) -> tuple[str, str]:
        answer, status = self.parse(text)
        if status != "ok":
            return answer, status
        form = example.fields["form"]
        if form == "choice":
            return answer, _letter(answer)[1]
        if form == "names":
            return answer, _names_status(answer, _people(example))
        return answer, _polarity(answer)[1] if form == "yes_no" else "ok"

    # -- scores -------------------------------------------------------------------------------

    def grade(self, example: Example, answer: str) -> float:
        """0 or 1; for sentences the F1 of their words."""
        form, gold = example.fields["form"], example.fields["correct_answer"]
        if form in ("fact", "belief"):
            return token_f1(str(gold), answer)
        return float(self.right(example, form, answer))

    def right(self, example: Example, form: AnswerForm, answer: str) -> bool:
        """Whether an answer other than a sentence is right."""
        gold = example.fields["correct_answer"]
        if form == "choice":
            return _letter(answer)[0] == _gold_letter(gold)
        if form == "yes_no":
            return _polarity(answer)[0] == _gold_polarity(gold)
        gold_names = {plain(name) for name in parse_candidates(gold)}
        names = named_options(answer, _people(example))
        nobody = plain(answer) in (NOBODY, "no one", "none", "none of them")
        return names == gold_names and (bool(gold_names) or nobody)

    def measures(self, example: Example, answer: str) -> dict[str, float | None]:
        """For free beliefs: whether the answer is closer to the gold than to the wrong answer."""
        if example.fields["form"] != "belief":
            return {}
        wrong = example.fields.get("wrong_answer")
        if not wrong:
            return {"nearer_gold": None}
        right = token_f1(str(example.fields["correct_answer"]), answer)
        return {"nearer_gold": float(right > token_f1(str(wrong), answer))}

    def _episode(
        self, example: Example, context: tuple[Segment, ...], completion: Completion,
        index: int, kind: Kind,
    ) -> Episode:  # fmt: skip
        episode = super()._episode(example, context, completion, index, kind)
        belongs = example.fields.get("set_id") is not None and example.fields["form"] != "fact"
        if belongs and str(example.fields["correct_answer"]) != "no:long":
            access = example.fields.get("missed_info_accessibility")
            note = {"set": f"{example.fields['set_id']}/{access}", "form": _group(example.fields)}
            sizes = {k: v for k in _SIZES if (v := example.fields.get(k)) is not None}
            episode = replace(episode, notes={**episode.notes, **note, **sizes})
        return episode

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """`accuracy` over letters, lists and yes or no (the headline), `free_f1` of the words of
        free answers, and metrics over whole sets. If no question counts for `accuracy`, its `n` is
        0."""
        accuracy = mean_of(self.counted(records), "questions")
        if not accuracy.n:
            accuracy = replace(accuracy, not_applicable=NO_CHOICE)
        free = mean_of(_values(records, FREE), "questions")
        free_f1 = {"free_f1": free} if free.n else {}
        return {"accuracy": accuracy} | free_f1 | set_numbers(records)

    def counted(self, records: Sequence[Record]) -> list[float | None]:
        """The values that the headline averages."""
        return _values(records, STRICT)

    # -- gold ---------------------------------------------------------------------------------

    def gold_text(self, example: Example) -> str:
        gold, form = example.fields["correct_answer"], example.fields["form"]
        if form == "choice":
            return _options(example.fields).get(_gold_letter(gold), _gold_letter(gold))
        if form == "names":
            return ", ".join(self._gold_names(gold)) or NOBODY
        return _gold_polarity(gold) if form == "yes_no" else str(gold)

    def _gold_names(self, gold: Any) -> list[str]:
        return parse_candidates(gold)

    def gold_completion(self, example: Example) -> str:
        if example.fields["form"] == "choice":
            return f"<answer>{_gold_letter(example.fields['correct_answer'])}</answer>"
        return f"<answer>{self.gold_text(example)}</answer>"

    def wrong_completion(self, example: Example) -> str | None:
        form, wrong = example.fields["form"], example.fields.get("wrong_answer")
        if form in ("choice", "yes_no"):
            return super().wrong_completion(example)
        if form == "names":
            return f"<answer>{self._wrong_names(example.fields['correct_answer'], wrong)}</answer>"
        return f"<answer>{wrong or 'I cannot tell.'}</answer>"

    def _wrong_names(self, gold: Any, wrong: Any) -> str:
        """All right names and the wrong ones; without wrong ones, the opposite of the gold."""
        right = self._gold_names(gold)
        others = [n for n in name_list(wrong) if plain(n) not in {plain(name) for name in right}]
        return ", ".join([*right, *others]) if others else NOBODY if right else "everybody"

    # -- feedback -----------------------------------------------------------------------------

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        return advice_on(example.fields, score)

    def leak_view(self, example: Example) -> LeakView:
        """The options of the answer. For names, all people are options; for sentences, the words
        that only the gold contains.

        With `each`, a remark that contains any of the options reveals part of the answer.
        """
        question, form = example.fields["complete_question"], example.fields["form"]
        gold = self.gold_text(example)
        if form == "choice":
            options = _options(example.fields)
            return LeakView(question, tuple(options.values()), gold, tuple(options))
        if form == "yes_no":
            return LeakView(question, ("yes", "no"), gold)
        if form == "names":
            people = _people(example)
            first = next(iter(self._gold_names(example.fields["correct_answer"])), NOBODY)
            return LeakView(question, tuple(dict.fromkeys((*people, first))), first, each=True)
        wrong = str(example.fields.get("wrong_answer") or "")
        telling = _telling(gold, f"{question} {wrong}")
        if not 0 < len(telling) <= _FEW:
            return LeakView(question, (gold,), gold)
        return LeakView(question, telling, telling[0], each=True)


def _telling(gold: str, context: str) -> tuple[str, ...]:
    """The longer words of `gold` that do not occur in `context`, ignoring inflections."""
    stems = {word[:_STEM] for word in (*answer_words(context), *_COMMON)}
    words = [w for w in answer_words(gold) if len(w) >= _STEM and w[:_STEM] not in stems]
    return tuple(dict.fromkeys(words))


# -- sets ----------------------------------------------------------------------------------------


def _group(fields: Mapping[str, Any]) -> str:
    form = str(fields["form"])
    if form in ("choice", "belief"):
        return form
    return "info" if "info_accessibility" in str(fields["question_type"]) else "answerability"


@dataclass(slots=True)
class _Set:
    """One play of a set, with the questions that are among the records."""

    right: dict[str, bool] = field(default_factory=dict)
    """Question group → whether all its questions are right."""
    counts: Counter[bool] = field(default_factory=Counter)
    """Number of free beliefs (True) and of all others (False)."""
    size: int | None = None
    beliefs: int | None = None
    broken: bool = False
    """Whether a question about its conversation is unscored."""

    def add(self, notes: Mapping[str, Any], right: bool) -> None:
        group = str(notes["form"])
        self.right[group] = self.right.get(group, True) and right
        self.counts[group == "belief"] += 1
        self.size, self.beliefs = (notes.get(name) for name in _SIZES)

    @property
    def strict(self) -> bool:
        """Whether the set has all question groups that ALL requires."""
        return {"choice", "answerability", "info"} <= set(self.right)

    @property
    def whole(self) -> bool:
        return self.size is None or self.counts[False] >= self.size

    @property
    def all_free(self) -> bool:
        return self.beliefs is None or self.counts[True] >= self.beliefs

    def all_right(self, *, free: bool = False) -> bool:
        return all(right for group, right in self.right.items() if free or group != "belief")


def set_numbers(records: Sequence[Record]) -> dict[str, BatchMetric]:
    """`set_all` and `set_all_star` (shares of sets with every question right), and `sets`.

    A set counts if it has a lettered belief question, a question about who can answer and one about
    who has the information; for ALL* also a free belief question. Fact questions and those with the
    gold `no:long` are left out, because they concern the whole conversation. An unscored question
    excludes all sets of its conversation, an unplayed question only its own set. Unplayed questions
    are detected only in rows that record the size of their set, as generated and imported rows do
    (`sets_complete` counts these sets). In released rows, an incomplete set counts as a set.
    """
    sets = [s for s in _sets(drafts(records)) if s.strict and s.whole]
    if not sets:
        return {}
    scored = [s for s in sets if not s.broken]
    starred = [s for s in sets if "belief" in s.right and s.all_free]
    metrics = {
        "set_all": _over(sets),
        "sets": _count(len(scored), len(scored), len(sets)),
        "sets_complete": _count(sum(s.size is not None for s in scored), len(scored), len(sets)),
    }
    return metrics | ({"set_all_star": _over(starred, free=True)} if starred else {})


def _sets(records: Sequence[Record]) -> list[_Set]:
    sets: dict[tuple[Any, ...], _Set] = defaultdict(_Set)
    broken: set[tuple[Any, ...]] = set()
    for record in records:
        play = (record.cluster, record.kind, record.step, record.rollout)
        notes, score = record.episode.notes, record.score
        if not score.scored:
            broken.add(play)
        elif "set" in notes:
            near = score.metrics.get("nearer_gold") if notes["form"] == "belief" else score.value
            if near is not None:  # a free belief without a wrong answer decides nothing
                sets[*play, notes["set"]].add(notes, near == 1)
    for key, members in sets.items():
        members.broken = key[:-1] in broken
    return list(sets.values())


def _over(sets: Sequence[_Set], *, free: bool = False) -> BatchMetric:
    right = [None if members.broken else float(members.all_right(free=free)) for members in sets]
    return mean_of(right, "sets")


def _count(value: int, scored: int, n: int) -> BatchMetric:
    return BatchMetric(value=float(value), n=n, n_scored=scored, unit="sets", low=0.0)


def _values(records: Sequence[Record], forms: Sequence[AnswerForm]) -> list[float | None]:
    kinds = ((r, answer_form(r.tags.get("question", ""))) for r in drafts(records))
    return [record.score.value for record, form in kinds if form in forms]


# -- reading -------------------------------------------------------------------------------------


def name_list(value: Any) -> list[str]:
    """The names in a list or in comma-separated text, without brackets and quotes."""
    if value is None:
        return []
    if isinstance(value, str):
        return [name for part in value.split(",") if (name := part.strip(MARKS))]
    return [str(name) for name in (value if isinstance(value, list | tuple) else (value,))]


def _options(fields: Mapping[str, Any]) -> dict[str, str]:
    return dict(_OPTION.findall(str(fields["complete_question"])))


def _people(example: Example) -> tuple[str, ...]:
    golds = parse_candidates(example.fields["correct_answer"])
    return (*golds, *parse_candidates(example.fields.get("wrong_answer")))


def _letter(answer: str) -> tuple[str, str]:
    """(lower-case letter, status); `(b)`, as the options show it, is as good as `b`."""
    letter, status = tagged_letter(f"<answer>{answer}</answer>", "paper")
    shown = answer.strip().lower() == f"({letter.lower()})"
    return letter.lower(), "ok" if letter and shown else status


def _polarity(answer: str) -> tuple[str, str]:
    """(`yes`, `no` or "", status): a clear word at either end, or a statement about knowing."""
    words = plain(answer).split()
    senses = {"yes" for w in words if w in ASSENT} | {"no" for w in words if w in DENIAL}
    if len(words) == 1 and senses:
        return senses.pop(), "ok"
    text = " ".join(words)
    if not senses:
        if _NOT_KNOWING.search(text):
            return "no", "salvaged"
        sure = "knows" in words and not set(words) & set(_HEDGES)
        return ("yes", "salvaged") if sure else ("", "malformed")
    clear = _LEADING.match(answer) or words[-1] in (*ASSENT, *DENIAL)
    # `That is not true` means the opposite of its last word; `She is not, no` does not.
    denied = len(words) > 1 and words[-2] in ("not", "t", "never") and words[-1] != "no"
    hedged = denied or set(words) & {"maybe", "perhaps", "or"}
    readable = len(senses) == 1 and clear and not hedged
    return (senses.pop(), "salvaged") if readable else ("", "malformed")


def _names_status(answer: str, people: Sequence[str]) -> str:
    """`ok` for a plain list of names, `salvaged` for names within other words."""
    parts = [plain(part).split() for part in re.split(r"[,;\n/&]|\band\b", answer)]
    if all(len(part) <= _NAME_WORDS for part in parts):
        return "ok" if any(parts) else "malformed"
    return "salvaged" if named_options(answer, people) else "malformed"


# -- gold ----------------------------------------------------------------------------------------


def gold_index(gold: Any) -> int | None:
    """The option index that a lettered gold names, counted from 0; None if it is not a number."""
    try:
        return int(gold)
    except (TypeError, ValueError):
        return None


def _gold_letter(gold: Any) -> str:
    index = gold_index(gold)
    return chr(ord("a") + index) if index is not None and 0 <= index < 26 else ""


def _gold_polarity(gold: Any) -> str:
    return {"yes": "yes", "no": "no", "no:long": "no"}.get(str(gold).strip().lower(), "")


def _check(fields: Mapping[str, Any], form: AnswerForm) -> None:
    gold = fields["correct_answer"]
    if not str(fields.get("context") or "").strip():
        raise RowError("The row has no conversation.", "The questions are about the conversation.")
    if form == "choice" and _gold_letter(gold) not in _options(fields):
        raise RowError(
            f"The gold answer '{gold}' is not the index of an option.", "Indices count from 0."
        )
    if form == "yes_no" and not _gold_polarity(gold):
        raise RowError(
            f"The gold answer '{gold}' is neither yes nor no.", "No answer can match it."
        )
    # An empty list is a valid gold: no one is one of the people asked about.
    nobody = form == "names" and gold == []
    if not nobody and (not str(gold).strip() or gold in ([], {})):
        raise RowError("The gold answer is blank.", "No answer can match it.")


_LETTER = re.compile(r"\(?([a-d])\)?\.?")


class FantomReference(Fantom):
    free_beliefs = False

    def check(self, fields: Mapping[str, Any], form: AnswerForm) -> None:
        """Every row is played."""

    def parse(self, text: str) -> tuple[str, str]:
        answer = tagged_text(text, "reference")
        return ("", "no_tag") if answer is None else (answer, "ok")

    def read(self, example: Example, text: str) -> tuple[str, str]:
        return self.parse(text)

    def counted(self, records: Sequence[Record]) -> list[float | None]:
        """All values: the published mean includes the F1 of facts."""
        return [record.score.value for record in drafts(records)]

    def right(self, example: Example, form: AnswerForm, answer: str) -> bool:
        fields = example.fields
        return published_right(form, answer, fields["correct_answer"], fields.get("wrong_answer"))

    def _gold_names(self, gold: Any) -> list[str]:
        return name_list(gold)


def published_right(form: AnswerForm, answer: str, gold: Any, wrong: Any) -> bool:
    """The published rules, reproduced exactly."""
    if form == "choice":
        letter = _LETTER.fullmatch(answer.lower())
        return letter is not None and ord(letter.group(1)) - ord("a") == gold_index(gold)
    if form == "names":
        names = name_list(gold)
        right = bool(names) and all(has_word(answer, name) for name in names)
        return right and not any(has_word(answer, name) for name in name_list(wrong))
    text = answer.lower().strip(MARKS[2:])
    assent = text.startswith(ASSENT) or _holds(text, " yes,", " yes ", " yes.", " knows ")
    denial = text.startswith(DENIAL) or _holds(
        text, " no,", " no ", " no.", " does not know ", " doesn't know "
    )
    return {"yes": assent and not denial, "no": denial and not assent}.get(
        "no" if gold == "no:long" else str(gold), False
    )


def _holds(text: str, *parts: str) -> bool:
    return any(part in text for part in parts)
