"""Several servers asked as one: places, deaths, and that no request is lost or put twice.

The servers of a run: one a model, started one after the other, none left in the end.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ConfigError, ModelLoadError, ProviderError, RunError
from soulkit.models.local.loading import adapter_hash
from soulkit.models.local.tiny import build_tiny
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.players import check_players
from soulkit.models.vllm.client import Address, ServerRefused, VllmClient
from soulkit.models.vllm.manager import (
    ServerNeed,
    ServerTerms,
    VllmServers,
    actor_need,
    adapter_rank,
    player_need,
    players_needs,
    server_devices,
    terms_of,
)
from soulkit.models.vllm.replicas import TRIES, NoServerLeft, Replicas
from soulkit.models.vllm.settings import SamplingEngine, interpreter, parse_engine, resolve_engine
from soulkit.types import Call, Completion, Sampling, Segment
from tests.models.vllm.test_adapters import adapter as write_adapter
from tests.support.reporting import Heard
from tests.support.servers import tiny_vllm
from tests.support.servers.ids_server import Fault, IdsServer
from tests.support.servers.toy_vllm import Body, Toy, ToyVllm

PATH = "/v1/completions"


def body(number: int, **more: Any) -> Body:
    ids = {"model": "base", "prompt": [1, 2, 3 + number % 50], "seed": number, "max_tokens": 4}
    return {**ids, "return_token_ids": True, **more}


def fleet(*servers: ToyVllm, in_flight: int = 8, **more: Any) -> Replicas:
    clients = [VllmClient(Address(server.url)) for server in servers]
    return Replicas(clients, in_flight=in_flight, **{"pause_s": 0.0, **more})


def tokens(reply: Body) -> list[int]:
    return list(reply["choices"][0]["token_ids"])


def ask_all(servers: Replicas, bodies: Sequence[Body]) -> list[Body]:
    async def asking() -> list[Body]:
        replies = await asyncio.gather(*(servers.ask(PATH, one) for one in bodies))
        await servers.close()
        return list(replies)

    return asyncio.run(asking())


def times_put(*servers: ToyVllm) -> Counter[str]:
    return Counter(json.dumps(one) for server in servers for one in server.bodies())


def expected(bodies: Sequence[Body]) -> list[list[int]]:
    with ToyVllm() as single:
        return [tokens(reply) for reply in ask_all(fleet(single), bodies)]


def test_the_least_loaded_server_is_asked_and_none_has_more_than_its_places() -> None:
    bodies = [body(n) for n in range(40)]
    with ToyVllm(Toy(delay_s=0.005)) as one, ToyVllm(Toy(delay_s=0.005)) as other:
        replies = ask_all(fleet(one, other, in_flight=3), bodies)
    assert [tokens(reply) for reply in replies] == expected(bodies)
    assert one.most_at_once <= 3 and other.most_at_once <= 3
    assert len(one.bodies()) >= 5 and len(other.bodies()) >= 5
    assert set(times_put(one, other).values()) == {1}


@pytest.mark.slow
def test_a_server_that_dies_half_way_costs_nothing_but_its_requests_put_again() -> None:
    bodies, lines = [body(n) for n in range(200)], list[str]()
    with ToyVllm(Toy(die_after=60)) as one, ToyVllm() as other:
        servers = fleet(one, other, reporter=Heard(lines))
        replies = ask_all(servers, bodies)
        assert servers.urls == (other.url,)
    assert [tokens(reply) for reply in replies] == expected(bodies)
    again = times_put(one, other)
    assert set(again.values()) <= {1, 2}
    (line,) = lines
    assert line.startswith(f"vLLM server {one.url} was dropped (") and "1 server left" in line
    assert "is gone" not in line and ".)" not in line
    assert 1 <= sum(times - 1 for times in again.values()) <= 8
    assert sum(len(server.bodies()) for server in (one, other)) == sum(again.values())


def test_a_lost_server_is_in_the_log_where_nobody_reports(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ToyVllm(Toy(die_after=1)) as one, ToyVllm() as other:
        ask_all(fleet(one, other), [body(n) for n in range(8)])
    (line,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert line.startswith(f"vLLM server {one.url} was dropped (")


@pytest.mark.slow
def test_a_server_that_hangs_is_dropped_and_its_requests_go_to_the_others() -> None:
    bodies, lines = [body(n) for n in range(12)], list[str]()
    with ToyVllm() as one, ToyVllm() as other:
        one.hang()
        servers = fleet(one, other, in_flight=2, reporter=Heard(lines), health_s=0.3)
        replies = ask_all(servers, bodies)
    assert [tokens(reply) for reply in replies] == expected(bodies)
    assert len(lines) == 1 and one.url in lines[0]
    assert "did not answer" in lines[0] and "2 requests to repeat" in lines[0]


def test_with_nobody_left_all_who_wait_hear_it() -> None:
    lines = list[str]()
    with ToyVllm(Toy(die_after=2)) as one, ToyVllm(Toy(die_after=2)) as other:
        servers = fleet(one, other, in_flight=2, reporter=Heard(lines))

        async def asking() -> list[Any]:
            requests = (servers.ask(PATH, body(n)) for n in range(30))
            return list(await asyncio.gather(*requests, return_exceptions=True))

        outcomes = asyncio.run(asking())
    lost = [outcome for outcome in outcomes if isinstance(outcome, NoServerLeft)]
    assert len(lost) + sum(isinstance(outcome, dict) for outcome in outcomes) == 30
    assert len(lost) >= 20 and len(lines) == 1
    what, why, way_out = lost[0].lines()
    assert "All vLLM servers of this run have failed" in what
    assert one.url in why and other.url in why and "kept" in why
    assert "same command" in way_out


def test_a_server_of_our_own_says_itself_why_it_ended() -> None:
    with ToyVllm(Toy(die_after=0)) as server:

        def check() -> None:
            if server.dead.is_set():
                raise RunError("The server ended.", "Its log: out of memory.", "Take less.")

        with pytest.raises(NoServerLeft) as caught:
            ask_all(fleet(server, checks={server.url: check}), [body(1)])
    assert "out of memory" in caught.value.why


def test_a_broken_connection_to_a_server_that_lives_drops_nobody() -> None:
    lines = list[str]()
    with ToyVllm(Toy(breaks=4)) as server:
        (reply,) = ask_all(fleet(server, reporter=Heard(lines)), [body(7)])
        assert len(server.bodies()) == 5
    assert [tokens(reply)] == expected([body(7)])
    assert lines == []


def test_connections_that_break_without_end_are_a_failure_and_no_death() -> None:
    lines = list[str]()
    with ToyVllm(Toy(breaks=1000)) as server:
        servers = fleet(server, reporter=Heard(lines))
        with pytest.raises(ProviderError, match="the connection broke"):
            ask_all(servers, [body(7)])
        server.toy.breaks = 0
        assert ask_all(servers, [body(7)])
    assert lines == []


@pytest.mark.parametrize(
    ("faults", "health", "error", "asked"),
    [
        (TRIES - 1, 200, None, TRIES),
        (TRIES, 200, ServerRefused, TRIES),
        (1, 503, NoServerLeft, 1),
    ],
)
def test_a_busy_server_is_asked_again_as_long_as_it_lives(
    faults: int, health: int, error: type[Exception] | None, asked: int
) -> None:
    script = {n: Fault(status=503, message="later") for n in range(faults)}
    with IdsServer(lambda body: [5, 6, 7], script=script) as server:
        server.health = health
        asked_for = [body(1, stop_token_ids=[], temperature=0.0)]
        servers = Replicas([VllmClient(Address(server.url))], in_flight=1, pause_s=0.0)
        if error is None:
            assert [tokens(one) for one in ask_all(servers, asked_for)] == [[5, 6, 7]]
        else:
            with pytest.raises(error):
                ask_all(servers, asked_for)
        assert len(server.requests) == asked


def test_a_refusal_is_the_callers_and_is_put_to_nobody_else() -> None:
    with ToyVllm() as one, ToyVllm() as other:
        with pytest.raises(ServerRefused) as caught:
            ask_all(fleet(one, other), [body(1, model="nobody")])
        assert caught.value.status == 404
    assert sum(times_put(one, other).values()) == 1


def test_callers_that_are_cancelled_give_their_places_back() -> None:
    with ToyVllm(Toy(delay_s=0.05)) as server:
        servers = fleet(server, in_flight=2)

        async def asking() -> Body:
            requests = [asyncio.ensure_future(servers.ask(PATH, body(n))) for n in range(8)]
            await until(lambda: len(server.bodies()) >= 2)
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            return await servers.ask(PATH, body(100))

        assert [tokens(asyncio.run(asking()))] == expected([body(100)])
    assert len(server.bodies()) < 8


@pytest.mark.slow
def test_a_fleet_serves_one_event_loop_after_the_other() -> None:
    with ToyVllm(Toy(die_after=5)) as one, ToyVllm() as other:
        servers = fleet(one, other, in_flight=1)
        first = ask_all(servers, [body(n) for n in range(15)])
        second = ask_all(servers, [body(n) for n in range(15)])
        assert servers.urls == (other.url,)
    assert [tokens(reply) for reply in first] == [tokens(reply) for reply in second]


def test_idle_waits_for_requests_under_way_and_for_those_that_wait() -> None:
    with ToyVllm(Toy(delay_s=0.02)) as server:
        servers = fleet(server, in_flight=1)

        async def asking() -> tuple[int, int]:
            requests = [asyncio.ensure_future(servers.ask(PATH, body(n))) for n in range(4)]
            await asyncio.sleep(0)
            await servers.idle("somebody else")
            before = sum(request.done() for request in requests)
            await servers.idle("base")
            return before, sum(request.done() or server.answered == 4 for request in requests)

        assert asyncio.run(asking()) == (0, 4)


def test_everywhere_is_every_server_that_lives() -> None:
    with ToyVllm() as one, ToyVllm() as other:
        servers = fleet(one, other)

        async def asking() -> list[dict[str, Body]]:
            both = await servers.everywhere(PATH, body(1))
            one.die()
            return [both, await servers.everywhere(PATH, body(2))]

        both, rest = asyncio.run(asking())
    assert set(both) == {one.url, other.url} and set(rest) == {other.url}
    assert tokens(both[one.url]) == tokens(both[other.url])


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


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
        (first,), (second,) = (servers._running[need.key] for need in (one, other))
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
    assert [remark.partition(" after ")[0] for remark in remarks] == [
        f"vllm 0.32.0 serves {path}" for path in models
    ]
    assert sorted(file.name for file in (tmp_path / "run" / "vllm").iterdir()) == [
        "one.log", "other.log",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_model_has_a_server_on_every_gpu(models: tuple[Path, Path], tmp_path: Path) -> None:
    need, remarks = ServerNeed(model=str(models[0]), lora_rank=8), list[str]()
    terms = ServerTerms(python=tiny_vllm.interpreter(tmp_path), gpus=("auto", "auto"))
    with VllmServers(tmp_path / "run", terms, reporter=Heard(remarks)) as servers:
        servers.prepare([need])
        servers.prepare([need])  # they are kept
        first, second = servers._running[need.key]
        assert servers.fleet(need).urls == (first.url, second.url) and len(starts(tmp_path)) == 2
        answers = asyncio.run(servers.fleet(need).each("/v1/models"))
        assert set(answers) == {first.url, second.url}
        assert len(asyncio.run(said_by(servers, need)).token_ids) == 4
    assert not alive(first.group) and not alive(second.group)
    assert "by 2 servers on auto, auto after" in remarks[0]


@pytest.mark.parametrize(
    ("gpus", "flags", "devices"),
    [((), {}, ["cuda"]), ((), {"tensor-parallel-size": "2"}, ["cuda"]),
     (("cuda:2", "cuda:3"), {}, ["cuda:2", "cuda:3"]),
     (("cuda:2", "cuda:3"), {"tensor-parallel-size": "2"}, ["cuda:2,3"]),
     (("cuda:1", "cuda:2", "cuda:3", "cuda:5"), {"pipeline-parallel-size": "2"},
      ["cuda:1,2", "cuda:3,5"]),
     (("cuda:1",), {"tensor-parallel-size": "2"}, ["cuda:1"]),
     (("auto", "auto"), {}, ["auto"] * 2)],
)  # fmt: skip
def test_parallel_servers_get_several_gpus_each(
    gpus: tuple[str, ...], flags: dict[str, str], devices: list[str]
) -> None:
    need = ServerNeed(model="m/m", args=tuple(flags.items()))
    assert server_devices(ServerTerms(device="cuda", gpus=gpus), need) == devices


def test_gpus_that_cannot_be_divided_are_refused() -> None:
    need = ServerNeed(model="m/m", args=(("tensor-parallel-size", "2"),))
    with pytest.raises(ConfigError, match="3 GPUs cannot be divided") as error:
        server_devices(ServerTerms(gpus=("cuda:1", "cuda:2", "cuda:3")), need)
    assert "--sampler-gpus 2" in error.value.way_out


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
    assert partner.key == actor_need(config, "a/b@v2").key
    assert partner.beyond > actor_need(config, "a/b@v2").beyond == 0
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
    assert (begun.kind, begun.version, begun.why) == (
        "vllm",
        "0.32.0",
        "as at the start of this run",
    )
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
