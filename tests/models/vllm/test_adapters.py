"""Adapters on running servers: there under a new name, proven, and gone again in every way out."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from soulkit.errors import ModelLoadError
from soulkit.models.vllm.adapters import (
    AdapterNotServed,
    Distance,
    ServedAdapter,
    any_weight,
    entries_of,
    prompt_logprobs,
    prove_adapter,
    push_adapter,
    serve_adapter,
    unique_name,
    unload_adapter,
)
from soulkit.models.vllm.client import Address, ServerRefused, VllmClient
from soulkit.models.vllm.replicas import Replicas
from soulkit.reporting import SILENT, Reporter
from tests.support.reporting import Heard
from tests.support.servers.toy_vllm import Body, Toy, ToyVllm

T = TypeVar("T")
PROMPT = (5, 9, 2, 33, 17)


def fleet(*servers: ToyVllm, reporter: Reporter = SILENT) -> Replicas:
    clients = [VllmClient(Address(server.url)) for server in servers]
    return Replicas(clients, in_flight=4, pause_s=0.0, reporter=reporter)


def run(act: Callable[[], Awaitable[T]]) -> T:
    async def acting() -> T:
        return await act()

    return asyncio.run(acting())


def adapter(place: Path, b: bytes = b"\x00\x00\x80\x3f", rank: int = 8) -> Path:
    """An adapter with one A of ones and one B of these bytes, written without any library."""
    ones = b"\x00\x00\x80\x3f" * 4
    header = {
        "__metadata__": {"format": "pt"},
        "layers.0.lora_A.weight": _place("F32", [4], 0, len(ones)),
        "layers.0.lora_B.weight": _place("U8", [len(b)], len(ones), len(ones) + len(b)),
    }
    text = json.dumps(header).encode()
    place.mkdir(parents=True)
    content = struct.pack("<Q", len(text)) + text + ones + b
    (place / "adapter_model.safetensors").write_bytes(content)
    (place / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return place


def _place(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter in a folder whose name is no message."""
    return adapter(tmp_path / "max_lora_rank 8")


# -- pushing and unloading -------------------------------------------------------------------------


def test_an_adapter_is_on_every_server_and_gone_from_all_of_them(folder: Path) -> None:
    with ToyVllm() as one, ToyVllm() as other:
        servers = fleet(one, other)
        served = run(lambda: serve_adapter(servers, "base", folder, PROMPT))
        assert set(one.adapters) == set(other.adapters) == {served.name}
        assert served.lent
        run(lambda: served.unload(servers))
        assert one.adapters == other.adapters == {}


def test_names_are_never_the_same_twice(folder: Path) -> None:
    names = {unique_name(folder) for _ in range(20)}
    assert len(names) == 20 and len({name[:20] for name in names}) == 1


def test_a_name_that_is_there_already_is_not_used_again(folder: Path) -> None:
    with ToyVllm() as server:
        servers = fleet(server)
        run(lambda: push_adapter(servers, folder, "policy"))
        with pytest.raises(
            AdapterNotServed, match="already serves a model or adapter named 'policy'"
        ):
            run(lambda: push_adapter(servers, folder, "policy"))
        assert set(server.adapters) == {"policy"}


