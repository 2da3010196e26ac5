"""LifeChoices: what a character from a book decides, given memories of their life.

{"character_name": "Odile Marchetti", "book": "Nine Winters of Glass", "input_text": "Odile blows
glass ...", "Multiple Choice Question": {"Scenario": "A count offers ...", "Question": "What does
Odile answer?", "Options": ["Yes", "No", "Half of them", "Next year"], "Correct Answer": "B"}}

`input_text` is cut to its last words, as many as its budget allows; the tag `memory` says whether a
row was cut. `reference` parses replies with the eight published patterns in turn. In generated rows
the memories show one drive three times (`plain`), or another drive, a turning point, and then the
present one (`changed`). The four options are the actions of four drives in one situation.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from soulkit.data.literals import item_text, literal_list, structure
from soulkit.errors import RowError
from soulkit.judge.verdict import plain, spoken
from soulkit.tasks.kit.choice import (
    CLOSE,
    LetteredTask,
    bad_gold,
    led_letter,
    letter_of,
    opening,
    read_state,
)
from soulkit.tasks.kit.made_rows import rows_by_index
from soulkit.tasks.kit.prompting import Texts
from soulkit.types import Example, Score

_LETTERS = "ABCD"
NESTED = "Multiple Choice Question"
_PARTS = {
    "scenario": ("Scenario", "scenario"),
    "question": ("Question", "question"),
    "options": ("Options", "options", "Choices", "choices"),
    "correct_answer": ("Correct Answer", "correct_answer", "Correct_Answer", "Answer"),
}
"""Column → its names inside the nested question."""

_BARE = re.compile(r"[\s(\[*_`\"']*([A-Da-d])[\s)\]*_`\"'.:]*")
_CUT_TAG = re.compile(r"<answer>\s*([A-Da-d])\s*\Z", re.IGNORECASE)


class LifeChoices(LetteredTask):
    letter_column = "correct_answer"

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        nested = structure(fields.get(NESTED))
        inner = nested if isinstance(nested, Mapping) else {}
        parts = {
            name: next((inner[n] for n in names if inner.get(n) is not None), fields.get(name))
            for name, names in _PARTS.items()
        }
        options = _options(parts["options"])
        gold = str(parts["correct_answer"] or "")
        texts = {name: str(parts[name] or "").strip() for name in ("scenario", "question")}
        gold = self.checked(texts["question"], options, gold)
        return {**fields, **texts, NESTED: None, "options": options, "correct_answer": gold}

    def checked(self, question: str, options: Sequence[str], gold: str) -> str:
        """The gold's letter; DataError if the question cannot be played or scored."""
        if not question or not 2 <= len(options) <= len(_LETTERS) or not all(options):
            why = f"It needs a question and two to four options: {', '.join(options)!r:.80}."
            raise RowError("A row of lifechoices has no complete question.", why)
        letter = letter_of(gold, dict(zip(_LETTERS, options, strict=False)), _LETTERS)
        if not letter:
            raise bad_gold(gold, "the letter or the text of one option")
        return letter

    def tags(self, fields: Mapping[str, Any]) -> dict[str, str]:
        budget = self.spec.columns["input_text"].max_words
        words = len(str(fields["input_text"]).split())
        return {**super().tags(fields), "memory": "cut" if budget and words > budget else "whole"}

    def options(self, example: Example) -> dict[str, str]:
        return dict(zip(_LETTERS, example.fields["options"], strict=False))

    def question(self, example: Example) -> str:
        return f"{example.fields['scenario']}\n{example.fields['question']}"

    def parse(self, text: str) -> tuple[str, str]:
        letter, status = super().parse(text)
        if status != "no_tag":
            return letter, status
        reply = spoken(text, "paper")
        match = _BARE.fullmatch(reply) or _CUT_TAG.search(reply)
        return (match.group(1).upper(), "salvaged") if match else ("", "no_tag")

    def lessons(self, example: Example, score: Score | None) -> Iterable[str]:
        name = str(example.fields["character_name"])
        lead = opening(
            read_state(score), f"That is how {name} acts.", f"That is not how {name} acts."
        )
        first = TEXTS["turn"] if example.fields.get("kind") == "changed" else TEXTS["habit"]
        yield from (f"{lead} {text}".strip() for text in (first, TEXTS["habit"], TEXTS["short"]))
        yield CLOSE


