"""`soul eval local` with a tiny real model: resume, determinism, repeats, real text, overflow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from soulkit.data.files import write_rows
from soulkit.models.local.tiny import build_tiny
from soulkit.tasks.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.train.forward.policy import load_policy
from tests.support.evaluation import (
    FAST,
    examples,
    records,
    replaced,
    soul,
    summary,
    three_lines,
    value,
    visitor,
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model that knows the words of the tasks' prompts."""
    registry = load_registry()
    texts = [
        segment.text
        for name in ("tomi", "secret_keeper")
        for example in examples(name, 8)
        for segment in registry.task(name).preview(example)
    ]
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny", texts, max_context=512)


def local(model: Path, out: Path, *arguments: object, task: str = "tomi", n: int = 5) -> int:
    rows = ("--task", task, "--data", f"synth:{n}", "--max-tokens", 6)
    # Untrained, it hardly ever ends a reply.
    tolerant = ("--max-unscored", 1)
    usual = ("--model", model, "--out", out, *rows, *FAST[:2], *tolerant)
    return soul("eval", "local", *replaced(usual, arguments))


def texts(out: Path) -> dict[str, str]:
    return {r.key: r.episode.transcript[-1].text for r in records(out)}


def test_greedy_is_the_same_in_any_batch(tiny: Path, tmp_path: Path, capsys) -> None:
    assert local(tiny, tmp_path / "a", "--temperature", 0) == 0
    assert local(tiny, tmp_path / "b", "--temperature", 0, "--batch-size", 2, "--json") == 0
    assert texts(tmp_path / "a") == texts(tmp_path / "b")
    printed = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))
    assert printed == summary(tmp_path / "b")
    assert printed["n_scored"] == 5
    assert printed["model"] == str(tiny)
    assert (tmp_path / "b" / "config.yaml").exists()


def test_repeats_are_different_samples_of_one_prompt(tiny: Path, tmp_path: Path) -> None:
    assert local(tiny, tmp_path / "a", "--repeats", 4, n=3) == 0
    by_example: dict[str, set[str]] = {}
    for key, text in texts(tmp_path / "a").items():
        by_example.setdefault(key.split("/")[1], set()).add(text)
    assert [len(replies) for replies in by_example.values()] == [4, 4, 4]
    assert value(tmp_path / "a")["n"] == 12
    assert local(tiny, tmp_path / "b", "--seed", 1, "--repeats", 4, n=3) == 0
    assert not set(texts(tmp_path / "a").values()) & set(texts(tmp_path / "b").values())


def test_a_run_cut_short_ends_as_if_it_had_not_been(tiny: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert local(tiny, whole) == 0
    assert local(tiny, cut) == 0
    lines = (cut / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    (cut / "episodes.jsonl").write_bytes(lines[0] + lines[1] + lines[2][:80])
    (cut / "summary.json").unlink()
    assert local(tiny, cut) == 0
    assert texts(cut) == texts(whole)
    assert value(cut) == value(whole)
    tokens = {r.key: r.episode.final.token_ids for r in records(cut) if r.episode.final}
    assert tokens == {r.key: r.episode.final.token_ids for r in records(whole) if r.episode.final}


def test_another_adapter_under_the_same_name_is_another_model(
    tiny: Path, tmp_path: Path, capsys
) -> None:
    adapter, out = tmp_path / "adapter", tmp_path / "run"
    policy = load_policy(TrainConfig(method="grpo", model="x", tasks={"tomi": 1.0}), tiny)
    policy.save(adapter)
    assert local(tiny, out, "--adapter", adapter) == 0
    assert local(tiny, out, "--adapter", adapter) == 0  # finished, and still the same weights
    with torch.no_grad():
        for _, parameter in policy.trained:
            parameter.add_(0.01)
    policy.save(adapter)
    capsys.readouterr()
    assert local(tiny, out, "--adapter", adapter) == 2
    assert "other adapter weights" in three_lines(capsys.readouterr().err)[0]


def test_text_in_words_the_model_never_saw(tiny: Path, tmp_path: Path) -> None:
    row = {
        "story": "Zoë déposa l’œuf 🥚 dans le garde-manger; \t\u200bथोड़ा 水 — <|im_start|> “ok”.",
        "question": "Où est l’œuf, à présent ?",
        "answer": "garde-manger",
    }
    write_rows(tmp_path / "rows.jsonl", [row], data_source="tomi")
    data = ("--data", tmp_path / "rows.jsonl")
    out = tmp_path / "run"
    base = ("--task", "tomi", "--max-tokens", 5, "--out", out, *FAST[:2], "--max-unscored", 1)
    assert soul("eval", "local", "--model", tiny, *base, *data) == 0
    assert value(out)["n_scored"] == 1


def test_a_dialogue_with_the_served_visitor(tiny: Path, tmp_path: Path) -> None:
    with visitor() as url:
        partner = ("--partner", f"endpoint:scripted-visitor@{url}")
        assert local(tiny, tmp_path / "run", *partner, task="secret_keeper", n=2) == 0
    assert value(tmp_path / "run", "secret_keeper")["n_scored"] == 2
    for record in records(tmp_path / "run"):
        assert 8 <= len(record.episode.transcript) <= 12
        assert len(record.episode.traces[0].turns) * 2 == len(record.episode.transcript)


def test_prompts_that_do_not_fit_stop_the_run_or_stay_unscored(
    tiny: Path, tmp_path: Path, capsys
) -> None:
    out, short = tmp_path / "run", ("--max-context", 100)
    assert local(tiny, out, *short, n=8) == 2
    what, why, fix = three_lines(capsys.readouterr().err)
    assert what.endswith("of 8 prompts of 'tomi' do not fit the model's context.")
    assert "the model holds 100" in why
    assert "--allow-overflow" in fix
    assert not out.exists()
    assert local(tiny, out, *short, "--allow-overflow", "--max-unscored", 0, n=8) == 1
    over = int(what.split()[0])
    assert 0 < over <= 8
    cell = value(out)
    assert cell["unscored"] == {"context_overflow": over}
    assert cell["n_scored"] == 8 - over
    assert "context_overflow" in capsys.readouterr().err


@pytest.mark.slow
def test_the_way_out_names_a_limit_that_fits(tiny: Path, tmp_path: Path, capsys) -> None:
    assert local(tiny, tmp_path / "run", "--max-tokens", 500) == 2
    fix = three_lines(capsys.readouterr().err)[2]
    fits = int(fix.split("--max-tokens ")[1].split()[0])
    assert local(tiny, tmp_path / "run", "--max-tokens", fits) == 0
    capsys.readouterr()
    assert local(tiny, tmp_path / "all", "--max-tokens", fits + 1) == 2
