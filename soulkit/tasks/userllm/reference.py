"""UserLLM under `--protocol reference`: the published numbers, labels and hints.

High overlap with the intent is rewarded, an empty message is scored like any other, and a judge is
asked once; any reply other than exactly the right label counts as the wrong one. Hints are explicit
and may contain answers: there is no leak check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soulkit.judge.leaks import LeakView
from soulkit.judge.structured import JudgeQuestion
from soulkit.models.base import Cast
from soulkit.tasks.userllm.fields import CSQA, END, NQ, PRISM, UserMessage
from soulkit.tasks.userllm.metrics import (
    choices_named,
    content_words,
    goal_keywords,
    intent_overlap,
    published_batch,
    role_adherence,
)
from soulkit.tasks.userllm.task import LabelScore, UserLLM, verdict_words
from soulkit.types import BatchMetric, Episode, Example, Record, Score

_KEYWORDS = 8
_PARROTING = 0.8
"""Below this overlap the hints ask for more of the intent's words."""


class UserLLMReference(UserLLM):
    def _unpacked(self, choices: Any) -> Any:
        return choices

    def check(self, fields: dict[str, Any], conversation: Any) -> dict[str, Any]:
        return fields

    async def rated(
        self, example: Example, episode: Episode, message: UserMessage, cast: Cast
    ) -> Score:
        fields = example.fields
        source, last, choices = fields["source"], fields["is_last_turn"], fields["choices"] or ()
        judgement: LabelScore = (0.0, (), {})
        complete = bool(fields["question"] and fields["assistant_suggestion_turn"])
        if asks(source, message, complete):
            ask = self._detected if source == PRISM else self._judged
            judgement = await ask(
                example, episode, message.text if source == PRISM else message.output, cast
            )
        label, verdicts, metrics = judgement
        values = numbers(source, fields["intent"], message, last, choices, label)
        used, words = self._templates(verdicts), verdict_words(verdicts)
        return self._scored(mean(values), {**values, **metrics}, verdicts, used, words=words)

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """Message scores averaged by source, and the other metrics of the published code."""
        return published_batch(records)

    def group_rewards(self, records: Sequence[Record]) -> Sequence[Record]:
        return records

    def _worth(self, label: str, right: str) -> float:
        return worth(label, right)

    def judge_question(self, purpose: str, prompt: str, source: str) -> JudgeQuestion[str]:
        """Accepts any text at the first attempt."""
        return JudgeQuestion(purpose, prompt, str, lambda text: {"label": text}, attempts=1)

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        message = self._message(episode) if score is not None else None
        if message is None or score is None:
            return super().explain(example, episode, score)
        return hint(example.fields, message, score)

    def leak_view(self, example: Example) -> LeakView | None:
        return None

    def gold_message(self, fields: Mapping[str, Any]) -> str:
        """The intent itself, because overlap with it is rewarded."""
        return str(fields["intent"]) + (f" {END}" if fields["is_last_turn"] else "")


# -- numbers -------------------------------------------------------------------------------------


def asks(source: str, message: UserMessage, complete: bool) -> bool:
    """Whether the published score asks its judge. `complete`: the row has question and
    suggestion."""
    if source == NQ:
        return complete and bool(message.output)
    return source == PRISM and bool(message.text)


def numbers(
    source: str,
    intent: str,
    message: UserMessage,
    last: bool | None,
    choices: Sequence[str],
    label: float,
) -> dict[str, float]:
    """The published metrics of one reply: metric → value, empty for an unknown source.

    `label` is the judge's number, 0 if it was not asked.
    """
    if source == CSQA:
        return {"role_adherence": role_adherence(choices, message.output, "reference")}
    if source == NQ:
        return {"intent_adherence": label}
    if source != PRISM:
        return {}
    return {
        "intent_decomposition": intent_overlap(intent, message.output),
        "termination": float(last is not None and message.ended == last),
        "ai_detector": label,
    }


def mean(values: Mapping[str, float]) -> float:
    """The mean of the parts; 0 if there are none."""
    return sum(values.values()) / len(values) if values else 0.0


def worth(text: str | None, right: str) -> float:
    """1 for exactly the right label, ignoring case and surrounding white space; else 0.

    Anything else counts as the wrong label, including a failed call (None).
    """
    return float((text or "").strip().upper() == right)


# -- hints ---------------------------------------------------------------------------------------


def hint(fields: Mapping[str, Any], message: UserMessage, score: Score) -> str | None:
    """The published hints on a draft, reworded; None if there are none."""
    source = fields["source"]
    if source == CSQA:
        return _avoid(fields["choices"] or (), message)
    if source == NQ:
        return _ask_again(fields, score)
    parts = (_when_to_end(fields, message, score), _use_keywords(fields, message, score))
    return " ".join(part for part in parts if part) or None


def _avoid(choices: Sequence[str], message: UserMessage) -> str | None:
    if not choices_named(choices, message.output, "reference"):
        return None
    listed = "; ".join(f'"{choice}"' for choice in choices)
    return f"Do not write any of these expressions, not even in passing: {listed}. Use other words."


def _ask_again(fields: Mapping[str, Any], score: Score) -> str | None:
    if score.value is None or score.value >= 1:
        return None
    question = fields["question"] or fields["intent"]
    return f"Pass over the assistant's proposal without a word and ask again at once: {question}"


def _when_to_end(fields: Mapping[str, Any], message: UserMessage, score: Score) -> str:
    last = fields["is_last_turn"]
    if last is None or message.ended == last:
        return ""
    if last:
        return f"Everything is answered: reply with {END} and not one word more."
    return f"You are not done yet: leave out {END} and ask your next question."


def _use_keywords(fields: Mapping[str, Any], message: UserMessage, score: Score) -> str:
    overlap = score.metrics.get("intent_decomposition")
    missing = set(goal_keywords(fields["intent"])) - content_words(message.output)
    if overlap is None or overlap >= _PARROTING or not missing:
        return ""
    words = ", ".join(goal_keywords(fields["intent"])[:_KEYWORDS])
    return f"Be brief and build the message from these words: {words}. Every other word costs."
