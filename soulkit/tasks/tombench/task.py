"""ToMBench: what a person thinks, wants, feels, means or knows; two to four options, two languages.

{"language": "en", "story": "Ada leaves the shed. Ben moves the rope to the crate.", "question":
"Where will Ada look for the rope?", "options_dict": {"A": "in the crate", "B": "on the hook"},
"correct_letter": "B", "ability": "Belief: Location false beliefs"}

`paper` asks every question with its options in five orders (`options: {shuffles: 5}`), and the
majority of the answers counts for the row; `reference` asks once. An imported record becomes two
rows with the same `story_id`, so that both languages are in the same split. In generated rows, row
2k is a scene in English and row 2k + 1 the same scene in Chinese.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow, RawRow
from soulkit.data.rows import content_hash
from soulkit.errors import ConfigError
from soulkit.tasks.kit.choice import (
    UNREAD_OPENINGS,
    OrderedTask,
    check_gold,
    chosen_letter,
    opening,
    over_orders,
    read_options,
    read_state,
)
from soulkit.tasks.kit.importing import BadRecord, Imported, Row, import_records, need
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.kit.scoring import macro, row_mean
from soulkit.types import BatchMetric, Example, Record, Score

_GROUP = re.compile(r"([^:]+?):\s*")

TEXTS = Texts(__file__)


class ToMBench(OrderedTask):
    hears_thinking = True

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        options = read_options(fields.get("options_dict"), fields.get("options"))
        letter = str(fields.get("correct_letter") or "").strip().upper()
        if self.protocol == "paper":
            check_gold(letter, options)
        language = "zh" if str(fields["language"]).strip().lower() == "zh" else "en"
        return {
            **fields,
            "language": language,
            "options": options,
            "options_dict": None,
            "correct_letter": letter or None,
            "order": None,
            "story_id": fields.get("story_id") or fields["story"],
        }

    @property
    def shuffles(self) -> int:
        """The number of option orders in which a question is asked; ConfigError if invalid."""
        count = self.spec.options.get("shuffles", 1)
        if self.protocol == "reference":
            return 1
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"The task '{self.name}' cannot ask in {count!r} orders.",
                "Its option 'shuffles' is the number of option orders for each question.",
                "Use a whole number of at least 1; the benchmark uses 5.",
            )
        return count

    def examples(
        self, row: Mapping[str, Any], *, source: str = "", split: str = "test"
    ) -> tuple[Example, ...]:
        """The row once per order of its options."""
        example = self.example(row, source=source, split=split)
        if self.shuffles == 1:
            return (example,)
        drawn = orders(tuple(example.fields["options"]), self.shuffles, example.id)
        return self.in_orders(example, drawn)

    def tags(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """Language, group of abilities, and the full ability if the row names one."""
        ability = str(fields.get("ability") or "").strip()
        finer = {"ability": ability_group(ability)} if ability else {}
        return {**super().tags(fields), **finer}

    def lessons(self, example: Example, score: Score | None) -> Iterable[str]:
        texts = TEXTS["lessons"][example.fields["language"]]
        first = opening(
            read_state(score), texts["right"], texts["wrong"], texts.get("unread", UNREAD_OPENINGS)
        )
        group = ability_group(str(example.fields.get("ability") or "")).lower()
        general = texts["general"]
        for text in dict.fromkeys((texts["advice"].get(group, general), general)):
            yield f"{first} {text}".strip()
        yield general

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """`row_accuracy`: the mean over rows of their accuracy over all orders (the headline).

        `macro_ability`: the mean of the accuracies of ability groups.

        `majority_accuracy`: the share of rows with a right majority answer over all orders, among
        rows scored in every order. On a tie, the option with the earlier first vote wins, as in the
        benchmark. An unreadable reply is not a vote.
        """
        metrics = {"row_accuracy": row_mean(records), "macro_ability": macro(records, "ability")}
        if self.shuffles > 1:
            metrics["majority_accuracy"] = over_orders(records, self.shuffles, _majority_right)
        return {name: m for name, m in metrics.items() if m is not None and m.n}


# -- orders --------------------------------------------------------------------------------------


def orders(letters: Sequence[str], n: int, seed: str) -> list[str]:
    """`n` orders of the letters, drawn from the seed; no order repeats before all have been
    used."""
    every = ["".join(order) for order in permutations(letters)]
    random.Random(f"orders/{seed}").shuffle(every)
    return [every[i % len(every)] for i in range(n)]


def _majority_right(records: Sequence[Record]) -> bool:
    votes: Counter[str] = Counter()
    right: dict[str, bool] = {}
    for record in records:
        if letter := chosen_letter(record):
            votes[letter] += 1
            right[letter] = record.score.value == 1
    return bool(votes) and right[votes.most_common(1)[0][0]]


def ability_group(ability: str) -> str:
    """`Belief` of `Belief: Location false beliefs`; a text without a colon is its own group."""
    match = _GROUP.match(ability)
    return match.group(1).strip() if match else ability


LICENCE = "MIT"
_ABILITY, _INDEX, _ANSWER = "能力\nABILITY", "序号\nINDEX", "答案\nANSWER"
_COLUMNS = {
    "en": ("STORY", "QUESTION", "OPTION-{}"),
    "zh": ("故事", "问题", "选项{}"),
}
_GOLD = re.compile(r"\s*([A-D])\s*[.．。、]?\s*")


def import_tombench(path: Path) -> Imported:
    """Rows of one subtask's JSON lines, English before Chinese; the file name is the subtask."""

    def both_languages(record: RawRow, _: int) -> Iterator[Row | BadRow]:
        for language in _COLUMNS:
            try:
                yield _imported_row(record, language, path.stem)
            except BadRecord as error:
                yield BadRow(f"{record.source} ({language})", str(error))

    return import_records(
        path, {("STORY",): both_languages, ("故事",): both_languages}, origin="ToMBench",
        way_out="Give a .jsonl file of the ToMBench release.", licence=LICENCE, notes=_notes,
    )  # fmt: skip