NO_ADAPTERS = frozenset({"adapters"})
REFUSED: dict[str, tuple[Toy, dict[str, Any] | None, tuple[str, str, str]]] = {
    "rank": (Toy(max_rank=16), {"r": 32}, ("", "rank 32", "--max-lora-rank")),
    "started without": (
        Toy(without=NO_ADAPTERS), {"r": 8},
        ("cannot load adapters while it runs", "", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ),
    "no file": (Toy(), None, ("max_lora_rank 8", "", "same path")),
    "another model": (
        Toy(), {"r": 8, "width": 32}, ("does not fit", "size of tensor", "for this model"),
    ),
    "only listed": (Toy(idle_adapters=True), {"r": 8}, ("no effect", "", "")),
    "no log-probs": (
        Toy(without=frozenset({"prompt_logprobs"})), {"r": 8},
        ("does not return the log-probs", "", ""),
    ),
    **{says: (Toy(refuses=says), {"r": 8}, ("", says.partition("{}")[2], way)) for says, way in (
        ("Error while deserializing header: incomplete metadata, file not fully covered", "whole"),
        ("LoRA rank 64 is greater than max_lora_rank 16.", "--max-lora-rank"),
        ("LoRA is not enabled. Use --enable-lora to enable LoRA.", "--enable-lora"),
        ("Call to add_lora method failed: list index out of range", "server's log"),
        ("{} holds DoRA weights, which are not supported", "server's log"),
    )},
}  # fmt: skip
"""Name → the second server, the adapter's config, words of the three lines."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_adapter_is_on_no_server_and_the_way_out_is_named(
    case: str, folder: Path
) -> None:
    toy, config, words = REFUSED[case]
    file = folder / "adapter_config.json"
    file.unlink() if config is None else file.write_text(json.dumps(config))
    with ToyVllm(toy if toy.idle_adapters else Toy()) as one, ToyVllm(toy) as other:
        with pytest.raises(AdapterNotServed) as caught:
            run(lambda: serve_adapter(fleet(one, other), "base", folder, PROMPT))
        assert one.adapters == other.adapters == {}
    lines = caught.value.lines()
    assert all(word in line for word, line in zip(words, lines, strict=True)), lines
    assert "--max-lora-rank" not in lines[2] or words[2].startswith(("--", "VLLM"))


def test_a_name_goes_only_when_nothing_is_under_way_for_it(folder: Path) -> None:
    with ToyVllm(Toy(delay_s=0.05)) as server:
        servers = fleet(server)

        async def acting() -> list[Any]:
            await push_adapter(servers, folder, "policy")
            body: Body = {"model": "policy", "prompt": [1, 2], "max_tokens": 2}
            requests = [asyncio.ensure_future(servers.ask("/v1/completions", body))
                        for _ in range(9)]  # fmt: skip
            await asyncio.sleep(0)
            await unload_adapter(servers, "policy")
            return [request.result() for request in requests]

        assert len(run(acting)) == 9
        assert [path for path, _ in server.requests][-1] == "/v1/unload_lora_adapter"


def test_ctrl_c_while_it_arrives_leaves_the_servers_clean(folder: Path) -> None:
    with ToyVllm(Toy(delay_s=0.2)) as server:
        servers = fleet(server)

        async def acting() -> None:
            task = asyncio.ensure_future(serve_adapter(servers, "base", folder, PROMPT))
            while not server.bodies():  # it is loaded, and the proof is under way
                await asyncio.sleep(0.005)
            assert server.adapters
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        run(acting)
        assert server.adapters == {}


def test_unloading_from_servers_that_have_gone_is_no_trouble(tmp_path: Path) -> None:
    with ToyVllm() as server:
        servers = fleet(server)
        served = ServedAdapter("policy", lent=True)
        run(lambda: served.unload(servers))  # it has lost it already
        server.die()
        run(lambda: served.unload(servers))
        assert servers.urls == ()


def test_a_folder_that_the_servers_have_already_is_asked_for_under_its_name(
    folder: Path, tmp_path: Path
) -> None:
    toy = Toy(without=frozenset({"adapters"}), shelf={"house": str(folder.resolve())})
    with ToyVllm(toy) as server:
        servers = fleet(server)
        served = run(lambda: serve_adapter(servers, "base", folder, PROMPT))
        assert served.name == "house" and not served.lent
        run(lambda: served.unload(servers))
        assert set(server.adapters) == {"house"}
        other = adapter(tmp_path / "b")
        with pytest.raises(AdapterNotServed):
            run(lambda: serve_adapter(servers, "base", other, PROMPT))


@pytest.mark.parametrize("limit", [0, -5, True, "1024", None])
def test_a_context_that_is_no_number_of_tokens_is_not_known(limit: object) -> None:
    (entry,) = entries_of({"data": [{"id": "base", "max_model_len": limit}]})
    assert entry.max_context is None
    assert entries_of({"data": [{"id": "base", "max_model_len": 64}]})[0].max_context == 64


# -- proof -----------------------------------------------------------------------------------------


def test_an_adapter_of_zeros_moves_nothing_and_may(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", b=bytes(8))
    with ToyVllm(Toy(idle_adapters=True)) as server:
        served = run(lambda: serve_adapter(fleet(server), "base", folder, PROMPT))
        assert set(server.adapters) == {served.name}


def test_servers_that_read_other_weights_under_one_path_are_refused(folder: Path) -> None:
    with ToyVllm() as one, ToyVllm() as other:
        servers = fleet(one, other)
        run(lambda: push_adapter(servers, folder, "policy"))
        other.adapters["policy"] = (str(folder), "of another host")
        with pytest.raises(AdapterNotServed, match="give different results"):
            run(lambda: prove_adapter(servers, "base", "policy", folder, PROMPT))


def test_log_probs_of_a_prompt_tell_pushed_weights_apart(tmp_path: Path) -> None:
    first, second = adapter(tmp_path / "a"), adapter(tmp_path / "b", b=b"\x01\x02\x03\x04")
    with ToyVllm() as one, ToyVllm() as other:
        servers = fleet(one, other)
        run(lambda: push_adapter(servers, first, "step-1"))
        run(lambda: push_adapter(servers, second, "step-2"))
        before = run(lambda: prompt_logprobs(servers, "step-1", PROMPT))
        after = run(lambda: prompt_logprobs(servers, "step-2", PROMPT))
    assert before[one.url] == before[other.url] and len(before[one.url]) == len(PROMPT) - 1
    assert Distance.between([before[one.url]], [after[one.url]]).largest > 0.1


@pytest.mark.parametrize("other", [[(float("nan"), -1.0)], [(-1.0,)], []])
def test_log_probs_that_cannot_be_compared_are_infinitely_far_apart(other: list[Any]) -> None:
    assert Distance.between([(-1.0, -1.0)], other).largest == float("inf")
    assert Distance.between([(-1.0, -1.5)], [(-1.25, -1.5)]) == Distance(0.25, 0.125)


def test_a_server_that_was_started_anew_has_lost_the_adapter_and_is_dropped(tmp_path: Path) -> None:
    folder, lines = adapter(tmp_path / "a"), list[str]()
    body: Body = {"model": "policy", "prompt": [1, 2], "max_tokens": 2}
    with ToyVllm() as one, ToyVllm() as other:
        servers = fleet(one, other, reporter=Heard(lines))

        async def acting() -> None:
            await push_adapter(servers, folder, "policy")
            one.adapters.clear()
            await asyncio.gather(*(servers.ask("/v1/completions", body) for _ in range(6)))
            with pytest.raises(ServerRefused):
                await servers.ask("/v1/completions", {**body, "model": "never loaded"})

        run(acting)
        assert servers.urls == (other.url,)
    assert len(lines) == 1 and "lost its adapter" in lines[0] and one.url in lines[0]


# -- weights of zeros ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "any_of_them"),
    [
        (bytes(64), False),
        (struct.pack("<4f", 0.0, -0.0, 0.0, -0.0), False),
        (bytes(3 << 20), False),
        (bytes(3 << 20) + b"\x00\x00\x00\x3c", True),
        (struct.pack("<4f", 0.0, 0.0, -1e-8, 0.0), True),
    ],
)
def test_whether_an_adapter_changes_anything(tmp_path: Path, b: bytes, any_of_them: bool) -> None:
    assert any_weight(adapter(tmp_path / "a", b=b)) is any_of_them


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, struct.pack("<Q", 2) + b"[]"])
def test_weights_that_cannot_be_read_are_named(folder: Path, content: bytes) -> None:
    (folder / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors"):
        any_weight(folder)


def test_a_damaged_adapter_is_told_before_a_server_is_asked(tmp_path: Path) -> None:
    file = adapter(tmp_path / "a") / "adapter_model.safetensors"
    whole = file.read_bytes()
    with ToyVllm() as server:
        for size in (0, 5, 40, len(whole) - 1, None):
            file.unlink() if size is None else file.write_bytes(whole[:size])
            with pytest.raises(ModelLoadError) as caught:
                run(lambda: serve_adapter(fleet(server), "base", tmp_path / "a", PROMPT))
            _, _, way_out = caught.value.lines()
            assert "whole folder" in way_out and "rank" not in way_out.lower(), size
        assert server.requests == []
