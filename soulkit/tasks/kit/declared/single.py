"""The kinds `choice` and `text`: one prompt, one reply, scored without a model."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from soulkit.data.literals import item_text
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import plain, spoken, tagged_text
from soulkit.tasks.kit.choice import ChoiceTask, LetteredTask, check_gold, read_options
from soulkit.tasks.kit.declared.keys import GOLD_LETTER, OPTIONS_BY_LETTER, PROMPT
from soulkit.tasks.kit.declared.task import YamlTask
from soulkit.types import Example

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class YamlChoice(YamlTask, LetteredTask):
    """One of several options, by its letter in the answer tag."""

    letters = ALPHABET
    template = PROMPT

    def template_texts(self) -> dict[str, str]:
        texts = super().template_texts()
        text = texts[PROMPT]
        if "options" not in text:
            texts[PROMPT] = f"{text.rstrip()}\n\n{{{{ options }}}}"
        if "<answer>" not in text:
            texts[PROMPT] += "\n\nAnswer with the letter of one option: <answer>A</answer>"
        return texts

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        options = self._lettered(fields)
        letter = gold_letter(fields.get(self.keys.gold), options)
        check_gold(letter, options)
        return {**fields, OPTIONS_BY_LETTER: options, GOLD_LETTER: letter}

    def _lettered(self, fields: Mapping[str, Any]) -> dict[str, str]:
        source = self.keys.options
        if source.column:
            value = fields.get(source.column)
            return read_options(value if isinstance(value, Mapping) else None,
                                None if isinstance(value, Mapping) else value)  # fmt: skip
        texts = list(source.texts) or [item_text(fields.get(c), c) for c in source.columns]
        if source.columns:  # the columns have one order in every row
            random.Random("/".join(texts)).shuffle(texts)
        return dict(zip(ALPHABET, texts, strict=False))

    def prompt_values(self, example: Example, seat: str) -> dict[str, Any]:
        lines = (f"{letter}. {text}" for letter, text in self.options(example).items())
        return {**super().prompt_values(example, seat), "options": "\n".join(lines)}

    def options(self, example: Example) -> Mapping[str, str]:
        options: Mapping[str, str] = example.fields[OPTIONS_BY_LETTER]
        return options

    def gold_letter(self, example: Example) -> str:
        return str(example.fields[GOLD_LETTER])

    def question(self, example: Example) -> str:
        return self.context(example, None)[-1].text


def gold_letter(gold: Any, options: Mapping[str, str]) -> str:
    """The letter of the gold, which is an option's text, its letter or its position from 0."""
    text = str(gold).strip()
    by_text = [letter for letter, option in options.items() if plain(option) == plain(text)]
    if by_text or text.upper() in options:
        return (by_text or [text.upper()])[0]
    place = int(text) if text.isdecimal() else -1
    return list(options)[place] if 0 <= place < len(options) else text


class YamlText(YamlTask, ChoiceTask):
    """A free text, compared with the gold."""

    template = PROMPT

    def parse(self, text: str) -> tuple[str, str]:
        reply = spoken(text, self.protocol)
        answer = tagged_text(text, self.protocol) if self.keys.answer == "tag" else reply
        return (answer or "", "ok" if answer else "no_tag" if answer is None else "empty")

    def grade(self, example: Example, answer: str) -> float:
        return float(plain(answer) == plain(self.gold_text(example)))

    def gold_text(self, example: Example) -> str:
        return str(example.fields.get(self.keys.gold) or "")

    def gold_completion(self, example: Example) -> str:
        gold = self.gold_text(example)
        return f"<answer>{gold}</answer>" if self.keys.answer == "tag" else gold

    def leak_view(self, example: Example) -> LeakView:
        return LeakView(self.context(example, None)[-1].text, gold=self.gold_text(example))
