"""Social-R1: what people in a short scene feel, want, believe or mean; lettered options.

{"prompt_text": "Story: Ilka lets her little brother win at chess ... Question: What is she after?
A. A quick end B. His good mood" (each on a line of its own), "answer_text": "B. His good mood"}

`paper` parses the options in the text and rejects a row whose gold is not among them, or whose gold
letter and text disagree. `reference` takes the first character of a gold without a letter and
accepts any letter. The feedback is a worked example with the answer, used only on request.
Generated rows cycle through six kinds of scenes; the scene states what decides it, and `why`, which
only the author of a worked example reads, says which part that is.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from soulkit.data.literals import first_message, structure
from soulkit.errors import RowError
from soulkit.judge.leaks import LeakView
from soulkit.tasks.kit.choice import (
    ANY_LETTER,
    CLOSE,
    WorkedTask,
    bad_gold,
    led_text,
    letter_of,
    opening,
    read_state,
)
from soulkit.tasks.kit.made_rows import rows_by_index
from soulkit.tasks.kit.prompting import Texts
from soulkit.types import Example, Score

TEXTS = Texts(__file__)
_ON_LINES = re.compile(r"^[ \t]*[*(]{0,3}([A-Z])[.):]\**(?=\s)[ \t]*", re.MULTILINE)
_INLINE = re.compile(r"(?:\A|(?<=\s))\(?([A-Z])[.)](?=\s)\s*")
_LEADING = re.compile(r"([A-Z])[.)]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PromptParts:
    """A row's text in parts: the scene, the question, and the lettered options."""

    story: str
    question: str
    options: dict[str, str] = field(default_factory=dict)


class SocialR1(WorkedTask):
    letters, published = string.ascii_uppercase, ANY_LETTER
    gold_column, letter_column = "answer_text", "answer_letter"

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        text = prompt_of(fields, reference=self.protocol == "reference")
        if not text.strip():
            what = "A row of social_r1 has no question."
            raise RowError(what, "prompt_text, conversations and prompt are empty.")
        parts = split_prompt(text)
        gold = fields.get("answer_text") or ""
        rest = {"conversations": None, "prompt": None, "answer_text": led_text(gold) or None}
        letter = self._gold(fields, parts)
        return {**fields, **rest, "prompt_text": text, "answer_letter": letter,
                "story": parts.story}  # fmt: skip

    def _gold(self, fields: Mapping[str, Any], parts: PromptParts) -> str:
        letter, text = (fields.get(name) or "" for name in ("answer_letter", "answer_text"))
        if self.protocol == "reference":
            return letter.strip().upper() or leading_letter(text)
        letters = [
            letter_of(g, parts.options, string.ascii_uppercase) for g in (letter, text) if g.strip()
        ]
        if len(set(letters)) != 1 or not letters[0]:
            gold = " / ".join(g for g in (letter, text) if g.strip())
            raise bad_gold(gold, "an option's letter, or its letter and text")
        return letters[0]

    def options(self, example: Example) -> dict[str, str]:
        return split_prompt(str(example.fields["prompt_text"])).options

    def leak_view(self, example: Example) -> LeakView:
        parts = split_prompt(str(example.fields["prompt_text"]))
        options = parts.options or {self.gold_letter(example): self.gold_text(example)}
        gold = self.gold_text(example)
        return LeakView(parts.question, tuple(options.values()), gold, tuple(options))

    def worked_example(self, example: Example) -> str:
        why = example.fields.get("why") or f"What fits the scene: {self.gold_text(example)}"
        return f"{str(why).rstrip('.')}. {self.gold_completion(example)}"

    def lessons(self, example: Example, score: Score | None) -> Iterable[str]:
        lead = opening(
            read_state(score), "That reading holds up.", "That reading does not hold up."
        )
        kind = str(example.fields.get("kind") or "")
        advice = TEXTS["about"].get(kind, TEXTS["steps"])
        yield from (f"{lead} {text}".strip() for text in (advice, TEXTS["steps"], TEXTS["short"]))
        yield CLOSE


