"""Models that stand in for others: unavailable, answering by a function, observed, scripted.

A scripted model follows a file, for trials of a judge, a partner or a coach without any model:

    name: shopkeeper
    rules:                          # the first whose pattern is found in the last message
      - when: "(?i)how much|price"
        say: "Twelve euros."
      - when: '"score"'
        say: ['{"reasoning": "fine", "score": 6}', '{"reasoning": "fine", "score": 7}']
      - purpose: next_speaker       # of calls that name a seat or purpose: only of those
        say: "Ann"
    replies:                        # else these, a turn each; the last one again and again
      - "Good morning."
      - "Anything else?"

A list under `say` is gone through by judge sample and turn. Nothing depends on the clock or on
chance, so equal calls get equal replies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from soulkit.config import read_settings_file
from soulkit.errors import ConfigError
from soulkit.models.base import ChatModel
from soulkit.runs.jsonl import first_problem
from soulkit.types import Call, Completion, Sampling, Segment, Usage


class AnsweringModel:
    """A model whose replies are what `answer` says of a call and how it is sampled."""

    def __init__(self, name: str, answer: Callable[[Call, Sampling], str]) -> None:
        self.name, self._answer = name, answer

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        return Completion(text=self._answer(call, sampling))

    async def close(self) -> None:
        """Nothing is open."""


class UnavailableModel(AnsweringModel):
    """Takes the place of a model that cannot be asked: every call raises the error of `why`."""

    def __init__(self, name: str, why: Callable[[Call], Exception]) -> None:
        super().__init__(name, self._refuse)
        self._why = why

    def _refuse(self, call: Call, sampling: Sampling) -> str:
        raise self._why(call)


class ObservedModel:
    """Another model, whose calls a subclass watches by overriding `complete`."""

    def __init__(self, model: ChatModel) -> None:
        self.model, self.name = model, model.name

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        return await self.model.complete(context, sampling, call)

    def set_aside(self, context: Sequence[Segment], sampling: Sampling, call: Call) -> None:
        """The reply to this call was of no use; the model behind is not told."""

    async def close(self) -> None:
        await self.model.close()


class _Rule(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    when: str = ""
    seat: str | None = None
    purpose: str | None = None
    say: tuple[str, ...]

    @field_validator("say", mode="before")
    @classmethod
    def _listed(cls, say: Any) -> Any:
        return (say,) if isinstance(say, str) else say

    @field_validator("say")
    @classmethod
    def _something(cls, say: tuple[str, ...]) -> tuple[str, ...]:
        if not say:
            raise ValueError("an empty list says nothing")
        return say

    @field_validator("when")
    @classmethod
    def _pattern(cls, when: str) -> str:
        try:
            re.compile(when)
        except re.error as error:
            raise ValueError(f"'{when}' is no regular expression ({error})") from error
        return when

    @model_validator(mode="after")
    def _condition(self) -> Self:
        if not self.model_fields_set & {"when", "seat", "purpose"}:
            raise ValueError("a rule says when it holds: when, seat or purpose")
        return self

    def fits(self, last: str, call: Call) -> bool:
        """Whether the rule holds for a call with this last message."""
        seat, purpose = self.seat, self.purpose
        if seat not in (None, call.seat) or purpose not in (None, call.purpose):
            return False
        return re.search(self.when, last) is not None


class Script(BaseModel):
    """The contents of a script file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "scripted"
    rules: tuple[_Rule, ...] = ()
    replies: tuple[str, ...] = ()


class ScriptedModel:
    """A ChatModel that answers from a Script; an empty reply when nothing in it fits."""

    def __init__(self, script: Script) -> None:
        self.script, self.name = script, script.name

    @classmethod
    def read(cls, file: Path) -> Self:
        """The model of a script file; ConfigError when it is missing or no script."""
        try:
            return cls(Script.model_validate(read_settings_file(file)))
        except ValidationError as error:
            problem = first_problem(error, "the file").replace("Value error, ", "")
            raise ConfigError(
                f"The script '{file}' cannot be followed: {problem}.",
                "A scripted player says what stands under 'rules' and 'replies', and nothing else.",
                "Write  replies: ['Hello.']  or  rules: [{when: PATTERN, say: TEXT}].",
            ) from error

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        """The reply that the script has for this call; sampling changes nothing."""
        text = self._reply(context[-1].text if context else "", call)
        words = sum(len(segment.text.split()) for segment in context)
        usage = Usage(calls=1, prompt_tokens=words, completion_tokens=len(text.split()))
        return Completion(text=text, usage=usage)

    async def close(self) -> None:
        """Nothing is open."""

    def _reply(self, last: str, call: Call) -> str:
        for rule in self.script.rules:
            if rule.fits(last, call):
                return rule.say[(call.sample + call.turn) % len(rule.say)]
        replies = self.script.replies
        return replies[min(call.turn, len(replies) - 1)] if replies else ""
