"""From lessons to one generalist: warm-up, two experts by Ditto, distillation by the command line,
as docs/distillation.md prints it.

The world is that of the benchmark in its small size: keeping secrets in a dialogue with a partner
over HTTP, and what people say by a rule that no prompt holds.

A whole distillation that is killed again and again ends where an untouched one does.

Experts of one base behind one vLLM server, each with its adapter (a toy at the far end).
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from soulkit.distill.config import STAGES, DistillConfig, Stage
from soulkit.distill.experts import find_experts
from soulkit.distill.report import read_distillation
from soulkit.distill.run import distill
from soulkit.distill.sample import sample, sample_config, samples_folder, shared_servers
from soulkit.models.local.loading import adapter_hash
from soulkit.runs.jsonl import read_jsonl
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.kit.made_rows import made_rows
from soulkit.tasks.kit.registry import load_registry
from tests.support.distilling import distillation, killed_after, save_expert, small_base
from tests.support.evaluation import ROOT, examples, last_message, records, soul, visitor
from tests.support.reporting import Heard
from tests.support.resuming import fork_context
from tests.support.servers.openai_server import ScriptedServer
from tests.support.servers.tiny_vllm import interpreter
from tests.test_printed_commands import blocks_of, lines_of

pytestmark = [pytest.mark.slow, pytest.mark.torch]
PEOPLE_TASKS = ("cast_of_people", "secret_keeper")


VISITOR = "http://127.0.0.1:8799/v1"
"""Where the page has it."""


def walk() -> dict[str, str]:
    """How a command of the page's walk begins → its line."""
    starts = (".venv/bin/python", "soul serve", "soul distill")
    page = (ROOT / "docs" / "distillation.md").read_text(encoding="utf-8")
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
    "samples/hitom/episodes.jsonl", "samples/tomi/ledger.sqlite-wal", "samples/tomi/episodes.jsonl",
    "selected.jsonl", "generalist/config.yaml", "generalist/metrics.jsonl",
    "generalist/model/adapter_model.safetensors", "measured/base/hitom/episodes.jsonl",
    "measured/base/tomi/conditions.json", "measured/expert/tomi/episodes.jsonl",
    "measured/generalist/hitom/config.yaml", "measured/generalist/tomi/episodes.jsonl",
)  # fmt: skip
"""What each of twelve processes gets to write before it is killed: all stages have their share.
tests/distill/test_gather_killed.py adds eight kills in the middle of samples and selections."""


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
