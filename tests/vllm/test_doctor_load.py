"""`soul doctor --load` asks an actor with its adapter behind a real vLLM server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.evaluation import soul

pytestmark = pytest.mark.vllm


def test_an_actor_behind_vllm_is_asked_where_load_says_so(
    tmp_path: Path, tiny_model: Path, tiny_adapter: Path, attached: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    settings = {"kind": "local", "model": str(tiny_model), "adapter": str(tiny_adapter),
                "engine": attached, "tasks": ["tomi"], "data": {"*": "synth:2"},
                "max_tokens": 8}  # fmt: skip
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(settings))
    for options, asked_times in (((), 0), (("--load",), 1)):
        assert soul("doctor", file, "--json", *options) == 0
        (actor,) = json.loads(capsys.readouterr().out)["players"]
        assert actor["calls"] == asked_times, actor
    assert 0 < actor["completion_tokens"] <= 8
