"""Servers that do not come up: what a real vLLM writes is read, and nothing of it is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from soulkit.models.vllm.command import ServerSpec
from soulkit.models.vllm.server import ServerFailed, VllmServer
from soulkit.models.vllm.settings import vllm_version
from tests.support.servers.groups import children

pytestmark = pytest.mark.vllm


def failure(spec: ServerSpec, folder: Path) -> tuple[str, str, str]:
    before = set(children(os.getpid()))
    with pytest.raises(ServerFailed) as failed:
        VllmServer.start(spec, folder)
    assert set(children(os.getpid())) <= before
    return failed.value.lines()


def test_a_flag_that_vllm_does_not_know(vllm_python: str, tiny_model: Path, tmp_path: Path) -> None:
    spec = ServerSpec(model=str(tiny_model), python=vllm_python, args={"no-such-flag": "1"})
    what, why, way_out = failure(spec, tmp_path)
    assert what.endswith("did not start: it ended with exit code 2.")
    assert why.endswith("error: unrecognized arguments: --no-such-flag=1")
    assert "--vllm-arg" in way_out


def test_memory_that_is_not_there(
    vllm_python: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = vllm_version(vllm_python)
    if install is None or install.on_gpu:
        pytest.skip("the setting is that of a server on a CPU")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "900000")
    spec = ServerSpec(model=str(tiny_model), python=vllm_python)
    what, why, way_out = failure(spec, tmp_path)
    assert what.endswith("did not start: it ended with exit code 1.")
    assert "less than requested memory" in why
    assert "Engine core initialization failed" not in why
    assert "VLLM_CPU_KVCACHE_SPACE=GIB" in way_out
