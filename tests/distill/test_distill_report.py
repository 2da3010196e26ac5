"""What a distillation came to, from runs that were really played against servers that know so much.

No model is loaded: three served ones stand for base, expert and generalist.

`soul distill` before anything is played: plans, costs, stages that come too early.

Which weights played: a name may stand for others later, and one model plays after the other.
"""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.cli.app import main
from soulkit.distill.config import DistillConfig, open_distillation
from soulkit.distill.experts import Expert, find_experts
from soulkit.distill.generalist import generalist_config, imitation_config, prompts_a_step
from soulkit.distill.measure import (
    LastLoaded,
    generalist_weights,
    measure,
    measured_folder,
    measurements,
    unmeasured_words,
)
from soulkit.distill.report import (
    Distillation,
    GateInputs,
    distilled,
    gate_results,
    parse_gates,
    read_distillation,
    write_distillation,
)
from soulkit.distill.run import unread_words
from soulkit.distill.sample import refuse_other_samples, refuse_other_teachers, sample
from soulkit.errors import ConfigError, RunError
from soulkit.eval.results.summary import recorded_summary
from soulkit.metrics.comparisons import paired_difference
from soulkit.metrics.retention import LOSS, NO_SPREAD, Retention
from soulkit.models.local.loading import adapter_hash
from soulkit.report.distillation import distillation_parts, remarks_of, write_distillation_page
from soulkit.report.grid import parts_text
from soulkit.runs.folder import Run
from soulkit.runs.jsonl import DISTILLATION_SCHEMA, SUMMARY_SCHEMA, schema_file, write_json
from tests.support.distilling import distillation, save_expert, small_base
from tests.support.evaluation import Body, api, oracle
from tests.support.servers.openai_server import ScriptedServer

ROWS = 60
EXPERT = Expert(task="tomi", folder=Path("adapter"), adapter=Path("adapter"), base="base")


def settings(**more: Any) -> DistillConfig:
    plain: dict[str, Any] = {"experts": "experts", "held_out": {"tomi": f"synth:{ROWS}"}}
    return DistillConfig.model_validate(plain | more)


def sometimes(right: float) -> Callable[[Body], str]:
    """Knows this share of the answers, always the same."""
    gold = oracle("tomi", ROWS)

    def answer(body: Body) -> str:
        text = str(body["messages"][-1]["content"])
        return gold(body) if sum(text.encode()) % 100 < 100 * right else "I cannot say."

    return answer


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run for each share of right answers, and one of half the rows."""
    root = tmp_path_factory.mktemp("played")
    for right in (0.1, 0.5, 0.9):
        with ScriptedServer(answer=sometimes(right)) as server:
            assert api(server.base_url, root / str(right), n=ROWS) == 0
            if right == 0.9:
                assert api(server.base_url, root / "half", "--limit", ROWS // 2, n=ROWS) == 0
    return root


def measured(out: Path, played: Path, **sides: object) -> Path:
    """A distillation's folder with these runs in it."""
    for side, run in sides.items():
        shutil.copytree(played / str(run), out / "measured" / side / "tomi")
    return out


