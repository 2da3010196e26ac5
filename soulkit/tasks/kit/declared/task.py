"""What all tasks without code share: templates, columns for the judge, and feedback by rules.

A class of one kind is `class YamlChoice(YamlTask, LetteredTask)`: this class comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from soulkit.errors import ConfigError
from soulkit.judge.verdict import plain
from soulkit.tasks.kit.base import READABLE, Task
from soulkit.tasks.kit.declared.keys import (
    PROMPT,
    SYSTEM,
    Declaration,
    Rule,
    template_names,
)
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
}
"""Kind → its class."""
_SLOT = "\n{% if feedback %}\n\nFeedback on an earlier attempt: {{ feedback }}\n{% endif %}"
"""The feedback slot of a prompt that does not name `feedback`."""
USUAL_RULES = (
    Rule(when={"outcome": "right"}, say="The answer was right. Keep reasoning this way."),
    Rule(when={"outcome": "wrong"}, say="The answer was wrong. Read everything again before you "
         "answer, and check each detail."),
    Rule(say="Answer in exactly the form that the instructions ask for."),
)  # fmt: skip


class YamlTask(Task):
    """A task whose declaration is all there is."""

    def __init__(
        self, name: str, spec: TaskSpec, *, protocol: Protocol = "paper", folder: Path | None = None
    ) -> None:
        super().__init__(name, spec, protocol=protocol, folder=folder)
        assert spec.declaration is not None
        self.keys: Declaration = spec.declaration
        self.prompts = self.prompts.with_texts(self.template_texts())

    def template_texts(self) -> dict[str, str]:
        """Template name → text. The actor's prompt gets a feedback slot if it names none."""
        texts = self.keys.templates()
        texts[PROMPT] = self.actor_prompt(texts[PROMPT])
        if "feedback" not in template_names(texts[PROMPT] + texts.get(SYSTEM, "")):
            texts[PROMPT] += _SLOT
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
        nine of ten rows."""
        texts = (self.keys.templates().get(name, "") for name in (PROMPT, SYSTEM))
        for name in sorted(template_names(" ".join(texts)) & set(self.spec.columns)):
            golds = [
                {plain(self.gold_text(e)), plain(str(e.fields.get(self.keys.gold)))}
                for e in examples
            ]
            values = [plain(str(e.fields.get(name) or "")) for e in examples]
            same = sum(bool(v) and v in gold for v, gold in zip(values, golds, strict=True))
            if self.keys.gold and same and same >= 0.9 * len(examples):
                raise ConfigError(
                    f"The prompt of the task '{self.name}' shows the answer: the column '{name}' "
                    f"has the text of '{self.keys.gold}' in {same} of {len(examples)} rows.",
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
        return self.prompts.opening(PROMPT, feedback, self.prompt_values(example, seat), "user")

    def context(self, example: Example, feedback: Feedback | None) -> tuple[Segment, ...]:
        """The actor's first context: the system message, if there is one, and the prompt."""
        seat = self.acted_seat(example)
        prompt = self.slot(example, seat, feedback)
        if SYSTEM not in self.prompts.texts:
            return (prompt,)
        return (self.prompts.opening(SYSTEM, feedback, self.prompt_values(example, seat)), prompt)

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        """The first rule whose conditions all hold; None if there is none."""
        facts = {**{k: str(v) for k, v in example.fields.items()}, **example.tags}
        facts["outcome"] = outcome(score, self.spec.metric.high)
        for rule in (*self.keys.feedback.rules, *self.usual_rules):
            if all(facts.get(name) == value for name, value in rule.when.items()):
                return rule.say
        return None

    @property
    def usual_rules(self) -> tuple[Rule, ...]:
        """Rules for a task that declares none."""
        return () if self.keys.feedback.rules else USUAL_RULES


def outcome(score: Score | None, best: float) -> str:
    """`none` (no draft), `right`, `wrong`, or the status of an unreadable draft."""
    if score is None:
        return "none"
    if score.status not in READABLE:
        return score.status
    return "right" if score.value == best else "wrong"