def _options(value: Any) -> tuple[str, ...]:
    """The option texts, from a list, its literal, or a mapping of letters; without their letters.

    Letters are removed only if every option starts with its own.
    """
    items = structure(value)
    if isinstance(items, Mapping):
        items = [items[key] for key in sorted(items)]
    texts = [item_text(item or None, "options") for item in literal_list(items) or ()]
    led = [led_letter(text, "ABCDEFGHIJ") for text in texts]
    if len(texts) > 1 and led == list("ABCDEFGHIJ"[: len(texts)]) and all(map(plain, texts)):
        cut = [re.sub(r"\A[\s(\[*]*\w[)\]*.:]+\s*", "", text) for text in texts]
        return tuple(cut if all(cut) else texts)
    return tuple(texts)


_LADDER = tuple(
    re.compile(pattern)
    for pattern in (
        r"\A([ABCD])\Z",
        r"<ANSWER>\s*([ABCD])\s*</ANSWER>",
        r"\A([ABCD])\s*[.):,]",
        r"CHOICE[:\s]+([ABCD])",
        r"ANSWER[:\s]+([ABCD])",
        r"\(([ABCD])\)",
        r"([ABCD])\s*\Z",
        r"([ABCD])",
    )
)
_TAG = 1
"""The pattern, by position, of the required form."""


class LifeChoicesReference(LifeChoices):
    def checked(self, question: str, options: Sequence[str], gold: str) -> str:
        """The first character of the gold, even if it is not an option's letter."""
        return gold.strip().upper()[:1]

    def parse(self, text: str) -> tuple[str, str]:
        return climb(spoken(text, "reference"))


def climb(text: str) -> tuple[str, str]:
    """(letter or "", status), read with the first published pattern that matches.

    The text is upper-cased first, so later patterns match letters in ordinary words.
    """
    upper = text.strip().upper()
    for number, step in enumerate(_LADDER):
        if match := step.search(upper):
            return match.group(1), "ok" if number == _TAG else "salvaged"
    return "", "no_tag"


TEXTS = Texts(__file__)


def _made_row(rng: random.Random, index: int) -> dict[str, Any]:
    people = dict(zip("nfp", rng.sample(TEXTS["first"], 3), strict=True)) | {
        "town": rng.choice(TEXTS["towns"])
    }
    full = f"{people['n']} {rng.choice(TEXTS['last'])}"
    situation = rng.choice(TEXTS["situations"])
    drive, *others = rng.sample(sorted(TEXTS["drives"]), 4)
    changed = index % 3 == 2
    options = [drive, *others]
    rng.shuffle(options)
    return {
        "character_name": full,
        "book": rng.choice(TEXTS["books"]),
        "input_text": _memory(rng, {**people, "full": full}, drive, others[0] if changed else ""),
        "Multiple Choice Question": {
            "Scenario": situation["scene"].format(**people),
            "Question": rng.choice(TEXTS["asked"]).format(**people),
            "Options": [situation["acts"][option].format(**people) for option in options],
            "Correct Answer": "ABCD"[options.index(drive)],
        },
        "kind": "changed" if changed else "plain",
        "index": index,
    }


rows = rows_by_index("lifechoices", _made_row)


def _memory(rng: random.Random, people: dict[str, str], drive: str, former: str) -> str:
    """The memories: first, if there is one, the former drive's deeds and a turning point."""
    quiet = rng.sample(TEXTS["quiet"], 4)
    parts = [f"{{full}} is a {rng.choice(TEXTS['jobs'])} from {{town}}. {{f}} is an old friend."]
    if former:
        early = [*rng.sample(TEXTS["drives"][former], 2), quiet.pop()]
        rng.shuffle(early)
        parts += ["This is told of the early years.", *early, rng.choice(TEXTS["turns"])]
    late = [*rng.sample(TEXTS["drives"][drive], 3), *quiet]
    rng.shuffle(late)
    return " ".join([*parts, *late]).format(**people)
