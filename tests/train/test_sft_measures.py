"""What a supervised run is measured by while it runs: greedy dev scores, probes, and their cost.

General ability before and after a training: of which weights, what came of it, what is said.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ConfigError
from soulkit.report.training import ability_text, probe_text
from soulkit.runs.jsonl import read_jsonl
from soulkit.runs.records import load_records
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.train.planning import training_plan
from soulkit.train.setup.data import load_training_data, measured_settings
from soulkit.train.setup.rows import general_rows
from soulkit.train.state.summary import AbilityTotals, ability_totals
from soulkit.types import Episode, Failure, Record, Score, unscored
from tests.support.evaluation import replaced
from tests.support.resuming import files, reply, states
from tests.support.servers.openai_server import ScriptedServer
from tests.support.training import lines_of, soul

PROBES = {
    "probe_every": 2, "probe_steps": 2, "probe_method": "grpo", "prompts_per_step": 2,
    "group_size": 4, "max_tokens": 12,
}  # fmt: skip


def config(**settings: Any) -> TrainConfig:
    plain: dict[str, Any] = {
        "method": "sft", "model": "unused", "tasks": {"tomi": 1.0}, "data": {"tomi": "synth:60"},
        "steps": 8, "lr": 0.5,
    }  # fmt: skip
    return TrainConfig.model_validate(plain | settings)


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "words"), [
    ({"eval_task": ["tomi"]}, "needs --eval-every STEPS"),
    ({"eval_data": {"tomi": "rows.jsonl"}, "eval_every": 2}, "--eval-task"),
    ({"eval_task": ["tomi"], "eval_data": {"hitom": "f"}, "eval_every": 2}, "hitom"),
    ({"method": "grpo", "probe_every": 2}, "only work with sft"),
    ({"tasks": {}, "data": {}, "corpora": ["chats.jsonl"], "probe_every": 2}, "cannot be played"),
])  # fmt: skip
def test_settings_that_nothing_would_read_are_refused(settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**settings)


def test_what_is_measured_has_the_settings_of_a_reinforcement() -> None:
    assert measured_settings(config()) is None
    scored = measured_settings(config(eval_every=2, limit=30))
    assert scored is not None
    assert (scored.method, scored.tasks, scored.limit) == ("grpo", {"tomi": 1.0}, 30)
    other = measured_settings(config(
        **PROBES, eval_task="hitom", eval_data={"*": "synth:9"}, limit=30, full=True,
        retention=True, probe_lr=1e-3, judge=[{"model": "j"}],
    ))  # fmt: skip
    assert other is not None and (other.tasks, other.data) == ({"hitom": 1.0}, {"*": "synth:9"})
    assert (other.limit, other.full, other.retention, other.lr) == (None, False, False, 1e-3)
    assert (other.steps, other.eval_every, other.probe_every) == (2, 2, None)
    assert [one.model for one in other.judge] == ["j"]


def test_dev_rows_are_learned_by_nobody() -> None:
    material = load_training_data(config(**PROBES, eval_every=2, dev_limit=5))
    measured = material.measured
    assert measured is not None and measured.config.method == "grpo"
    dev = {example.id for _, example in measured.dev}
    assert len(dev) == 5
    assert not dev & {example.id for pool in (material.pool, measured.pool) for _, example in pool}
    with pytest.raises(ConfigError, match="evaluation-only"):
        load_training_data(config(eval_every=2, eval_task="instructions"))


def test_the_plan_counts_dev_scores_and_probes() -> None:
    planned = training_plan(load_training_data(config(**PROBES, eval_every=4, dev_limit=5)))
    episodes = {part.task: part.episodes for part in planned.tasks}
    # Scored after steps 2, 4, 6, 8; four probes of 2 steps, 2 prompts and 4 drafts each.
    assert episodes["tomi dev"] == 4 * 5 and episodes["tomi drafts probe"] == 4 * 2 * 2 * 4
    assert episodes["tomi dev probe"] == 4 * 5


def test_probes_are_told_in_a_line() -> None:
    done: dict[str, dict[str, float | None]] = {
        "50": {"tomi/before": 0.1, "tomi/after": 0.4},
        "100": {"tomi/before": 0.25, "tomi/after": None},
    }
    assert probe_text(done) == "tomi 0.100 to 0.400 after 50 steps, 0.250 to – after 100"
    assert probe_text({}) == ""


# -- runs ------------------------------------------------------------------------------------------


def sft(model: Path, out: Path, *more: object) -> list[str]:
    usual = ("dev_limit=4", "max_tokens=12")
    own = [one for one in usual if not any(one.partition("=")[0] in str(word) for word in more)]
    words = (
        "train", "sft", "--model", model, "--task", "tomi", "--data", "tomi=synth:40",
        *(word for one in own for word in ("--set", one)), "--set", "deterministic=true",
        "--out", out,
        *replaced(("--steps", 4, "--batch", 4, "--lr", 1e-3, "--lora-r", 4, "--eval-every", 2,
                   "--checkpoint-every", 1), more),
    )  # fmt: skip
    return [str(word) for word in words]


def probed(model: Path, out: Path) -> list[str]:
    return sft(
        model, out, "--probe-every", 2, "--probe-steps", 2, "--probe-method", "ditto",
        "--set", "probe_lr=0.003", "--set", "prompts_per_step=2", "--set", "group_size=4",
    )  # fmt: skip


def learned(run: Path) -> list[dict[str, Any]]:
    """The metrics of the training itself."""
    lines = [
        {k: v for k, v in line.items() if not k.startswith("probe/")} for line in lines_of(run)
    ]
    return [line for line in lines if line.keys() - {"schema", "step"}]


def probe_results(run: Path) -> dict[str, Any]:
    return {path.parent.name: json.loads(path.read_text())
            for path in sorted((run / "probes").rglob("probe.json"))}  # fmt: skip


@pytest.fixture(scope="module")
def plain(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SFT that is scored, and never probed."""
    out = tmp_path_factory.mktemp("measures") / "plain"
    assert soul(*sft(warm / "model", out)) == 0
    return out


