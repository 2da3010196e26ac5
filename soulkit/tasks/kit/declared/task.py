"""What all tasks without code share: templates, contexts, and feedback.

A class of one kind is `class YamlChoice(YamlTask, LetteredTask)`: this class comes first.

Feedback without a coach is the first of these that applies: a rule of the task, the judge's words
(`critique: true`), or, in a task without rules, a usual sentence for the outcome.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from soulkit.errors import ConfigError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import fence, plain
from soulkit.models.base import Cast
from soulkit.tasks.kit.base import READABLE, Rollout, Task
from soulkit.tasks.kit.coaching import (
    first_verdict,
    judged_dimensions,
    remarks_without_secrets,
    without_secrets,
)
from soulkit.tasks.kit.declared.keys import (
    COACH,
    PROMPT,
    SYSTEM,
    Declaration,
    Rule,
    template_names,
)
from soulkit.tasks.kit.prompting import first_words
from soulkit.tasks.kit.scoring import macro
from soulkit.tasks.kit.spec import TaskSpec
from soulkit.types import (
    BatchMetric,
    Episode,
    Example,
    Feedback,
    Protocol,
    Record,
    Score,
    Segment,
)

CLASSES: Mapping[str, str] = {
    "choice": "soulkit.tasks.kit.declared.single:YamlChoice",
    "text": "soulkit.tasks.kit.declared.single:YamlText",
    "judged": "soulkit.tasks.kit.declared.judged:YamlJudged",
    "dialogue": "soulkit.tasks.kit.declared.judged:YamlDialogue",
}
"""Kind → its class."""
_SLOT = "\n{% if feedback %}\n\nFeedback on an earlier attempt: {{ feedback }}\n{% endif %}"
"""The feedback slot of a prompt that does not name `feedback`."""
SHARED_COACH = "task_coach"
"""The shared template of a coach."""
_USUAL = {
    False: {"right": "The answer was right. Keep reasoning this way.",
            "wrong": "The answer was wrong. Read everything again, and check each detail.",
            "": "Answer in exactly the form that the instructions ask for."},
    True: {"high": "That was good. Keep to this way of writing.",
           "low": "That was weak. Read the instructions again, and do all that they ask for.",
           "": "Do what the instructions ask for, and write nothing else."},
}  # fmt: skip
USUAL_RULES = {
    judged: tuple(Rule(when={"outcome": o} if o else {}, say=say) for o, say in texts.items())
    for judged, texts in _USUAL.items()
}
"""Whether a judge scores the task → the feedback on its outcomes if it has no rules."""


class YamlTask(Task):
    """A task whose declaration is all there is."""

    prompt_role: Literal["system", "user"] = "user"
    """The role of the message with the actor's prompt."""

    def __init__(
        self, name: str, spec: TaskSpec, *, protocol: Protocol = "paper", folder: Path | None = None
    ) -> None:
        super().__init__(name, spec, protocol=protocol, folder=folder)
        assert spec.declaration is not None
        self.keys: Declaration = spec.declaration
        texts = self.template_texts()
        self.prompts = self.prompts.with_texts(texts)
        self.templates = tuple(name for name in texts if name != COACH)

    def template_texts(self) -> dict[str, str]:
        """Template name → text. The actor's prompt gets a feedback slot if it names none."""
        texts = self.keys.templates()
        texts[PROMPT] = self.actor_prompt(texts[PROMPT])
        if "feedback" not in template_names(texts[PROMPT] + texts.get(SYSTEM, "")):
            texts[PROMPT] += _SLOT
        texts.setdefault(COACH, self.prompts.source(SHARED_COACH))
        return texts

    def actor_prompt(self, text: str) -> str:
        """The actor's prompt with what its kind adds."""
        return text

    def other_columns(self, row: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """Human labels, and for the judge every other column."""
        columns = self.spec.columns
        declared = {n for name, column in columns.items() for n in (name, *column.aliases)}
        others = dict.fromkeys(sorted(row.keys() - declared - {"data_source"}), ("judge",))
        return {**others, **super().other_columns(row)}

    def with_baselines(self, examples: Sequence[Example]) -> Sequence[Example]:
        """The same examples. ConfigError if a column that the actor's prompt names is the gold in
        nine of ten rows. In few rows that can be chance, above all in a column with an option."""
        gold, prompts = self.keys.gold, self.keys.templates()
        shown = template_names(" ".join(prompts.get(name, "") for name in (PROMPT, SYSTEM)))
        count, options = len(examples), set(self.keys.options.columns)
        names = [name for name in sorted(shown & set(self.spec.columns))
                 if gold and count >= (10 if name in options else 3)]  # fmt: skip
        for name in names:
            texts = [(plain(str(e.fields.get(name) or "")), plain(self.gold_text(e)),
                      plain(str(e.fields.get(gold)))) for e in examples]  # fmt: skip
            same = sum(bool(text) and text in golds for text, *golds in texts)
            if same and same >= 0.9 * count:
                raise ConfigError(
                    f"The prompt of the task '{self.name}' shows the answer: the column '{name}' "
                    f"has the text of '{gold}' in {same} of {count} rows.",
                    "A model that copies the column would be right.",
                    f"Leave '{name}' out of the prompt, or choose another column for 'gold'.",
                )
        return examples

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        mean = macro(records, self.keys.macro) if self.keys.macro else None
        return {} if mean is None else {self.spec.metric.headline: mean}

    def prompt_values(self, example: Example, seat: str) -> dict[str, Any]:
        """The values of the actor's templates: the columns that the seat may see."""
        view, _ = self.within_budget(example.visible(seat))
        return view

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        """The message with the actor's prompt, with the feedback slot filled and empty."""
        values = self.prompt_values(example, seat)
        return self.prompts.opening(PROMPT, feedback, values, self.prompt_role)

    def context(self, example: Example, feedback: Feedback | None) -> tuple[Segment, ...]:
        """The actor's first context: the system message, if there is one, and the prompt."""
        seat = self.acted_seat(example)
        prompt = self.slot(example, seat, feedback)
        if SYSTEM not in self.prompts.texts:
            return (prompt,)
        return (self.prompts.opening(SYSTEM, feedback, self.prompt_values(example, seat)), prompt)

    def task_prompt(self, example: Example) -> str:
        """What the actor reads, for judges and coaches."""
        return "\n\n".join(segment.text for segment in self.context(example, None))

    # -- feedback -----------------------------------------------------------------------------

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        """The first rule whose conditions all hold; the usual ones if the task has no rules."""
        rules = self.keys.feedback.rules or USUAL_RULES[self.keys.judge is not None]
        return self._by_rule(rules, example, score)

    def _by_rule(self, rules: Sequence[Rule], example: Example, score: Score | None) -> str | None:
        marks = score.metrics if score is not None else {}
        halves = {name: _half(mark, *scale) for name, scale in self.spec.metric.scales.items()
                  if (mark := marks.get(name)) is not None}  # fmt: skip
        facts = {**example.fields, **example.tags, **halves}
        words = {name: {str(value)} for name, value in facts.items()}
        words["outcome"] = self.outcomes(score)
        applies = (r.say for r in rules if all(v in words.get(n, ()) for n, v in r.when.items()))
        return next(applies, None)

    def outcomes(self, score: Score | None) -> set[str]:
        """The words of rules for an outcome: `none` (no draft); `right` or `wrong`, and `high` or
        `low` (the half of the scale); `unread` and the status of an unreadable draft."""
        if score is None:
            return {"none"}
        if score.status not in READABLE or score.value is None:
            return {"unread", score.status}
        low, high = self.spec.metric.low, self.spec.metric.high
        return {"right" if score.value == high else "wrong", _half(score.value, low, high)}

    async def critique(
        self, example: Example, episode: Episode, score: Score, cast: Cast, rollout: Rollout
    ) -> Feedback | None:
        """Feedback by the coach, a rule of the task, the judge's own words, or a usual rule."""
        feedback = self.keys.feedback
        if (
            cast.coach is None
            and feedback.critique
            and not self._by_rule(feedback.rules, example, score)
        ):
            view = self.leak_view(example) or LeakView()
            safe = [(name, without_secrets(text, view)) for name, text in _remarks(score)]
            lines = [f"{name}: {text}".removeprefix(": ") for name, text in safe if text]
            if lines:
                text = first_words(" ".join(lines), self.spec.feedback.max_words)
                author = next(verdict.judge for verdict in score.verdicts if verdict.said)
                dimensions = judged_dimensions(score)
                return replace(self.symbolic(text), author=author, dimensions=dimensions)
        return await super().critique(example, episode, score, cast, rollout)

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        """The columns for the coach, the actor's prompt, its attempt, and the judge's remarks."""
        view, _ = self.within_budget(super().coach_view(example, episode, score))
        hidden, attempt = self.leak_view(example) or LeakView(), fence(view["attempt"], "attempt")
        remarks = remarks_without_secrets(_remarks(score), hidden)
        return {**view, "task_prompt": self.task_prompt(example), "attempt": attempt,
                "remarks": remarks}  # fmt: skip


def _half(value: float, low: float, high: float) -> str:
    return "high" if 2 * value >= low + high else "low"


def _remarks(score: Score) -> list[tuple[str, str]]:
    """(dimension, reasons) of the first readable rating; one score has no dimension."""
    rating = first_verdict(score, "score")
    parts = rating if all(isinstance(part, Mapping) for part in rating.values()) else {"": rating}
    return [(name, str(part["reasoning"])) for name, part in parts.items()]
