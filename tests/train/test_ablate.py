"""`soul train ablate`: every run ordinary, budgets equal, failures told, nothing done twice.

`soul train ablate` puts no difference between methods that are not measured the same way.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.errors import ConfigError, RunError
from soulkit.report import ablation
from soulkit.report.ablation import write_ablation
from soulkit.runs.records import load_records
from soulkit.train.ablate import Arm, parse_arm, parse_arms, plan_arms
from tests.support import judged
from tests.support.servers.openai_server import Body, Fault, ScriptedServer
from tests.support.training import CTRL_C, random_model, soul

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


def test_a_sweep_has_an_arm_for_every_combination() -> None:
    arms = parse_arms("grpo,ditto:lambda_fb=0|0.5:lora.r=2 | 4")
    assert [arm.spelling for arm in arms] == [
        "grpo", *(f"ditto:lambda_fb={a}:lora.r={r}" for a in ("0", "0.5") for r in (2, 4))
    ]  # fmt: skip
    assert dict(arms[-1].settings) == {"lambda_fb": 0.5, "lora.r": 4}


def test_a_spelling_that_is_no_folder_name_gets_one() -> None:
    a, b = (Arm(f"opd:teacher_model=some/{x}", "opd", {}) for x in ("a b", "a/b"))
    assert "/" not in a.slug and a.slug != b.slug


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("grpo,dito", "ditto"), ("sft", "Choose one of"), ("ditto:lamda_fb=0", "lambda_fb"),
        ("ditto:lambda_fb", "lambda_fb=VALUE"), ("grpo,grpo", "twice"), (" , ", "names no method"),
        ("ditto:seed=3", "setting"), ("erl:accept_from=", "no value"),
        ("ditto:accept_from=1", "not a setting of ditto"),
        ("ditto:lambda_fb=1|", "no value"), ("ditto:lambda_fb=1|1", "twice"),
        ("ditto:lambda_fb=0|0.0", "are the same arm"), ("ditto:lambda_fb=0:lambda-fb=1", "twice"),
        ("ditto:lambda_fb=" + "|".join(map(str, range(201))), "201 arms"),
        ("grpo," * 5000, "5,000 arms"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_told(text: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arms(text)
    assert word in " ".join(caught.value.lines())


def test_a_matrix_has_no_sweeps() -> None:
    with pytest.raises(ConfigError, match="several values") as caught:
        parse_arm("grpo:lora.r=2|4")
    assert "soul train ablate --methods 'grpo:lora.r=2|4'" in caught.value.way_out


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
    for wrong in (
        {"seeds": 0, "match": "prompts"}, {"seeds": 10**20, "match": "prompts"},
        {"seeds": 1, "match": "tokens"},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            plan_arms(parse_arms("grpo"), tmp_path, None, common, **wrong)  # type: ignore[arg-type]


def test_the_traits_of_a_method_are_those_of_its_objective() -> None:
    from soulkit.train.objectives.base import make_objective, method_class, rollout_methods
    from tests.support.training import config

    made = {n: make_objective(config(method=n, teacher_model="m")) for n in rollout_methods()}
    traits = {name: method_class(name).traits(name) for name in made}
    assert {name for name, one in made.items() if one.refines} == {
        "ditto",
        "rltf-sd",
        "erl",
        "critique-grpo",
    }
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
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_comparison_from_end_to_end(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], parallel: int
) -> None:
    out = tmp_path / "ablation"
    flags = ("--methods", "grpo,ditto:only_copy,ditto:max_tokens=5000", "--seeds", 2, "--steps", 1,
             "--parallel", parallel)  # fmt: skip
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
            raise CTRL_C

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


SMALL_RUN = ("--task", "tomi", "--data", "tomi=synth:24", "--prompts", 2, "--group-size", 2,
         "--max-tokens", 6, "--lora-r", 2, "--lr", 1e-3, "--steps", 1, "--seeds", 1)  # fmt: skip
NOBODY = "http://127.0.0.1:9/v1"
"""Where no server is: what is refused here asks nobody."""


def scene(tmp_path: Path, methods: str, *more: Any) -> int:
    """Methods on a judged dialogue, with the players j, k, p and q by name."""
    book = {name: {"model": name, "base_url": NOBODY} for name in "jkpq"}
    (tmp_path / "book.yaml").write_text(yaml.safe_dump({"endpoints": book}))
    return soul(
        "train", "ablate", "--methods", methods, "--model", "m", "--task", "sotopia",
        "--data", "sotopia=synth:8", "--endpoints", tmp_path / "book.yaml", "--partner", "p",
        "--judge", "j", "--out", tmp_path / "out", *more,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("judge=k", "judge endpoint:j@http://127.0.0.1:9/v1 vs endpoint:k@"),
        ("judge_samples=2", "judge samples 1 vs 2"),
        ("judge_order=seeded", "judge order both vs seeded"),
        ("partner=q", "partner endpoint:p@http://127.0.0.1:9/v1 vs endpoint:q@"),
        ("protocol=reference", "protocol paper vs reference"),
        ("limit=4", "limit none vs 4"),
        ("eval_every=1", "dev split off vs on"),
        ("tasks.sotopia=2", "mixing ratio 1.0 vs 2.0"),
        ("data.sotopia=other.jsonl", "rows of synth:8 vs other.jsonl"),
        ("where.hard=maybe", "where {} vs {'hard': 'maybe'}"),
    ],
)
def test_methods_that_would_be_measured_in_another_way_do_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, words: str
) -> None:
    assert scene(tmp_path, f"grpo,ditto,grpo:{setting}") == 2
    lines = [line.partition(": ") for line in capsys.readouterr().err.splitlines()]
    assert [head for head, *_ in lines] == ["error", "why", "fix"]
    assert f"grpo vs grpo:{setting}: sotopia: {words}" in lines[0][2]
    assert "against ditto" not in lines[0][2]
    assert "--force-mixed" in lines[2][2]
    assert not (tmp_path / "out").exists()


def test_a_partner_that_every_method_trains_is_another_one_in_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scene(tmp_path, "grpo,ditto", "--partner", "sotopia=actor") == 2
    assert "grpo vs ditto: sotopia: partner actor:m" in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_method_may_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = "grpo,ditto:coach=k,ditto:temperature=0.5,grpo:max_tokens=9,grpo:group_size=3"
    assert scene(tmp_path, f"{arms},grpo:judge=j", "--dry-run") == 0
    assert scene(tmp_path, "grpo,grpo:judge=k", "--dry-run", "--force-mixed") == 0


@pytest.mark.slow
def test_a_mixture_is_told_as_one(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ("train", "ablate", "--model", model, *SMALL_RUN, "--out", out, "--methods",
               "grpo,grpo:limit=12,grpo:temperature=0.5")  # fmt: skip
    assert soul(*command) == 2
    assert soul(*command, "--force-mixed", "--json") == 0
    capsys.readouterr()
    first, fewer, cold = ablation.load_ablation(out).rows
    assert first.mixed == cold.mixed == () and fewer.remarks == ()
    assert fewer.mixed == ("tomi: training rows 24 vs 12, 12 in both",)
    assert cold.remarks == ("tomi: temperature 1.0 vs 0.5",)
    assert fewer.final_difference is not None and cold.final_difference is not None
    page = (out / "report" / "index.html").read_text()
    assert "grpo vs grpo:limit=12, not measured the same way, so the difference has" in page

    state = json.loads((out / "ablation.json").read_text())
    (out / "ablation.json").write_text(json.dumps({**state, "force_mixed": False}))
    comparison = ablation.load_ablation(out)
    _, fewer, cold = comparison.rows
    assert fewer.final_difference is fewer.area_difference is fewer.dev_difference is None
    assert cold.final_difference is not None and fewer.final.mean is not None
    page = write_ablation(comparison, tmp_path / "page").read_text()
    apart = "grpo vs grpo:limit=12, not measured the same way, so no difference is given"
    for line in (
        f"{apart}: tomi: training rows 24 vs 12, 12 in both.",
        "grpo vs grpo:temperature=0.5: tomi: temperature 1.0 vs 0.5.",
    ):
        assert line in page and line in ablation.method_notes(comparison)
    saved = json.loads((tmp_path / "page" / "comparison.json").read_text())["rows"][1]
    assert saved["final_difference"] is None and saved["mixed"] == list(fewer.mixed)

    runs = [out / arm / "seed_0" for arm in ("grpo", "grpo-limit=12", "grpo-temperature=0.5")]
    capsys.readouterr()
    assert soul("compare", *runs[:2]) == 2
    assert "tomi: training rows 24 vs 12" in capsys.readouterr().err
    assert soul("compare", runs[0], runs[2], "--json") == 0
    *remarks, drafted = json.loads(capsys.readouterr().out)["remarks"]
    assert remarks == list(cold.remarks) and "over training drafts" in drafted


@pytest.mark.slow
def test_recorded_methods_with_other_judges_have_no_difference(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the settings cannot tell before the start: somebody else's word in the folder."""
    out = tmp_path / "out"
    assert soul("train", "ablate", "--model", model, *SMALL_RUN, "--out", out, "--methods",
                "grpo,grpo:kl_coef=0.01") == 0  # fmt: skip
    assert ablation.load_ablation(out).rows[1].final_difference is not None
    for arm, name in (("grpo", "j"), ("grpo-kl_coef=0.01", "k")):
        file = out / arm / "seed_0" / "conditions.json"
        record = json.loads(file.read_text())
        seated = {"judge": [{"kind": "endpoint", "model": name, "address": NOBODY}]}
        record["tasks"]["tomi"] |= {"roles": ["judge"], "players": seated}
        file.write_text(json.dumps(record))
    row = ablation.load_ablation(out).rows[1]
    assert row.final_difference is None
    assert row.mixed == (f"tomi: judge endpoint:j@{NOBODY} vs endpoint:k@{NOBODY}",)


