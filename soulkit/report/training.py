"""Training runs: one-line facts on feedback, leaks and losses, and their learning curves."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from soulkit.eval.results.summary import Cell
from soulkit.metrics.intervals import (
    Interval,
    estimate,
    estimate_text,
    finite_value,
    number,
    signed,
)
from soulkit.report.figures import DASHES, IN_ONE_FRAME, Chart, Curve, Plot
from soulkit.report.grid import Grid, GridRow
from soulkit.report.load import EPISODES, RunData
from soulkit.report.published import CAVEAT, published_during_training
from soulkit.runs.folder import is_run, read_config
from soulkit.runs.jsonl import has_lines
from soulkit.runs.records import stream_records
from soulkit.train.state.metrics import Rewards, StepLine
from soulkit.train.state.stops import alike_feedback
from soulkit.train.state.summary import (
    AbilityTotals,
    CanaryTotals,
    FeedbackTotals,
    TrainSummary,
    ValidationTotals,
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
        ("memory", memory_text(summary)),
        *lesson_facts(summary),
    ]


def dimension_text(run: RunData) -> str:
    """In how many of its refined replies the gap in each judged dimension is known; or empty."""
    scored: Counter[str] = Counter()
    n: Counter[str] = Counter()
    for line in run.steps:
        scored.update(line.rewards.scored_by_dimension)
        n.update(line.rewards.n_by_dimension)
    parts = ", ".join(f"{name} {scored[name]} of {n[name]}" for name in n)
    return f"Refined replies of {run.name} with a score, by dimension: {parts}" if parts else ""


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


def memory_text(summary: TrainSummary) -> str:
    """Which weights a run with --max-exposure kept, or empty."""
    if summary.kept_step is None:
        return ""
    bits = number(summary.kept_exposure, 2)
    return f"weights of step {summary.kept_step}: canaries planted once have {bits} bits"


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


def lesson_facts(summary: TrainSummary) -> list[tuple[str, str]]:
    """Training on conversations: (label, text) of its losses and of omitted lessons and rows."""
    facts = []
    if (valid := summary.validation) is not None:
        facts.append(("validation loss", "; ".join(_validated(valid, name) for name in valid.last)))
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


def _validated(valid: ValidationTotals, name: str) -> str:
    """`NAME 2.369 to 1.612 [1.503, 1.721] (90 conversations of 6 people)`."""
    loss, low, high = valid.last[name], valid.low.get(name), valid.high.get(name)
    text = estimate_text(loss, low, high)
    text = text if valid.first[name] == loss else f"{valid.first[name]:.3f} to {text}"
    n, people = valid.lessons.get(name, 0), valid.people.get(name, 0)
    of = f" of {people:,} people" if 0 < people < n else ""
    return f"{name} {text}" + (f" ({n:,} conversations{of})" if n else "")


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


def steps_grid(run: RunData, title: str = "") -> Grid:
    """The first and the last number of each curve of a training run. If it is not from the first or
    last step, the cell names its step."""
    columns = dict.fromkeys((run.steps[0].step, run.steps[-1].step))
    rows = []
    for quantity in QUANTITIES:
        for curve in quantity.read(run):
            ends = zip(curve.first_and_last(), columns, strict=False)  # one step: one column
            texts = [number(value) + (f" (step {step})" if step != column else "")
                     for (step, value), column in ends]  # fmt: skip
            rows.append(GridRow.of(f"{quantity.title}: {curve.label}", *texts))
    head = ("training", *(f"step {step}" for step in columns))
    return Grid(title=title, head=head, rows=tuple(rows))


@dataclass(frozen=True, slots=True)
class FeedbackMoment:
    """Feedback on a draft."""

    step: int
    reward: float | None
    text: str


def feedback_over_time(
    run: RunData, most: int = 3
) -> list[tuple[str, FeedbackMoment, FeedbackMoment]]:
    """(example, early, late) for the examples with feedback at the steps furthest apart; empty if
    no example was played at two steps."""
    log = run.path / EPISODES
    moments: dict[tuple[str, str], tuple[FeedbackMoment, FeedbackMoment]] = {}
    for record in stream_records(log, light=True) if run.steps and has_lines(log) else ():
        feedback = record.received
        if record.kind == "draft" and feedback and feedback.usable and feedback.text.strip():
            key = record.task, record.example_id
            now = FeedbackMoment(record.step, record.score.reward, feedback.text)
            early, late = moments.get(key, (now, now))
            moments[key] = (now if now.step <= early.step else early,
                            now if now.step >= late.step else late)  # fmt: skip
    apart = [(key, *both) for key, both in moments.items() if both[0].step < both[1].step]
    apart.sort(key=lambda one: one[1].step - one[2].step)
    return [(f"{task}, {example}", early, late) for (task, example), early, late in apart[:most]]


# --- learning curves ------------------------------------------------------------------------------


def arms_of(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    """The runs by arm: two runs are seeds of one arm if their settings differ only in the seed.
    Paths inside a run's parent folder are compared without that folder."""
    arms: dict[str, dict[object, RunData]] = {}
    for run in runs:
        settings = read_config(run.path) if is_run(run.path) else {}
        seed, parent = settings.pop("seed", None), str(run.path.resolve().parent)
        same = json.dumps(settings, sort_keys=True, default=str).replace(f"{parent}/", "")
        key = same if settings and seed not in arms.get(same, {}) else run.name
        arms.setdefault(key, {})[seed] = run
    named: dict[str, list[RunData]] = {}
    for seeds in (list(arm.values()) for arm in arms.values()):
        names = [run.name for run in seeds]
        common = [part for part in names[0].split("/") if all(part in n.split("/") for n in names)]
        short = f"{'/'.join(common)} ({len(seeds)} seeds)" if common else ", ".join(names)
        name = names[0] if len(seeds) == 1 else short
        named[", ".join(names) if name in named else name] = seeds
    return named


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One figure of a training: its curves, by run."""

    title: str
    caption: str
    read: Callable[[RunData], list[Curve]]
    together: bool = False
    """With several arms, the curves of a run share a panel instead of having one each."""
    scored: bool = False
    """The numbers are on the scale of the scores."""
    split: bool = False
    """Every label has a panel, with its own axis."""


def learning_charts(runs: Sequence[RunData]) -> list[Chart]:
    """The figures for which training runs have data, in reading order; all arms share the axes.

    An arm with several seeds has a thin line for each, and their mean with a 95% interval.
    """
    trained = [run for run in runs if run.steps or run.evals or run.valid]
    trained.sort(key=lambda run: not any(line.played for line in run.steps))  # warm-ups go last
    return arm_charts(arms_of(trained))


def arm_charts(arms: Mapping[str, Sequence[RunData]]) -> list[Chart]:
    """The same for the runs of each arm."""
    runs = [run for several in arms.values() for run in several]
    published = published_during_training(runs)
    scale = score_scale([run for run in runs if any(line.played for line in run.steps)])
    charts = []
    for quantity in QUANTITIES:
        curves = {
            arm: [curve for run in several for curve in quantity.read(run)]
            for arm, several in arms.items()
        }
        if any(curves.values()):
            rules = published if quantity.title == EVALUATION else {}
            charts.append(_chart(quantity, curves, rules, scale if quantity.scored else None))
    return charts


Drawn = Mapping[str, Mapping[str, list[Curve]]]
"""Arm → label → its seeds and, last, the mean."""


def _chart(
    quantity: Quantity, curves: Mapping[str, Sequence[Curve]],
    published: Mapping[str, list[tuple[str, float]]], scale: Interval | None,
) -> Chart:  # fmt: skip
    labels = list(dict.fromkeys(curve.label for lines in curves.values() for curve in lines))
    drawn = {
        arm: {label: _with_mean([c for c in lines if c.label == label], scale) for label in labels}
        for arm, lines in curves.items()
    }
    together = len(curves) == 1 or (quantity.together and len(curves) <= IN_ONE_FRAME)
    split = len(labels) > 1 and (quantity.split or not together or bool(published))
    panels = [
        Plot(title=shown[0] if split else "", curves=_in_one_frame(drawn, shown, labels),
             rules=[rule for label in shown for rule in published.get(label, ())])
        for shown in ([[label] for label in labels] if split else [labels])
    ]  # fmt: skip
    seeds = any(len(lines) > 1 for by_label in drawn.values() for lines in by_label.values())
    remarks = [
        "Thin: seeds; thick: their mean; shaded: its 95% interval, from three seeds on and for at "
        "most four curves."
        if seeds
        else "",
        f"Dashed lines: {CAVEAT}" if any(panel.rules for panel in panels) else "",
    ]
    return Chart(
        name=re.sub(r"\W+", "-", quantity.title.lower()), title=quantity.title, panels=panels,
        caption=" ".join(filter(None, (quantity.caption, *remarks))),
    )  # fmt: skip


def _in_one_frame(drawn: Drawn, shown: Sequence[str], labels: Sequence[str]) -> list[Curve]:
    """Several arms have a colour each; the labels of one arm differ in colour and style."""
    curves: list[Curve] = []
    present = [arm for arm, by_label in drawn.items() if any(by_label.values())]
    for a, arm in enumerate(drawn):
        for s, label in enumerate(shown if arm in present else ()):
            name, place, dash = label, labels.index(label), labels.index(label)
            if len(drawn) > 1 and len(shown) > 1:
                name, place, dash = f"{arm}: {label}", a, s
            elif len(drawn) > 1:
                name, place, dash = arm, a, present.index(arm)
            look = partial(replace, label=name, colour=place + 1, dash=dash % len(DASHES))
            curves += map(look, drawn[arm][label])
    return curves


def _with_mean(seeds: Sequence[Curve], scale: Interval | None) -> list[Curve]:
    """The curve; of several seeds their thin lines, and the mean. Its interval is left out for two
    seeds: it is so wide that nothing else could be read."""
    if len(seeds) < 2:
        return [*seeds]
    at: dict[float, list[float | None]] = {}
    for curve in seeds:
        for step, value in zip(curve.steps, curve.values, strict=True):
            at.setdefault(step, []).append(value)
    means = {step: estimate(at[step], range(len(at[step])), scale=scale) for step in sorted(at)}
    whole = replace(seeds[0], steps=[*means], values=[m.mean for m in means.values()])
    whole = replace(whole, low=(), high=()) if len(seeds) == 2 else replace(
        whole, low=[m.ci_low for m in means.values()], high=[m.ci_high for m in means.values()]
    )  # fmt: skip
    return [*(replace(curve, low=(), high=(), thin=True) for curve in seeds), whole]


def score_scale(runs: Sequence[RunData]) -> Interval | None:
    """The bounds of all scores of the runs; None if a run did not record its scale."""
    scales = [metrics.get("value", Cell()).scale for run in runs for metrics in run.tasks.values()]
    ends = [scale for scale in scales if scale is not None]
    if not ends or len(ends) < len(scales):
        return None
    return min(low for low, _ in ends), max(high for _, high in ends)


Numbers = Mapping[str, float | None]


def _labelled(points: Sequence[tuple[int, Numbers]]) -> list[Curve]:
    """A curve for each label with a number. A number that is missing or not finite is a gap; steps
    without the label, such as those without rows of a task, are bridged."""
    curves = []
    for label in dict.fromkeys(label for _, numbers in points for label in numbers):
        line = {step: finite_value(numbers[label]) for step, numbers in points if label in numbers}
        if any(value is not None for value in line.values()):
            curves.append(Curve(label=label, steps=[*line], values=[*line.values()]))
    return curves


def _by_step(read: Callable[[StepLine], Numbers]) -> Callable[[RunData], list[Curve]]:
    return lambda run: _labelled([(line.step, read(line)) for line in run.steps])


def _gaps_of(run: RunData) -> list[Curve]:
    """The gaps to other drafts, with interval, and to the own draft."""
    read = _by_step(lambda line: {"other drafts": line.rewards.loo, "own draft": line.rewards.pair})
    low, high = ([getattr(line.rewards, name) for line in run.steps]
                 for name in ("loo_low", "loo_high"))  # fmt: skip
    return [replace(curve, low=low, high=high) if curve.label == "other drafts" else curve
            for curve in read(run)]  # fmt: skip


def _dimension_gaps(run: RunData) -> list[Curve]:
    """The gap in every dimension that judges rated, with interval."""
    rewards = {line.step: line.rewards for line in run.steps}
    read = _by_step(lambda line: line.rewards.loo_by_dimension)
    return [
        replace(
            curve, low=[rewards[int(s)].loo_low_by_dimension.get(curve.label) for s in curve.steps],
            high=[rewards[int(s)].loo_high_by_dimension.get(curve.label) for s in curve.steps],
        )
        for curve in read(run)
    ]  # fmt: skip


def _imitation(run: RunData) -> list[Curve]:
    """The loss of supervised training; the loss of a policy gradient is not informative."""
    supervised = not any(line.played for line in run.steps)
    return _by_step(lambda line: {"loss": line.learned.loss})(run) if supervised else []


def _source_losses(run: RunData) -> list[Curve]:
    losses = _by_step(lambda line: line.learned.losses)(run)
    return losses if len(losses) > 1 else []  # with one source, this is the curve of the loss


def _measured(points: Sequence[tuple[int, Mapping[str, float]]]) -> list[Curve]:
    """Curves of measurements between steps; a name that is missing at one of them is a gap."""
    names = dict.fromkeys(name for _, means in points for name in means)
    return _labelled([(step, {name: means.get(name) for name in names}) for step, means in points])


EVALUATION = "Evaluation during training"
QUANTITIES = (
    Quantity(title="Loss", caption="Loss of the imitated replies, per token, by step.",
             read=_imitation),
    Quantity(title="Rewards", together=True, scored=True, read=_by_step(
                 lambda line: {"drafts": line.rewards.draft, "refined": line.rewards.refined}),
             caption="Mean reward of drafts and of refined episodes, which saw feedback."),
    Quantity(title="Leave-one-out gap", together=True, read=_gaps_of,
             caption="Score of refined episodes minus that of the other drafts of their example, "
             "with 95% intervals. Uninformative feedback gives zero on average."),
    Quantity(title="Leave-one-out gap by dimension", read=_dimension_gaps, split=True,
             caption="The same gap in each dimension that the judge rated, on the scale of the "
             "dimension. Replies that were not rated are left out."),
    Quantity(title="Rewards by task", caption="Mean draft reward of each task in the mixture.",
             scored=True, read=_by_step(lambda line: line.rewards.draft_by_task)),
    Quantity(title="Leave-one-out gap by task",
             caption="The same gap for each task in the mixture.",
             read=_by_step(lambda line: line.rewards.loo_by_task)),
    Quantity(title="Loss by source", read=_source_losses,
             caption="Loss of each source of conversations, in nats per learned token."),
    Quantity(title="Validation loss", read=lambda run: _measured(run.valid),
             caption="Loss on held-out conversations by source, in nats per learned token. Step −1 "
             "is the model before training."),
    Quantity(title=EVALUATION, scored=True, caption="Mean of each task, by training "
             "step; `dev_judge`: the same episodes, by a judge outside the training.",
             read=lambda run: _measured(run.evals)),
    Quantity(title="Feedback", read=_by_step(
                 lambda line: {"with feedback": line.feedback.share,
                               "leaks": line.feedback.leak_share}),
             caption="Share of drafts with feedback, and share of feedback with a leak."),
    Quantity(title="Feedback by dimension", read=_by_step(lambda line: line.feedback.about),
             caption="Share of feedback texts that mention a judged dimension by a word of its "
             "name."),
    Quantity(title="Response length", caption="Tokens per turn.",
             read=_by_step(lambda line: {"tokens per turn": line.rewards.tokens_per_turn})),
    Quantity(title="Policy", read=_by_step(
                 lambda line: {"entropy": line.learned.means.entropy,
                               "KL to base": line.learned.kl_base}),
             caption="Entropy and divergence from the base model, per token."),
)  # fmt: skip
"""In reading order."""
