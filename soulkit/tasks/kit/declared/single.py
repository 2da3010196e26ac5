"""The kinds `choice` and `text`: one prompt, one reply, scored without a model.

The answer of a reply is in the tag `<answer>`, the whole reply, or the last match of a pattern with
one group (`answer:`). A choice is answered by a letter, or by an option's full text (`salvaged`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from soulkit.data.literals import item_text, structure
from soulkit.errors import DataError, RowError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import plain, spoken, tagged_letter, tagged_text
from soulkit.tasks.kit.choice import (
    ChoiceTask,
    OrderedTask,
    bad_gold,
    chosen_letter,
    letter_of,
    over_orders,
    unreadable_options,
    with_status,
)
from soulkit.tasks.kit.declared.keys import (
    ALPHABET,
    GOLD_LETTER,
    OPTION_ORDER,
    OPTIONS_BY_LETTER,
    PROMPT,
    Declaration,
    Scorer,
    template_names,
)
from soulkit.tasks.kit.declared.scorers import json_validator, matches, score_names, score_of
from soulkit.tasks.kit.declared.task import YamlTask
from soulkit.tasks.kit.scoring import mean_of, row_mean
from soulkit.text import normalised
from soulkit.types import BatchMetric, Example, Record

_WRONG = ("I do not know.", "0", "1", "no", "yes", "-")
_GROUP = re.compile(r"(?<!\\)\((?!\?).*(?<!\\)\)", re.DOTALL)
_SYNTAX = re.compile(r"\\[bBAZ]|[\^$]|(?:\\s|\.|\[[^\]]*\])[*+?]*|\\(\W)|[?*+]")
FROM_ONE = "from 1"
"""In place of a gold letter: the gold is a position that fits only if positions count from 1."""


class AnswerPlace(YamlTask):
    """Where the answer of a reply is."""

    asks = "Put your answer between <answer> and </answer>."

    @property
    def place(self) -> str:
        """`tag`, `reply`, or a pattern."""
        return self.keys.answer or ("tag" if self.keys.kind == "choice" else "reply")

    def actor_prompt(self, text: str) -> str:
        """The prompt with the form of the answer, unless it names the tag."""
        named = self.place != "tag" or "<answer>" in text
        return text if named else f"{text.rstrip()}\n\n{self.asks}\n"

    def answer_in(self, text: str) -> str | None:
        """The answer of a reply; None if it is not in its place."""
        if self.place == "tag":
            return tagged_text(text, self.protocol)
        reply = spoken(text, self.protocol)
        if self.place == "reply":
            return reply
        found = list(matches(self.place, reply))
        return (found[-1][1] or "").strip() if found else None

    def in_form(self, answer: str) -> str:
        """A reply with this answer in its place; empty if the pattern is too complex for that."""
        if self.place in ("tag", "reply"):
            return f"<answer>{answer}</answer>" if self.place == "tag" else answer
        ends = [_SYNTAX.sub(lambda m: m[1] or " " * m[0].startswith("\\s"), end)
                for end in _GROUP.split(self.place, maxsplit=1)]  # fmt: skip
        reply = answer.join(ends)
        return reply if self.answer_in(reply) == answer else ""


# -- choice ----------------------------------------------------------------------------------------


class YamlChoice(AnswerPlace, OrderedTask):
    """One of several options."""

    template, letters = PROMPT, ALPHABET
    options_column, letter_column = OPTIONS_BY_LETTER, GOLD_LETTER
    order_column = OPTION_ORDER
    asks = "Put the letter of your answer between <answer> and </answer>."

    def actor_prompt(self, text: str) -> str:
        """The prompt with the options and the form of the answer, unless it has them."""
        texts = "".join(self.keys.options.texts)  # A, B, C: the prompt says what they stand for
        shown = (
            (texts and ALPHABET.startswith(texts))
            or self.keys.fixes_order
            or "options" in template_names(text)
        )
        return super().actor_prompt(text if shown else f"{text.rstrip()}\n\n{{{{ options }}}}\n")

    def prompt_values(self, example: Example, seat: str) -> dict[str, Any]:
        options = Listed(self.options(example).values())
        return {**super().prompt_values(example, seat), "options": options}

    def examples(
        self, row: Mapping[str, Any], *, source: str = "", split: str = "test"
    ) -> tuple[Example, ...]:
        example, count = self.example(row, source=source, split=split), self.keys.orders
        if count == 1:
            return (example,)
        return self.in_orders(example, balanced_orders(self.options(example), count, example.id))

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        names, texts = _named_options(self.keys, fields)
        options = dict(zip(ALPHABET, texts, strict=False))
        letter = letter_of_gold(fields.get(self.keys.gold), options, names)
        return {**fields, OPTIONS_BY_LETTER: options, GOLD_LETTER: letter}

    def with_baselines(self, examples: Sequence[Example]) -> Sequence[Example]:
        """The examples; DataError if their golds count from 1, so that all would be wrong."""
        if late := [e for e in examples if self.gold_letter(e) == FROM_ONE]:
            raise DataError(
                f"The column '{self.keys.gold}' seems to count the options from 1.",
                f"{late[0].source}: it is {late[0].fields[self.keys.gold]}, of "
                f"{len(self.options(late[0]))} options; positions count from 0.",
                "Subtract 1 in the file, or give the option's letter or text.",
            )
        return super().with_baselines(examples)

    def question(self, example: Example) -> str:
        """The last line before the options; what stands above it may hold the answer."""
        text = self.context(example, None)[-1].text
        return re.split(r"\n\s*A[.):：、]", text, maxsplit=1)[0].strip().rpartition("\n")[2]

    def read(self, example: Example, text: str) -> tuple[str, str]:
        inside, options = self.answer_in(text), self.options(example)
        if inside is None:
            return "", "no_tag"
        letter, status = tagged_letter(f"<answer>{inside}</answer>", "paper")
        alike = [key for key, option in options.items() if _same(option, inside)]
        if status != "ok" and len(alike) == 1:
            return alike[0], "salvaged"
        return (letter, status) if letter in options else ("", "malformed")

    def gold_completion(self, example: Example) -> str:
        return self.in_form(self.gold_letter(example))

    def wrong_completion(self, example: Example) -> str | None:
        others = [key for key in self.options(example) if key != self.gold_letter(example)]
        return self.in_form(random.Random(example.id).choice(others)) or None

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """With `orders`: `row_accuracy`, the mean over rows of their accuracy in all orders;
        `consistency`, the share of rows whose answers choose the same option in all orders;
        `first_option`, the share of readable answers that choose the option shown first."""
        metrics = super().summarise(records)
        if (count := self.keys.orders) > 1:
            first = [float(r.score.words == "A") for r in records if r.score.words in self.letters]
            metrics |= {"row_accuracy": row_mean(records), "first_option": mean_of(first),
                        "consistency": over_orders(records, count, _alike)}  # fmt: skip
        return {name: metric for name, metric in metrics.items() if metric.n}


class Listed(tuple[str, ...]):
    """The options in a template: texts in a loop, lines with letters as a text."""

    def __str__(self) -> str:
        return "\n".join(f"{key}. {text}" for key, text in zip(ALPHABET, self, strict=False))


def balanced_orders(letters: Mapping[str, str], count: int, seed: str) -> list[str]:
    """`count` orders: rotations of drawn orders, so that every option stands in every place."""
    rng, orders = random.Random(f"orders/{seed}"), list[str]()
    while len(orders) < count:
        drawn = "".join(rng.sample(list(letters), len(letters)))
        orders += [drawn[i:] + drawn[:i] for i in range(len(drawn))]
    return orders[:count]


def _alike(play: Sequence[Record]) -> bool:
    letters = set(map(chosen_letter, play))
    return len(letters) == 1 and "" not in letters


def _named_options(keys: Declaration, fields: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(names in the row, texts) of the options; absent ones (None) are left out. RowError for
    options that cannot be told apart, or that are too few or too many."""
    source = keys.options
    value = structure(fields.get(source.column)) if source.column else source.texts
    if isinstance(value, Mapping) and isinstance(value.get("text"), list | tuple):
        texts = value["text"]
        pairs = list(zip(value.get("label") or [""] * len(texts), texts, strict=False))
    elif isinstance(value, Mapping | list | tuple):
        pairs = list(value.items() if isinstance(value, Mapping) else (("", v) for v in value))
    else:
        raise unreadable_options(value)
    pairs += [(name, fields.get(name)) for name in source.columns]
    present = [(str(name), item_text(text, "options")) for name, text in pairs if text is not None]
    if source.columns and not keys.fixes_order:  # the columns have one order in every row
        random.Random("/".join(text for _, text in present)).shuffle(present)
    texts = [text for _, text in present]
    twice = next((text for place, text in enumerate(texts) if text in texts[:place]), None)
    if not all(texts) or twice or not 2 <= len(texts) <= len(ALPHABET):
        why = f"'{twice:.60}' occurs twice" if twice else f"there are {len(texts)}"
        why = why if all(texts) else "one of them is blank"
        raise RowError("The row's options are not usable.",
                       f"It needs 2 to {len(ALPHABET)} different ones; {why}.")  # fmt: skip
    return [name for name, _ in present], texts


