"""The kind `dialogue`: a conversation with a partner, scored by a judge or by its last line.

The actor's prompt is a system message. The conversation ends after the declared turns, when either
side says one of the declared `ends` (the partner only after a turn of the actor), or when the actor
says nothing. The judge reads the transcript; without a judge, the actor's last line is the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from soulkit.judge.verdict import utterances
from soulkit.models.base import Cast
from soulkit.tasks.kit.base import READABLE
from soulkit.tasks.kit.declared.judged import REPLY, WEAK_REPLY, YamlJudge
from soulkit.tasks.kit.declared.keys import DialogueKeys
from soulkit.tasks.kit.dialogue import DialogueTask
from soulkit.types import Episode, Example, Feedback, Line, Role, Score, Segment

ENDED = "ended"
"""The stop reason of a dialogue in which one side said an end."""
HELLO = "Hello."
"""What a scripted partner says, for self-checks."""


class YamlDialogue(YamlJudge, DialogueTask):
    prompt_role = "system"
    partner_attempts = 2

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self.keys.dialogue is not None
        self.talk: DialogueKeys = self.keys.dialogue
        self.start, self.actor_begins = self.talk.start, self.talk.begins == "actor"
        self.gold_is_script = self.keys.judge is not None

    def calls(self, example: Example) -> dict[Role, int]:
        answers = self.most_turns - self.actor_begins
        calls: dict[Role, int] = {"actor": self.most_turns, "partner": answers}
        calls |= self.judge_calls() if self.keys.judge else {}
        return {role: count for role, count in calls.items() if count}

    def preview(self, example: Example) -> tuple[Segment, ...]:
        return (*self.context(example, None), Segment("user", self.start))

    def ending(self, example: Example, lines: Sequence[Line], turns: int) -> str | None:
        return self.partner_ending(lines[-1].text) if lines[-1].text else "empty"

    def partner_ending(self, line: str) -> str | None:
        return ENDED if any(_says(line, end) for end in self.talk.ends) else None

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        if self.keys.judge is not None or episode.failure is not None:
            score = await super().score(example, episode, cast)
        else:
            answer, status = self.reply_of(episode)
            value = self.grade(example, answer) if status in READABLE else self.spec.metric.low
            score = self.judged_score(value, {}, status=status, words=answer)
        turns, ended = float(len(utterances(episode))), float(episode.stop == ENDED)
        return replace(score, metrics={**score.metrics, "turns": turns, "ended": ended})

    # -- scripts ------------------------------------------------------------------------------

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        last = REPLY if self.keys.judge else self.gold_completion(example)
        return self.scripted(example, [(HELLO, last)], feedback, "max_turns")

    def wrong(self, example: Example) -> Episode:
        return self.scripted(example, [(HELLO, WEAK_REPLY)], None, "max_turns")

    def canary(self, example: Example, text: str) -> Episode | None:
        return (
            self.scripted(example, [(HELLO, text)], None, "max_turns") if self.keys.judge else None
        )


def _says(line: str, end: str) -> bool:
    """Whether a line says an end: a text, or a pattern between two slashes; ignoring case."""
    if len(end) > 2 and end[0] == end[-1] == "/":
        return re.search(end[1:-1], line, re.IGNORECASE) is not None
    return end.casefold() in line.casefold()
