"""What a person is told about a step, beside its numbers: sentences read off its line."""

from __future__ import annotations

from collections.abc import Sequence

from soulkit.judge.coach import LEAST_DISTINCT
from soulkit.train.state.lines import StepLine
from soulkit.train.state.skips import skip_remarks

STOP_FLAT = 10
"""Steps in a row that learn nothing, after which a run ends where calls cost money."""
WAYS = (
    "try more drafts of a prompt (--group-size), a higher --temperature, rows that are neither "
    "always solved nor never (easier ones, or a model warmed up by sft, where rewards are low), or "
    "a reward that also pays for half an answer"
)


def step_remarks(line: StepLine) -> list[str]:
    """Feedback that could not be used or hardly differs, and updates that were not taken."""
    # Said of the first step, and of the whole run at its end.
    alike = alike_feedback(line.feedback.distinct) if line.step == 0 else ""
    return [*line.feedback.missing.values(), *skip_remarks(line), *filter(None, [alike])]


def alike_feedback(distinct: float | None) -> str:
    """`the feedback hardly differs: 0.02 different texts a draft …`; empty where it does."""
    if distinct is None or distinct >= LEAST_DISTINCT:
        return ""
    return (
        f"the feedback hardly differs: {distinct:.2f} different texts a draft, fewer than 1 in "
        f"{1 / LEAST_DISTINCT:.0f}; what is the same for every draft is a part of the prompt, and "
        "no answer to the draft (--coach names another)"
    )


def flat_words(line: StepLine, before: int, stop_flat: int | None) -> str:
    """What is said of a step in which no rollout is better than another, after `before` such steps
    in this run: the first time all of it, then a count at every tenfold of it."""
    text = flat_groups(line)
    if text and not before:
        end = f"{stop_flat} such steps in a row end the run" if stop_flat else (
            f"--stop-flat {STOP_FLAT} would end the run after {STOP_FLAT} such steps"
        )  # fmt: skip
        return f"step {line.step}: {text}; {end} (said once, then counted)"
    tenfold = str(before + 1).strip("0") == "1"
    return f"step {line.step}: {before + 1} steps so far had nothing to learn from" if (
        text and tenfold
    ) else ""  # fmt: skip


def flat_total(lines: Sequence[StepLine]) -> str:
    """How many steps of a whole run had nothing to learn from; empty where it was one or none."""
    played = [line for line in lines if line.played]
    flat = sum(bool(flat_groups(line)) for line in played)
    return f"{flat} of {len(played)} steps had nothing to learn from rewards" if flat > 1 else ""


def flat_groups(line: StepLine) -> str:
    """`8 of 8 groups have equal rewards: nothing is learned; try …`; empty when one has spread."""
    learned = line.learned
    groups, single = learned.groups or 0, learned.groups_single or 0
    flat, moved = learned.groups_flat or 0, bool(learned.grad_norm)
    # Under protocol reference a group of one keeps its reward: what moved may be that.
    if not groups or single + flat < groups or (single and moved):
        return ""
    what = (
        "equal rewards" if not single else "one rollout or equal rewards" if flat else "one rollout"
    )
    lesson = "nothing is learned from rewards" if moved else "nothing is learned"
    return f"{groups} of {groups} groups have {what}: {lesson}; {WAYS}"
