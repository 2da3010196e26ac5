"""Experts on this machine: what is learned is what they emitted, and kills change none of it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.corpora.lessons import Lesson
from soulkit.distill.config import DistillConfig
from soulkit.distill.experts import find_experts
from soulkit.distill.sample import sample, samples_folder
from soulkit.distill.select import read_selection, select_samples
from soulkit.errors import RunError
from soulkit.models.local.sampler import LocalModel
from soulkit.runs.jsonl import read_jsonl
from soulkit.tasks.secret_keeper.task import visitor_line
from soulkit.train.objectives.sequences import emitted_spans
from soulkit.train.sft.encode import LessonEncoder
from soulkit.types import Segment
from tests.support.distilling import killed_after
from tests.support.evaluation import paid, records
from tests.support.resuming import fork_context
from tests.support.servers.openai_server import ScriptedServer
from tests.support.training import soul, warm_model

pytestmark = [pytest.mark.slow, pytest.mark.torch]
KILLS = 8
"""Half of them in each stage; tests/distill/test_whole_distillations.py kills twelve times more."""
TASKS = ("tomi", "secret_keeper")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warmed base, and a run on each task, trained for a moment."""
    root = tmp_path_factory.mktemp("experts")
    base = warm_model(root / "warm") / "model"
    for task in TASKS:
        words = ("--task", task, "--data", f"{task}=synth:20", "--steps", 1, "--batch", 4)
        out = root / "experts" / f"run of {task}"
        assert soul("train", "sft", "--model", base, *words, "--lora-r", 4, "--out", out) == 0
    return root / "experts"


@pytest.fixture(scope="module")
def partner() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer=lambda body: visitor_line(body["messages"])) as server:
        yield server


@pytest.fixture(scope="module")
def settings(experts: Path, partner: ScriptedServer) -> dict[str, Any]:
    return {
        "experts": str(experts), "data": {"tomi": "synth:8", "secret_keeper": "synth:4"},
        "samples": 4, "keep_top": 2, "partner": f"endpoint:visitor@{partner.base_url}",
        "batch_size": 4, "device": "cpu", "threads": 1, "max_tokens": 12, "min_reward": 0.0,
    }  # fmt: skip


@pytest.fixture(scope="module")
def untouched(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("untouched") / "out"
    config = DistillConfig.model_validate(settings)
    several = find_experts(config)
    sample(config, several, out)
    select_samples(config, several, out)
    return out


def kill_while_sampling(
    context: Any, rng: random.Random, settings: dict[str, Any], out: Path
) -> int:  # fmt: skip
    """Let the samples be played, with kills after an episode or in the middle of a dialogue; how
    many."""
    episodes = [samples_folder(out, task) / "episodes.jsonl" for task in TASKS]
    talks = [samples_folder(out, TASKS[1]) / "ledger.sqlite-wal"]
    for kills in range(KILLS):
        growing, events = (talks, rng.randrange(1, 20)) if kills % 3 == 1 else (episodes, 1)
        if not killed_after(
            context, settings, out, "sample", growing=growing, events=events,
            delay=0.02 * rng.random(),
        ):  # fmt: skip
            return kills
    assert not killed_after(context, settings, out, "sample", delay=600)
    return KILLS


def kill_while_selecting(
    context: Any, rng: random.Random, settings: dict[str, Any], out: Path, kills: int
) -> None:
    """Let the samples be selected from after so many kills, at any moment."""
    while kills or not (out / "selection.json").is_file():
        for name in ("selected.jsonl", "selection.json") if kills else ():
            (out / name).unlink(missing_ok=True)
        delay = 0.02 + 0.3 * rng.random() if kills else 600.0
        kills -= killed_after(context, settings, out, "sample", "select", delay=delay)


def test_kills_select_the_same_samples(
    settings: dict[str, Any], untouched: Path, partner: ScriptedServer, tmp_path: Path
) -> None:
    """In whatever stage and at whatever moment; no prompt is recorded or paid for twice."""
    rng, context = random.Random(7), fork_context()
    kills, folders = 0, list[Path]()
    while kills < KILLS // 2:
        folders.append(tmp_path / f"out{len(folders)}")
        kills += kill_while_sampling(context, rng, settings, folders[-1])
    questions = len(partner.requests)
    for out in folders:
        for task in TASKS:
            lines = read_jsonl(samples_folder(out, task) / "episodes.jsonl")
            keys = [line["key"] for line in lines]
            assert len(keys) == len(set(keys)) == read_selection(untouched).tasks[task].sampled
        calls = paid(samples_folder(out, TASKS[1]))
        kill_while_selecting(context, rng, settings, out, KILLS // 2 if out == folders[0] else 0)
        assert paid(samples_folder(out, TASKS[1])) == calls
        assert (out / "selected.jsonl").read_bytes() == (untouched / "selected.jsonl").read_bytes()
        assert read_selection(out) == read_selection(untouched)
    assert len(partner.requests) == questions


def test_rows_hold_exactly_what_was_emitted(settings: dict[str, Any], untouched: Path) -> None:
    """Encoded for training, a row is the sequence that was sampled, id by id."""
    expert = find_experts(DistillConfig.model_validate(settings))[0]
    model = LocalModel.load(expert.model, device="cpu")
    traces = {
        (r.task, r.example_id, r.rollout): r.episode.traces[0]
        for task in TASKS for r in records(samples_folder(untouched, task))
    }  # fmt: skip
    rows = read_jsonl(untouched / "selected.jsonl")
    assert {row["task"] for row in rows} == set(TASKS)
    for row in rows:
        segments = [
            Segment(m["role"], m["content"], token_ids=tuple(m.get("token_ids", ())))
            for m in row["messages"]
        ]
        trained = tuple(s.role == "assistant" for s in segments)
        lesson = Lesson(tuple(segments), trained, "x", "x:1", tokenizer=row["tokenizer"])
        spans = LessonEncoder(model.renderer(), lambda text: [], None)(lesson)
        emitted = emitted_spans(traces[row["task"], row["example_id"], row["rollout"]])
        assert [(s.ids, s.trained) for s in spans] == [(s.ids, s.trained) for s in emitted]  # type: ignore[union-attr]


def test_an_expert_that_changed_is_refused(
    settings: dict[str, Any], untouched: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "experts"
    shutil.copytree(settings["experts"], folder)
    shutil.copytree(untouched / "samples", tmp_path / "out" / "samples")
    config = DistillConfig.model_validate({**settings, "experts": str(folder)})
    with pytest.raises(RunError, match="adapter: "):  # another folder is another expert
        sample(config, find_experts(config), tmp_path / "out")