@pytest.fixture(scope="module")
def good(played: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("good")
    open_distillation(out, settings())
    return measured(out, played, base=0.1, expert=0.9, generalist=0.5)


SCHEMAS = {"summary": SUMMARY_SCHEMA, "distillation": DISTILLATION_SCHEMA}


def against(schema: str, value: Any) -> list[str]:
    """What a schema has against a value."""
    jsonschema = pytest.importorskip("jsonschema")
    loaded = json.loads(schema_file(SCHEMAS[schema]).read_text(encoding="utf-8"))
    return [e.message for e in jsonschema.Draft202012Validator(loaded).iter_errors(value)]


def result_of(out: Path, *gates: str, **more: Any) -> Distillation:
    config = settings(**more)
    return distilled(config, [EXPERT], out, parse_gates(gates, ["tomi"]))


def test_retention_is_the_ratio_of_the_gains_on_the_same_rows(good: Path) -> None:
    result = result_of(good)
    (tomi,) = result.tasks
    means = {s: recorded_summary(measured_folder(good, s, "tomi")).tasks["tomi"]["value"].mean
             for s in ("base", "expert", "generalist")}  # type: ignore[arg-type]  # fmt: skip
    base, expert, generalist = (means[s] for s in ("base", "expert", "generalist"))
    assert base is not None and expert is not None and generalist is not None
    assert tomi.kept.ratio == pytest.approx((generalist - base) / (expert - base))
    assert tomi.kept.ci_low is not None and tomi.kept.ci_low < tomi.kept.ratio
    assert (tomi.kept.n_shared, tomi.metric, tomi.mixed) == (ROWS, "value", ())
    assert tomi.lost is not None and tomi.lost.difference == pytest.approx(generalist - expert)
    assert result.macro.ratio == pytest.approx(tomi.kept.ratio)
    assert result.regressions == () and result.passed


def test_gates_are_tested_by_the_ends_of_intervals(good: Path) -> None:
    result = result_of(
        good, "tomi/retention>=-0.5", "retention>=2.5", "mean/retention>=-0.5", "tomi>=-0.5",
        "regressions<=0",
    )  # fmt: skip
    outcomes = [gate.outcome for gate in result.gates]
    assert outcomes[0] == outcomes[2] == outcomes[3] == outcomes[4] == "pass"
    assert outcomes[1] in ("fail", "undecided") and not result.passed
    assert result.gates[1].why.startswith("tomi: ")


def test_answers_that_never_change_still_have_an_interval(played: Path, tmp_path: Path) -> None:
    out = measured(tmp_path, played, base=0.5, expert=0.9, generalist=0.5)
    result = result_of(out, "tomi>=-0.9", "tomi>=-0.01")
    assert [gate.outcome for gate in result.gates] == ["pass", "undecided"]
    assert result.gates[0].low is not None and -0.9 < result.gates[0].low < -0.01
    page = write_distillation_page(result, tmp_path / "report").read_text()
    low = f"{result.gates[0].low:.3f}".replace("-", "\u2212")
    assert f'<strong>0.000</strong><span class="sub">[{low}, ' in page
    gains = "The generalist keeps 0% [" if result.tasks[0].kept.ratio is not None else "How much of"
    assert f"<h1>{gains}" in page


def test_where_grades_do_not_vary_a_gate_is_tested_as_that_of_a_comparison() -> None:
    """The same difference everywhere: how many others there may be follows from the clusters."""
    keys = range(60)
    same = paired_difference(dict.fromkeys(keys, 0.5), dict.fromkeys(keys, 0.5),
                             {key: key for key in keys}, scale=(0.0, 1.0))  # fmt: skip
    of = GateInputs(kept={}, macro=Retention(), differences={"tomi": {"": same}}, regressions=(),
               spans={"tomi": {"": 1.0}})  # fmt: skip
    gates = gate_results(parse_gates(["tomi>=-0.9", "tomi>=-0.01"], ["tomi"]), of)
    assert [gate.outcome for gate in gates] == ["pass", "undecided"]
    assert gates[0].why == "headline: no spread in 60 clusters"


def test_a_gate_on_every_task_stays_shut_where_one_was_not_measured(good: Path) -> None:
    other = Expert(task="hitom", folder=Path("b"), adapter=Path("b"), base="base")
    gates = parse_gates(["retention>=-0.5", "tomi/retention>=-0.5"], ["tomi"])
    result = distilled(settings(), [EXPERT, other], good, gates)
    assert [gate.outcome for gate in result.gates] == ["undecided", "pass"]
    assert result.gates[0].why == "hitom: no held-out rows"


def test_a_ratio_of_zero_is_one_that_lacks_its_interval(good: Path) -> None:
    result = result_of(good)
    kept = Retention(ratio=0.0, n_shared=4, n_clusters=4, method="no-spread", why=NO_SPREAD)
    text = "\n".join(remarks_of(replace(result, tasks=(replace(result.tasks[0], kept=kept),))))
    assert "tomi: no interval, clusters do not vary" in text and "no retention" not in text


def test_a_gate_on_what_is_not_measured_is_refused() -> None:
    for text in ("hitom>=0", "mean>=0.2", "mean/gain>=0.2", "retention/hacked>=0.2"):
        with pytest.raises(ConfigError, match="which is not measured") as raised:
            parse_gates([text], ["tomi"])
        assert all(raised.value.lines())


def test_what_falls_below_the_base_is_named(played: Path, tmp_path: Path) -> None:
    result = result_of(
        measured(tmp_path, played, base=0.5, expert=0.9, generalist=0.1), "regressions<=0"
    )
    assert result.regressions == ("tomi",) and not result.passed
    assert result.tasks[0].kept.ci_high is not None and result.tasks[0].kept.ci_high < 0
    text = parts_text(distillation_parts(result), 200)
    assert "significantly worse than the base: tomi" in text
    assert "gate regressions<=0: fail" in text


def test_without_a_gain_there_is_no_ratio_and_the_reason_is_said(
    played: Path, tmp_path: Path
) -> None:
    result = result_of(
        measured(tmp_path, played, base=0.9, expert=0.5, generalist=0.9), "tomi/retention>=0.1"
    )
    (tomi,) = result.tasks
    assert tomi.kept.ratio is None and tomi.kept.why == LOSS
    assert result.macro.ratio is None and result.gates[0].outcome == "undecided"
    assert f"tomi: no retention, {tomi.kept.why}" in parts_text(distillation_parts(result), 200)


def test_runs_of_other_rows_are_not_put_into_one_ratio(played: Path, tmp_path: Path) -> None:
    out = measured(tmp_path, played, base=0.1, expert="half", generalist=0.5)
    (tomi,) = result_of(out).tasks
    assert tomi.kept.ratio is None and tomi.generalist_gain is None
    assert any("rows" in line for line in tomi.mixed)


def test_a_missing_measurement_is_an_error(played: Path, tmp_path: Path) -> None:
    measured(tmp_path, played, base=0.1)
    with pytest.raises(RunError, match="The expert has not been measured on 'tomi'"):
        result_of(tmp_path)


def test_the_file_the_table_and_the_page_say_the_same(
    good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_distillation(good, settings())
    capsys.readouterr()
    assert main(["runs", str(good), "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["state"], line["progress"]["done"]) == ("unfinished", 0)
    assert main(["report", str(good)]) == 2
    assert "has no report yet" in capsys.readouterr().err
    result = result_of(good, "retention>=-0.5")
    write_distillation(run, result)
    assert read_distillation(good) == result
    written = json.loads((good / "summary.json").read_text())
    assert against("summary", written) == against("distillation", written["distillation"]) == []
    assert against("distillation", {**written["distillation"], "tasks": 1})
    assert main(["report", str(good), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["tasks"][0]["kept"]["ratio"] == result.tasks[0].kept.ratio
    assert main(["report", str(good)]) == 0
    text = capsys.readouterr().out
    assert "retention" in text and "gate retention>=-0.5: pass" in text
    assert main(["runs", str(good), "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    mean = result.tasks[0].cells["generalist"].mean
    assert (line["state"], line["command"], line["headlines"][0]["mean"]) == (
        "finished", "distill", mean,
    )  # fmt: skip
    page = write_distillation_page(result, good / "report").read_text()
    kept = result.tasks[0].kept.ratio
    assert kept is not None and f"<strong>{100 * kept:.0f}%</strong>" in page and "<svg" in page
    for name, files in (("page.html", ["page.html"]), ("f", ["distillation.json", "index.html"])):
        place = good / "shown" / name
        assert main(["report", str(good), "--format", "html", "--out", str(place)]) == 0
        written = place if place.is_dir() else place.parent
        assert sorted(path.name for path in written.iterdir() if path.is_file()) == files
    assert main(["report", str(good), "--figures", str(good / "drawn")]) == 0
    assert {path.name for path in (good / "drawn").iterdir()} == {"scores.pdf", "scores.svg"}
    assert main(["report", str(good), str(measured_folder(good, "base", "tomi"))]) == 2
    assert "cannot be shown in one table" in capsys.readouterr().err


def test_measurements_differ_in_the_weights_alone() -> None:
    config = settings(held_out_limit=7, limit=3, seed=5, retention=True)
    parts = measurements(config, [EXPERT], Path("out"))
    assert [(p.side, p.task) for p in parts] == [
        ("base", "tomi"), ("base", "instructions"), ("expert", "tomi"),
        ("generalist", "tomi"), ("generalist", "instructions"),
    ]  # fmt: skip
    weights = {"model", "adapter"}
    of_tomi = [p.config.model_dump(exclude=weights) for p in parts if p.task == "tomi"]
    assert of_tomi[0] == of_tomi[1] == of_tomi[2]
    one = parts[0].config
    assert (one.temperature, one.repeats, one.limit, one.seed) == (0.0, 1, 7, 5)
    assert parts[-2].config.adapter == "out/generalist/model" and one.adapter is None


def test_tasks_without_held_out_rows_are_named() -> None:
    other = Expert(task="hitom", folder=Path("b"), adapter=Path("b"), base="base")
    assert unmeasured_words(settings(), [EXPERT]) == ""
    assert "no retention is measured: hitom" in unmeasured_words(settings(), [EXPERT, other])


def test_steps_follow_from_epochs_samples_and_batch() -> None:
    training = imitation_config(settings(epochs=2.5, batch=8, lr=1e-3), [EXPERT], Path("out"), 100)
    assert (training.steps, training.sft_batch, training.lr) == (32, 8, 1e-3)
    (source,) = training.corpora
    assert (source.path, source.side) == ("out/selected.jsonl", "assistant")
    assert (training.model, training.adapter) == ("base", None)


def test_on_policy_as_many_replies_are_sampled_as_by_rejection() -> None:
    config = settings(by="opd", data={"tomi": "synth:100"}, samples=3, batch=12)
    training = generalist_config(config, [EXPERT], Path("out"))
    # 100 prompts, 16 a step at most: ten steps of ten, and none of them is asked twice.
    assert (training.method, training.group_size, training.prompts_per_step) == ("opd", 3, 10)
    assert [prompts_a_step(n) for n in (1, 7, 16, 17, 300)] == [1, 7, 16, 9, 15]
    assert training.steps * training.prompts_per_step * training.group_size == 300
    assert training.teacher_adapters == {"tomi": "adapter"}
    served = Expert(task="tomi", base="base")
    with pytest.raises(ConfigError, match="are not adapters"):
        generalist_config(config, [served], Path("out"))


@pytest.mark.parametrize(
    ("words", "message"),
    [(["samples"], "There is no stage 'samples'"), ([], "missing: --experts")],
)
def test_mistakes_are_three_lines(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    experts = ["--experts", "nowhere"] if words else []
    assert main(["distill", *words, *experts]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-3] and lines[-1].startswith("fix: ")


def trained_with(out: Path, losses: list[float], **more: Any) -> Path:
    """The folder with a generalist whose training had these losses."""
    training = imitation_config(settings(**more), [EXPERT], out, 100)
    run = Run.open(out / "generalist", "train sft", training.identity())
    lines = [{"step": i, "loss/total": loss} for i, loss in enumerate(losses)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


STILL, FALLING = [0.65, 0.60, 0.58, 0.56, 0.57], [0.65, 0.5, 0.3, 0.2, 0.2]
RISING = [0.65, 0.7, 1.4, 2.2, 2.6]


@pytest.mark.parametrize(
    ("generalist", "losses", "said", "unsaid"),
    [
        (0.1, RISING, ["kept on tomi", "0.650 to 2.600", "a rising loss", "lower --lr"], ["raise"]),
        (0.1, STILL, ["less than half of the gain is kept on tomi", "0.650 to 0.570 in 5 training",
                      "hardly changed", "raise --epochs or --lr"], []),
        (0.1, FALLING, ["kept on tomi", "0.650 to 0.200", "more --epochs"], ["hardly changed"]),
        (0.9, STILL, [], ["training loss"]),  # little was left to learn
        (0.9, FALLING, [], ["training loss"]),
    ],
)  # fmt: skip
def test_where_little_is_kept_the_report_says_how_the_training_went(
    played: Path, tmp_path: Path, generalist: float, losses: list[float], said: list[str],
    unsaid: list[str],
) -> None:  # fmt: skip
    out = trained_with(measured(tmp_path, played, base=0.1, expert=0.9, generalist=generalist),
                       losses)  # fmt: skip
    text = "\n".join(remarks_of(result_of(out)))
    assert all(part in text for part in said) and not any(part in text for part in unsaid)


@pytest.mark.parametrize(
    ("expert", "generalist", "losses", "said", "little"),
    [
        (0.5, 0.5, STILL, True, False),
        (0.5, 0.5, FALLING, False, False),
        (0.9, 0.1, STILL, True, True),
    ],
)
def test_a_loss_that_hardly_moved_is_named_without_a_gain_and_below_the_base(
    played: Path, tmp_path: Path, expert: float, generalist: float, losses: list[float],
    said: bool, little: bool,
) -> None:  # fmt: skip
    folder = measured(tmp_path, played, base=0.5, expert=expert, generalist=generalist)
    text = "\n".join(remarks_of(result_of(trained_with(folder, losses))))
    assert ("hardly changed" in text) is said
    assert ("less than half of the gain is kept on tomi" in text) is little


def test_few_samples_are_learned_in_more_and_smaller_updates() -> None:
    def taken(lines: int, **more: Any) -> tuple[int, int]:
        training = imitation_config(settings(**more), [EXPERT], Path("out"), lines)
        return training.sft_batch, training.steps

    assert taken(207) == (6, 104) and taken(5000) == (32, 469)
    assert taken(20) == (4, 15) and taken(207, batch=32) == (32, 20)
    assert taken(207, epochs=6) == (6, 207)  # more epochs are more updates


pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory.mktemp("base") / "model")


def soul(base: Path, *words: object, where: str = "http://127.0.0.1:9/v1") -> int:
    """`soul distill` with two served experts; nobody answers there unless said otherwise."""
    experts = [f"--experts={task}=endpoint:expert@{where}" for task in ("hitom", "tomi")]
    rows = ("--data", "synth:6", "--held-out", "synth:6", "--held-out-limit", 4)
    options = ("--model", base, *experts, *rows, "--samples", 3, "--batch", 4, "--epochs", 6)
    return main([str(word) for word in (*words, *options)])


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_a_plan_names_every_stage_and_sums_up(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert soul(base, "plan", "distill", "--out", out, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    stages: dict[str, Any] = {one["stage"]: one for one in plan["stages"]}
    assert list(stages) == ["sample", "train", "report"] and not out.exists()
    assert stages["sample"]["episodes"] == 2 * 6 * 3
    assert stages["train"]["remarks"] == [
        "18 steps over 12 selected samples, if all prompts pass the selection"
    ]
    # Base, expert and generalist, four rows of two tasks each.
    assert stages["report"]["episodes"] == 3 * 2 * 4
    assert plan["whole"]["episodes"] == 36 + 24
    assert plan["whole"]["machine"]["memory"] == max(
        one["machine"]["memory"] for one in plan["stages"] if one["machine"]
    )
    assert soul(base, "plan", "distill", "--out", out) == 0
    assert "stage train" in capsys.readouterr().out


def test_nothing_is_written_before_the_cost_is_agreed_to(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    out = tmp_path / "out"
    paid = "https://experts.example/v1"
    assert soul(base, "distill", "--out", out, where=paid) == 2
    words = printed(capsys)
    assert words.count("cost of this run") == 1 and "--yes" in words
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["select"], "sample"),
        (["train"], "select"),
        (["report"], "There is no generalist"),
        (["sample", "--by", "opd"], "There is no stage 'sample' with --by opd"),
        (["--gate", "fantom/retention>=0.6"], "which is not measured"),
    ],
)
def test_stages_that_come_too_early_and_gates_on_nothing(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], what: str
) -> None:
    assert soul(base, "distill", *words, "--out", tmp_path / "out") == 2
    lines = [line for line in printed(capsys).splitlines() if line.startswith(("error:", "why:"))]
    assert len(lines) == 2 and what in " ".join(lines)


def test_a_changed_setting_is_refused_by_name(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with ScriptedServer(answer="<answer>A</answer>") as server:
        assert soul(base, "distill", "select", "--out", out, where=server.base_url) == 2
        printed(capsys)
        (out / "selection.json").write_text("{}")
        assert soul(base, "distill", "--out", out, "--near", 0.5, where=server.base_url) == 2
        assert not server.requests
    words = printed(capsys)
    assert "near: 0.8 -> 0.5" in words and "select, train, report" in words


TASKS = ("hitom", "tomi")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts, and another one that takes the place of the second in the tests."""
    root = tmp_path_factory.mktemp("made")
    base = small_base(root / "base")
    for task in TASKS:
        save_expert(root / "experts" / task, base, task)
    save_expert(root / "other", base, "tomi", seed=1)
    return root


@pytest.fixture
def config(made: Path, tmp_path: Path) -> DistillConfig:
    for name in ("experts", "other"):
        shutil.copytree(made / name, tmp_path / name)
    return distillation(
        tmp_path / "experts", data={"*": "synth:2"}, held_out={"*": "synth:2"}, samples=1,
        max_tokens=2, batch_size=4, exclude_overlap=True,
    )  # fmt: skip


def replace_adapter(there: Path, tmp_path: Path) -> None:
    name = "adapter_model.safetensors"
    shutil.copy(tmp_path / "other" / name, there / name)


def test_a_model_is_loaded_once_for_its_runs_and_never_beside_another(
    config: DistillConfig, tmp_path: Path
) -> None:
    parts = measurements(config, find_experts(config), tmp_path / "out")
    last = LastLoaded()
    first = last.load(parts[0].config)
    again = last.load(parts[1].config)
    assert (parts[0].side, parts[1].side, parts[1].task) == ("base", "base", "tomi")
    assert again is not first and again.model is first.model
    weights = weakref.ref(first.model)
    del first, again
    expert = last.load(parts[2].config)
    assert parts[2].side == "expert" and expert.policy_version and weights() is None


@pytest.mark.slow
def test_what_was_measured_of_other_weights_is_refused(
    config: DistillConfig, tmp_path: Path
) -> None:
    config = config.model_copy(update={"held_out": {"tomi": "synth:1"}})
    out = tmp_path / "out"
    shutil.copytree(tmp_path / "experts" / "tomi", generalist_weights(out))
    experts = find_experts(config)
    measure(config, experts, out)
    measure(config, experts, out)  # finished: the same weights are what they are
    replace_adapter(generalist_weights(out), tmp_path)
    with pytest.raises(RunError, match="made with different weights than the generalist has now"):
        measure(config, experts, out)


def test_samples_of_an_expert_that_was_trained_on_are_refused(
    config: DistillConfig, tmp_path: Path
) -> None:
    """Also once something was selected from them: they would pass for those of the new weights."""
    out = tmp_path / "out"
    sample(config, find_experts(config), out)
    (out / "selection.json").write_text("{}")
    sample(config, find_experts(config), out)
    replace_adapter(tmp_path / "experts" / "tomi", tmp_path)
    with pytest.raises(RunError, match="made with different weights") as caught:
        refuse_other_samples(out, find_experts(config))
    assert "experts/tomi" in caught.value.what
    with pytest.raises(RunError, match="made with different weights"):
        sample(config, find_experts(config), out)


def test_a_generalist_of_other_teachers_is_refused(config: DistillConfig, tmp_path: Path) -> None:
    adapters = {task: str(tmp_path / "experts" / task) for task in TASKS}
    prints = {
        task: {"model": "base", "adapter_weights": adapter_hash(adapter)}
        for task, adapter in adapters.items()
    }
    write_json(tmp_path / "conditions.json", {"players": {}, "tasks": {}, "teachers": prints})
    refuse_other_teachers(tmp_path, adapters)
    replace_adapter(tmp_path / "experts" / "tomi", tmp_path)
    with pytest.raises(RunError, match="than the tomi expert has now"):
        refuse_other_teachers(tmp_path, adapters)


def test_settings_that_the_road_does_not_read_are_named() -> None:
    assert unread_words(distillation(Path("x"), by="opd", epochs=2, quota=3)) == (
        "ignored with --by opd: epochs, quota"
    )
    assert unread_words(distillation(Path("x"), by="opd")) == ""