def test_judges_of_their_own_need_one_who_scores_all_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scene(tmp_path, "grpo,grpo:judge=k", "--dry-run") == 2
    assert "--eval-judge MODEL" in capsys.readouterr().err.splitlines()[-1]
    assert scene(tmp_path, "grpo,grpo:judge=k", "--dry-run", "--eval-judge", "q") == 0
    capsys.readouterr()
    assert scene(tmp_path, "grpo,grpo:partner=q", "--dry-run", "--eval-judge", "q") == 2
    assert "partner endpoint:p@" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("attempts", [1, 2])
def test_the_judge_of_the_ends_is_asked_as_often_as_the_command_says(
    tmp_path: Path, model: Path, attempts: int
) -> None:
    rows = judged.write_rows(tmp_path / "rows.jsonl", 8)

    def fault(index: int, body: Body) -> Fault | None:
        return Fault.status_error(500) if body["model"] == "q" else None

    with ScriptedServer(answer=judged.judge(), script=fault) as server:
        assert soul(
            "train", "ablate", "--methods", "grpo", "--model", model, "--tasks", judged.TASKS,
            "--task", "essay", "--data", f"essay={rows}", "--judge",
            f"endpoint:j@{server.base_url}", "--eval-judge", f"endpoint:q@{server.base_url}",
            "--prompts", 2, "--group-size", 2, "--max-tokens", 6, "--lora-r", 2, "--steps", 1,
            "--seeds", 1, "--match", "prompts", "--backoff", 0, "--max-attempts", attempts,
            "--out", tmp_path / "out",
        ) in (0, 1)  # fmt: skip
        models = [body["model"] for body in server.requests]
    assert models.count("q") == attempts * models.count("j") > 0


