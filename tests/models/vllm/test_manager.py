"""The servers of a run: one a model, started one after the other, none left in the end."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from soulkit.errors import ConfigError, ModelLoadError
from soulkit.models.local.loading import adapter_hash
from soulkit.models.local.tiny import build_tiny
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.players import check_players
from soulkit.models.vllm.manager import (
    ServerNeed,
    ServerTerms,
    VllmServers,
    actor_need,
    adapter_rank,
    player_need,
    players_needs,
    terms_of,
)
from soulkit.models.vllm.settings import SamplingEngine, interpreter, parse_engine, resolve_engine
from soulkit.types import Call, Completion, Sampling, Segment
from tests.models.vllm.test_adapters import adapter as write_adapter
from tests.support.reporting import Heard
from tests.support.servers import tiny_vllm
from tests.support.servers.toy_vllm import Toy


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    one, other = (
        build_tiny(folder / name, ["Say a word."], max_context=tokens)
        for name, tokens in (("one", 1024), ("other", 64))
    )
    return one, other


def starts(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "starts").read_text().splitlines()]


def value_of(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_servers_are_shared_kept_and_stopped(models: tuple[Path, Path], tmp_path: Path) -> None:
    one, other = (ServerNeed(model=str(path)) for path in models)
    terms = ServerTerms(python=tiny_vllm.interpreter(tmp_path), in_flight=3, max_context=128)
    remarks: list[str] = []
    with VllmServers(tmp_path / "run", terms, reporter=Heard(remarks)) as servers:
        servers.expect([ServerNeed(model=str(models[0]), lora_rank=8)])  # of a later run
        servers.prepare([one, other, one])
        first, second = (servers._running[need.key] for need in (one, other))
        assert [value_of(a, "--model") for a in starts(tmp_path)] == [str(p) for p in models]
        lengths = [value_of(a, "--max-model-len") for a in starts(tmp_path)]
        assert lengths == ["128", "64"], "no more than a model holds"
        assert value_of(starts(tmp_path)[0], "--max-lora-rank") == "8"
        assert "--enable-lora" not in starts(tmp_path)[1]
        assert len(asyncio.run(said_by(servers, one)).token_ids) == 4
        servers.prepare([ServerNeed(model=str(models[0]), lora_rank=4)])
        assert len(starts(tmp_path)) == 2, "what runs and is large enough is kept"
        assert alive(first.group) and not alive(second.group)
        assert len(asyncio.run(said_by(servers, one)).token_ids) == 4
    assert not alive(first.group)
    assert [remark.partition(",")[0] for remark in remarks] == [
        f"vllm 0.32.0 serves {path}" for path in models
    ]
    assert sorted(file.name for file in (tmp_path / "run" / "vllm").iterdir()) == [
        "one.log", "other.log",
    ]  # fmt: skip


async def said_by(servers: VllmServers, need: ServerNeed) -> Completion:
    model = servers.sampler(need)
    try:
        prompt, call = [Segment("user", "Say a word.")], Call(role="judge", example_id="e")
        return await model.complete(prompt, Sampling(max_tokens=4), call)
    finally:
        await model.close()


def test_needs_of_players_hold_the_flags_of_command_and_player(tmp_path: Path) -> None:
    config = RolesConfig.load(
        env={},
        flags={
            "vllm_arg": {"--seed": "1", "max_num_batched_tokens": "64"}, "partner": "vllm:a/b@v2",
            "judge": [{"kind": "vllm", "model": "a/b@v2", "args": {"seed": "2"}}],
        },
    )  # fmt: skip
    judge, partner = sorted(players_needs(config), key=lambda need: need.args, reverse=True)
    assert judge.args == (("max-num-batched-tokens", "64"), ("seed", "2"))
    assert partner == actor_need(config, "a/b@v2")
    assert judge.key != partner.key
    assert player_need(config, config.judge[0]).key == judge.key
    assert actor_need(config, "a/b@v2", attached=True).args == ()


def test_the_rank_of_an_adapter_is_its_largest(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"r": 8, "rank_pattern": {"q_proj": 32}}))
    assert adapter_rank(tmp_path) == 32
    file.write_text(json.dumps({"r": 8}))
    assert adapter_rank(tmp_path) == 8
    file.write_text(json.dumps({"peft_type": "OTHER"}))
    with pytest.raises(ModelLoadError, match="rank"):
        adapter_rank(tmp_path)


def test_flags_that_are_not_the_users_are_refused_before_any_start(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    config = RolesConfig.load(
        env={},
        flags={
            "vllm_python": tiny_vllm.interpreter(tmp_path), "vllm_arg": {"port": "1"},
            "judge": [f"vllm:{models[0]}"],
        },
    )  # fmt: skip
    with pytest.raises(ConfigError, match="port"):
        check_players(config)
    assert terms_of(config).python == str(tmp_path / "python")
    assert not (tmp_path / "starts").exists()


def test_what_auto_comes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOULKIT_VLLM_PYTHON", tiny_vllm.interpreter(tmp_path))
    python, auto = interpreter(None), parse_engine("auto")
    assert resolve_engine(auto, python=python) == SamplingEngine(kind="local")  # for CPUs alone
    begun = resolve_engine(auto, python=python, begun="vllm")
    assert (begun.kind, begun.version, begun.why) == ("vllm", "0.32.0", "as this run began")
    asked = resolve_engine(parse_engine("vllm"), python=python, begun="local")
    assert (asked.words(), asked.attached) == ("vllm 0.32.0", False)
    attached = resolve_engine(parse_engine("vllm@http://a:1/v1,http://b:2"), python="nothing")
    assert attached.urls == ("http://a:1", "http://b:2") and attached.record() == {"kind": "vllm"}


def test_an_interpreter_in_the_home_folder_may_be_named_by_a_tilde(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert interpreter("~/vllm/bin/python") == "/home/somebody/vllm/bin/python"
    monkeypatch.setenv("SOULKIT_VLLM_PYTHON", "~/other/bin/python")
    assert interpreter(None) == "/home/somebody/other/bin/python"


@pytest.mark.torch
def test_an_adapter_that_attached_servers_were_started_with_is_asked_for_and_left(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a")
    toy = Toy(without=frozenset({"adapters"}), shelf={"house": str(folder)})
    need, terms = ServerNeed(model=str(models[0]), lora_rank=8), ServerTerms()
    with tiny_vllm.TalkingVllm(models[0], toy) as server:
        with VllmServers(
            tmp_path, terms, attached=[server.url], attached_model=need.model
        ) as servers:
            servers.prepare([need])
            model = servers.sampler(need, adapter=folder)
            assert (model.served, model.policy_version) == ("house", adapter_hash(folder))
        assert set(server.adapters) == {"house"}
