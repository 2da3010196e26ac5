"""Whole runs through the command line: what they write, and that what they write can be used."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from soulkit.eval.run.run_lock import run_lock
from soulkit.models.local.sampler import LocalModel
from soulkit.report.load import load_runs
from soulkit.report.tables import blocks, markdown
from soulkit.runs.folder import Run
from soulkit.runs.jsonl import read_jsonl
from soulkit.runs.records import load_records, newest_dev
from soulkit.tasks.secret_keeper.task import visitor_line
from soulkit.train.model.policy import load_policy
from soulkit.train.model.prepare import log_probs
from soulkit.train.objectives.sequences import emitted_spans
from soulkit.train.rollouts.play import Rollouts
from soulkit.train.state.checkpoint import load_checkpoint
from soulkit.types import Call, Sampling
from tests.support.evaluation import replaced, visitor
from tests.support.servers.openai_server import Fault, ScriptedServer
from tests.support.training import config, lines_of, random_model, rows, soul

TINY_STEP = ("--prompts", 4, "--group-size", 4, "--max-tokens", 12, "--lr", 1e-3, "--lora-r", 4)
TOMI = ("--task", "tomi", "--data", "tomi=synth:60", *TINY_STEP)
STEP_KEYS = {
    "step", "optimizer/lr", "reward/draft", "reward/refined", "gap/loo", "gap/loo_low",
    "gap/loo_high", "gap/loo_clusters", "gap/pair", "rollouts/draft", "rollouts/refined",
    "rollouts/unscored",
    "tokens/per_turn", "tokens/sampled", "feedback/share", "feedback/leak_share",
    "feedback/distinct", "feedback/dropped",
    "feedback/blind_reader", "feedback/blind_chance", "feedback/coach_failures",
    "feedback/coaches", "groups/all", "groups/single", "groups/flat", "groups/silent_share",
    "trained/draft", "trained/copy", "trained/refined", "clip/share", "clip/share_dual",
    "ratio/mean", "kl/old", "policy/entropy", "loss/total", "grad/norm", "optimizer/updates",
    "kl/base", "policy/version", "time/sample", "time/train", "update/skipped",
    "logprob/sampler_gap", "logprob/sampler_gap_max",
    *(f"part/{part}/{name}" for part in ("draft", "copy", "refined")
      for name in ("clipped", "clipped_dual", "ratio", "kl_old", "entropy")),
}  # fmt: skip


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


@pytest.fixture(scope="module")
def ditto(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three Ditto steps on stories."""
    out = tmp_path_factory.mktemp("runs") / "ditto"
    model = warm / "model"
    done = soul("train", "ditto", "--model", model, *TOMI, "--steps", 3, "--out", out,
                "--checkpoint-every", 2, "--eval-every", 2, "--set", "dev_limit=10",
                "--set", "mini_batch_prompts=2")  # fmt: skip
    assert done == 0
    return out


