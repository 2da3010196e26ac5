"""Weights that travel to servers: in what order, and what is no proof that they arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from soulkit.errors import ConfigError, RunError, UserError
from soulkit.eval.run.resume import check_engine
from soulkit.models.codec import Codec
from soulkit.models.local.journal import SAMPLED, Journal, JournalKey
from soulkit.models.local.tiny import build_tiny
from soulkit.models.vllm.adapters import NotArrived
from soulkit.models.vllm.capabilities import ServerCapabilities
from soulkit.models.vllm.client import Address, VllmClient
from soulkit.models.vllm.model import VllmModel
from soulkit.models.vllm.replicas import Replicas
from soulkit.runs.conditions import Conditions
from soulkit.runs.folder import Run
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy
from soulkit.train.model.prepare import scores_by_key
from soulkit.train.model.teacher import Teacher
from soulkit.train.objectives.sequences import Span
from soulkit.train.rollouts.engine_choice import refuse_engine
from soulkit.train.rollouts.push import (
    Distance,
    LogprobProbe,
    Pusher,
    ServedPolicy,
    check_adapter,
    random_factors,
)
from soulkit.train.rollouts.rollout_check import by_server, trained_spans
from soulkit.types import Call, Completion, Episode, Record, Sampling, Score, Segment, Trace, Turn
from tests.support.reporting import Heard
from tests.support.servers.adapter_server import AdapterServer
from tests.support.training import SHARP, config, jolt, policy_of

WORDS = [f"word{number}" for number in range(100)]
PROMPTS = (tuple(range(20, 60)), tuple(range(90, 110)))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = build_tiny(tmp_path_factory.mktemp("models") / "tiny", WORDS, max_context=256)
    weights = load_file(folder / "model.safetensors")
    sharp = {name: w * SHARP if w.ndim == 2 else w for name, w in weights.items()}
    save_file(sharp, folder / "model.safetensors", metadata={"format": "pt"})
    return policy_of(folder)


def pusher_to(
    servers: list[AdapterServer], policy: Policy, folder: Path, lines: list[str] | None = None
) -> Pusher:
    clients = [VllmClient(Address(server.url)) for server in servers]
    heard = Heard(lines)
    fleet = Replicas(clients, in_flight=4, reporter=heard)
    return Pusher(fleet, LogprobProbe(policy, PROMPTS), folder / "pushes", heard, sleeps=True)


def of_kind(server: AdapterServer, *kinds: str) -> list[tuple[str, str]]:
    return [(kind, name) for kind, name in server.events if kind in kinds]


# --- order ----------------------------------------------------------------------------------------


def test_every_push_has_a_name_of_its_own_and_the_name_before_goes_first(
    policy: Policy, tmp_path: Path
) -> None:
    with AdapterServer(policy) as server:
        pusher = pusher_to([server], policy, tmp_path)

        async def three() -> list[tuple[str, str]]:
            names: list[tuple[str, str]] = []
            for _ in range(2):
                jolt(policy, 0.02, seed=len(names))
                names += [await pusher(policy), await pusher(policy)]
            folders = sorted(path.name for path in (tmp_path / "pushes").iterdir())
            assert folders == [names[-1][0]] == list(server.adapters)
            await pusher.close()
            return names

        first, same, second, _ = asyncio.run(three())
        assert first == same and first[0] != second[0] and second[1] == policy.version()
        probe = server.events[0][1]
        assert of_kind(server, "load", "unload") == [
            ("load", probe), ("unload", probe), ("load", first[0]),
            ("load", second[0]), ("unload", first[0]), ("unload", second[0]),
        ]  # fmt: skip
        # The new one is read before the old one goes.
        reads = [at for at, event in enumerate(server.events) if event == ("read", second[0])]
        assert reads and reads[-1] < server.events.index(("unload", first[0]))
        assert not server.unread and not list((tmp_path / "pushes").iterdir())


def test_what_is_pushed_are_the_weights(policy: Policy, tmp_path: Path) -> None:
    with AdapterServer(policy) as server:
        pusher = pusher_to([server], policy, tmp_path)
        name, _ = asyncio.run(pusher(policy))
        for key, parameter in policy.trained:
            assert server.adapters[name][key.replace(".policy.", ".")].equal(parameter.data)
        saved = load_file(tmp_path / "pushes" / name / "adapter_model.safetensors")
        assert set(saved) == set(server.adapters[name])
        assert pusher.distance is not None and pusher.distance.largest <= 1e-4


def test_what_a_killed_run_left_goes_name_first(policy: Policy, tmp_path: Path) -> None:
    with AdapterServer(policy) as server:
        killed = pusher_to([server], policy, tmp_path)
        old, _ = asyncio.run(killed(policy))
        (tmp_path / "pushes" / ".soulkit-half.part").mkdir()
        name, _ = asyncio.run(pusher_to([server], policy, tmp_path)(policy))
        assert list(server.adapters) == [name] and not server.unread
        assert of_kind(server, "load", "unload")[3] == ("unload", old)
        assert [path.name for path in (tmp_path / "pushes").iterdir()] == [name]


# --- what is no proof -----------------------------------------------------------------------------


def test_a_server_that_ignores_adapters_is_found_out_before_the_first_push(
    policy: Policy, tmp_path: Path
) -> None:
    with AdapterServer(policy) as good, AdapterServer(policy, deaf=True) as deaf:
        with pytest.raises(NotArrived, match="does not apply LoRA adapters") as error:
            asyncio.run(pusher_to([good, deaf], policy, tmp_path)(policy))
        assert deaf.url in error.value.what and "--enable-lora" in error.value.way_out
        assert not good.adapters and not deaf.adapters
        assert not list((tmp_path / "pushes").iterdir())


def test_new_weights_that_did_not_arrive_are_not_sampled_with(
    policy: Policy, tmp_path: Path
) -> None:
    with AdapterServer(policy) as server:
        pusher = pusher_to([server], policy, tmp_path)
        model = served_model(pusher)

        async def stale() -> None:
            await model.take(policy)
            before = model.policy_version, model.model.served
            jolt(policy, 0.05, seed=7)
            server.stale = True
            with pytest.raises(NotArrived, match="does not sample with the weights"):
                await model.take(policy)
            assert (model.policy_version, model.model.served) == before
            assert list(server.adapters) == [model.model.served]

        asyncio.run(stale())
        assert len(list((tmp_path / "pushes").iterdir())) == 1


def test_narrow_numbers_prove_less_and_the_probe_proves_the_rest(policy: Policy) -> None:
    stone = LogprobProbe(policy, PROMPTS)
    near, far = Distance(3e-4, 1e-4), Distance(2.0, 0.3)
    assert stone.exact and not stone.passes(near) and stone.passes(Distance(1e-5, 1e-6))
    assert "1e-04" in stone.bound or "0.0001" in stone.bound
    probing = stone.probe()
    assert probing.moved.largest > 1
    assert probing.passes(probing.after) and not probing.passes(probing.before)
    assert not replace(probing, after=probing.before).passes(probing.before)  # it moved nothing

    class Narrow(LogprobProbe):
        exact = False

    narrow = Narrow(policy, PROMPTS)
    assert narrow.passes(near) and not narrow.passes(far)


def test_a_distance_of_nothing_is_infinite() -> None:
    assert Distance.between([[0.5, 1.0]], [[0.5, 1.5]]) == Distance(0.5, 0.25)
    for other in ([], [[0.5]], [[0.5, float("nan")]], [[0.5, 1.0], [1.0]]):
        assert Distance.between([[0.5, 1.0]], other).mean == float("inf")
    assert Distance.between([], []).largest == float("inf")


def test_the_probe_leaves_no_trace_in_the_weights(policy: Policy) -> None:
    before, drawn = policy.version(), []
    for _ in range(2):
        with random_factors(policy, 0.5):
            drawn.append(policy.version())
    assert drawn[0] == drawn[1] != before == policy.version()
    with pytest.raises(ZeroDivisionError), random_factors(policy, 0.5):
        raise ZeroDivisionError
    assert policy.version() == before


# --- sampling -------------------------------------------------------------------------------------


def served_model(pusher: Pusher, journal: Journal | None = None) -> ServedPolicy:
    policy = pusher.touchstone.policy
    abilities = ServerCapabilities(served="base", version="0.32.0", adapters=True)
    model = VllmModel(
        pusher.fleet, Codec(policy.tokenizer), name="tiny", served="base", abilities=abilities
    )
    return ServedPolicy(model, pusher, journal)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path / "sampled.jsonl")
    yield opened
    opened.close()


def test_what_is_recorded_of_these_weights_is_not_asked_again(
    policy: Policy, tmp_path: Path, journal: Journal
) -> None:
    context = [Segment("user", "Where is the apple ?")]
    call, sampling = Call(role="actor", example_id="x", turn=0), Sampling(max_tokens=8)
    with AdapterServer(policy) as server:
        pusher = pusher_to([server], policy, tmp_path)
        ids = tuple(Codec(policy.tokenizer).prompt_ids(context))
        reply = Completion(text="box", prompt_ids=ids, token_ids=(5,), logprobs=(-1.0,))
        journal.write([JournalKey(call, sampling, ids, policy.version())], [reply])
        journal.close()
        again = Journal(journal.path)

        async def resumed() -> Completion:
            model = served_model(pusher, again)
            await model.take(policy)
            recorded = await model.complete(context, sampling, call)
            await model.close()
            return recorded

        assert asyncio.run(resumed()) == reply
        assert not [body for body in server.events if body == ("read", "base")]


def test_every_token_of_a_rollout_counts_for_the_server_that_sampled_it(policy: Policy) -> None:
    """Four turns that continue each other and one that does not, by two servers."""
    ids, spans, replies = list(range(20, 60)), [], []
    for turn in range(5):
        prompt, emitted = tuple(ids[-30:] if turn == 4 else ids), (60 + turn, 70 + turn, 80 + turn)
        spans.append(Span((*prompt, *emitted), (*(False,) * len(prompt), *(True,) * 3), ()))
        replies.append(Completion(text="", prompt_ids=prompt, token_ids=emitted))
        ids += [*emitted, 90]
    off = {"a": 0.0, "b": 0.5}
    told = [
        replace(reply, server=server, logprobs=tuple((logs - off[server]).tolist()))
        for reply, logs, server in zip(
            replies, Teacher(policy).log_probs(spans, None), "abbab", strict=True
        )
    ]
    told[0] = replace(told[0], logprobs=())
    trace = Trace("seat", tuple(Turn((), reply) for reply in told))
    episode = Episode(example_id="e", task="t", traces=(trace,))
    unscored = Record(
        key="k", example_id="e", task="t", kind="draft", rollout=0, episode=episode,
        score=Score(value=None, reward=None),
    )  # fmt: skip
    scores = scores_by_key(policy, trained_spans(trace), None, "none")
    compared, unchecked = by_server([unscored], scores)
    apart = {server: Distance.between(*pair) for server, pair in compared.items()}
    assert unchecked == {"a": 1} and {s: len(pair[0]) for s, pair in compared.items()} == {
        "a": 1, "b": 3,
    }  # fmt: skip
    assert apart["a"].largest < 1e-4 and apart["b"].mean == pytest.approx(0.5, abs=1e-4)


# --- sleep ----------------------------------------------------------------------------------------


def test_what_wakes_is_proved_and_gets_the_adapter_under_a_new_name(
    policy: Policy, tmp_path: Path
) -> None:
    with AdapterServer(policy) as server:
        pusher = pusher_to([server], policy, tmp_path)

        async def through_a_night() -> list[str]:
            first, _ = await pusher(policy)
            await pusher.sleep()
            await pusher.sleep()  # once is enough
            assert server.sleeping
            second, _ = await pusher(policy)  # the same weights
            assert not server.sleeping and list(server.adapters) == [second]
            return [first, second]

        first, second = asyncio.run(through_a_night())
        assert first != second
        told = [kind for kind, _ in server.events]
        assert told.count("sleep") == told.count("wake_up") == 1
        after = server.events[told.index("wake_up") + 1 :]
        probe = next(name for kind, name in after if kind == "load")
        assert "-probe-" in probe and [e for e in after if e[0] != "read"] == [
            ("load", probe), ("unload", probe), ("load", second), ("unload", first),
        ]  # fmt: skip
        assert ("read", probe) in after and ("read", second) in after


def test_adapters_without_effect_after_a_wake_end_the_run(policy: Policy, tmp_path: Path) -> None:
    with AdapterServer(policy, numb=True) as server:
        pusher = pusher_to([server], policy, tmp_path)

        async def through_a_night() -> None:
            await pusher(policy)
            await pusher.sleep()
            await pusher(policy)

        with pytest.raises(NotArrived, match="does not apply LoRA adapters") as error:
            asyncio.run(through_a_night())
        assert "--vllm-sleep" in error.value.why and "--vllm-sleep" in error.value.way_out


def test_a_server_that_cannot_sleep_is_named_and_one_that_sleeps_is_left_alone(
    policy: Policy, tmp_path: Path
) -> None:
    with AdapterServer(policy) as server:
        pusher = pusher_to([server], policy, tmp_path)

        async def to_bed() -> None:
            await pusher(policy)
            await pusher.sleep()
            before = len(server.events)
            await pusher.close()
            assert len(server.events) == before and not list((tmp_path / "pushes").iterdir())

        asyncio.run(to_bed())
        server.sleepless = True
        with pytest.raises(NotArrived, match="refuses POST /sleep") as error:
            asyncio.run(pusher_to([server], policy, tmp_path).sleep())
        assert "--vllm-sleep" in error.value.way_out


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"full": True, "dtype": "float32"}, "--full does not"),
        ({"deterministic": True}, "deterministic"),
        ({"method": "sft"}, "train sft does not"),
    ],
)
def test_what_servers_cannot_sample_is_refused(settings: dict[str, Any], words: str) -> None:
    for engine in ("vllm", "vllm@http://127.0.0.1:1"):
        with pytest.raises(ConfigError, match=words) as error:
            refuse_engine(of(engine, settings))
        assert "--engine local" in error.value.way_out or "--engine" in error.value.way_out
    refuse_engine(of("local", settings))
    refuse_engine(of("auto", settings))


def of(engine: str, settings: dict[str, Any]) -> TrainConfig:
    return config(**{"method": "grpo", **settings, "engine": engine})


def test_flags_of_a_server_that_nobody_starts_are_refused() -> None:
    flags = {"vllm_arg": {"max-model-len": "512"}}
    for engine in ("auto", "local", "vllm@http://127.0.0.1:1"):
        with pytest.raises(ConfigError, match="no vLLM server is started"):
            refuse_engine(of(engine, flags))
    refuse_engine(of("vllm", flags))
    refuse_engine(of("local", {**flags, "judge": "vllm:/models/judge"}))


def test_an_adapter_that_servers_do_not_know_is_refused(policy: Policy) -> None:
    check_adapter(policy)
    adapter = policy.model.peft_config["policy"]
    rank, adapter.r = adapter.r, 1024
    try:
        with pytest.raises(ConfigError, match="rank is 1024"):
            check_adapter(policy)
    finally:
        adapter.r = rank


def test_errors_have_three_lines() -> None:
    error = NotArrived("what", "why", "way out")
    assert isinstance(error, UserError) and len(error.lines()) == 3


# --- taken up by another engine -------------------------------------------------------------------


def test_a_start_that_failed_binds_nobody_to_its_engine(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "run", "train grpo", {})
    engine = {"kind": "vllm", "version": "0.32.0"}
    Conditions(players={}, tasks={}, engine=engine).write(run.path)
    for name in ("episodes.jsonl", SAMPLED):
        (run.path / name).touch()  # opened, and nothing was played
    check_engine(run, {"kind": "local"})
    (run.path / SAMPLED).write_text('{"policy": "x"}\n', encoding="utf-8")  # killed in a step
    with pytest.raises(RunError, match="sampled by vllm"):
        check_engine(run, {"kind": "local"})
    (run.path / SAMPLED).write_bytes(b"")  # the step is over
    run.episodes.write_text('{"key": "0/x/0/draft"}\n', encoding="utf-8")
    with pytest.raises(RunError, match="sampled by vllm"):
        check_engine(run, {"kind": "local"})
