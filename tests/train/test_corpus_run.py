"""`soul train sft` on conversations: what is learned, measured, refused, written down, resumed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import struct
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from soulkit.data.corpora.lessons import Lesson
from soulkit.errors import ConfigError
from soulkit.runs.jsonl import read_jsonl
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy, load_policy
from soulkit.train.objectives.sequences import Span
from soulkit.train.setup.rows import gather_corpus
from soulkit.train.sft.encode import LessonEncoder
from soulkit.train.sft.run import encode_lessons, encoder_for, unmeasured_conversations
from soulkit.train.sft.steps import Validation
from soulkit.train.state.checkpoint import Position
from soulkit.train.state.loop import merit
from soulkit.train.state.metrics import StepLine
from tests.support.chats import chats_file, jsonl, person_chat
from tests.support.evaluation import replaced
from tests.support.resuming import assert_same, fork_context, stop_after
from tests.support.training import soul

OPTIONS = ("--side", "human", "--batch", 6, "--set", "deterministic=true", "--threads", 1)


def command(folder: Path, out: Path, *more: object, steps: int = 6) -> list[str]:
    """Two sources at other ratios, a validation file, windows that are smaller than the files."""
    words = ("train", "sft", "--model", "tiny", "--full", "--data", folder / "chats.jsonl",
             "--data", f"{folder / 'more.jsonl'}:1.5", "--validation", folder / "valid.jsonl",
             *OPTIONS, "--window", 16, "--steps", steps, "--checkpoint-every", 2,
             "--eval-every", 2, "--out", out, *replaced(("--keep-last", 1), more))  # fmt: skip
    return [str(word) for word in words]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    chats_file(folder / "chats.jsonl", 90)
    chats_file(folder / "more.jsonl", 30, seed=1)
    chats_file(folder / "valid.jsonl", 12, seed=2)
    return folder


def config(folder: Path, **settings: Any) -> TrainConfig:
    plain = {"method": "sft", "model": "tiny", "corpora": [str(folder / "chats.jsonl")],
             "side": "human"}  # fmt: skip
    return TrainConfig.load(env={}, flags=plain | settings)


# --- a run ----------------------------------------------------------------------------------------


def test_a_run_learns_the_people_and_says_so(
    tmp_path: Path, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert soul(*command(files, out, "--lesson-tokens", 60, steps=2)) == 0
    before, first, second, measured = read_jsonl(out / "metrics.jsonl")
    assert before["step"] == -1 and before["loss/valid/valid"] > measured["loss/valid/valid"]
    learned = [sum(line[f"lessons/of/{name}"] for line in (first, second)) for name in
               ("chats", "more")]  # fmt: skip
    assert learned == [8, 4]  # 90 rows and one and a half times 30
    assert first["loss/of/chats"] > 0
    assert sum(line.get("lessons/shortened", 0) for line in (first, second)) == 3
    ends = {f"loss/valid_{end}/valid" for end in ("low", "high")}
    assert measured.keys() == {"schema", "step", "loss/valid/valid", *ends}
    assert measured["step"] == 1
    summary = json.loads((out / "summary.json").read_text())
    assert summary["best_valid"] == summary["validation"]["last"]["valid"]
    assert summary["validation"]["lessons"] == {"valid": 12} and "best_dev" not in summary
    assert summary["lessons"]["lessons/of/chats"] == 8
    note = json.loads((out / "model" / "soulkit.json").read_text())
    assert note["tasks"] == {} and note["corpora"] == [
        {"name": "chats", "side": "human", "ratio": 1.0, "rows": 90},
        {"name": "more", "side": "human", "ratio": 1.5, "rows": 30},
    ]
    for place in ("model", "best"):
        card = (out / place / "README.md").read_text()
        assert "| chats | 90 |" in card and "validation loss (step 2)" in card
        assert str(files) not in card and "--side human" in card
    printed = capsys.readouterr()
    assert "validation loss" in printed.out and "chats 8, more 4" in printed.out
    assert soul("report", out) == 0 and soul("runs", tmp_path) == 0
    shown = capsys.readouterr().out
    assert "Validation loss: valid" in shown and "validation loss valid" in shown


@pytest.fixture(scope="module")
def policy(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    from soulkit.models.local.tiny import build_tiny

    rows = [person_chat(number) for number in range(90)]
    texts = [message["content"] for row in rows for message in row["messages"]]
    folder = build_tiny(tmp_path_factory.mktemp("models") / "tiny", texts, max_context=256)
    return load_policy(config(files, full=True, model=str(folder)), folder)


def test_a_validation_loss_is_the_mean_over_the_learned_tokens(files: Path, policy: Policy) -> None:
    settings = config(files, validation=[str(files / "valid.jsonl")], tokens_per_batch=64)
    corpus = gather_corpus(settings)
    encode = encoder_for(policy, settings)
    spans = list(chain(*encode_lessons(corpus.validation["valid"], encode)))
    nats, tokens = 0.0, 0
    for span in spans:
        with torch.no_grad():
            logits = policy.causal(input_ids=torch.tensor([span.ids])).logits[0].log_softmax(-1)
        for at, trained in enumerate(span.trained):
            nats -= float(logits[at - 1, span.ids[at]]) if trained else 0.0
            tokens += trained
    people = [f"p{number % 4}" for number in range(len(spans))]
    (loss,) = (
        Validation(settings, policy, {"valid": spans}, {}, {"valid": people}).losses().values()
    )
    assert loss.mean == pytest.approx(nats / tokens, rel=1e-5) and loss.n_clusters == 4
    assert loss.ci_low is not None and loss.ci_low < nats / tokens
    alone = Validation(settings, policy, {"valid": spans}).losses()["valid"]
    assert alone.mean == pytest.approx(nats / tokens, rel=1e-5) and alone.ci_low is None
    words = {policy.tokenizer.decode([i for i, t in zip(s.ids, s.trained, strict=True) if t])
             for s in spans}  # fmt: skip
    assert any("hi i am" in text for text in words) and not any("hello" in t for t in words)


def _within(limit: int, lessons: Sequence[Lesson], encode: LessonEncoder) -> list[list[Span]]:
    """The lessons that fit so many tokens."""
    encode.limit = limit
    return encode_lessons(lessons, encode)


def test_validation_conversations_that_do_not_fit_are_told_and_not_counted(
    files: Path, policy: Policy
) -> None:
    settings = config(files, validation=[str(files / "valid.jsonl")])
    corpus, encode = gather_corpus(settings), encoder_for(policy, settings)
    lessons = corpus.validation["valid"]
    longest = [max(len(span.ids) for span in one) for one in encode_lessons(lessons, encode)]
    few = (limit for limit in range(max(longest)) if len(_within(limit, lessons, encode)))
    _within(next(few), lessons, encode)
    counts = {"valid": len(encode_lessons(lessons, encode))}
    assert 0 < counts["valid"] < len(lessons)
    (remark,) = unmeasured_conversations(corpus, Validation(settings, policy, {}, counts))
    lost = len(lessons) - counts["valid"]
    assert remark.startswith(f"{lost} of the {len(lessons)} validation conversations in 'valid'")
    assert not unmeasured_conversations(
        corpus, Validation(settings, policy, {}, {"valid": len(lessons)})
    )


def test_validation_comes_every_so_often_and_after_the_last_step(
    files: Path, policy: Policy
) -> None:
    every = Validation(config(files, eval_every=3, steps=7), policy, {})
    (*spans,) = chain(*encode_lessons(
        gather_corpus(config(files)).samples["chats"][:2], encoder_for(policy, every.config)
    ))  # fmt: skip
    every = Validation(every.config, policy, {"v": spans})
    assert [step for step in range(-1, 7) if every(step)] == [-1, 2, 5, 6]
    last = Validation(config(files, steps=7), policy, {"v": spans})
    assert [step for step in range(-1, 7) if last(step)] == [-1, 6]


def test_what_checkpoints_are_ranked_by() -> None:
    def place(**measured: Any) -> Position:
        return Position(step=1, metrics=0, episodes=0, policy="", **measured)

    low, high = (place(valid=loss).merit for loss in (1.5, 2.5))
    assert low is not None and high is not None and low > high  # a lower loss is the better
    assert place(dev=0.4, valid=9.0).merit == place(dev=0.4).merit
    # The last step may have a loss alone: a dev score on any scale goes before it.
    assert high is not None and place(dev=-30.0).merit > high
    assert place().merit is None
    assert merit(StepLine(step=1, valid={"a": 1.0, "b": 3.0})) == (False, -2.0)
    assert merit(StepLine(step=1, valid={"a": 1.0, "b": None})) is None


# --- what is refused ------------------------------------------------------------------------------


def refusal(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: object) -> str:
    """What a command says that must fail with 2, in three lines, and leave no run folder."""
    capsys.readouterr()
    assert soul("train", "--debug", *words, "--out", tmp_path / "none") == 2
    lines = [line for line in capsys.readouterr().err.splitlines()
             if line.startswith(("error: ", "why: ", "fix: "))]  # fmt: skip
    assert [line.partition(":")[0] for line in lines] == ["error", "why", "fix"]
    assert not (tmp_path / "none").exists()
    return " ".join(lines)


def test_mistakes_cost_three_lines(
    tmp_path: Path, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def says(*words: object) -> str:
        return refusal(capsys, tmp_path, *words)

    chats, tiny = ("--data", files / "chats.jsonl"), ("--model", "tiny", "--full")
    assert "missing: --task, --suite or --data" in says("sft", *tiny)
    assert "both tasks and conversations" in says("sft", *tiny, "--task", "tomi", "--set",
                                            f"corpora=[{files / 'chats.jsonl'}]")  # fmt: skip
    assert "--side" in says("ditto", "--model", "tiny", "--task", "tomi", "--side", "human")
    assert "only applies to conversations" in says(
        "sft", *tiny, "--task", "tomi", "--side", "human"
    )
    assert "nothing.jsonl" in says("sft", *tiny, "--data", tmp_path / "nothing.jsonl",
                                   "--side", "human")  # fmt: skip
    assert "is also training data" in says("sft", *tiny, *chats, "--side", "human", "--validation",
                                       files / "chats.jsonl")  # fmt: skip
    copy = shutil.copy(files / "chats.jsonl", tmp_path / "copy.jsonl")
    assert "90 of the 90 validation" in says(
        "sft", *tiny, *chats, "--side", "human", "--validation", copy
    )
    assert "osim-midtrain" in says("sft", *tiny, *chats, "--side", "human", "--preset", "osim")
    assert "no usable conversation" in says("sft", *tiny, *chats, "--side", "nobody")


def test_conversations_that_stand_in_both_are_measured_and_not_learned(
    tmp_path: Path, files: Path
) -> None:
    mixed = jsonl(
        tmp_path / "mixed.jsonl", [person_chat(3), *(person_chat(n, 2) for n in range(9))]
    )
    corpus = gather_corpus(config(files, validation=[str(mixed)]))
    assert len(corpus.held_out) == 10
    assert "1 of the first conversations" in " ".join(corpus.remarks())


def test_validation_files_of_a_shard_folder_are_used(tmp_path: Path) -> None:
    for name, seed in (("train-00000.jsonl", 0), ("validation-00000.jsonl", 1)):
        chats_file(tmp_path / "shards" / name, 6, seed)
    corpus = gather_corpus(config(tmp_path, corpora=[str(tmp_path / "shards")]))
    assert {name: len(some) for name, some in corpus.validation.items()} == {"validation-00000": 6}


# --- presets --------------------------------------------------------------------------------------


def headers_of_a_model(folder: Path, context: int, hidden: int = 4096, layers: int = 36) -> Path:
    """What a checkpoint of about eight billion weights says of itself, without them."""
    folder.mkdir(parents=True)
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": 32,
             "vocab_size": 150_000, "max_position_embeddings": context}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    tensor = {"w": {"dtype": "BF16", "shape": [8_000_000_000], "data_offsets": [0, 16 * 10**9]}}
    header = json.dumps(tensor).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def test_a_preset_goes_behind_what_is_written(files: Path) -> None:
    preset = config(files, preset="osim-midtrain")
    assert (preset.full, preset.lesson_tokens, preset.sft_batch, preset.steps) == (
        True, 24_576, 1024, 4500,
    )  # fmt: skip
    assert (preset.lr, preset.lr_schedule, preset.warmup_steps) == (1e-5, "cosine", 50)
    changed = config(files, preset="osim-midtrain", steps=7, full=False)
    assert (changed.steps, changed.full, changed.sft_batch) == (7, False, 1024)
    assert changed.resolved()["preset"] == "osim-midtrain"
    for wrong in (["osim-midtrain"], 7, ""):
        with pytest.raises(ConfigError):
            config(files, preset=wrong)


def test_a_preset_that_cannot_fit_is_refused_with_figures(
    tmp_path: Path, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--data", files / "chats.jsonl", "--side", "human", "--preset", "osim-midtrain",
             "--device", "cpu")  # fmt: skip
    small = headers_of_a_model(tmp_path / "small", 8192)
    told = refusal(capsys, tmp_path, "sft", "--model", small, *words)
    assert "24,576" in told and "8,192" in told
    large = headers_of_a_model(tmp_path / "large", 32_768, hidden=65_536, layers=400)
    told = refusal(capsys, tmp_path, "sft", "--model", large, *words)
    assert "GiB are free" in told and "--lora" in told


def test_the_plan_counts_rows_and_estimates_tokens(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*command(files, files / "none"), "--json"]
    assert soul("plan", *arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [(one["source"], one["rows"], one["ratio"]) for one in plan["sources"]] == [
        ("chats", 90, 1.0), ("more", 30, 1.5),
    ]  # fmt: skip
    assert plan["steps_per_pass"] == 23 and plan["steps"] == 6  # 135 lessons in sixes
    assert 0 < plan["learned_tokens"] < plan["tokens"] and plan["validation"] == 12
    assert soul("plan", *arguments, "--lesson-tokens", 7) == 0
    short = json.loads(capsys.readouterr().out)
    assert [one["tokens_per_lesson"] for one in short["sources"]] == [7, 7]
    assert all(one["tokens_per_lesson"] > 7 for one in plan["sources"])
    assert not (files / "none").exists()


# --- stopped and taken up again -------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert soul(*command(files, out)) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_run_goes_on_to_the_bit(
    tmp_path: Path, files: Path, whole: Path, number: int
) -> None:
    out, rng, context = tmp_path / "run", random.Random(int(number)), fork_context()
    growing = [out / "metrics.jsonl", out / "material.json"]
    codes = [
        stop_after(context, command(files, out), growing, rng.randint(1, 6), number)
        for _ in range(2)
    ]
    assert codes[0] in (-number, 128 + number)
    assert soul(*command(files, out)) == 0
    assert_same(out, whole)


@pytest.mark.slow
def test_held_out_rows_of_a_task_have_a_loss_too(tmp_path: Path) -> None:
    words = ("--task", "tomi", "--data", "tomi=synth:40", "--steps", 2, "--batch", 4)
    out = tmp_path / "gold"
    assert soul("train", "sft", "--model", "tiny", "--full", *words, "--eval-every", 2,
                "--out", out) == 0  # fmt: skip
    losses = [line["loss/valid/tomi"] for line in read_jsonl(out / "metrics.jsonl")
              if "loss/valid/tomi" in line]  # fmt: skip
    assert len(losses) == 2 and losses[1] < losses[0]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["validation"]["lessons"]["tomi"] > 0
    assert summary["validation"]["last"]["tomi"] == losses[1]
    assert "best_valid" not in summary and summary["best_dev"] >= 0  # it was played as well


@pytest.mark.slow
def test_a_changed_file_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("chats", 0), ("more", 1), ("valid", 2)):
        chats_file(tmp_path / f"{name}.jsonl", 12, seed)
    out = tmp_path / "run"
    assert soul(*command(tmp_path, out, steps=2)) == 0
    chats_file(tmp_path / "more.jsonl", 12, seed=3)
    assert soul(*command(tmp_path, out, steps=2)) == 2
    assert "more" in capsys.readouterr().err


# --- the second command ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("full", [True, False])
def test_feedback_training_goes_on_from_the_conversations(
    tmp_path: Path, files: Path, warm: Path, full: bool
) -> None:
    chats, rest = tmp_path / "sft", ("--task", "tomi", "--data", "tomi=synth:12", "--steps", 1,
            "--prompts", 2, "--group-size", 2, "--max-tokens", 8)  # fmt: skip
    kind = "--full" if full else "--lora"
    learned = ("train", "sft", "--model", warm / "model", kind, "--data", files / "chats.jsonl",
               *OPTIONS, "--steps", 2, "--out", chats)  # fmt: skip
    assert soul(*learned) == 0
    model = (chats / "model",) if full else (warm / "model", "--adapter", chats / "model")
    assert soul("train", "ditto", "--model", *model, *rest, "--out", tmp_path / "rl") == 0
    note = json.loads((tmp_path / "rl" / "model" / "soulkit.json").read_text())
    assert note["tasks"] == {"tomi": 1.0} and ("adapter" in note) is not full
