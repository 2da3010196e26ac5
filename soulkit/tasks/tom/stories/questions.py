"""What a question asks, whoever wrote it: the kind, the chain of thinkers, the object."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from soulkit.tasks.tom.stories.tracker import Beliefs

QuestionKind = Literal["memory", "reality", "belief"]


@dataclass(frozen=True, slots=True)
class Question:
    """`chain` has the outermost thinker first and is empty unless `kind` is `belief`."""

    kind: QuestionKind
    chain: tuple[str, ...]
    obj: str

    @property
    def order(self) -> int:
        return len(self.chain)


_NAME = r"([A-Z][A-Za-z]*)"
_OBJ = r"the (?P<obj>\S.*?)"
_MEMORY = re.compile(rf"Where was {_OBJ} at (?:the beginning|first)\?")
_REALITY = re.compile(rf"Where is {_OBJ} (?:really|now)\?")
_FIRST = re.compile(rf"Where (?:will|would) {_NAME} (?:look|search) for {_OBJ}\?")
_SECOND = re.compile(
    rf"Where does {_NAME} (?:think|believe) that {_NAME} (?:searches|would search) for {_OBJ}\?"
)
_CHAIN = re.compile(
    rf"Where does {_NAME} (?:really )?(?:think|believe)"
    rf"(?P<rest>(?: [A-Z][A-Za-z]* (?:thinks|believes))*) {_OBJ} is\?"
)


def read_question(text: str) -> Question | None:
    """The question that a text asks; None when its form is unknown."""
    text = text.strip().replace(" - ", "-")  # some copies split "t-shirt"
    if match := _MEMORY.fullmatch(text):
        return Question("memory", (), match["obj"])
    if match := _REALITY.fullmatch(text):
        return Question("reality", (), match["obj"])
    if match := _FIRST.fullmatch(text):
        return Question("belief", (match[1],), match["obj"])
    if match := _SECOND.fullmatch(text):
        return Question("belief", (match[1], match[2]), match["obj"])
    if match := _CHAIN.fullmatch(text):
        rest = tuple(match["rest"].split()[::2])
        return Question("belief", (match[1], *rest), match["obj"])
    return None


def solve(beliefs: Beliefs, question: Question) -> str | None:
    """The tracker's answer to a question, None when the story does not settle it."""
    if question.kind == "memory":
        return beliefs.start(question.obj)
    return beliefs.answer(question.chain, question.obj)
