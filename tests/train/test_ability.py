"""General ability before and after a training: of which weights, what came of it, what is said."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from soulkit.report.training import ability_text
from soulkit.runs.records import load_records
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.train.planning import training_plan
from soulkit.train.setup.data import load_training_data
from soulkit.train.setup.rows import general_rows
from soulkit.train.state.summary import AbilityTotals, ability_totals
from soulkit.types import Episode, Failure, Record, Score, unscored
from tests.support.training import lines_of, soul

RETAINED = ("--retention", "--set", "retention_tokens=2")


def sft(out: Path, *more: object, steps: int = 2) -> tuple[object, ...]:
    return (
        "train", "sft", "--model", "tiny", "--full", "--task", "tomi", "--data", "tomi=synth:12",
        "--steps", steps, "--batch", 4, "--checkpoint-every", 1, "--out", out, *more,
    )  # fmt: skip


def records(scores: Sequence[float | None]) -> list[Record]:
    kept = []
    for number, value in enumerate(scores):
        name = f"row{number}"
        score = Score(value=value, reward=value)
        if value is None:
            score = unscored(Failure("context_overflow", "too long"), "paper")
        episode = Episode(example_id=name, task="rules", kind="draft", rollout=0, traces=(),
                          transcript=(), stop="stop")  # fmt: skip
        kept.append(Record(
            key=f"0/{name}/0/draft", task="rules", example_id=name, rollout=0, kind="draft",
            episode=episode, score=score, cluster=name,
        ))  # fmt: skip
    return kept


def totals(before: Sequence[float | None], after: Sequence[float | None]) -> AbilityTotals:
    tasks = [load_registry().task(name) for name in load_registry().suite("general")]
    return ability_totals(records(before), records(after), tasks)


# -- the numbers -----------------------------------------------------------------------------------


def test_what_was_surely_lost_is_a_regression_and_said_aloud() -> None:
    lost = totals([1.0] * 30 + [0.0] * 10, [1.0] * 12 + [0.0] * 28)
    assert (lost.before.mean, lost.after.mean) == (0.75, 0.3)
    assert lost.difference == pytest.approx(-0.45) and lost.regression
    assert lost.ci_low is not None and lost.ci_high is not None
    assert -1 <= lost.ci_low < -0.45 < lost.ci_high < 0
    (remark,) = lost.remarks()
    assert "lost" in remark and "0.750 to 0.300" in remark and "\u22120.450 [" in remark
    assert ability_text(lost).endswith("a regression")


def test_what_chance_explains_is_none() -> None:
    rng = random.Random(3)
    scores = [float(rng.random() < 0.5) for _ in range(40)]
    once = totals(scores, [1 - scores[0], *scores[1:]])
    assert once.difference and not once.regression and not once.remarks()
    gained = totals([0.0] * 40, [1.0] * 20 + [0.0] * 20)
    assert gained.difference == 0.5 and not gained.regression


def test_what_was_not_scored_is_no_zero() -> None:
    partly = totals([1.0, 1.0, 0.0, None], [1.0, 0.0, None, 0.0])
    assert (partly.before.n_scored, partly.before.n, partly.n_shared) == (3, 4, 2)
    assert dict(partly.before.unscored) == {"context_overflow": 1}
    assert partly.difference == -0.5
    nothing = totals([], [1.0, 0.0])
    assert nothing.difference is None and "never measured" in nothing.remarks()[0]


def test_a_summary_keeps_them() -> None:
    lost = totals([1.0] * 9, [1.0, *[0.0] * 8])
    assert AbilityTotals.from_json(json.loads(json.dumps(lost.to_json()))) == lost


# -- a plan ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_the_plan_counts_both_measurements(method: str) -> None:
    flags = {"method": method, "model": "m", "tasks": {"tomi": 1.0}, "steps": 3, "max_tokens": 8,
             "data": {"tomi": "synth:20"}, "retention": True}  # fmt: skip
    plan = training_plan(load_training_data(TrainConfig.load(env={}, flags=flags)))
    (part,) = [task for task in plan.tasks if task.task.startswith("instructions")]
    assert part.episodes == 80 and part.calls == {"actor": 80}
    # The limit of what is trained on is not that of these replies.
    assert part.asked[0].reply_tokens == 80 * 120
    bare = training_plan(
        load_training_data(TrainConfig.load(env={}, flags={**flags, "retention": False}))
    )
    assert bare.episodes == plan.episodes - 80


# -- a run -----------------------------------------------------------------------------------------


def replies(path: Path) -> set[str]:
    """The hashes of the weights that spoke in a file of episodes."""
    return {
        turn.completion.policy
        for record in load_records(path)
        for trace in record.episode.traces
        for turn in trace.turns
    }


def test_both_measurements_are_of_the_weights_that_they_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    limits = ("--retention", "--set", "retention_tokens=4", "--set", "max_tokens=1")
    assert soul(*sft(out, *limits, steps=1)) == 0
    assert "general ability" in capsys.readouterr().out
    before, after = (out / "retention" / f"{name}.jsonl" for name in ("before", "after"))
    rows = {example.id for _, example in general_rows()}
    assert {r.example_id for r in load_records(before)} == rows and len(rows) == 40
    lengths = {len(turn.completion.token_ids) for r in load_records(after)
               for trace in r.episode.traces for turn in trace.turns}  # fmt: skip
    assert max(lengths) == 4 > 1  # not that of the training's own replies
    last = json.loads((out / "checkpoints" / "step_000001" / "position.json").read_text())
    assert replies(after) == {last["policy"]} != replies(before)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["retention"]["before"]["n"], summary["retention"]["n_shared"]) == (40, 40)
    assert "General ability" in (out / "model" / "README.md").read_text()


@pytest.mark.slow
def test_replies_of_other_weights_are_measured_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert soul(*sft(out, *RETAINED)) == 0
    before, after = (out / "retention" / f"{name}.jsonl" for name in ("before", "after"))
    last = replies(after)
    whole = [record.episode.transcript for record in load_records(after)]
    after.write_bytes(before.read_bytes())
    assert soul(*sft(out, *RETAINED)) == 0
    assert replies(after) == last
    assert [record.episode.transcript for record in load_records(after)] == whole
    assert soul(*sft(out)) == 2  # begun with it, resumed without


@pytest.mark.slow
def test_measuring_moves_no_weight(tmp_path: Path) -> None:
    measured, plain = tmp_path / "measured", tmp_path / "plain"
    assert soul(*sft(measured, *RETAINED)) == soul(*sft(plain)) == 0
    assert lines_of(measured) == lines_of(plain)
    file = Path("model") / "model.safetensors"
    assert (measured / file).read_bytes() == (plain / file).read_bytes()
