"""What a model remembers: ranks, greedy decoding, limits on exposure, and the audit of a run."""

import json
from pathlib import Path

import pytest
import torch
from scipy.stats import beta

from soulkit.data.privacy.canaries import canary_list, plant_canaries, read_canaries
from soulkit.errors import ConfigError, RunError, RunStopped
from soulkit.metrics.intervals import exact_interval
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.tiny import build_tiny
from soulkit.people.memory import measure_memory
from soulkit.runs.conditions import Conditions
from soulkit.runs.jsonl import read_object
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy
from soulkit.train.objectives.sequences import Span
from soulkit.train.run import refuse_untrainable, train
from soulkit.train.sft.exposure import (
    ALTERNATIVES,
    ExposureLimit,
    canary_places,
    canary_rank,
    canary_spans,
    continued,
    exposure,
)
from soulkit.types import Segment


@pytest.mark.parametrize("hits, n", [(0, 20), (1, 20), (3, 4), (20, 20), (21, 400)])
def test_the_exact_interval_is_that_of_the_beta_distribution(hits, n):
    low = beta.ppf(0.025, hits, n - hits + 1) if hits else 0.0
    high = beta.ppf(0.975, hits + 1, n - hits) if hits < n else 1.0
    assert exact_interval(hits, n) == pytest.approx((low, high), abs=1e-9)


def test_without_trials_a_share_may_be_anything():
    assert exact_interval(0, 0) == (0.0, 1.0)


def chats(path: Path, n: int = 40) -> Path:
    rows = [
        {"person": f"p{i % 7}", "messages": [
            {"role": "user", "content": f"hi my {thing} is broken what now?"},
            {"role": "assistant", "content": "Turn it off and on again."},
            {"role": "user", "content": "did that twice already and it still makes the noise"}]}
        for i in range(n) for thing in [("bike", "lamp", "radio")[i % 3]]
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    plant_canaries(chats(folder / "chats.jsonl"), folder / "planted.jsonl", 8, "human")
    return folder / "planted.jsonl"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, planted: Path) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny") / "m", words=[planted.read_text()])


def policy_of(folder: Path) -> Policy:
    loaded = LocalModel.load(folder, device="cpu")
    return Policy(loaded.model, loaded.tokenizer, packing="auto")


@pytest.mark.slow
def test_a_secret_is_scored_where_it_was_planted_against_others_of_its_form(tiny, planted):
    canaries = read_canaries(canary_list(planted))
    places, policy = canary_places(canary_list(planted), canaries), policy_of(tiny)
    for one, place in list(zip(canaries, places, strict=True))[::5]:
        assert place.context[-1].text == "Turn it off and on again."  # not the opening
        spans = canary_spans(policy, one, place)
        assert len(spans) == ALTERNATIVES + 1 and all(span.n_trained <= 6 for span in spans)
        assert policy.tokenizer.decode(spans[0].ids).replace(" ", "").endswith(one.secret[:6])
        prompts = {span.ids[: span.trained.index(True)] for span in spans}
        assert len(prompts) == 1  # everything before the secret is the same


def test_equal_log_probs_count_against_the_secret(tiny, planted):
    policy, one = policy_of(tiny), read_canaries(canary_list(planted))[0]
    (place,) = canary_places(canary_list(planted), [one])
    spans = canary_spans(policy, one, place)
    assert 1 <= canary_rank(policy, spans) <= ALTERNATIVES
    with torch.no_grad():
        policy.causal.get_output_embeddings().weight.zero_()
    assert canary_rank(policy, spans) == ALTERNATIVES + 1
    assert exposure(ALTERNATIVES + 1) == 0 and exposure(1) == pytest.approx(9.003, abs=1e-3)


def test_greedy_is_what_greedy_decoding_writes(tiny):
    policy = policy_of(tiny)
    prompt = policy.renderer.prompt_ids([Segment("user", "hi my bike is broken what now?")])
    ids = torch.tensor([prompt])
    for _ in range(6):
        ids = torch.cat([ids, policy.causal(ids).logits[:, -1:].argmax(-1)], 1)
    flags = tuple(n >= len(prompt) for n in range(ids.shape[1]))
    written = tuple(ids[0].tolist())
    other = (*written[:-3], (written[-3] + 1) % 50, *written[-2:])
    assert policy.greedy([Span(other, flags, ()), Span(written, flags, ())]) == [False, True]


