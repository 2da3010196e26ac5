"""One-line facts of a training run: feedback, leaks, canaries, losses, probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soulkit.metrics.intervals import estimate_text, signed
from soulkit.train.state.metrics import Rewards
from soulkit.train.state.stops import alike_feedback
from soulkit.train.state.summary import (
    AbilityTotals,
    CanaryTotals,
    FeedbackTotals,
    TrainSummary,
)

LEAK_CHECK = (
    "compares words: it finds feedback that states the answer, leaves few options or repeats "
    "private texts; it does not notice a paraphrase or a code"
)
"""The scope of the leak check, shown for every training run with feedback."""
MODES = {
    "drop": LEAK_CHECK,
    "log": f"counts leaks but keeps the feedback (log); {LEAK_CHECK}",
    "off": "off: feedback was not checked",
}


def facts_of_training(summary: TrainSummary) -> list[tuple[str, str]]:
    """The facts in the head of a training run, in addition to those of every run: (label, text)."""
    return [
        ("feedback", feedback_text(summary.feedback)),
        ("feedback texts", alike_feedback(summary.feedback.distinct) if summary.feedback else ""),
        ("leak check", leak_check_text(summary.feedback)),
        ("canaries", canary_text(summary.canaries)),
        ("general ability", ability_text(summary.retention)),
        ("probes", probe_text(summary.probes)),
        *lesson_facts(summary),
    ]


def feedback_text(feedback: FeedbackTotals | None) -> str:
    """`symbolic 512, 3 dropped (2 gold_text, 1 answerable); 0.42 different texts per draft; coach
    failed 4 times; 8 of 520 drafts needed none`, or empty."""
    feedback = feedback or FeedbackTotals()
    parts = []
    for author, counts in feedback.coaches.items():
        kinds = ", ".join(f"{n} {kind}" for kind, n in counts.leaks.items())
        parts.append(f"{author} {counts.checked}, {counts.dropped} dropped")
        parts[-1] += f" ({kinds})" if kinds else ""
    if feedback.distinct is not None:
        parts.append(f"{feedback.distinct:.2f} different texts per draft")
    failures = feedback.coach_failures
    if failures:
        parts.append(f"coach failed {failures} time{'s' * (failures != 1)}")
    if feedback.gated:
        parts.append(f"{feedback.gated} of {feedback.drafts} drafts needed none")
    return "; ".join(parts)


def leak_check_text(feedback: FeedbackTotals | None) -> str:
    """How the run handled leaks; empty without feedback."""
    return MODES[feedback.leak_check] if feedback and feedback.coaches else ""


def task_lines(rewards: Rewards) -> list[str]:
    """`TASK  draft 0.512  refined 0.634  gap +0.120 [+0.080, +0.160]` per task of a mixture."""
    width = max((len(task) for task in rewards.draft_by_task), default=0)
    return [f"{task:{width}}  {_task_text(rewards, task)}" for task in rewards.draft_by_task]


def _task_text(rewards: Rewards, task: str) -> str:
    parts = []
    for label, by_task in (("draft", rewards.draft_by_task), ("refined", rewards.refined_by_task)):
        if (reward := by_task.get(task)) is not None:
            parts.append(f"{label} {reward:.3f}")
    if (gap := rewards.loo_by_task.get(task)) is not None:
        low, high = rewards.loo_low_by_task.get(task), rewards.loo_high_by_task.get(task)
        parts.append(f"gap {estimate_text(gap, low, high, signed)}")
    return "  ".join(parts)


LESSON_FACTS = ("validation loss", "texts written", "lessons", "left out", "unusable rows")
"""The labels of `lesson_facts`."""
LABELLED_FACTS = ("feedback", "leak check", "canaries", "general ability", "probes", *LESSON_FACTS)
"""The labels of `facts_of_training` that must be shown, because the text alone is unclear."""


def lesson_facts(summary: TrainSummary) -> list[tuple[str, str]]:
    """Training on conversations: (label, text) of its losses and of omitted lessons and rows."""
    facts = []
    if (valid := summary.validation) is not None:
        texts = [
            _moved(valid.first[name], loss, name)
            + (f" ({valid.lessons[name]:,} conversations)" if name in valid.lessons else "")
            for name, loss in valid.last.items()
        ]
        facts.append(("validation loss", "; ".join(texts)))
    if summary.written is not None:
        facts.append(("texts written", summary.written.words()))
    if learned := summary.lessons.learned:
        facts.append(("lessons", ", ".join(f"{name} {n:,}" for name, n in learned.items())))
    reasons = [f"{n:,} × {reason}" for reason, n in summary.lessons.left_out.items()]
    if n := summary.lessons.shortened:
        reasons.append(f"{n:,} without their oldest turns")
    if reasons:
        facts.append(("left out", "; ".join(reasons)))
    rows = [
        f"{source}: " + ", ".join(f"{n:,} × {reason}" for reason, n in several.items())
        for source, several in summary.unusable.items()
        if several
    ]
    if rows:
        facts.append(("unusable rows", "; ".join(rows)))
    return facts


def _moved(first: float, last: float, name: str) -> str:
    """`NAME 2.369 to 1.612`; a single loss if the two are equal."""
    return f"{name} {last:.3f}" if first == last else f"{name} {first:.3f} to {last:.3f}"


def validation_rows(
    measured: Sequence[tuple[int, Mapping[str, float]]],
) -> list[tuple[str, str, str]]:
    """(label, first, newest) loss of each validation source, from (step, source → loss)."""
    rows = []
    for name in dict.fromkeys(name for _, losses in measured for name in losses):
        ends = [(step, losses[name]) for step, losses in measured if name in losses]
        first, last = (
            f"{loss:.3f} ({f'step {step}' if step >= 0 else 'before'})"
            for step, loss in (ends[0], ends[-1])
        )
        rows.append((f"validation loss, {name}", first, last))
    return rows


def canary_text(canaries: CanaryTotals | None) -> str:
    """`keywords 0.10 to 0.12; no alarm`, or the newest alarms, and the number without a verdict;
    empty without canaries."""
    if canaries is None:
        return ""
    moved = [
        f"{name} {canaries.first[name]:.2f} to {value:.2f}"
        for name, value in canaries.last.items()
        if name in canaries.first
    ]
    silent = f"; {canaries.unscored} without a verdict" if canaries.unscored else ""
    total = canaries.alarms
    if not total:
        return f"{', '.join(moved) or 'not measured'}; no alarm{silent}"
    newest = "; ".join(alarm.words() for alarm in canaries.newest)
    return f"{total} alarm{'s' * (total != 1)}, the newest at step {newest}{silent}"


def ability_text(ability: AbilityTotals | None) -> str:
    """`0.525 to 0.400 (40/40, 40/40 scored), -0.125 [-0.231, -0.019], 40 clusters: a regression`;
    empty if not measured."""
    if ability is None:
        return ""
    return ability.words() + (": a regression" if ability.regression else "")


def probe_text(probes: Mapping[str, Mapping[str, float | None]]) -> str:
    """`TASK 0.100 to 0.400 after 50 steps, 0.150 to 0.450 after 100`; empty without probes, a dash
    for a probe without a result."""
    by_task: dict[str, list[str]] = {}
    for step, scores in probes.items():
        for name in scores:
            task, _, moment = name.rpartition("/")
            if moment == "before":
                ends = [scores.get(f"{task}/{one}") for one in ("before", "after")]
                moved = " to ".join("–" if score is None else f"{score:.3f}" for score in ends)
                steps = "" if by_task.get(task) else " steps"
                by_task.setdefault(task, []).append(f"{moved} after {step}{steps}")
    return "; ".join(f"{task} {', '.join(moves)}" for task, moves in by_task.items())
