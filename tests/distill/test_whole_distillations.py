"""From lessons to one generalist: warm-up, two experts by Ditto, distillation by the command line,
as docs/guides/distill.md prints it.

The world is that of the benchmark in its small size: keeping secrets in a dialogue with a partner
over HTTP, and what people say by a rule that no prompt holds.

A whole distillation that is killed again and again ends where an untouched one does.

Experts of one base behind one vLLM server, each with its adapter (a toy at the far end).

Experts on this machine: what is learned is what they emitted, and kills change none of it.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.corpora.lessons import Lesson
from soulkit.distill.config import STAGES, DistillConfig, Stage
from soulkit.distill.experts import find_experts
from soulkit.distill.report import read_distillation
from soulkit.distill.run import distill
from soulkit.distill.sample import sample, sample_config, samples_folder, shared_servers
from soulkit.distill.select import read_selection, select_samples
from soulkit.errors import RunError
from soulkit.models.local.loading import adapter_hash
from soulkit.models.local.sampler import LocalModel
from soulkit.runs.jsonl import read_jsonl
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.kit.made_rows import made_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.secret_keeper.task import visitor_line
from soulkit.train.objectives.sequences import emitted_spans
from soulkit.train.sft.encode import LessonEncoder
from soulkit.types import Segment
from tests.support.distilling import distillation, killed_after, save_expert, small_base
from tests.support.evaluation import ROOT, examples, last_message, paid, records, soul, visitor
from tests.support.reporting import Heard
from tests.support.resuming import fork_context
from tests.support.servers.openai_server import ScriptedServer
from tests.support.servers.tiny_vllm import interpreter
from tests.support.training import warm_model
from tests.test_printed_commands import blocks_of, lines_of

pytestmark = [pytest.mark.slow, pytest.mark.torch]
PEOPLE_TASKS = ("cast_of_people", "secret_keeper")


VISITOR = "http://127.0.0.1:8799/v1"
"""Where the page has it."""


def walk() -> dict[str, str]:
    """How a command of the page's walk begins → its line."""
    starts = (".venv/bin/python", "soul serve", "soul distill")
    page = (ROOT / "docs" / "guides" / "distill.md").read_text(encoding="utf-8")
    section = page.split("\n## ")[1]
    lines = [line for block in blocks_of(section) for line in lines_of(block)]
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 3
    return dict(zip(starts, lines, strict=True))


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder after the first command: a warmed-up base and two experts in runs/world."""
    desk = tmp_path_factory.mktemp("desk")
    words = shlex.split(walk()[".venv/bin/python"])
    done = subprocess.run(
        [sys.executable, str(ROOT / words[1]), *words[2:]], text=True, check=False, cwd=desk,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Before: warmup " in done.stdout
    assert all(f"experts/{task} " in done.stdout for task in PEOPLE_TASKS)
    assert "Warning" not in done.stderr
    return desk


def test_the_walk_of_the_page_ends_in_a_generalist_that_beats_the_base(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    out, lines = Path("runs/distilled"), walk()
    with visitor() as url:
        command = shlex.split(lines["soul distill"].replace(VISITOR, url))[1:]
        assert f"endpoint:scripted-visitor@{url}" in command
        assert soul("plan", *command) == 0
        assert soul(*command) == 0
        selected = (out / "selected.jsonl").read_bytes()
        assert soul(*command) == 0  # finished: nothing is played or trained again
    assert (out / "selected.jsonl").read_bytes() == selected
    result = results(out)
    assert result.keys() == set(PEOPLE_TASKS)
    for task, one in result.items():
        gain = one["generalist_gain"]
        assert gain["difference"] > 0.2, task
        assert gain["ci_low"] > 0, task
        assert one["kept"]["ci_low"] > 0, task
        assert 0 < one["selection"]["taken"] <= one["selection"]["sampled"] == 160 * 2
    _no_row_is_measured_and_learned(out)


def results(out: Path) -> dict[str, Any]:
    """Task → what the report says of it."""
    whole = json.loads((out / "summary.json").read_text(encoding="utf-8"))["distillation"]
    return {one["task"]: one for one in whole["tasks"]}


def _no_row_is_measured_and_learned(out: Path) -> None:
    learned = {row["example_id"] for row in read_jsonl(out / "selected.jsonl")}
    measured = {
        record["example_id"]
        for task in PEOPLE_TASKS
        for record in read_jsonl(out / "measured" / "generalist" / task / "episodes.jsonl")
    }
    assert learned and measured and not learned & measured


TASKS, ROWS = ("hitom", "tomi"), "synth:6"
PLACES = (
    "samples/tomi/ledger.sqlite-wal", "selected.jsonl", "generalist/metrics.jsonl",
    "generalist/model/adapter_model.safetensors", "measured/base/tomi/conditions.json",
    "measured/generalist/hitom/episodes.jsonl",
)  # fmt: skip
"""What each of six processes gets to write before it is killed: all stages have their share.
The test of kills while samples are gathered adds four in the middle of samples and selections."""


def once(settings: dict[str, Any], out: str, stages: Sequence[Stage]) -> None:
    """The command, in a process of its own."""
    import torch

    torch.set_num_threads(1)
    distill(DistillConfig.model_validate(settings), Path(out), stages)


def answers() -> dict[str, str]:
    """Every prompt of the rows that are sampled or measured, with its right answer."""
    prompts: dict[str, str] = {}
    for name in TASKS:
        live = load_registry().task(name)
        assert isinstance(live, ChoiceTask)
        for split in ("train", "test"):
            for row in to_examples(live, made_rows(live, ROWS, 0, split)).examples:  # type: ignore[arg-type]
                prompts[live.preview(row)[0].text] = live.gold_completion(row)
    return prompts


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Two served experts that know every answer, on a base that knows none."""
    gold = answers()
    base = small_base(tmp_path_factory.mktemp("base") / "model", words=[*gold, *gold.values()])
    with ScriptedServer(answer=lambda body: gold[last_message(body)]) as server:
        yield {
            "experts": dict.fromkeys(TASKS, f"endpoint:expert@{server.base_url}"),
            "model": str(base), "data": dict.fromkeys(TASKS, ROWS),
            "held_out": dict.fromkeys(TASKS, ROWS), "held_out_limit": 4, "samples": 3,
            "epochs": 6, "batch": 4, "max_tokens": 8, "device": "cpu", "threads": 1,
            "batch_size": 4, "lora": {"r": 2, "alpha": 4}, "backoff_s": 0,
        }  # fmt: skip


