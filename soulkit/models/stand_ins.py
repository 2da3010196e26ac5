"""Models that replace others: unavailable, function-based, observed, scripted.

A scripted model reads its replies from a file, to try a judge, partner or coach without a model:

    name: shopkeeper
    rules:                          # the first rule whose pattern is in the last message
      - when: "(?i)how much|price"
        say: "Twelve euros."
      - when: '"score"'
        say: ['{"reasoning": "fine", "score": 6}', '{"reasoning": "fine", "score": 7}']
      - purpose: next_speaker       # applies only to calls with this purpose (or seat)
        say: "Ann"
    replies:                        # if no rule applies: one per turn, then the last one again
      - "Good morning."
      - "Anything else?"

A list under `say` is indexed by judge sample and turn, so equal calls get equal replies.
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
from soulkit.parse import PATTERN_ERRORS, ParseError, pattern_matches
from soulkit.runs.jsonl import first_problem
from soulkit.text import one_line
from soulkit.types import Call, Completion, Sampling, Segment, Usage


class AnsweringModel:
    """A model whose reply is `answer(call, sampling)`."""

    def __init__(self, name: str, answer: Callable[[Call, Sampling], str]) -> None:
        self.name, self._answer = name, answer

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        return Completion(text=self._answer(call, sampling))

    async def close(self) -> None:
        """Nothing to close."""


class UnavailableModel(AnsweringModel):
    """Replaces a model that cannot be called: every call raises the error that `why` returns."""

    def __init__(self, name: str, why: Callable[[Call], Exception]) -> None:
        super().__init__(name, self._refuse)
        self._why = why

    def _refuse(self, call: Call, sampling: Sampling) -> str:
        raise self._why(call)


class ObservedModel:
    """Wraps another model. Subclasses watch its calls by overriding `complete`."""

    def __init__(self, model: ChatModel) -> None:
        self.model, self.name = model, model.name

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        return await self.model.complete(context, sampling, call)

    def set_aside(self, context: Sequence[Segment], sampling: Sampling, call: Call) -> None:
        """Ignore an unusable reply, without forwarding it to the wrapped model."""

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
            raise ValueError("'say' must contain at least one reply")
        return say

    @field_validator("when")
    @classmethod
    def _pattern(cls, when: str) -> str:
        try:
            re.compile(when)
        except PATTERN_ERRORS as error:
            raise ValueError(f"'{when}' is not a regular expression ({error})") from error
        if re.search(r"(?<!\\)\{(?![\d,]+\})", when):
            raise ValueError(f"'{when}' has a brace that is no repeat; write it as \\{{")
        return when

    @model_validator(mode="after")
    def _condition(self) -> Self:
        if not self.model_fields_set & {"when", "seat", "purpose"}:
            raise ValueError("a rule needs a condition: when, seat or purpose")
        return self

    def fits(self, last: str, call: Call) -> bool:
        """Whether the rule applies to a call with this last message."""
        seat, purpose = self.seat, self.purpose
        if seat not in (None, call.seat) or purpose not in (None, call.purpose):
            return False
        try:
            return next(pattern_matches(self.when, last), None) is not None
        except ParseError as error:
            raise ConfigError(
                f"The pattern '{one_line(self.when, 60)}' of a script cannot be used.",
                f"The reader reports: {error}.",
                "Write it without large or nested repeats, such as (a+)+.",
            ) from error


class Script(BaseModel):
    """Contents of a script file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "scripted"
    rules: tuple[_Rule, ...] = ()
    replies: tuple[str, ...] = ()


class ScriptedModel:
    """A ChatModel that replies from a Script; the reply is empty if nothing matches."""

    def __init__(self, script: Script) -> None:
        self.script, self.name = script, script.name

    @classmethod
    def read(cls, file: Path) -> Self:
        """Load a script file. ConfigError if it is missing or not a script."""
        try:
            return cls(Script.model_validate(read_settings_file(file)))
        except ValidationError as error:
            problem = first_problem(error, "the file").replace("Value error, ", "")
            raise ConfigError(
                f"The script '{file}' is not valid: {problem}.",
                "A scripted player only uses the replies under 'rules' and 'replies'.",
                "Write  replies: ['Hello.']  or  rules: [{when: PATTERN, say: TEXT}].",
            ) from error

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        """The scripted reply to this call; sampling has no effect."""
        text = self._reply(context[-1].text if context else "", call)
        words = sum(len(segment.text.split()) for segment in context)
        usage = Usage(calls=1, prompt_tokens=words, completion_tokens=len(text.split()))
        return Completion(text=text, usage=usage)

    async def close(self) -> None:
        """Nothing to close."""

    def _reply(self, last: str, call: Call) -> str:
        for rule in self.script.rules:
            if rule.fits(last, call):
                return rule.say[(call.sample + call.turn) % len(rule.say)]
        replies = self.script.replies
        return replies[min(call.turn, len(replies) - 1)] if replies else ""