# --- sft ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sft_lowers_the_loss_and_leaves_a_whole_model(warm: Path) -> None:
    lines = lines_of(warm)
    assert [line["step"] for line in lines] == list(range(40))
    assert lines[-1]["loss/total"] < 0.5 * lines[0]["loss/total"]
    files = {p.name for p in (warm / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files
    model = LocalModel.load(warm / "model")
    task, (example, *_) = rows("tomi", 1)
    call = Call(role="actor", example_id=example.id)
    greedy = Sampling(temperature=0.0, max_tokens=12)
    reply = asyncio.run(model.complete(task.preview(example), greedy, call))
    assert reply.text.startswith("<answer>") and reply.stop_reason == "stop"
    summary = summary_of(warm)
    assert summary["command"] == "train sft" and set(summary["tasks"]) == {"tomi", "secret_keeper"}


# --- reinforcement --------------------------------------------------------------------------------


def test_a_ditto_run_writes_its_files(ditto: Path) -> None:
    assert {p.name for p in ditto.iterdir()} >= {
        "config.yaml", "environment.json", "episodes.jsonl", "metrics.jsonl", "summary.json",
        "checkpoints", "model",
    }  # fmt: skip
    assert {p.name for p in (ditto / "checkpoints").iterdir()} == {"step_000002", "step_000003"}
    recorded = json.loads((ditto / "environment.json").read_text())
    assert recorded["pass"]["checkpointing"] is False
    assert recorded["pass"]["tokens"] in (4096, 16384)  # by the free memory
    every = read_jsonl(ditto / "metrics.jsonl")
    lines, dev = ([line for line in every if ("eval/tomi" in line) == e] for e in (False, True))
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert {name for name in line if not name.startswith("leak/")} == {"schema", *STEP_KEYS}
        assert line["rollouts/draft"] == 16 and line["optimizer/updates"] == 2
        assert line["rollouts/unscored"] == 0
    assert [line["step"] for line in dev] == [1]
    assert dev[0].keys() == {"schema", "step", "eval/tomi"}
    assert any(line["grad/norm"] > 0 for line in lines)
    assert len({line["policy/version"] for line in lines}) == 3  # every step moved the weights


def test_episodes_hold_the_feedback_on_both_sides(ditto: Path) -> None:
    records = load_records(ditto / "episodes.jsonl")
    drafts = {(r.step, r.example_id, r.rollout): r for r in records if r.kind == "draft"}
    refined = [r for r in records if r.kind == "refined"]
    assert len(drafts) == 48 and len(records) == len({r.key for r in records})
    clean = [d for d in drafts.values() if d.received and not d.received.leak]
    assert len(refined) == len(clean) > 0
    for record in refined:
        draft = drafts[record.step, record.example_id, record.rollout]
        assert record.given == draft.received and record.given is not None
        assert record.given.text in record.prompt and record.given.text not in draft.prompt


def test_dev_rows_are_never_trained_on(ditto: Path) -> None:
    from soulkit.config import read_settings_file
    from soulkit.train.config import TrainConfig
    from soulkit.train.setup.data import load_training_data

    settings = TrainConfig.model_validate(read_settings_file(ditto / "config.yaml"))
    material = load_training_data(settings)
    held, training = ({e.cluster for _, e in pool} for pool in (material.dev, material.pool))
    assert held and not held & training
    played = {r.cluster for r in load_records(ditto / "episodes.jsonl")}
    assert played <= training
    facts = json.loads((ditto / "conditions.json").read_text())["tasks"]["tomi"]
    assert facts["origins"] == {"made here": len(facts["dev_rows"])}  # no published figure fits


def test_the_headline_is_what_was_held_out(ditto: Path) -> None:
    """The last of three steps was not evaluated: the score is of the weights after two."""
    dev = load_records(ditto / "dev.jsonl")
    values = [r.score.value for r in dev]
    assert {r.step for r in dev} == {1} and len(dev) == len({r.example_id for r in dev})
    assert dev == newest_dev(ditto)
    summary = summary_of(ditto)
    cells = summary["tasks"]["tomi"]
    assert [name for name, cell in cells.items() if cell.get("headline")] == ["dev"]
    assert cells["dev"]["mean"] == pytest.approx(sum(values) / len(values))
    assert (cells["dev"]["n"], summary["dev_steps"]) == (len(dev), 2)
    line = next(line for line in read_jsonl(ditto / "metrics.jsonl") if "eval/tomi" in line)
    assert line["eval/tomi"] == pytest.approx(cells["dev"]["mean"])
    assert cells["value"]["n"] == 48 and "headline" not in cells["value"]
    (run,) = load_runs([ditto], episodes=False)
    shown = markdown(blocks([run]))
    assert "accuracy (held-out rows)" in shown and "drafts, last" not in shown
    assert "accuracy (drafts, last 3 steps)" in markdown(blocks([run], details=True))


def test_the_summary_has_both_rewards_and_their_gap(ditto: Path) -> None:
    summary = summary_of(ditto)
    assert summary["steps"] == 3 and summary["command"] == "train ditto"
    assert summary["rewards"].keys() == {
        "reward/draft", "reward/refined", "gap/loo", "gap/loo_low", "gap/loo_high",
        "gap/loo_clusters",
    }  # fmt: skip
    assert "tomi" in summary["tasks"]
    symbolic = summary["feedback"]["coaches"]["symbolic"]
    assert summary["feedback"]["drafts"] == 48 and symbolic["checked"] == 48
    assert symbolic["dropped"] == sum(symbolic["leaks"].values())


def test_one_supervised_step_is_a_run_too(tmp_path: Path) -> None:
    out = tmp_path / "one"
    options = ("--task", "tomi", "--data", "tomi=synth:20", "--steps", 1, "--batch", 2)
    assert soul("train", "sft", "--model", "tiny", "--full", *options, "--out", out) == 0
    loss = summary_of(out)["tasks"]["tomi"]["loss"]
    assert loss["n"] == 1 and loss["ci_low"] is None
    assert (out / "model" / "model.safetensors").is_file()


def test_a_folder_that_is_trained_in_is_left_alone(
    ditto: Path, warm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = ("train", "ditto", "--model", warm / "model", *TOMI, "--steps", 3, "--out", ditto,
             "--checkpoint-every", 2, "--eval-every", 2, "--set", "dev_limit=10",
             "--set", "mini_batch_prompts=2")  # fmt: skip
    run = Run(path=ditto, command="train ditto", resumed=True)
    with run_lock(run):
        assert soul(*again) == 2
    assert "Another process" in capsys.readouterr().err


def test_the_saved_adapter_has_the_trainers_log_probs(ditto: Path, warm: Path) -> None:
    policy = load_policy(config(lora={"r": 4, "alpha": 8}), warm / "model")
    optimizer = torch.optim.AdamW([p for _, p in policy.trained])
    load_checkpoint(ditto / "checkpoints" / "step_000003", policy, optimizer)
    loaded = LocalModel.load(warm / "model", adapter=ditto / "model")
    plain = LocalModel.load(warm / "model")
    records = load_records(ditto / "episodes.jsonl")[:12]
    spans = [s for r in records for t in r.episode.traces for s in emitted_spans(t)]
    scores = log_probs(policy, spans, 4096)
    reloaded = log_probs(type(policy)(loaded.model, loaded.tokenizer), spans, 4096)
    base = log_probs(type(policy)(plain.model, plain.tokenizer), spans, 4096)
    for a, b in zip(scores, reloaded, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    assert max(float((a - c).abs().max()) for a, c in zip(scores, base, strict=True)) > 1e-3


def test_the_same_command_again_changes_nothing(ditto: Path, warm: Path) -> None:
    files = {name: (ditto / name).read_bytes() for name in ("metrics.jsonl", "episodes.jsonl")}
    before, weights = summary_of(ditto), (ditto / "model/adapter_model.safetensors").read_bytes()
    done = soul("train", "ditto", "--model", warm / "model", *TOMI, "--steps", 3, "--out", ditto,
                "--checkpoint-every", 2, "--eval-every", 2, "--set", "dev_limit=10",
                "--set", "mini_batch_prompts=2")  # fmt: skip
    assert done == 0
    assert files == {name: (ditto / name).read_bytes() for name in files}
    after = summary_of(ditto)
    assert after.pop("provenance")["dates"]["resumed"] and before.pop("provenance")["dates"]
    assert after == before
    assert (ditto / "model/adapter_model.safetensors").read_bytes() == weights


def test_grpo_trains_without_feedback(tmp_path: Path, warm: Path) -> None:
    out = tmp_path / "grpo"
    assert soul("train", "grpo", "--model", warm / "model", *TOMI, "--steps", 2, "--out", out) == 0
    for line in read_jsonl(out / "metrics.jsonl"):
        assert line["rollouts/refined"] == 0 and "reward/refined" not in line
        assert line["feedback/share"] == 0
        assert {name for name in line if name.startswith("trained/")} <= {"trained/draft"}
    assert {r.kind for r in load_records(out / "episodes.jsonl")} == {"draft"}


@pytest.mark.slow
def test_a_mixture_has_its_ratios_and_shuffled_feedback_is_somebody_elses(
    tmp_path: Path, warm: Path
) -> None:
    out = tmp_path / "mixed"
    done = soul("train", "ditto", "--model", warm / "model", "--task", "tomi,paratomi:0.5",
                "--data", "tomi=synth:8", "--data", "paratomi=synth:8", *TINY_STEP[4:],
                "--steps", 1, "--prompts", 12, "--group-size", 2, "--shuffle-feedback",
                "--out", out)  # fmt: skip
    assert done == 0
    records = load_records(out / "episodes.jsonl")
    drafts = [r for r in records if r.kind == "draft"]
    assert {n: sum(r.task == n for r in drafts) for n in ("tomi", "paratomi")} == {
        "tomi": 16, "paratomi": 8
    }  # fmt: skip
    tasks = [r.task for r in drafts[::2]]  # one of each group; updates take prompts in this order
    assert tasks not in (sorted(tasks), sorted(tasks, reverse=True))
    feedback_of = {(r.example_id, r.rollout): r.received for r in drafts}
    refined = [r for r in records if r.given is not None]
    assert refined
    for record in refined:
        assert record.given is not None
        sources = {e for (e, _), f in feedback_of.items() if f is not None and f == record.given}
        assert sources - {record.example_id}


OBJECTIVES = {
    "corrected and cut": ("sampler_cap=2.0", "lambda_fb=0", "mask_truncated=true",
                          "denominator=separate"),
    "gspo with penalties": ("ratio=sequence", "aggregation=seq-mean-token-mean", "kl_coef=0.05",
                            "entropy_coef=0.01"),
    "full": ("full=true", "advantage_std=none"),
}  # fmt: skip


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(extra, id=name, marks=[] if name == "full" else pytest.mark.slow)
        for name, extra in OBJECTIVES.items()
    ],
)
def test_every_setting_of_the_objective_runs(
    tmp_path: Path, warm: Path, extra: tuple[str, ...]
) -> None:
    out, options = tmp_path / "run", [w for e in extra for w in ("--set", e)]
    done = soul("train", "ditto", "--model", warm / "model", *replaced(TOMI, ("--prompts", 2)),
                "--steps", 2,
                "--set", "mini_batch_prompts=1", *options, "--out", out)  # fmt: skip
    assert done == 0
    assert len(read_jsonl(out / "metrics.jsonl")) == 2


# --- with a partner -------------------------------------------------------------------------------

KEEPER = (
    "--task", "secret_keeper", "--data", "secret_keeper=synth:12", "--prompts", 2,
    "--group-size", 3, "--max-tokens", 16, "--lr", 1e-3, "--lora-r", 4, "--steps", 2,
)  # fmt: skip


@pytest.mark.slow
def test_dialogues_are_trained_with_a_partner_over_http(tmp_path: Path, warm: Path) -> None:
    out = tmp_path / "keeper"
    with visitor() as url:
        done = soul("train", "ditto", "--model", warm / "model", *KEEPER, "--partner",
                    f"endpoint:visitor@{url}", "--out", out)  # fmt: skip
    assert done == 0
    lines = read_jsonl(out / "metrics.jsonl")
    assert len(lines) == 2 and all(line["rollouts/unscored"] == 0 for line in lines)
    assert all(line["rollouts/refined"] == 6 for line in lines)
    assert "task/secret_keeper/turns" in lines[0]
    refined = [r for r in load_records(out / "episodes.jsonl") if r.kind == "refined"]
    assert all(len(r.episode.traces[0].turns) >= 4 for r in refined)
    for line in lines:  # a copy has the tokens of its refined twin
        assert line["trained/copy"] == line["trained/refined"]


@pytest.mark.slow
@pytest.mark.parametrize("who", ["partner", "coach"])
def test_a_server_that_only_fails_ends_the_run_and_keeps_its_weights(
    tmp_path: Path, warm: Path, who: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sick = False

    def broken(index: int, body: dict[str, Any]) -> Fault | None:
        return Fault.status_error(400, f"the {who} is ill") if sick else None

    def answer(body: dict[str, Any]) -> str:
        return visitor_line(body["messages"]) if who == "partner" else "Look at who was there."

    def once(steps: int) -> int:
        options = (*KEEPER, "--partner", f"endpoint:v@{server.base_url}")
        if who == "coach":
            options = (*TOMI, "--coach", f"endpoint:wise@{server.base_url}")
        return soul("train", "ditto", "--model", warm / "model",
                    *replaced(options, ("--steps", steps, "--out", out)))  # fmt: skip

    out = tmp_path / "run"
    with ScriptedServer(answer=answer, script=broken) as server:
        stop = Rollouts.jobs

        def jobs(step: Rollouts, number: int) -> Any:
            nonlocal sick
            sick = number == 1 and not well
            return stop(step, number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Rollouts, "jobs", jobs)
            well = False
            assert once(2) == 1
            message = capsys.readouterr().err
            assert f"the {who} is ill" in message and "internal error" not in message
            assert [line["step"] for line in read_jsonl(out / "metrics.jsonl")] == [0]
            assert (out / "checkpoints" / "step_000001").is_dir()
            well = True
            assert once(2) == 0
    assert [line["step"] for line in read_jsonl(out / "metrics.jsonl")] == [0, 1]


def test_a_blind_reader_is_asked_about_every_feedback(tmp_path: Path, warm: Path) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer="<answer>A</answer>") as server:
        done = soul("train", "ditto", "--model", warm / "model", *TOMI, "--steps", 1,
                    "--blind-reader", f"endpoint:reader@{server.base_url}",
                    "--out", out)  # fmt: skip
        prompts = [body["messages"][0]["content"] for body in server.requests]
    assert done == 0
    drafts = [r for r in load_records(out / "episodes.jsonl") if r.kind == "draft"]
    feedback = [r.received for r in drafts if r.received is not None]
    assert len(prompts) == 8 * len(feedback) > 0
    assert not any(line in prompts[0] for line in drafts[0].prompt.splitlines() if "came" in line)
    assert {round(8 * (f.blind or 0), 6) % 1 for f in feedback} == {0.0}


# --- trackers -------------------------------------------------------------------------------------


def test_tensorboard_gets_the_numbers(tmp_path: Path, warm: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    done = soul("train", "grpo", "--model", warm / "model", *replaced(TOMI, ("--prompts", 2)),
                "--steps", 2,
                "--track", "tensorboard", "--out", out)  # fmt: skip
    assert done == 0
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    drawn = events.Scalars("reward/draft")
    logged = [line["reward/draft"] for line in read_jsonl(out / "metrics.jsonl")]
    assert [e.value for e in drawn] == pytest.approx(logged)


# --- the best weights -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_best_weights_are_kept_and_can_be_loaded(tmp_path: Path, warm: Path) -> None:
    out, steps = tmp_path / "run", 4
    options = replaced(TOMI, ("--steps", steps, "--out", out, "--eval-every", 1, "--lr", 0.01))
    done = soul("train", "ditto", "--model", warm / "model", *options, "--set", "keep_best=2",
                "--set", "keep_last=1", "--set", "dev_limit=10")  # fmt: skip
    assert done == 0
    lines = read_jsonl(out / "metrics.jsonl")
    dev = [line["eval/tomi"] for line in lines if "eval/tomi" in line]
    assert len(dev) == steps
    best = sorted(range(1, steps + 1), key=lambda step: (dev[step - 1], step), reverse=True)
    names = {p.name for p in (out / "checkpoints").iterdir()}
    assert names == {f"step_{step:06d}" for step in (*best[:2], steps)}

    summary = summary_of(out)
    assert (summary["best_step"], summary["best_dev"]) == (best[0], dev[best[0] - 1])
    weights = "adapter_model.safetensors"
    point = out / summary["best_checkpoint"]
    assert (out / "best" / weights).read_bytes() == (point / weights).read_bytes()
    last = out / "checkpoints" / f"step_{steps:06d}" / weights
    assert (out / "model" / weights).read_bytes() == last.read_bytes()
    assert LocalModel.load(warm / "model", adapter=out / "best").policy_version


def test_without_a_dev_split_there_is_no_best(tmp_path: Path, warm: Path) -> None:
    out = tmp_path / "run"
    assert soul("train", "grpo", "--model", warm / "model", *TOMI, "--steps", 1, "--out", out) == 0
    assert not (out / "best").exists() and "best_step" not in summary_of(out)


def test_lessons_beyond_the_context_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    words = ("train", "sft", "--model", random_model(tmp_path / "short", max_context=32), "--task",
             "tomi", "--data", "tomi=synth:6", "--steps", 1, "--out", tmp_path / "run")  # fmt: skip
    assert soul(*words) == 2
    assert not (tmp_path / "run").exists()