def table(out: Path) -> dict[str, Any]:
    """What the report says, and every score that it rests on."""
    result = read_distillation(out)
    assert result is not None
    episodes = {
        str(file.relative_to(out)): {line["key"]: line["score"]["value"]
                                     for line in read_jsonl(file)}
        for file in sorted((out / "measured").rglob("episodes.jsonl"))
    }  # fmt: skip
    summary = json.loads((out / "summary.json").read_text())["distillation"]
    return {"summary": summary, "episodes": episodes}


def test_kills_in_every_stage_end_in_the_same_table(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    rng, context = random.Random(11), fork_context()
    untouched, out = tmp_path / "untouched", tmp_path / "out"
    assert not killed_after(context, settings, untouched, *STAGES, delay=600, target=once)
    for place in range(len(PLACES)):
        # A process that was quick may have written what the next one is to be killed at.
        growing = [out / name for name in PLACES[place:]]
        assert killed_after(
            context, settings, out, *STAGES, growing=growing, events=1,
            delay=0.05 * rng.random(), target=once,
        ), PLACES[place]  # fmt: skip
    assert not killed_after(context, settings, out, *STAGES, delay=600, target=once)
    assert (out / "selected.jsonl").read_bytes() == (untouched / "selected.jsonl").read_bytes()
    assert table(out) == table(untouched)
    for task in TASKS:
        keys = [line["key"] for line in read_jsonl(samples_folder(out, task) / "episodes.jsonl")]
        assert len(keys) == len(set(keys)) == 18
    weights = [
        (folder / "generalist" / "model" / "adapter_model.safetensors").read_bytes()
        for folder in (out, untouched)
    ]
    assert weights[0] == weights[1]


def test_experts_of_one_base_share_a_server(tmp_path: Path) -> None:
    words = [s.text for e in examples("hitom", 2) for s in load_registry().task("hitom").preview(e)]
    base = small_base(tmp_path / "base", words=words)
    experts = tmp_path / "experts"
    for name in ("tomi", "hitom"):
        save_expert(experts / name, base, name)
    config = distillation(
        experts, engine="vllm", vllm_python=interpreter(tmp_path), samples=2, max_tokens=4,
        data={"*": "synth:2"},
    )  # fmt: skip
    made, remarks = find_experts(config), list[str]()
    configs = [sample_config(config, expert) for expert in made]
    out = tmp_path / "out"
    reporter = Heard(remarks)
    with shared_servers(config, configs, out, reporter) as servers:
        sample(config, made, out, servers=servers, reporter=reporter)
    (arguments,) = [json.loads(line) for line in (tmp_path / "starts").read_text().splitlines()]
    assert arguments[arguments.index("--max-lora-rank") + 1] in ("2", "8")
    for name in ("tomi", "hitom"):
        turns = [r.episode.traces[0].turns[0] for r in records(samples_folder(out, name))]
        assert len(turns) == 4
        assert {turn.completion.policy for turn in turns} == {adapter_hash(experts / name)}
    assert sum("serves" in remark for remark in remarks) == 1


KILLS = 4
"""Half of them in each stage; the whole distillation is killed six times more."""
GATHERED = ("tomi", "secret_keeper")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warmed base, and a run on each task, trained for a moment."""
    root = tmp_path_factory.mktemp("experts")
    base = warm_model(root / "warm") / "model"
    for task in GATHERED:
        words = ("--task", task, "--data", f"{task}=synth:20", "--steps", 1, "--batch", 4)
        out = root / "experts" / f"run of {task}"
        assert soul("train", "sft", "--model", base, *words, "--lora-r", 4, "--out", out) == 0
    return root / "experts"


@pytest.fixture(scope="module")
def partner() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer=lambda body: visitor_line(body["messages"])) as server:
        yield server


@pytest.fixture(scope="module")
def gather_settings(experts: Path, partner: ScriptedServer) -> dict[str, Any]:
    return {
        "experts": str(experts), "data": {"tomi": "synth:8", "secret_keeper": "synth:4"},
        "samples": 4, "keep_top": 2, "partner": f"endpoint:visitor@{partner.base_url}",
        "batch_size": 4, "device": "cpu", "threads": 1, "max_tokens": 12, "min_reward": 0.0,
    }  # fmt: skip


@pytest.fixture(scope="module")
def untouched(gather_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("untouched") / "out"
    config = DistillConfig.model_validate(gather_settings)
    several = find_experts(config)
    sample(config, several, out)
    select_samples(config, several, out)
    return out


def kill_while_sampling(
    context: Any, rng: random.Random, gather_settings: dict[str, Any], out: Path
) -> int:  # fmt: skip
    """Let the samples be played, with kills after an episode or in the middle of a dialogue; how
    many."""
    episodes = [samples_folder(out, task) / "episodes.jsonl" for task in GATHERED]
    talks = [samples_folder(out, GATHERED[1]) / "ledger.sqlite-wal"]
    for kills in range(KILLS):
        growing, events = (talks, rng.randrange(1, 20)) if kills % 3 == 1 else (episodes, 1)
        if not killed_after(
            context, gather_settings, out, "sample", growing=growing, events=events,
            delay=0.02 * rng.random(),
        ):  # fmt: skip
            return kills
    assert not killed_after(context, gather_settings, out, "sample", delay=600)
    return KILLS


def kill_while_selecting(
    context: Any,
    rng: random.Random,
    gather_settings: dict[str, Any],
    out: Path,
    kills: int,
) -> None:
    """Let the samples be selected from after so many kills, at any moment."""
    while kills or not (out / "selection.json").is_file():
        for name in ("selected.jsonl", "selection.json") if kills else ():
            (out / name).unlink(missing_ok=True)
        delay = 0.02 + 0.3 * rng.random() if kills else 600.0
        kills -= killed_after(context, gather_settings, out, "sample", "select", delay=delay)


def test_kills_select_the_same_samples(
    gather_settings: dict[str, Any],
    untouched: Path,
    partner: ScriptedServer,
    tmp_path: Path,
) -> None:
    """In whatever stage and at whatever moment; no prompt is recorded or paid for twice."""
    rng, context = random.Random(7), fork_context()
    kills, folders = 0, list[Path]()
    while kills < KILLS // 2:
        folders.append(tmp_path / f"out{len(folders)}")
        kills += kill_while_sampling(context, rng, gather_settings, folders[-1])
    questions = len(partner.requests)
    for out in folders:
        for task in GATHERED:
            lines = read_jsonl(samples_folder(out, task) / "episodes.jsonl")
            keys = [line["key"] for line in lines]
            assert len(keys) == len(set(keys)) == read_selection(untouched).tasks[task].sampled
        calls = paid(samples_folder(out, GATHERED[1]))
        kill_while_selecting(
            context, rng, gather_settings, out, KILLS // 2 if out == folders[0] else 0
        )
        assert paid(samples_folder(out, GATHERED[1])) == calls
        assert (out / "selected.jsonl").read_bytes() == (untouched / "selected.jsonl").read_bytes()
        assert read_selection(out) == read_selection(untouched)
    assert len(partner.requests) == questions


def test_rows_hold_exactly_what_was_emitted(
    gather_settings: dict[str, Any], untouched: Path
) -> None:
    """Encoded for training, a row is the sequence that was sampled, id by id."""
    expert = find_experts(DistillConfig.model_validate(gather_settings))[0]
    model = LocalModel.load(expert.model, device="cpu")
    traces = {
        (r.task, r.example_id, r.rollout): r.episode.traces[0]
        for task in GATHERED for r in records(samples_folder(untouched, task))
    }  # fmt: skip
    rows = read_jsonl(untouched / "selected.jsonl")
    assert {row["task"] for row in rows} == set(GATHERED)
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
    gather_settings: dict[str, Any], untouched: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "experts"
    shutil.copytree(gather_settings["experts"], folder)
    shutil.copytree(untouched / "samples", tmp_path / "out" / "samples")
    config = DistillConfig.model_validate({**gather_settings, "experts": str(folder)})
    with pytest.raises(RunError, match="adapter: "):  # another folder is another expert
        sample(config, find_experts(config), tmp_path / "out")
