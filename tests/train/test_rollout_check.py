"""Rollouts that were sampled with other weights are found before anything is learned from them."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from soulkit.models.local.journal import SAMPLED
from soulkit.runs.records import load_records
from soulkit.train.rollouts.push import Distance
from soulkit.train.rollouts.rollout_check import UNCHECKED, exceeded_bound
from soulkit.train.state.checkpoint import checkpoints
from tests.support.servers.proxy import Body, Proxy
from tests.support.servers.tiny_vllm import TinyVllm
from tests.support.servers.toy_vllm import Toy
from tests.support.training import lines_of, random_model, soul

pytestmark = pytest.mark.torch

STEPS, WRONG = 3, 1
"""Steps of a run, and the one whose rollouts come from other weights."""
DRAFTS = 2 * 3
LOADING = threading.Lock()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny", max_context=512)


def train(model: Path, engine: str, out: Path, *more: object) -> int:
    """A short training; the model never solves a row, so what moves it is the entropy bonus."""
    steps = () if "--steps" in more else ("--steps", STEPS)
    return soul(
        "train", "grpo", "--model", model, "--task", "tomi", "--data", "synth:30",
        "--engine", engine, *steps, "--prompts", 2, "--group-size", 3, "--lora-r", 4,
        "--max-tokens", 6, "--lr", 1e-2, "--set", "entropy_coef=0.1", "--set", "warmup_steps=0",
        "--set", "mini_batch_prompts=1", "--dtype", "float32", "--device", "cpu", "--threads", 1,
        "--set", "checkpoint_every=10", "--out", out, *more,
    )  # fmt: skip


@contextmanager
def proxied(model: Path, count: int = 1, **toy: Any) -> Iterator[list[Proxy]]:
    """Proxies in front of servers of the model."""
    with ExitStack() as stack:
        servers = [stack.enter_context(TinyVllm(model, Toy(**toy))) for _ in range(count)]
        yield [stack.enter_context(Proxy(server.url)) for server in servers]


def at(proxies: Sequence[Proxy]) -> str:
    return f"vllm@{','.join(proxy.url for proxy in proxies)}"


def weights(run: Path) -> dict[str, bytes]:
    """Adapter and optimizer of the newest checkpoint."""
    newest = checkpoints(run / "checkpoints")[-1]
    return {name: (newest / name).read_bytes()
            for name in ("adapter_model.safetensors", "optimizer.safetensors")}  # fmt: skip


def honestly(body: Body) -> Body:
    return body


def load_or_none(run: Path) -> bytes:
    episodes = run / "episodes.jsonl"
    return episodes.read_bytes() if episodes.exists() else b""


def error_in(err: str) -> list[str]:
    """The three lines of the error that ended a command, which printed other lines before."""
    lines = err.splitlines()[-3:]
    assert [line.partition(":")[0] for line in lines] == ["error", "why", "fix"], err
    return lines


def said(run: Path) -> list[tuple[str, tuple[int, ...], str]]:
    """What every rollout said, and by which weights."""
    return sorted(
        (record.key, turn.completion.token_ids, turn.completion.policy)
        for record in load_records(run / "episodes.jsonl")
        for trace in record.episode.traces
        for turn in trace.turns
    )


def arithmetic(run: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if not name.startswith("push/")}
            for line in lines_of(run)]  # fmt: skip


@pytest.fixture(scope="module")
def honest(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody lies to, and one of the steps before the wrong one."""
    folder = tmp_path_factory.mktemp("honest")
    with proxied(model) as proxies:
        assert train(model, at(proxies), folder / "whole") == 0
        assert train(model, at(proxies), folder / "begun", "--steps", WRONG) == 0
    return folder


# --- lies -----------------------------------------------------------------------------------------

Lie = Callable[[Proxy, Path, Body], Body]
"""(proxy, run, request) → the request that is made instead."""


def base_model(proxy: Proxy, run: Path, body: Body) -> Body:
    return {**body, "model": "base"}


def earlier_adapter(proxy: Proxy, run: Path, body: Body) -> Body:
    """Of the step before, as a server would use that lost the last push."""
    return {**body, "model": f"kept-{proxy.adapters[-2]}"}