def _notes(rows: Sequence[Row], _: Sequence[BadRow]) -> list[str]:
    short = sum(len(row["options_dict"]) < 4 for row in rows)
    return [f"{short} of {len(rows)} rows have fewer than four options."] if short else []


def _imported_row(record: RawRow, language: str, subtask: str) -> dict[str, Any]:
    story_name, question_name, option_name = _COLUMNS[language]
    story, question = need(record, story_name, question_name)
    options = {x: record.fields.get(option_name.format(x)) for x in "ABCD"}
    letters = {x: _without_letter(text, x) for x, text in options.items() if text is not None}
    gold = _GOLD.fullmatch(str(record.fields.get(_ANSWER) or ""))
    if gold is None or not letters.get(gold.group(1)):
        raise BadRecord("its answer is not one of its options")
    return {
        "language": language,
        "story": story.strip(),
        "question": question.strip(),
        "options_dict": {x: text for x, text in letters.items() if text},
        "correct_letter": gold.group(1),
        "ability": " ".join(str(record.fields.get(_ABILITY) or "").split()),
        "subtask": subtask,
        "story_id": _story_id(record.fields),
        "index": record.fields.get(_INDEX),
    }


def _without_letter(text: Any, letter: str) -> str:
    """An option's text without its own letter as a prefix; another letter is kept."""
    return re.sub(rf"\A\s*{letter}\s*[.．、:：]\s*", "", str(text)).strip()


def _story_id(fields: Mapping[str, Any]) -> str:
    story = " ".join(str(fields.get("故事") or fields.get("STORY")).split())
    return content_hash("tombench", {"story": story})


Pair = tuple[str, str]
"""English and Chinese."""


