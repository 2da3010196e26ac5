"""`soul train ablate`: every run ordinary, budgets equal, failures told, nothing done twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ConfigError, RunError
from soulkit.runs.records import load_records
from soulkit.train.ablate import Arm, parse_arms, plan_arms
from tests.support.training import random_model, soul

SMALL = ("--task", "tomi", "--data", "tomi=synth:24", "--prompts", 2, "--group-size", 2,
         "--max-tokens", 6, "--lora-r", 2, "--lr", 1e-3)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny", max_context=512)


def common(method: str) -> dict[str, Any]:
    return {"method": method, "model": "m", "tasks": {"tomi": 1.0}, "group_size": 4, "seed": 5}


# --- what is asked for ----------------------------------------------------------------------------


def test_arms_are_spelled_as_methods_with_settings() -> None:
    text = "grpo, ditto:only-copy,ditto:lambda_fb=0:kl_coef=0.01,sdpo-token+grpo:lora.r=4"
    arms = parse_arms(text)
    assert [arm.method for arm in arms] == ["grpo", "ditto", "ditto", "sdpo-token+grpo"]
    assert [dict(arm.settings) for arm in arms] == [
        {}, {"only_copy": True}, {"lambda_fb": 0, "kl_coef": 0.01}, {"lora.r": 4}
    ]  # fmt: skip
    assert [arm.slug for arm in arms] == [
        "grpo", "ditto-only-copy", "ditto-lambda_fb=0-kl_coef=0.01", "sdpo-token+grpo-lora.r=4"
    ]  # fmt: skip


def test_a_spelling_that_is_no_folder_name_gets_one() -> None:
    a, b = (Arm(f"opd:teacher_model=some/{x}", "opd", {}) for x in ("a b", "a/b"))
    assert "/" not in a.slug and a.slug != b.slug


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("grpo,dito", "ditto"), ("sft", "Known"), ("ditto:lamda_fb=0", "lambda_fb"),
        ("ditto:lambda_fb", "lambda_fb=VALUE"), ("grpo,grpo", "twice"), (" , ", "No method"),
        ("ditto:seed=3", "setting"), ("ditto:accept_from=", "no value"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_told(text: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arms(text)
    assert word in " ".join(caught.value.lines())


def test_rollouts_are_matched_by_doubling_drafts_where_nothing_is_refined(tmp_path: Path) -> None:
    arms = parse_arms("grpo,ditto,erl,sdpo-logits,opd:teacher_model=m,grpo:group_size=3")
    sizes = {
        match: [
            r.config.group_size
            for r in plan_arms(arms, tmp_path, None, common, seeds=1, match=match)
        ]
        for match in ("rollouts", "prompts")
    }  # fmt: skip
    assert sizes == {"rollouts": [8, 4, 4, 8, 8, 3], "prompts": [4, 4, 4, 4, 4, 3]}


def test_seeds_count_up_from_the_first(tmp_path: Path) -> None:
    runs = plan_arms(parse_arms("grpo,ditto"), tmp_path, None, common, seeds=2, match="prompts")
    assert [(r.arm.method, r.config.seed) for r in runs] == [
        ("grpo", 5), ("ditto", 5), ("grpo", 6), ("ditto", 6)
    ]  # fmt: skip
    assert runs[0].path == tmp_path / "grpo" / "seed_5"
    for wrong in ({"seeds": 0, "match": "prompts"}, {"seeds": 1, "match": "tokens"}):
        with pytest.raises(ConfigError):
            plan_arms(parse_arms("grpo"), tmp_path, None, common, **wrong)  # type: ignore[arg-type]


def test_the_traits_of_a_method_are_those_of_its_objective() -> None:
    from soulkit.train.objectives.registry import make_objective, method_class, rollout_methods
    from tests.support.training import config

    made = {n: make_objective(config(method=n, teacher_model="m")) for n in rollout_methods()}
    traits = {name: method_class(name).traits(name) for name in made}
    assert {name for name, one in made.items() if one.refines} == {"ditto", "rltf-sd", "erl"}
    for name, one in made.items():
        assert ("refined" in traits[name], "feedback" in traits[name]) == (
            one.refines, one.uses_feedback
        )  # fmt: skip
        assert one.name == name


# --- whole comparisons ----------------------------------------------------------------------------


def ablate(model: Path, out: Path, *more: Any) -> int:
    return soul("train", "ablate", "--model", model, *SMALL, "--out", out, *more)


def state(out: Path) -> dict[tuple[str, int], dict[str, Any]]:
    runs = json.loads((out / "ablation.json").read_text())["runs"]
    return {(line["arm"], line["seed"]): line for line in runs}


@pytest.mark.slow
def test_a_comparison_from_end_to_end(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ablation"
    flags = ("--methods", "grpo,ditto:only_copy,ditto:max_tokens=5000", "--seeds", 2, "--steps", 1)
    assert ablate(model, out, *flags, "--json") == 1
    streams = capsys.readouterr()
    printed = json.loads(streams.out)
    assert [row["arm"] for row in printed["rows"]] == ["grpo", "ditto:only_copy"]
    assert "do not fit" in streams.err and "2 of 6 runs failed" in streams.err

    runs = state(out)
    assert [line["status"] for line in runs.values()] == ["finished", "finished", "failed"] * 2
    assert "do not fit" in runs["ditto:max_tokens=5000", 0]["reason"]
    assert not (out / "ditto-max_tokens=5000" / "seed_0").exists()
    played = {
        arm: {
            (r.example_id, r.step) for r in load_records(out / line["path"] / "episodes.jsonl")
        }
        for (arm, seed), line in runs.items()
        if seed == 0 and line["status"] == "finished"
    }  # fmt: skip
    assert played["grpo"] == played["ditto:only_copy"] and len(played["grpo"]) == 2
    assert {p.name for p in (out / "report").iterdir()} == {
        "index.html", "comparison.json", "figures"
    }  # fmt: skip

    stamps = {p: p.stat().st_mtime_ns for p in out.glob("*/seed_*/*.jsonl")}
    assert ablate(model, out, "--methods", "ditto:only_copy", "--seeds", 2, "--steps", 1) == 0
    assert f"next: soul runs {out}; soul show {out}/" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps  # finished runs are left alone
    assert {arm for arm, _ in state(out)} == {"ditto:only_copy"}

    assert ablate(model, out, "--methods", "ditto:only_copy", "--seeds", 2, "--steps", 2) == 0
    raised = [json.loads(path.read_text()) for path in out.glob("ditto*/seed_*/summary.json")]
    assert [summary["steps"] for summary in raised] == [2, 2]


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from soulkit.train.state.loop import Loop

    out = tmp_path / "ablation"
    flags = ("--methods", "grpo,ditto", "--seeds", 1, "--steps", 2, "--checkpoint-every", 1)
    with monkeypatch.context() as patch:
        checkpoint = Loop.checkpoint

        def stop(loop: Loop, dev: float | None = None) -> None:
            checkpoint(loop, dev)
            raise KeyboardInterrupt

        patch.setattr(Loop, "checkpoint", stop)
        assert ablate(model, out, *flags) == 130
    assert [line["status"] for line in state(out).values()] == ["waiting", "waiting"]
    assert ablate(model, out, *flags) == 0
    assert [line["status"] for line in state(out).values()] == ["finished", "finished"]
    noted = json.loads((out / "grpo" / "seed_0" / "environment.json").read_text())
    assert len(noted["resumed"]) == 1


def test_an_option_reaches_the_methods_that_know_it(tmp_path: Path, model: Path) -> None:
    from soulkit.cli.train import settings_of

    options = {
        "task": ["tomi"],
        "model": "m",
        "lambda_fb": 0.5,
        "teacher": "base",
        "set": ["lr=1e-4"],
    }
    grpo, ditto, sdpo = (settings_of(m, options) for m in ("grpo", "ditto", "sdpo-logits"))
    assert "lambda_fb" not in grpo and ditto["lambda_fb"] == 0.5 and "lambda_fb" not in sdpo
    assert sdpo["teacher"] == "base" and "teacher" not in ditto
    assert grpo["lr"] == ditto["lr"] == sdpo["lr"]


def test_a_folder_without_a_comparison(tmp_path: Path) -> None:
    from soulkit.report.ablation import load_ablation

    with pytest.raises(RunError):
        load_ablation(tmp_path)
