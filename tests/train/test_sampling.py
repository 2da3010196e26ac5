"""Mixtures hold each task at its ratio; batches walk shuffled epochs; control feedback moves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soulkit.errors import DataError
from soulkit.train.material.sampling import TaskRows, batch, mixture
from soulkit.train.objectives.sequences import without_truncated
from soulkit.train.rollouts.shuffle import swap_feedback
from soulkit.types import Completion, Feedback, Record
from tests.support.training import rows, step_of
from tests.train.test_objectives import SMALL, record

TOMI, TEN = rows("tomi", 10)
HITOM, FOUR = rows("hitom", 4)
TASKS = {"tomi": TOMI, "hitom": HITOM}
EXAMPLES = {"tomi": TEN, "hitom": FOUR}


@pytest.mark.parametrize(("ratio", "rows_"), [(0.5, 5), (1.0, 10), (1.5, 15), (2.0, 20), (0.01, 1)])
def test_a_ratio_is_a_share_of_a_tasks_rows(ratio: float, rows_: int) -> None:
    pool = mixture(TASKS, EXAMPLES, {"tomi": ratio, "hitom": 1.0}, 0)
    names = Counter(task.name for task, _ in pool)
    assert names == {"tomi": rows_, "hitom": 4}
    times = Counter(e.id for task, e in pool if task.name == "tomi")
    assert max(times.values()) - min(times.values()) <= 1
    if ratio >= 1:
        assert len(times) == 10


def test_a_mixture_does_not_depend_on_the_order_of_the_file() -> None:
    turned = {name: rows_[::-1] for name, rows_ in EXAMPLES.items()}
    a, b = (mixture(TASKS, e, {"tomi": 0.5, "hitom": 1.0}, 3) for e in (EXAMPLES, turned))
    assert [e.id for _, e in a] == [e.id for _, e in b]
    other = mixture(TASKS, EXAMPLES, {"tomi": 0.5, "hitom": 1.0}, 4)
    assert [e.id for _, e in other] != [e.id for _, e in a]


def test_nothing_to_train_on_is_told() -> None:
    with pytest.raises(DataError, match="no row to train on"):
        mixture({"tomi": TOMI}, {"tomi": []}, {"tomi": 1.0}, 0)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 25), seed=st.integers(0, 5))
def test_every_epoch_holds_every_row_once(size: int, seed: int) -> None:
    pool: TaskRows = [(TOMI, e) for e in TEN]
    drawn = [e.id for step in range(12) for _, e in batch(pool, size, step, seed)]
    assert len(drawn) == 12 * size
    for start in range(0, len(drawn) - 9, 10):
        assert len(set(drawn[start : start + 10])) == 10


def test_a_step_has_its_batch_whoever_asks() -> None:
    pool: TaskRows = [(TOMI, e) for e in TEN]
    assert batch(pool, 4, 7, 1) == batch(pool, 4, 7, 1) != batch(pool, 4, 7, 2)
    firsts = [e.id for _, e in batch(pool, 10, 0, 1)]
    assert firsts != [e.id for _, e in batch(pool, 10, 1, 1)]


def draft_of(example: str, rollout: int, leak: str = "") -> Record:
    text = f"{example}/{rollout}"
    feedback = Feedback(text=text, author="symbolic", leak=leak)
    return replace(record(example, rollout, "draft", 0.0), received=feedback)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=6), seed=st.integers(0, 9))
def test_control_feedback_always_comes_from_another_example(sizes: list[int], seed: int) -> None:
    drafts = [draft_of(f"x{i}", r) for i, size in enumerate(sizes) for r in range(size)]
    swapped = swap_feedback(drafts, str(seed))
    for draft, feedback in zip(drafts, swapped, strict=True):
        assert feedback is not None
        assert feedback.text.partition("/")[0] != draft.example_id
    if max(sizes) * 2 <= sum(sizes):
        assert len({f.text for f in swapped if f}) == len(drafts)  # everybody gives one


def test_control_feedback_skips_leaks_and_drafts_without_any() -> None:
    drafts = [draft_of("a", 0), draft_of("a", 1, leak="gold_text"), draft_of("b", 0), SMALL[0]]
    swapped = swap_feedback(drafts, "0")
    assert [f and f.text for f in swapped] == ["b/0", None, "a/0", None]
    assert swap_feedback([draft_of("a", 0), draft_of("a", 1)], "0") == [None, None]


def test_cut_off_replies_leave_the_loss_but_not_the_baseline() -> None:
    sequences = [replace(s, example_id="x") for s in step_of(examples=1, drafts=2)]
    cut = record("x", 1, "refined", 0.2)
    (trace,) = cut.episode.traces
    long = replace(trace.turns[0].completion, stop_reason="length")
    assert isinstance(long, Completion)
    turns = (replace(trace.turns[0], completion=long),)
    episode = replace(cut.episode, traces=(replace(trace, turns=turns),))
    masked = without_truncated(sequences, [*SMALL[:3], replace(cut, episode=episode)])
    lost = {(s.part, s.rollout) for s in masked if s.weight == 0}
    assert lost == {("copy", "1/refined"), ("refined", "1/refined")}
    assert [s.reward for s in masked] == [s.reward for s in sequences]
