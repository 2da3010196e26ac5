"""A whole distillation that is killed again and again ends where an untouched one does."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from soulkit.distill.config import STAGES, DistillConfig, Stage
from soulkit.distill.report import read_distillation
from soulkit.distill.run import Watcher, distill
from soulkit.distill.sample import samples_folder
from soulkit.runs.folder import read_jsonl
from soulkit.tasks.choice import ChoiceTask
from soulkit.tasks.loading import to_examples
from soulkit.tasks.made import made_rows
from soulkit.tasks.registry import load_registry
from soulkit.train.state.loop import Begin, Show, nobody_hears
from tests.support.distilling import killed_after, small_base
from tests.support.evaluation import last_message
from tests.support.resuming import fork_context
from tests.support.servers.openai_server import ScriptedServer

pytestmark = [pytest.mark.slow, pytest.mark.torch]
TASKS, ROWS = ("hitom", "tomi"), "synth:6"
PLACES = (
    "samples/hitom/episodes.jsonl", "samples/tomi/ledger.sqlite-wal", "samples/tomi/episodes.jsonl",
    "selected.jsonl", "generalist/config.yaml", "generalist/metrics.jsonl",
    "generalist/model/adapter_model.safetensors", "measured/base/hitom/episodes.jsonl",
    "measured/base/tomi/provenance.json", "measured/expert/tomi/episodes.jsonl",
    "measured/generalist/hitom/config.yaml", "measured/generalist/tomi/episodes.jsonl",
)  # fmt: skip
"""What each of twelve processes gets to write before it is killed: all stages have their share.
tests/distill/test_gather_killed.py adds eight kills in the middle of samples and selections."""


@contextmanager
def unseen(steps: int) -> Iterator[tuple[Show, Begin]]:
    yield (lambda line: None), nobody_hears


def once(settings: dict[str, Any], out: str, stages: Sequence[Stage]) -> None:
    """The command, in a process of its own."""
    import torch

    torch.set_num_threads(1)
    distill(DistillConfig.model_validate(settings), Path(out), stages,
            Watcher(say=lambda line: None, training=unseen))  # fmt: skip


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