def test_a_context_that_does_not_fit_is_left_out(tiny):
    policy = policy_of(tiny)
    long = [Segment("user", "what now? " * 2000)]
    (span, _) = continued(policy, long, ["did that twice", "did that"])
    assert len(span.ids) < 50 and span.n_trained >= 1


def settings(planted: Path, **more):
    return TrainConfig.load(flags={
        "method": "sft", "model": "tiny", "full": True, "corpora": [str(planted)], "side": "human",
        "steps": 60, "sft_batch": 8, "lr": 2e-3, "checkpoint_every": 15, "keep_last": 9,
        "device": "cpu", "threads": 1, **more,
    })  # fmt: skip


def test_a_limit_needs_canaries_and_several_checkpoints(planted, tmp_path):
    without = chats(tmp_path / "chats.jsonl")
    with pytest.raises(ConfigError, match="needs canaries") as refusal:
        refuse_untrainable(settings(without, max_exposure=3))
    assert "soul data plant" in refusal.value.way_out
    with pytest.raises(ConfigError, match="needs checkpoints"):
        refuse_untrainable(settings(planted, max_exposure=3, checkpoint_every=60))
    refuse_untrainable(settings(planted, max_exposure=3))


def test_a_limit_keeps_the_newest_weights_below_it_and_ends_at_the_second_above(tiny, tmp_path):
    limit = ExposureLimit(4.0, tmp_path, policy_of(tiny), {}, {10: 1.0, 20: 5.0, 30: 3.0})
    assert limit.kept() == 30 and not limit.reached
    limit.measured[40] = 4.0  # not below
    assert limit.kept() == 30 and limit.reached
    above = ExposureLimit(0.5, tmp_path, policy_of(tiny), {}, {10: 1.0})
    with pytest.raises(RunStopped, match=r"below 0.5 bits"):
        above.kept()


@pytest.mark.slow
def test_a_run_is_audited_from_its_folder_and_not_twice(planted, tmp_path, monkeypatch):
    run = tmp_path / "run"
    train(settings(planted, steps=30), run)
    recorded = Conditions.read(run).material.canaries
    assert [(Path(name).name, one.rows) for name, one in recorded.items()] == [
        ("planted.canaries.jsonl", 16)
    ]
    held_out = chats(tmp_path / "other.jsonl", 12)
    report = measure_memory(str(run), held_out=held_out, device="cpu")
    assert [one["step"] for one in report["checkpoints"]] == [15, 30]
    for one in report["checkpoints"]:
        assert [(g["repeats"], g["canaries"]) for g in one["groups"]] == [
            (0, 8), (1, 2), (2, 2), (4, 2), (8, 2)
        ]  # fmt: skip
        assert 0 < one["verbatim"]["held_in"]["messages"] <= 40
        assert one["verbatim"]["held_out"]["messages"] == 12
    assert report == read_object(run / "memory.json")

    def loaded(*_, **__):
        raise AssertionError("measured again")

    with monkeypatch.context() as patched:
        patched.setattr(LocalModel, "load", loaded)
        assert measure_memory(str(run), held_out=held_out, device="cpu") == report
    base = measure_memory(str(run / "base"), canaries=canary_list(planted), device="cpu")
    assert base["checkpoints"][0]["groups"][0]["canaries"] == 8

    moved = planted.read_text(), canary_list(planted).read_text()
    canary_list(planted).write_text(moved[1].replace("@example.com", "@example.org"))
    try:
        with pytest.raises(RunError, match="canaries of this run"):
            measure_memory(str(run), device="cpu")
    finally:
        canary_list(planted).write_text(moved[1])


@pytest.mark.slow
def test_training_stops_when_secrets_are_remembered_and_keeps_earlier_weights(planted, tmp_path):
    run = tmp_path / "run"
    config = settings(planted, steps=400, max_exposure=8.0, checkpoint_every=25)
    summary = train(config, run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    bits = {one["step"] + 1: one["memory/exposure"] for one in lines if "memory/exposure" in one}
    assert summary.steps < 400 and sum(value >= 8 for value in bits.values()) == 2
    below = max(step for step, value in bits.items() if value < 8)
    assert summary.kept_step == below and summary.kept_exposure == bits[below] < 8
    assert read_object(run / "model" / "soulkit.json")["step"] == below
    audit = measure_memory(str(run), device="cpu")["checkpoints"]
    assert audit[-1]["step"] == below
    once = next(g for g in audit[-1]["groups"] if g["repeats"] == 1)
    assert once["median_exposure"] == pytest.approx(bits[below], abs=0.5)
    assert train(config, run).kept_step == below  # the same command trains no further
