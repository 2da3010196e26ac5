"""The road of a model: distilled, exported, loaded by plain transformers, served, evaluated.

The experts are a server that knows every answer, so a tiny base has something to learn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from soulkit.distill.config import STAGES
from soulkit.distill.run import distill
from soulkit.models.local.sampler import LocalModel
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.kit.made_rows import made_rows
from soulkit.tasks.kit.registry import load_registry
from tests.support.distilling import distillation, small_base
from tests.support.evaluation import ROOT, last_message, records, soul
from tests.support.servers.openai_server import ScriptedServer

pytestmark = [pytest.mark.slow, pytest.mark.torch]
TASKS, ROWS = ("tomi", "hitom"), "synth:6"
IDS = [[5, 9, 40, 33, 21, 64, 70, 3]]
PLAIN = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
assert "soulkit" not in sys.modules and "peft" not in sys.modules
with torch.no_grad():
    logits = model(input_ids=torch.tensor({ids})).logits[0].tolist()
chat = tokenizer.apply_chat_template([{{"role": "user", "content": "hi"}}], tokenize=False)
print(json.dumps({{"logits": logits, "chat": chat}}))
"""
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def generalist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distillation, whose generalist is an adapter."""
    folder, gold = tmp_path_factory.mktemp("road"), {}
    for name in TASKS:
        live = load_registry().task(name)
        assert isinstance(live, ChoiceTask)
        for split in ("train", "test"):
            for row in to_examples(live, made_rows(live, ROWS, 0, split)).examples:  # type: ignore[arg-type]
                gold[live.preview(row)[0].text] = live.gold_completion(row)
    base = small_base(folder / "base", words=[*gold, *gold.values()])
    with ScriptedServer(answer=lambda body: gold[last_message(body)]) as server:
        experts = dict.fromkeys(TASKS, f"endpoint:expert@{server.base_url}")
        settings = {
            "model": str(base),
            "epochs": 15,
            "lr": 5e-3,
            "batch": 4,
            "samples": 2,
            "max_tokens": 8,
        }
        rows = {"data": dict.fromkeys(TASKS, ROWS), "held_out": dict.fromkeys(TASKS, ROWS)}
        lora = {"lora": {"r": 16, "alpha": 32}, "backoff_s": 0, "held_out_limit": 2}
        distill(distillation(experts, **settings, **rows, **lora), folder / "out", STAGES)
    return folder / "out"


@pytest.fixture(scope="module")
def exported(generalist: Path) -> Path:
    out = generalist.parent / "exported"
    assert soul("export", generalist, "--merge", "--out", out) == 0
    return out


def test_plain_transformers_load_the_exported_generalist(generalist: Path, exported: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN.format(ids=IDS), str(exported)], env=ENV, cwd=exported,
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    plain = json.loads(done.stdout.splitlines()[-1])
    base, adapter = generalist.parent / "base", generalist / "generalist" / "model"
    ours = LocalModel.load(base, adapter=adapter, device="cpu")
    with torch.no_grad():
        logits = ours.model(input_ids=torch.tensor(IDS)).logits[0]
    torch.testing.assert_close(torch.tensor(plain["logits"]), logits, rtol=0, atol=1e-4)
    message = [{"role": "user", "content": "hi"}]
    assert plain["chat"] == ours.tokenizer.apply_chat_template(message, tokenize=False)


@pytest.fixture(scope="module")
def served(exported: Path) -> Iterator[tuple[str, str]]:
    """Address and name of the exported model behind `soul serve`."""
    words = ("serve", exported, "--engine", "local", "--device", "cpu", "--port", 0)
    process = subprocess.Popen(
        [sys.executable, "-m", "soulkit", *map(str, words)], env=ENV, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), exported.name
    finally:
        process.terminate()
        process.wait(60)


def test_the_served_model_is_evaluated_like_the_local_one(
    exported: Path, served: tuple[str, str], tmp_path: Path
) -> None:
    """Greedy, row by row."""
    url, name = served
    usual = ("--task", ",".join(TASKS), "--data", "synth:12", "--temperature", 0,
             "--max-tokens", 16, "--max-unscored", 1)  # fmt: skip
    api = ("eval", "api", "--base-url", url, "--model", name, *usual, "--out", tmp_path / "api")
    local = ("eval", "local", "--model", exported, "--device", "cpu", *usual)
    assert soul(*api) == 0
    assert soul(*local, "--out", tmp_path / "local") == 0
    replies = [
        {
            r.key: (r.episode.transcript[-1].text, r.episode.stop, r.score.value)
            for r in records(run)
        }
        for run in (tmp_path / "api", tmp_path / "local")
    ]
    assert replies[0] == replies[1]
    assert len(replies[0]) == 24
    assert len({reply for reply, _, _ in replies[0].values()}) > 1  # not one reply for all
