"""What samples the rollouts by default, and how trainer and server share one card.

`torch.cuda` is a stand-in here: one H100 with 80 GB, on which the trained model is already loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from soulkit.errors import ConfigError
from soulkit.models.local.footprint import Footprint, footprint
from soulkit.models.vllm import settings as vllm_settings
from soulkit.runs.conditions import Conditions
from soulkit.runs.folder import Run
from soulkit.train.config import TrainConfig
from soulkit.train.memory import (
    SERVER_WORKSPACE,
    Card,
    ServerMemory,
    gpu_split,
    pass_beside,
    server_memory,
)
from soulkit.train.model.policy import Policy
from soulkit.train.rollouts.engine_choice import (
    EnginePlan,
    choice_words,
    engine_of_settings,
    kept_free,
    memory_beside_server,
    place,
    placed_terms,
    refuse_engine,
    settled_engine,
    with_share,
)
from soulkit.train.setup.data import load_training_data
from tests.support.evaluation import soul
from tests.support.training import config, policy_of, random_model

GB = 10**9
H100 = 80 * GB + 2 * GB  # as the driver counts them
QWEN = "Qwen/Qwen3-VL-8B-Instruct"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
    """A stand-in for one GPU and for a Python with vLLM 0.32; free memory can be changed."""
    held = 18 * GB
    memory = {"total": H100, "free": H100 - held - GB // 2, "held": held, "cards": 1}
    for name, value in {
        "is_available": lambda: True, "device_count": lambda: memory["cards"],
        "mem_get_info": lambda *_: (memory["free"], memory["total"]),
        "memory_reserved": lambda *_: memory["held"],
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(vllm_settings, "sees_cuda", lambda _: True)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'["vllm", "0.32.0"]\'\n')
    python.chmod(0o755)
    monkeypatch.setenv("SOULKIT_VLLM_PYTHON", str(python))
    return memory


@pytest.fixture(scope="module")
def qwen() -> Footprint:
    """The shape of the paper's base, without its files."""
    shape = footprint(QWEN)
    assert shape is not None
    return shape


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """Loaded before the stand-in, which libraries would take for a GPU."""
    return policy_of(random_model(tmp_path_factory.mktemp("models") / "m"), device="cpu")


def of(**settings: Any) -> TrainConfig:
    return config(**{"method": "grpo", "model": QWEN, "data": {"tomi": "synth:8"}, **settings})


# --- auto -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "kind", "why"),
    [({}, "vllm", "installed, and there is a GPU"), ({"engine": "local"}, "local", ""),
     ({"method": "sft"}, "local", ""), ({"device": "cpu"}, "local", ""),
     ({"full": True}, "local", "--full does not work with --engine vllm"),
     ({"deterministic": True}, "local", "--deterministic does not work"),
     ({"quantize": "nf4"}, "local", "--quantize nf4 does not work"),
     ({"engine": "vllm@http://127.0.0.1:1"}, "vllm", "")],
)  # fmt: skip
def test_auto_is_vllm_where_it_can_serve(
    settings: dict[str, Any], kind: str, why: str, gpu: dict[str, int]
) -> None:
    choice = engine_of_settings(of(**settings))
    assert choice.kind == kind and choice.why.startswith(why)
    assert bool(choice_words(choice)) == bool(why)


def test_without_vllm_for_the_gpu_one_line_says_so(
    gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_settings, "sees_cuda", lambda _: False)
    choice = engine_of_settings(of())
    assert choice.kind == "local" and "no supported vLLM" in choice_words(choice)


@pytest.mark.parametrize("kind", ["vllm", "local"])
def test_a_run_keeps_its_engine(kind: str, gpu: dict[str, int], tmp_path: Path) -> None:
    run = Run.open(tmp_path / "run", "train grpo", of().identity())
    assert engine_of_settings(of(), run).kind == "vllm"  # nothing has been sampled
    run.episodes.write_text("{}\n")
    assert engine_of_settings(of(), run).kind == "local"  # by a version without vLLM
    Conditions(players={}, tasks={}, engine={"kind": kind}).write(run.path)
    choice = engine_of_settings(of(), run)
    assert (choice.kind, choice.why) == (kind, "as at the start of this run")