@pytest.fixture(scope="module")
def whole(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two probes, untouched."""
    out = tmp_path_factory.mktemp("measures") / "whole"
    assert soul(*probed(warm / "model", out)) == 0
    return out


@pytest.mark.slow
def test_the_best_weights_follow_the_dev_scores(plain: Path) -> None:
    summary = json.loads((plain / "summary.json").read_text())
    scores = {line["step"]: line["eval/tomi"] for line in lines_of(plain) if "eval/tomi" in line}
    assert scores.keys() == {1, 3} and summary["best_dev"] == max(scores.values())
    assert summary["tasks"]["tomi"]["dev"]["headline"] and summary["dev_steps"] == 4
    records = load_records(plain / "dev.jsonl")
    assert {record.step for record in records} == {1, 3} and len(records) == 8
    assert (plain / "best" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_probes_leave_every_bit_of_the_training_alone(plain: Path, whole: Path) -> None:
    assert learned(whole) == learned(plain)
    assert states(whole) == states(plain)
    assert files(whole / "model").keys() == files(plain / "model").keys()
    name = "adapter_model.safetensors"
    assert files(whole / "model")[name] == files(plain / "model")[name]


@pytest.mark.slow
def test_a_probe_is_a_run_without_its_weights(whole: Path) -> None:
    assert list(probe_results(whole)) == ["step_000002", "step_000004"]
    run = whole / "probes" / "step_000004"
    steps = [line for line in read_jsonl(run / "metrics.jsonl") if "reward/draft" in line]
    assert len(steps) == 2 and (run / "summary.json").is_file() and (run / "config.yaml").is_file()
    assert not list((whole / "probes").rglob("*.safetensors"))
    summary = json.loads((whole / "summary.json").read_text())
    assert list(summary["probes"]) == ["2", "4"]
    measured = {k: v for line in lines_of(whole) for k, v in line.items() if line["step"] == 3}
    assert measured["probe/tomi/before"] == measured["eval/tomi"]
    assert measured["probe/tomi/after"] == probe_results(whole)["step_000004"]["after"]["tomi"]


@pytest.fixture
def url() -> Iterator[str]:
    with ScriptedServer(answer=reply) as server:
        yield server.base_url


@pytest.mark.slow
def test_dialogues_are_played_with_the_partner_that_is_named(
    warm: Path, tmp_path: Path, url: str
) -> None:
    out = tmp_path / "run"
    more = ("--eval-task", "secret_keeper", "--eval-data", "synth:60", "--partner",
            f"endpoint:visitor@{url}", "--set", "dev_limit=2", "--set", "max_tokens=8")  # fmt: skip
    assert soul(*sft(warm / "model", out, *more)) == 0
    records = load_records(out / "dev.jsonl")
    assert {record.task for record in records} == {"secret_keeper"} and len(records) == 4
    assert any(line.seat == "visitor" for line in records[0].episode.transcript)
    entry = json.loads((out / "conditions.json").read_text())["tasks"]["secret_keeper"]
    assert entry["sent"]["partner"]["visitor"][0]["temperature"] >= 0


@pytest.mark.slow
def test_a_probe_without_a_result_is_said_aloud_and_the_training_goes_on(
    warm: Path, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A coach that says nothing: a method that learns from feedback stops after three steps."""
    out = tmp_path / "run"
    with ScriptedServer(answer=lambda body: " ") as server:
        more = ("--probe-every", 4, "--probe-steps", 4, "--coach",
                f"endpoint:mute@{server.base_url}", "--set", "prompts_per_step=1", "--set",
                "group_size=2")  # fmt: skip
        assert soul(*sft(warm / "model", out, *more)) == 0
    assert "the probe of step 4 failed" in capsys.readouterr().err
    result = probe_results(out)["step_000004"]
    assert result["after"] == {} and result["failure"]
    assert lines_of(out)[-1]["probe/tomi/after"] is None
    assert learned(out) == learned(plain) and not list((out / "probes").rglob("*.safetensors"))


RETAINED = ("--retention", "--set", "retention_tokens=2")


def warmed_sft(out: Path, *more: object, steps: int = 2) -> tuple[object, ...]:
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
    assert "dropped" in remark and "0.750 to 0.300" in remark and "\u22120.450 [" in remark
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
    assert nothing.difference is None and "were not measured" in nothing.remarks()[0]


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
    assert soul(*warmed_sft(out, *limits, steps=1)) == 0
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


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose general ability was measured."""
    out = tmp_path_factory.mktemp("ability") / "run"
    assert soul(*warmed_sft(out, *RETAINED)) == 0
    return out


@pytest.mark.slow
def test_replies_of_other_weights_are_measured_again(measured: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(measured, tmp_path / "run"))
    before, after = (out / "retention" / f"{name}.jsonl" for name in ("before", "after"))
    last = replies(after)
    whole = [record.episode.transcript for record in load_records(after)]
    after.write_bytes(before.read_bytes())
    assert soul(*warmed_sft(out, *RETAINED)) == 0
    assert replies(after) == last
    assert [record.episode.transcript for record in load_records(after)] == whole
    assert soul(*warmed_sft(out)) == 2  # begun with it, resumed without


@pytest.mark.slow
def test_measuring_moves_no_weight(measured: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    assert soul(*warmed_sft(plain)) == 0
    assert lines_of(measured) == lines_of(plain)
    file = Path("model") / "model.safetensors"
    assert (measured / file).read_bytes() == (plain / file).read_bytes()