@dataclass(frozen=True, slots=True)
class _Story:
    """A story with its question in both languages; the gold is the first option."""

    story: Pair
    question: Pair
    options: tuple[Pair, ...]
    ability: str
    subtask: str


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends only on (seed, i), so fewer rows are a prefix of more."""
    return [_made_row(i, seed) for i in range(n)]


def _made_row(i: int, seed: int) -> dict[str, Any]:
    number, side = divmod(i, 2)
    rng = random.Random(f"tombench/{seed}/{number}")
    scene = _KINDS[number % len(_KINDS)](rng)
    order = list(range(len(scene.options)))
    random.Random(f"tombench/{seed}/{i}/order").shuffle(order)
    lettered = {"ABCD"[place]: scene.options[k][side] for place, k in enumerate(order)}
    return {
        "language": ("en", "zh")[side],
        "story": scene.story[side],
        "question": scene.question[side],
        "options_dict": lettered,
        "correct_letter": "ABCD"[order.index(0)],
        "ability": scene.ability,
        "subtask": scene.subtask,
        "story_id": f"s{seed}-{number}",
        "index": i,
    }


def _story(
    name: str, values: Mapping[str, Pair], options: Iterable[Pair], story: str = "story"
) -> _Story:
    scene = TEXTS["scenes"][name]
    return _Story(
        _both(scene[story], values), _both(scene["question"], values), tuple(options),
        scene["ability"], scene["subtask"],
    )  # fmt: skip


def _both(pattern: Pair, values: Mapping[str, Pair]) -> Pair:
    english, chinese = (
        text.format(**{name: value[side] for name, value in values.items()})
        for side, text in enumerate(pattern)
    )
    return english, chinese


def _capitals(*options: Pair) -> Iterable[Pair]:
    return ((english.capitalize(), chinese) for english, chinese in options)


def _belief(rng: random.Random) -> _Story:
    """A thing is moved; one of two people may be away; asks about their view or the other's."""
    a, b = rng.sample(TEXTS["people"], 2)
    room, thing = rng.sample(TEXTS["rooms"], 1)[0], rng.sample(TEXTS["things"], 1)[0]
    first, second, other, never = rng.sample(TEXTS["holders"], 4)
    away, deep = rng.random() < 0.7, rng.random() < 0.4
    values = {"a": a, "b": b, "room": room, "x": thing, "c1": first, "c2": second, "c3": other}
    right, wrong = (first, second) if away else (second, first)
    options = _capitals(right, wrong, other, never)
    return _story("second_belief" if deep else "belief", values, options,
                  "away" if away else "watches")  # fmt: skip


def _content(rng: random.Random) -> _Story:
    """A label promises one thing, the box holds another; only those who looked know."""
    a, b = rng.sample(TEXTS["people"], 2)
    label, inside, other, never = rng.sample(TEXTS["goods"], 4)
    asks_label = rng.random() < 0.6
    values = {"a": a, "b": b, "y": label, "z": inside, "w": b if asks_label else a}
    right, wrong = (label, inside) if asks_label else (inside, label)
    return _story("content", values, _capitals(right, wrong, other, never))


def _knowledge(rng: random.Random) -> _Story:
    """Did a person see where a thing went? Only two options."""
    a, b = rng.sample(TEXTS["people"], 2)
    thing, place = rng.sample(TEXTS["things"], 1)[0], rng.sample(TEXTS["holders"], 1)[0]
    saw = rng.random() < 0.5
    yes, no = TEXTS["yes_no"]
    values = {"a": a, "b": b, "x": thing, "c": place}
    return _story("knowledge", values, (yes, no) if saw else (no, yes), "saw" if saw else "slept")


def _desire(rng: random.Random) -> _Story:
    a, b = rng.sample(TEXTS["people"], 2)
    first, others, *rest = rng.sample(TEXTS["wishes"], 4)
    values = {"a": a, "b": b, "p": first, "q": others}
    return _story("desire", values, _capitals(others, first, *rest))


def _emotion(rng: random.Random) -> _Story:
    a, b = rng.sample(TEXTS["people"], 2)
    joy, sorrow, *rest = TEXTS["feelings"]
    asks_winner = rng.random() < 0.5
    right, wrong = (joy, sorrow) if asks_winner else (sorrow, joy)
    values = {"a": a, "b": b, "w": a if asks_winner else b}
    return _story("emotion", values, (right, wrong, *rest))


def _intention(rng: random.Random) -> _Story:
    (a,) = rng.sample(TEXTS["people"], 1)
    (deed, goal), *others = rng.sample(TEXTS["goals"], 4)
    return _story("intention", {"a": a, "d": deed}, (goal, *(g for _, g in others)))


def _hint(rng: random.Random) -> _Story:
    a, b = rng.sample(TEXTS["people"], 2)
    (hint, meaning), *others = rng.sample(TEXTS["hints"], 4)
    values = {"a": a, "b": b, "s": hint}
    return _story("hint", values, (meaning, *(w for _, w in others)))


_KINDS: Sequence[Callable[[random.Random], _Story]] = (
    _belief, _desire, _content, _knowledge, _emotion, _intention, _hint, _belief,
)  # fmt: skip
