"""A whole distillation that is killed again and again ends where an untouched one does."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from soulkit.distill.config import STAGES, DistillConfig
from soulkit.distill.report import read_distillation
from soulkit.distill.run import Watcher, distill
from soulkit.distill.sample import samples_folder
from soulkit.runs.folder import read_jsonl
from soulkit.tasks.choice import ChoiceTask
from soulkit.tasks.loading import to_examples
from soulkit.tasks.made import made_rows
from soulkit.tasks.registry import load_registry
from soulkit.train.state.loop import Begin, Show, nobody_hears
from tests.support.distilling import small_base
from tests.support.evaluation import last_message
from tests.support.resuming import fork_context
from tests.support.servers.openai_server import ScriptedServer

pytestmark = [pytest.mark.slow, pytest.mark.torch]
KILLS = 20
TASKS, ROWS = ("hitom", "tomi"), "synth:6"


@contextmanager
def unseen(steps: int) -> Iterator[tuple[Show, Begin]]:
    yield (lambda line: None), nobody_hears


def once(settings: dict[str, Any], out: str) -> None:
    """The whole command, in a process of its own."""
    import torch

    torch.set_num_threads(1)
    distill(DistillConfig.model_validate(settings), Path(out), STAGES,
            Watcher(say=lambda line: None, training=unseen))  # fmt: skip


def killed(context: Any, settings: dict[str, Any], out: Path, seconds: float) -> bool:
    """Whether it had not ended after so many seconds, and was killed."""
    process = context.Process(target=once, args=(settings, str(out)))
    process.start()
    process.join(seconds)
    ended = process.exitcode is not None
    process.kill()
    process.join(600)
    assert not ended or process.exitcode == 0
    return not ended


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


def test_twenty_kills_end_in_the_same_table(settings: dict[str, Any], tmp_path: Path) -> None:
    rng, context = random.Random(11), fork_context()
    untouched, out = tmp_path / "untouched", tmp_path / "out"
    assert not killed(context, settings, untouched, 600.0)
    kills = 0
    while kills < KILLS and killed(context, settings, out, 0.2 + 1.3 * rng.random()):
        kills += 1
    assert kills == KILLS or kills > 3, "there was something to kill"
    while kills < KILLS:  # finished: what can be made again from what is left is
        for name in ("summary.json", "generalist/summary.json"):
            (out / name).unlink(missing_ok=True)
        kills += killed(context, settings, out, 0.2 + 0.8 * rng.random())
    assert not killed(context, settings, out, 600.0)
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