def test_an_adapter_that_vllm_cannot_load_stays_here(
    policy: Policy, gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    early = engine_of_settings(of())
    assert settled_engine(of(), early, policy, QWEN) == early
    monkeypatch.setattr(policy.model.peft_config["policy"], "use_dora", True)
    choice = settled_engine(of(), early, policy, QWEN)
    assert choice.kind == "local" and "DoRA" in choice.why
    with pytest.raises(ConfigError, match="DoRA"):
        settled_engine(of(engine="vllm"), engine_of_settings(of(engine="vllm")), policy, QWEN)


# --- one card -------------------------------------------------------------------------------------


def test_8b_trainer_and_server_share_80_gb(gpu: dict[str, int], qwen: Footprint) -> None:
    settings = of()
    plan = EnginePlan.of(settings, None, QWEN, load_training_data(settings))
    (server,) = plan.servers
    assert server.context == 8192 + 4096  # max_prompt, and tomi's 256 tokens rounded up
    assert 17 * GB < server.weights < 19 * GB and server.token == 147_456
    size = pass_beside(settings, qwen, "cuda", H100 - GB // 2, kept_free(settings, [server]))
    config_, choice, words = with_share(
        settings, plan.early, plan.servers, memory_beside_server(settings, QWEN, size)
    )
    share = float(config_.vllm_arg["gpu-memory-utilization"])
    assert choice.kind == "vllm" and f"{share:.0%} of the GPU" in words
    assert size.checkpointing and size.tokens == 16_384
    assert share == pytest.approx(0.578, abs=0.01)  # about 47 GB
    cached = (share * H100 - server.weights - SERVER_WORKSPACE) / server.token
    assert cached > 150_000  # tokens in the cache, 12 whole contexts
    assert share * H100 + size.needs < H100


def test_a_small_server_takes_no_more_than_it_can_use() -> None:
    card = Card(total=H100, free=H100 - 2 * GB, held=GB)
    tiny = ServerMemory(weights=GB, token=1000, context=4096, requests=64)
    split = gpu_split(card, 2 * GB, [tiny])
    assert split == 0.066  # weights, workspace, and 65,536 tokens
    assert gpu_split(card, 2 * GB, [tiny, tiny]) == split


def test_a_full_card_has_no_room_and_its_plan_says_so(
    gpu: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu["free"] = 0
    words = ("plan", "train", "grpo", "--model", QWEN, "--task", "tomi", "--data", "synth:8")
    assert soul(*words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "does not fit the 0 B that are free" in shown


def test_without_room_auto_stays_here_and_vllm_is_refused_with_what_helps(
    gpu: dict[str, int], qwen: Footprint
) -> None:
    gpu |= {"total": 48 * GB, "free": 29 * GB}
    settings = of(max_context=131_072)
    plan = EnginePlan.of(settings, None, QWEN, load_training_data(settings))
    _, choice, words = with_share(settings, plan.early, plan.servers, 20 * GB)
    assert choice.kind == "local"
    assert words == (
        "transformers samples the rollouts: A vLLM server does not fit on the GPU beside the "
        "training"
    )
    judged = of(max_context=131_072, judge="vllm:nobody/knows")
    shared, choice, _ = with_share(judged, plan.early, plan.servers, 20 * GB)
    assert choice.kind == "local" and shared.vllm_arg == {"gpu-memory-utilization": "0.400"}
    asked = of(max_context=131_072, engine="vllm")
    early = engine_of_settings(asked)
    with pytest.raises(ConfigError) as refusal:
        with_share(asked, early, plan.servers, 20 * GB)
    assert len(refusal.value.lines()) == 3 and "131,072 tokens" in refusal.value.why
    assert "--max-context, --vllm-sleep" in refusal.value.way_out
    sleeping = of(max_context=131_072, vllm_sleep=True)  # vLLM was meant
    with pytest.raises(ConfigError, match="does not fit"):
        with_share(sleeping, plan.early, plan.servers, 20 * GB)


def test_servers_on_other_cards_and_shares_of_the_user_are_left_alone(gpu: dict[str, int]) -> None:
    material, flag = load_training_data(of()), "gpu-memory-utilization"
    own = of(vllm_arg={flag: "0.7"})
    plan = EnginePlan.of(own, None, QWEN, material)
    assert not plan.servers and with_share(own, plan.early, (), 0)[0] == own
    unknown = of(model="nobody/knows")
    early = engine_of_settings(unknown)
    shared, _, _ = with_share(unknown, early, (), 0)
    assert shared.vllm_arg == {flag: "0.400"}
    gpu["cards"] = 2
    plan = EnginePlan.of(of(), None, QWEN, material)
    assert plan.early.kind == "vllm" and not plan.servers
    assert with_share(of(), plan.early, (), 0)[0].vllm_arg == {}


def test_a_server_that_sleeps_leaves_its_memory_to_the_update(
    gpu: dict[str, int], qwen: Footprint
) -> None:
    awake, asleep = of(activation_checkpointing="off"), of(vllm_sleep=True)
    server = server_memory(qwen, "auto", context=16_384, requests=512, rank=32)
    assert kept_free(asleep, [server]) < server.least < kept_free(awake, [server])
    size = pass_beside(asleep, qwen, "cuda", H100 - GB // 2, kept_free(asleep, [server]))
    beside = [memory_beside_server(one, QWEN, size) for one in (asleep, awake)]
    assert beside[0] < beside[1] - 4 * GB  # the inputs of 36 layers are not kept
    assert beside[0] > 2 * qwen.parameters


@pytest.mark.parametrize(
    ("job", "ranks", "servers"),
    [(("cpu", 0, 1, 0), ["cpu"], ["auto"]), (("cpu", 0, 2, 2), ["cpu"] * 2, ["auto"] * 2),
     (("cuda", 1, 1, 0), [0], [0]), (("cuda", 4, 1, 0), [0], [1]), (("cuda:2", 4, 1, 0), [2], [0]),
     (("cuda:2", 4, 1, 3), [2], [0, 1, 3]), (("cuda", 8, 6, 2), range(6), [6, 7]),
     (("cuda:0", 8, 4, 0), range(4), [4]),  # one that no rank uses
     (("cuda", 4, 4, 0), range(4), [0]),  # the first rank's, never another's
     (("cuda", 1, 4, 0), range(4), [0])],  # each rank sees only its own
)  # fmt: skip
def test_servers_use_gpus_that_no_rank_uses(
    job: tuple[str, int, int, int], ranks: Sequence[str | int], servers: Sequence[str | int]
) -> None:
    devices = place(*job)
    expected = [tuple(f"cuda:{one}" if isinstance(one, int) else one for one in part)
             for part in (ranks, servers)]  # fmt: skip
    assert [devices.ranks, devices.servers] == expected
    assert devices.shared == (servers == [0] and 0 in ranks)


@pytest.mark.parametrize("job", [("cuda", 8, 7, 2), ("cuda", 1, 1, 1), ("cuda", 1, 4, 1)])
def test_servers_without_a_gpu_are_refused(job: tuple[str, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="There is no GPU for 1 of"):
        place(*job)


def test_gpus_for_samplers_mean_vllm_and_are_not_shared(gpu: dict[str, int]) -> None:
    gpu["cards"] = 4
    settings = of(gpus=4, sampler_gpus=2)
    plan = EnginePlan.of(settings, None, QWEN, load_training_data(settings))
    assert (plan.early.kind, plan.early.why) == ("vllm", "--sampler-gpus") and not plan.servers
    assert settings.training_gpus == 2 and placed_terms(settings).gpus == ("cuda:2", "cuda:3")
    assert with_share(settings, plan.early, (), 0)[0].vllm_arg == {}
    assert engine_of_settings(of(gpus=3)).kind == "vllm"  # one GPU is left
    every = engine_of_settings(of(gpus=4))
    assert every.kind == "local" and "--sampler-gpus" in every.why
    assert engine_of_settings(of(gpus=4, engine="vllm")).kind == "vllm"


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"engine": "local"}, "--sampler-gpus 1 has no effect"), ({"gpus": 1}, "leaves no GPU"),
     ({"engine": "vllm@http://127.0.0.1:1"}, "has no effect"), ({"full": True}, "--full does not"),
     ({"vllm_sleep": True}, "--vllm-sleep has no effect")],
)  # fmt: skip
def test_gpus_for_samplers_that_nobody_uses_are_refused(
    settings: dict[str, Any], words: str, gpu: dict[str, int]
) -> None:
    gpu["cards"] = 2
    choice = of(**{"gpus": 2, "sampler_gpus": 1, **settings})
    with pytest.raises(ConfigError, match=words):
        refuse_engine(choice)


def test_a_run_that_sampled_in_its_processes_takes_no_samplers(
    gpu: dict[str, int], tmp_path: Path
) -> None:
    run = Run.open(tmp_path / "run", "train grpo", of().identity())
    run.episodes.write_text("{}\n")
    with pytest.raises(ConfigError, match="has no effect"):
        engine_of_settings(of(gpus=2, sampler_gpus=1), run)


@pytest.mark.parametrize(
    ("flag", "way_out"),
    [("max-model-len", "Use --max-context."), ("max-num-seqs", "Use --batch-size")],
)
def test_flags_that_cannot_be_set_are_refused_before_there_is_a_folder(
    flag: str, way_out: str, gpu: dict[str, int]
) -> None:
    """Otherwise the same --out would be refused as soon as the flag is corrected."""
    settings = of(vllm_arg={flag: "100"}, engine="vllm")
    material = load_training_data(settings)
    with pytest.raises(ConfigError, match=f"{flag} cannot be set") as caught:
        EnginePlan.of(settings, None, QWEN, material)
    assert caught.value.way_out.startswith(way_out)


def test_sleep_without_a_server_on_the_trainers_card_is_refused(gpu: dict[str, int]) -> None:
    refuse_engine(of(vllm_sleep=True))
    refuse_engine(of(vllm_sleep=True, engine="vllm"))
    gpu["cards"] = 2
    for settings in ({}, {"engine": "local"}, {"engine": "vllm@http://127.0.0.1:1"}):
        with pytest.raises(ConfigError, match="--vllm-sleep has no effect"):
            refuse_engine(of(vllm_sleep=True, **settings))