def another_adapter(proxy: Proxy, run: Path, body: Body) -> Body:
    """The adapter that was pushed, with factors that are a little off."""
    with LOADING:
        folder = run / "other"
        if not folder.exists():
            folder.mkdir()
            pushed = run / "vllm" / "pushes" / str(body["model"])
            tensors = load_file(pushed / "adapter_model.safetensors")
            moved = {name: one * 1.1 for name, one in tensors.items()}
            save_file(moved, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            shutil.copy(pushed / "adapter_config.json", folder)
            proxy.load("other", folder)
    return {**body, "model": "other"}


def keep_adapters(proxy: Proxy, run: Path, body: Body) -> None:
    """Load every adapter that is sampled from a second time, under a name that nobody unloads."""
    with LOADING:
        name, kept = str(body["model"]), run / f"kept-{body['model']}"
        if not kept.exists():
            shutil.copytree(run / "vllm" / "pushes" / name, kept)
            proxy.load(kept.name, kept)


def lie_from(proxy: Proxy, run: Path, lie: Lie, step: int, reply: int) -> None:
    """Have `proxy` lie from the reply of this number in `step` on."""

    def change(body: Body) -> Body:
        if lie is earlier_adapter:
            keep_adapters(proxy, run, body)
        before = proxy.adapters.index(body["model"]) < step
        if before or proxy.sampled.count(body["model"]) <= reply:
            return body
        return lie(proxy, run, body)

    proxy.change = change


@pytest.mark.slow
@pytest.mark.parametrize(("lie", "reply"), [(earlier_adapter, 0), (another_adapter, 4)])
def test_a_swap_after_the_proof_is_found_before_anything_is_learned(
    model: Path, honest: Path, tmp_path: Path, capsys: Any, lie: Lie, reply: int
) -> None:
    out = tmp_path / "run"
    with proxied(model) as (proxy,):
        lie_from(proxy, out, lie, WRONG, reply)
        assert train(model, at([proxy]), out) == 2
        error = error_in(capsys.readouterr().err)
        assert proxy.url in error[0] and f"step {WRONG} " in error[0] and "nats" in error[1]
        # The steps before are kept, and nothing of this one is.
        assert weights(out) == weights(honest / "begun") and not (out / "model").exists()
        assert said(out) == said(honest / "begun")
        assert arithmetic(out) == arithmetic(honest / "begun")
        proxy.change = honestly
        assert train(model, at([proxy]), out) == 0
    assert said(out) == said(honest / "whole")
    assert arithmetic(out) == arithmetic(honest / "whole")
    assert weights(out) == weights(honest / "whole")


@pytest.mark.slow
def test_a_run_that_was_killed_before_the_record_finds_the_false_replies_again(
    model: Path, honest: Path, tmp_path: Path, capsys: Any
) -> None:
    """As after kill -9 between the check and the void record: the journal holds them as good."""
    out = tmp_path / "run"
    with proxied(model) as (proxy,):
        lie_from(proxy, out, base_model, WRONG, 0)
        assert train(model, at([proxy]), out) == 2
        journal = out / SAMPLED
        *replies, void = journal.read_text("utf-8").splitlines(keepends=True)
        assert json.loads(void)["void"]["step"] == WRONG and proxy.url in void
        journal.write_text("".join(replies), encoding="utf-8")
        proxy.change = honestly
        asked = len(proxy.sampled)
        assert train(model, at([proxy]), out) == 2
        assert proxy.url in error_in(capsys.readouterr().err)[0]
        assert len(proxy.sampled) == asked  # they came from the journal, which names their server
        assert train(model, at([proxy]), out) == 0
    assert said(out) == said(honest / "whole")
    assert weights(out) == weights(honest / "whole")


@pytest.mark.slow
def test_one_wrong_server_of_two_is_named(model: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    with proxied(model, 2) as (good, bad):
        bad.change = lambda body: {**body, "temperature": 0.9}
        assert train(model, at([good, bad]), out) == 2
        error = error_in(capsys.readouterr().err)
        assert bad.url in error[0] and not any(good.url in line for line in error)
        assert not checkpoints(out / "checkpoints") and not load_or_none(out)
        bad.change = honestly
        assert train(model, at([good, bad]), out) == 0
        servers = {turn.completion.server for record in load_records(out / "episodes.jsonl")
                   for trace in record.episode.traces for turn in trace.turns}  # fmt: skip
        assert servers == {good.url, bad.url}


@pytest.mark.slow
def test_log_probs_before_temperature_are_found_or_cannot_be_checked(
    model: Path, tmp_path: Path, capsys: Any
) -> None:
    toy = Toy()
    warm = ("--temperature", 0.7, "--steps", 2)
    with TinyVllm(model, toy) as server, Proxy(server.url) as proxy:

        def turn_raw(body: Body) -> Body:
            toy.raw = True  # after it was attached as one that gives them after temperature
            return body

        proxy.change = turn_raw
        assert train(model, at([proxy]), tmp_path / "swapped", *warm) == 2
        assert proxy.url in error_in(capsys.readouterr().err)[0]
        assert train(model, at([proxy]), tmp_path / "raw", *warm) == 0  # attached as a raw one
        printed = capsys.readouterr().err
    assert printed.count("cannot be checked") == 1 and proxy.url in printed
    for line in lines_of(tmp_path / "raw"):
        assert line["logprob/unchecked"] == DRAFTS and "logprob/sampler_gap" not in line
    noted = json.loads((tmp_path / "raw" / "environment.json").read_text("utf-8"))
    assert f"{DRAFTS} of {DRAFTS} replies" in noted[UNCHECKED]


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("largest", "temperature", "passes"),
    [
        (0.9e-4, 1.0, True), (1.1e-4, 1.0, False), (1.9e-4, 0.5, True), (2.1e-4, 0.5, False),
        (0.9e-3, 0.01, True), (1.1e-3, 0.01, False), (float("inf"), 1.0, False),
    ],
)  # fmt: skip
def test_no_token_may_differ_in_float32(largest: float, temperature: float, passes: bool) -> None:
    gap = Distance(largest, largest / 100)
    assert (exceeded_bound(gap, temperature, [1e-9] * 5, exact=True) == "") is passes


@pytest.mark.parametrize(
    ("mean", "earlier", "passes"),
    [
        (0.24, [], True), (0.26, [], False), (0.26, [0.2] * 9, False),
        (0.2, [0.01, 0.01], True),  # two steps are no history
        (0.2, [0.01, 0.01, 0.01], False), (0.2, [0.01, 0.03, 0.5], True),
        (0.049, [0.001] * 3, True), (0.051, [0.001] * 3, False),
        (float("inf"), [], False),
    ],
)  # fmt: skip
def test_narrower_numbers_may_differ_by_what_is_usual(
    mean: float, earlier: list[float], passes: bool
) -> None:
    gap = Distance(20 * mean, mean)  # one token may be far off
    assert (exceeded_bound(gap, 1.0, earlier, exact=False) == "") is passes