@pytest.mark.slow
def test_ends_of_methods_with_other_judges_are_compared_by_one(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two judged trainings in earnest: what the judges of the training said has no difference."""
    rows = judged.write_rows(tmp_path / "rows.jsonl", 8)
    with ScriptedServer(answer=judged.judge()) as server:
        book = {name: {"model": name, "base_url": server.base_url} for name in "jkq"}
        (tmp_path / "book.yaml").write_text(yaml.safe_dump({"endpoints": book}))
        command = (
            "train", "ablate", "--methods", "grpo,grpo:judge=k", "--model", model, "--tasks",
            judged.TASKS, "--task", "essay", "--data", f"essay={rows}", "--endpoints",
            tmp_path / "book.yaml", "--judge", "j", "--eval-judge", "q", "--prompts", 2,
            "--group-size", 2, "--max-tokens", 6, "--lora-r", 2, "--steps", 1, "--seeds", 1,
            "--match", "prompts", "--backoff", 0, "--out", tmp_path / "out",
        )  # fmt: skip
        assert soul(*command) == 0
        models = [body["model"] for body in server.requests]
        assert models.count("q") == models.count("j") + models.count("k")
        assert soul(*command, "--json") == 0
        assert len(server.requests) == len(models)
        # Another judge of all ends has folders of its own, and nothing is trained again. What that
        # judge said of its own method while training is in the ledger.
        others = ("k" if word == "q" else word for word in command)
        assert soul(*others) == 0 and len(server.requests) - len(models) == models.count("j")
        again = ablation.load_ablation(tmp_path / "out")
        assert again.eval_judge == f"endpoint:k@{server.base_url}"
        assert again.rows[0].judged.mean is not None
        assert soul(*command) == 0
    comparison = ablation.load_ablation(tmp_path / "out")
    first, other = comparison.rows
    assert comparison.eval_judge == f"endpoint:q@{server.base_url}"
    assert other.final_difference is None and "judge endpoint:j@" in other.mixed[0]
    assert first.judged.mean is not None and other.judged_difference is not None
    assert other.judged_difference.mean is not None
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert "final judge score" in page and "endpoint:q@" in page


# --- final evaluation -----------------------------------------------------------------------------


def finals(tmp_path: Path, server: ScriptedServer, model: Path, methods: str, *more: Any) -> int:
    """Two judged arms with a final evaluation by the judge q on other rows."""
    book = {name: {"model": name, "base_url": server.base_url} for name in "jkq"}
    (tmp_path / "book.yaml").write_text(yaml.safe_dump({"endpoints": book}))
    rows = judged.write_rows(tmp_path / "rows.jsonl", 8)
    file = tmp_path / "final.yaml"
    if not file.exists():
        file.write_text(yaml.safe_dump({"task": "essay", "data": str(rows), "judge": "q"}))
    return soul(
        "train", "ablate", "--methods", methods, "--model", model, "--tasks", judged.TASKS,
        "--task", "essay", "--data", f"essay={rows}", "--endpoints", tmp_path / "book.yaml",
        "--judge", "j", "--prompts", 2, "--group-size", 2, "--max-tokens", 6, "--lora-r", 2,
        "--seeds", 1, "--match", "prompts", "--backoff", 0, "--final-eval", file,
        *(() if "--steps" in more else ("--steps", 1)), "--yes", "--out", tmp_path / "out", *more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "methods", "words"),
    [
        ("- essay", "grpo", "contains a list"),
        ("taks: essay", "grpo", "'taks'"),
        ("{task: essay, data: rows.jsonl, judge: q, model: x}", "grpo", "sets 'model'"),
        ("{task: essay, data: rows.jsonl, judge: j}", "grpo", "the judge of grpo"),
        ("{task: essay, data: rows.jsonl, judge: q}", "grpo,ditto:coach=q",
         "the coach of ditto:coach=q"),
    ],
)  # fmt: skip
def test_a_wrong_final_evaluation_is_refused_before_any_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    settings: str, methods: str, words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "final.yaml").write_text(settings)
    with ScriptedServer(answer=judged.judge()) as server:
        assert finals(tmp_path, server, tmp_path, methods) == 2
        assert server.requests == []
    lines = [line.partition(": ") for line in capsys.readouterr().err.splitlines()[-3:]]
    assert [head for head, *_ in lines] == ["error", "why", "fix"] and words in lines[0][2]
    assert not (tmp_path / "out").exists()


def test_the_plan_counts_the_final_evaluations(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(answer=judged.judge()) as server:
        assert finals(tmp_path, server, model, "grpo,ditto", "--dry-run", "--json") == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    (last,) = [one for one in tasks if "final evaluation" in one["task"]]
    assert last["episodes"] == 8 * 3  # two arms and the base model


@pytest.mark.slow
def test_every_arm_is_evaluated_once_after_its_training(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, asked = tmp_path / "out", Counter[str]()
    arms = "grpo,ditto,ditto:max_tokens=5000"

    def fault(index: int, body: Body) -> Fault | None:
        asked[body["model"]] += 1
        down = body["model"] == "q" and 12 < asked["q"] <= 20
        return Fault.status_error(500) if down else None

    def scored() -> list[int]:
        return [one.n_scored for one in ablation.load_ablation(out).finals]

    with ScriptedServer(answer=judged.judge(), script=fault) as server:
        assert finals(tmp_path, server, model, arms, "--max-attempts", 1) == 1
        assert scored() == [8, 4, 4]
        trained = asked["j"]
        assert finals(tmp_path, server, model, arms, "--max-attempts", 1) == 1
        assert scored() == [8, 8, 8] and asked["q"] == 3 * 8 + 8  # only the lost ones again
        assert finals(tmp_path, server, model, arms) == 1 and asked["q"] == 3 * 8 + 8
        streams = capsys.readouterr()
        assert finals(tmp_path, server, model, arms, "--steps", 2) == 2
        assert "earlier step" in capsys.readouterr().err
        (tmp_path / "final.yaml").open("a").write("limit: 4\n")
        assert finals(tmp_path, server, model, arms) == 2
        assert "started with different settings: limit" in capsys.readouterr().err
        assert asked["j"] == trained
    assert "Without a complete result: ditto:max_tokens=5000 seed 0 failed" in streams.out.replace(
        "\n", " "
    )
    comparison = ablation.load_ablation(out)
    assert [one.arm for one in comparison.finals] == ["base model", "grpo", "ditto"]
    for one in comparison.finals:
        assert (one.metric, one.n_scored, one.n) == ("quality", 8, 8) and one.score.low is not None
        assert (one.difference is None) == (one.arm == "grpo")
    assert comparison.rows[1].judged_difference is not None
    page = (out / "report" / "index.html").read_text()
    assert "base model (8/8)" in page and "quality: difference" in page
