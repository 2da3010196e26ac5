"""Feedback that shows the answer by design: used only where a run asks for it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from soulkit.tasks.base import Task
from soulkit.tasks.registry import load_registry
from soulkit.train.rollouts.shuffle import swap_feedback
from soulkit.train.sft.lessons import feedback_for
from soulkit.types import Episode, Feedback, Record, Score
from tests.support.road import synth
from tests.support.training import config


def task_of(kind: str) -> Task:
    task = load_registry().task("tomi")
    feedback = task.spec.feedback.model_copy(update={"kind": kind})
    task.spec = task.spec.model_copy(update={"feedback": feedback})
    return task


@pytest.mark.parametrize(
    ("kind", "worked", "expected"),
    [("coach", False, True), ("worked_example", False, False), ("worked_example", True, True)],
)
def test_lessons(kind: str, worked: bool, expected: bool) -> None:
    task, rng = task_of(kind), random.Random(0)
    example = task.example(synth("tomi", 1, 0)[0])
    settings = config(method="sft", sft_feedback=1.0, worked_examples=worked)
    lesson = feedback_for(task, example, settings, rng)
    assert (lesson is not None) == expected
    assert lesson is None or lesson.kind == kind


def test_what_leaks_is_handed_on_only_as_a_worked_example() -> None:
    leak = Feedback(text="It is in the box.", author="x", leak="gold_text")
    drafts = [
        Record(key=name, task="t", example_id=name, rollout=0, kind="draft",
               episode=Episode(example_id=name, task="t"), score=Score(value=0, reward=0),
               received=leak)
        for name in "ab"
    ]  # fmt: skip
    assert swap_feedback(drafts, "k") == [None, None]
    shown = replace(leak, kind="worked_example")
    assert swap_feedback([replace(d, received=shown) for d in drafts], "k") == [shown, shown]