def letter_of_gold(gold: Any, options: Mapping[str, str], names: Sequence[str] = ()) -> str:
    """The letter of the gold: an option's name in the row, its text, its letter, or its position
    from 0. RowError if it is none of them; FROM_ONE for a position just behind the last."""
    text = normalised(str(gold)).strip()
    named = [k for k, name in zip(options, names, strict=False) if name and name == text]
    exact = [k for k, option in options.items() if normalised(option) == text]
    alike = [k for k, option in options.items() if _same(option, text)]
    letter = (named + exact or [letter_of(text, options, ALPHABET)])[0]
    if letter or len(alike) == 1:
        return letter or alike[0]
    whole = re.fullmatch(r"(\d+)(?:\.0)?", text)
    place = int(whole[1]) if whole else -1
    if not 0 <= place <= len(options):
        raise bad_gold(text, "an option's text, its letter, or its position from 0")
    return [*options, FROM_ONE][place]


def _same(one: str, other: str) -> bool:
    return one.strip() == other.strip() or plain(one) == plain(other) != ""


# -- text ------------------------------------------------------------------------------------------


class YamlAnswer(AnswerPlace):
    """A text, compared with the gold."""

    @property
    def scorers(self) -> Sequence[Scorer]:
        return self.keys.scorer or (Scorer(kind="normalised"),)

    def check_ready(self, examples: Sequence[Example]) -> None:
        for scorer in self.scorers:
            if scorer.kind == "json_schema":
                json_validator(scorer)

    def parse(self, text: str) -> tuple[str, str]:
        return with_status(self.answer_in(text))

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        if self.keys.gold and not self.golds(fields):
            raise RowError(f"The row's '{self.keys.gold}' is blank.", "Replies are compared to it.")
        return fields

    def golds(self, fields: Mapping[str, Any]) -> list[str]:
        """The golds of a row, of which the best counts: a text, a list, or `{text: [...]}`."""
        value = structure(fields.get(self.keys.gold))
        value = value.get("text", ()) if isinstance(value, Mapping) else value
        golds = value if isinstance(value, list | tuple) else [value]
        return [text for gold in golds if (text := item_text(gold, "golds"))]

    def scores(self, example: Example, answer: str) -> list[float]:
        """The score of each scorer."""
        golds = self.golds(example.fields) or [""]
        return [max(score_of(one, answer, gold) for gold in golds) for one in self.scorers]

    def grade(self, example: Example, answer: str) -> float:
        scores, weights = self.scores(example, answer), [one.weight for one in self.scorers]
        return sum(w * s for w, s in zip(weights, scores, strict=True)) / sum(weights)

    def measures(self, example: Example, answer: str) -> dict[str, float | None]:
        """With several scorers, the score of each."""
        scores = self.scores(example, answer) if answer else [0.0] * len(self.scorers)
        several = len(scores) > 1
        return dict(zip(score_names(self.scorers), scores, strict=True)) if several else {}

    def gold_text(self, example: Example) -> str:
        return " / ".join(self.golds(example.fields))

    def gold_completion(self, example: Example) -> str:
        """The first gold in form, or as it is, that is right; empty if there is no gold, or if it
        is a pattern."""
        golds = self.golds(example.fields)
        replies = [reply for gold in golds for reply in (self.in_form(gold), gold) if reply]
        right = [r for r in replies if self.grade(example, self.answer_in(r) or "") == 1]
        patterns = any(one.kind == "regex" and not one.pattern for one in self.scorers)
        return (right or ([] if patterns else replies) or [""])[0]

    def wrong_completion(self, example: Example) -> str | None:
        wrong = (self.in_form(text) for text in _WRONG if self.grade(example, text) < 1)
        return next(filter(None, wrong), None)

    def leak_view(self, example: Example) -> LeakView | None:
        golds, prompt = self.golds(example.fields), self.context(example, None)[-1].text
        if not golds:
            return None
        return LeakView(prompt, gold=golds[0], reference=golds[0], private=tuple(golds[1:]))


class YamlText(YamlAnswer, ChoiceTask):
    """One reply with a text."""

    template = PROMPT
