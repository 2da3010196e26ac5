"""Experts of one base behind one vLLM server, each with its adapter (a toy at the far end)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soulkit.distill.experts import find_experts
from soulkit.distill.sample import sample, sample_config, samples_folder
from soulkit.distill.serving import shared_servers
from soulkit.models.local.loading import adapter_hash
from soulkit.tasks.registry import load_registry
from tests.support.distilling import distillation, save_expert, small_base
from tests.support.evaluation import examples, records
from tests.support.servers.tiny_vllm import interpreter

pytestmark = [pytest.mark.slow, pytest.mark.torch]


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
    with shared_servers(config, configs, out, remarks.append, None) as servers:
        sample(config, made, out, say=remarks.append, servers=servers)
    (arguments,) = [json.loads(line) for line in (tmp_path / "starts").read_text().splitlines()]
    assert arguments[arguments.index("--max-lora-rank") + 1] in ("2", "8")
    for name in ("tomi", "hitom"):
        turns = [r.episode.traces[0].turns[0] for r in records(samples_folder(out, name))]
        assert len(turns) == 4
        assert {turn.completion.policy for turn in turns} == {adapter_hash(experts / name)}
    assert sum("serves" in remark for remark in remarks) == 1
