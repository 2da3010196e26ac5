"""What a server of an 8B-like base is started with: context, requests and inputs."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ContextOverflow
from soulkit.eval.run.actor import longest_episode
from soulkit.models.codec import Codec
from soulkit.models.players.config import RolesConfig
from soulkit.models.vllm.command import server_command
from soulkit.models.vllm.manager import (
    VllmServers,
    actor_need,
    player_need,
    terms_of,
    unstarted,
)
from soulkit.models.vllm.server import diagnosis
from soulkit.models.vllm.settings import VllmInstall
from soulkit.play.plan import Work
from soulkit.train.config import TrainConfig
from soulkit.train.rollouts.engine_choice import longest_rollout
from soulkit.train.setup.data import load_training_data
from soulkit.types import Call, Sampling, Segment
from tests.support.training import config, random_model

ON_GPU = VllmInstall("vllm", "0.32.0", on_gpu=True)
POSITIONS = 262_144


def folder_of(path: Path, *, vision: bool = True, positions: int = POSITIONS) -> Path:
    """A tokenizer with the config.json of Qwen3-VL-8B, or of its text part."""
    random_model(path)
    text = {
        "model_type": "qwen3",
        "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 8, "vocab_size": 151_936, "max_position_embeddings": positions,
    }  # fmt: skip
    whole = {"model_type": "qwen3_vl", "text_config": text, "vision_config": {"depth": 27}}
    (path / "config.json").write_text(json.dumps(whole if vision else text))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("models") / "vl")


def flags(settings: RolesConfig, model: Path, episode: int | None = None) -> dict[str, str]:
    """Flag → value of the command that serves `model` as the actor of a command."""
    need = actor_need(settings, str(model))
    servers = VllmServers(Path("unused"), terms_of(settings))
    servers.expect([need])
    if episode is not None:
        servers.expect_episodes(episode)
    words = server_command(servers._spec(need.key, 1), ON_GPU, 1)
    return dict(itertools.pairwise(words))


def trained(model: Path, **settings: Any) -> dict[str, str]:
    rows = {"tasks": {"tomi": 1.0}, "data": {"*": "synth:8"}, "model": str(model)}
    read = config(**{**rows, **settings})
    return flags(read, model, longest_rollout(load_training_data(read)))


def test_training_asks_for_what_prompts_and_replies_need(base: Path) -> None:
    usual = trained(base, method="grpo", max_tokens=8192)
    assert usual["--max-model-len"] == "16384"  # max_prompt and the reply
    assert json.loads(usual["--limit-mm-per-prompt"]) == {"image": 0, "video": 0}
    assert usual["--max-num-seqs"] == "512"
    short = trained(base, method="grpo", max_tokens=512, max_prompt=2048)
    assert short["--max-model-len"] == "4096"
    refined = trained(base, method="ditto", max_tokens=512, max_prompt=2048, show_draft=True)
    assert refined["--max-model-len"] == "8192"  # draft and feedback
    assert trained(base, max_context=6000)["--max-model-len"] == "6000"


def test_dialogues_get_room_for_their_lines_but_never_the_whole_context(base: Path) -> None:
    dialogue = {"tasks": {"secret_keeper": 1.0}, "partner": "local:unused", "judge": "local:unused"}
    alone = int(trained(base)["--max-model-len"])
    talked = int(trained(base, **dialogue)["--max-model-len"])
    assert alone < talked < POSITIONS // 4


def test_a_text_model_has_no_limit_of_images_and_no_more_context_than_its_own(
    tmp_path: Path,
) -> None:
    short = folder_of(tmp_path / "text", vision=False, positions=2048)
    asked = trained(short, max_context=4096)
    assert asked["--max-model-len"] == "2048" and "--limit-mm-per-prompt" not in asked


@pytest.mark.parametrize(
    ("settings", "requests"),
    [({}, 512), ({"concurrency": 100}, 100), ({"concurrency": 4}, 64), ({"concurrency": 9999}, 512),
     ({"batch_size": 8}, 8), ({"batch_size": 64}, 64)],
)  # fmt: skip
def test_requests_follow_the_rollouts_or_the_users_number(
    settings: dict[str, int], requests: int, base: Path
) -> None:
    assert flags(config(**settings), base)["--max-num-seqs"] == str(requests)


def test_a_judge_reads_an_episode_and_its_instructions(base: Path, tmp_path: Path) -> None:
    judged = RolesConfig.load(env={}, flags={"judge": [f"vllm:{base}"]})
    servers = VllmServers(tmp_path, terms_of(judged))
    need = player_need(judged, judged.judge[0])
    servers.expect([need])
    assert servers._spec(need.key, 1).max_context == 32_768
    servers.expect_episodes(3000)
    assert servers._spec(need.key, 1).max_context == 20_480
    itself = judged.model_copy(update={"judge": config(judge="actor").judge})
    assert actor_need(itself, str(base)).beyond == need.beyond


def test_an_episode_is_counted_with_a_tokenizer_and_estimated_without(base: Path) -> None:
    material = load_training_data(config(data={"tomi": "synth:8"}))
    (task,) = material.tasks.values()
    work = [Work(task, tuple(row for _, row in material.pool))]
    settings = TrainConfig.model_validate({"method": "grpo", "tasks": {"tomi": 1.0}})
    counted = longest_episode(work, settings, Codec.load(base))
    estimated = longest_episode(work, settings)
    assert 256 < counted < estimated < 2048  # replies of tomi have at most 256 tokens


def test_a_prompt_that_does_not_fit_names_the_option(base: Path) -> None:
    async def ask(codec: Codec) -> None:
        model = unstarted(str(base), codec)
        call = Call(role="actor", example_id="e")
        await model._question(
            [Segment("user", "Where is it? " * 90)], Sampling(max_tokens=64), call
        )

    with pytest.raises(ContextOverflow, match="holds 128; raise --max-context"):
        asyncio.run(ask(Codec.load(base, max_context=128)))
    asyncio.run(ask(Codec.load(base)))


@pytest.mark.parametrize(
    ("line", "advice"),
    [("ValueError: To serve at least one request with the model's max seq len (16384), (2.25 GiB "
      "KV cache is needed, which is larger than the available KV cache memory (1.1 GiB).",
      "Serve shorter contexts (--max-context N)"),
     ("ValueError: No available memory for the cache blocks.", "(--max-context N), or raise"),
     ("ValueError: Free memory on device cuda:0 (20/80 GiB) on startup is less than desired GPU "
      "memory utilization (0.9, 72 GiB).", "lower vLLM's gpu-memory-utilization")],
)  # fmt: skip
def test_a_log_about_memory_is_answered_with_what_helps(
    line: str, advice: str, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    log.write_text(f"{line}\n")
    assert advice in diagnosis(log).way_out
