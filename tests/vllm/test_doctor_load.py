"""`soul doctor --load` asks an actor with its adapter behind a real vLLM server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.evaluation import soul

pytestmark = pytest.mark.vllm


def test_an_actor_on_servers_that_run_is_asked_with_its_adapter(
    tmp_path: Path, tiny_model: Path, tiny_adapter: Path, attached: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    settings = {"kind": "local", "model": str(tiny_model), "adapter": str(tiny_adapter),
                "engine": attached, "tasks": ["tomi"], "data": {"*": "synth:2"},
                "max_tokens": 8}  # fmt: skip
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(settings))
    assert soul("doctor", file, "--json") == 0  # nothing is loaded here to ask it
    (actor,) = json.loads(capsys.readouterr().out)["players"]
    assert actor["calls"] == 1, actor
    assert 0 < actor["completion_tokens"] <= 8