# -- reading rows --------------------------------------------------------------------------------


def prompt_of(fields: Mapping[str, Any], *, reference: bool = False) -> str:
    """The text of a row from its first non-empty source; blank if there is none.

    `reference` takes the first message of `conversations` even if it is blank.
    """
    text = fields.get("prompt_text")
    if isinstance(text, str) and text.strip():
        return text
    wrapped = first_message(fields.get("conversations"))
    if wrapped is not None and (reference or wrapped.strip()):
        return wrapped
    return _spoken(structure(fields.get("prompt")))


def _spoken(value: Any) -> str:
    if isinstance(value, list | tuple):
        messages = [m for m in value if isinstance(m, Mapping) and m.get("role", "user") == "user"]
        return "\n\n".join(str(m.get("content") or "") for m in messages)
    return value if isinstance(value, str) else ""


def leading_letter(text: str | None) -> str:
    """The published parsing of a gold text: its leading `X.` or `X)`, else its first character."""
    gold = (text or "").strip()
    match = _LEADING.match(gold)
    return (match.group(1) if match else gold[:1]).upper()


def split_prompt(text: str) -> PromptParts:
    """Story, question (the last line before the options) and options of a prompt.

    Options are the last run of marks A, B, ... at line starts, or else within a line. With fewer
    than two, the last line is the question and there are no options.
    """
    marks = _last_run(text, _ON_LINES) or _last_run(text, _INLINE)
    head = text[: marks[0].start()] if marks else text
    lines = [line.strip() for line in head.splitlines() if line.strip()]
    ends = [mark.start() for mark in marks[1:]]
    options = {
        mark[1]: text[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=False)
    }
    if marks:  # text after the last option's line is not part of it
        options[marks[-1][1]] = text[marks[-1].end() :].split("\n")[0].strip()
    return PromptParts("\n".join(lines[:-1]), lines[-1] if lines else "", options)


def _last_run(text: str, mark: re.Pattern[str]) -> list[re.Match[str]]:
    """The last marks in the order A, B, C, ...; empty if there are fewer than two."""
    best: list[re.Match[str]] = []
    run: list[re.Match[str]] = []
    for match in mark.finditer(text):
        if match[1] == "A":
            run = [match]
        elif run and ord(match[1]) == ord(run[-1][1]) + 1:
            run.append(match)
            best = run
    return best


_THINGS = ("umbrella", "guitar", "bicycle pump", "tent", "lamp", "sewing kit", "drill", "kettle")
_PLACES = ("cupboard", "shed", "hallway", "attic", "cellar", "car boot")


KINDS = ("irony", "white_lie", "hint", "hidden_feeling", "careless_remark", "false_belief")


def _made_row(rng: random.Random, index: int) -> dict[str, Any]:
    kind = KINDS[index % len(KINDS)]
    scene = rng.choice(TEXTS["scenes"][kind])
    filled = dict(zip("abc", rng.sample(TEXTS["names"], 3), strict=True))
    filled |= {"thing": rng.choice(_THINGS), "place": rng.choice(_PLACES)}
    options = [scene["right"], *rng.sample(scene["others"], rng.choice((2, 3)))]
    rng.shuffle(options)
    letter = "ABCD"[options.index(scene["right"])]
    lettered = [f"{'ABCD'[i]}. {text}" for i, text in enumerate(options)]
    lines = (f"Story: {scene['story']}", f"Question: {scene['question']}", *lettered)
    return {
        "prompt_text": "\n".join(lines).format(**filled),
        "answer_letter": letter,
        "answer_text": f"{letter}. {scene['right']}".format(**filled),
        "kind": kind,
        "why": scene["why"].format(**filled),
        "index": index,
    }


rows = rows_by_index("social_r1", _made_row)
