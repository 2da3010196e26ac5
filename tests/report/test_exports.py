"""Exports of real runs: the table of episodes, and records of Every Eval Ever.

The runs are evaluations against servers on this machine: questions, judged dialogues with a judge
that fails once, a suite, a server that rejects settings, and a local model with an adapter.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from jsonschema.validators import validator_for

from soulkit.report.exports.episodes import COLUMNS
from soulkit.types import Feedback, Line, Record, Score
from tests.report.test_report import record
from tests.support.evaluation import (
    FAST,
    Body,
    api,
    messages,
    oracle,
    records,
    soul,
    summary,
    three_lines,
    write_records,
)
from tests.support.servers.openai_server import ScriptedServer
from tests.support.sotopia import LINE, judged, ratings
from tests.support.vectors import vectors_folder

PEAK = "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def choice(folder: Path) -> Path:
    """Thirty questions; the first answer is wrong, the second has no answer tag."""
    gold, turn = oracle("tomi", 30), count()

    def answer(body: Body) -> str:
        place = next(turn)
        return ["<answer>the moon</answer>", "=1+1"][place] if place < 2 else gold(body)

    with ScriptedServer(answer=answer) as server:
        assert api(server.base_url, folder / "choice", "--concurrency", "1", "--temperature", "0.3",
                   "--price-in", "2", "--price-out", "4", n=30) == 0  # fmt: skip
    return folder / "choice"


def scenes(out: Path, judge_url: str, *options: str) -> int:
    with ScriptedServer(answer=LINE) as player:
        return api(
            player.base_url, out, "--concurrency", "1", *options,
            "--partner", f"endpoint:p@{player.base_url}", "--judge", f"endpoint:j@{judge_url}",
            task="sotopia", n=3,
        )  # fmt: skip


@pytest.fixture(scope="module")
def dialogue(folder: Path) -> Path:
    """Three judged scenes; the judge's reply on one of them is unreadable, twice."""
    turn = count()
    rating = lambda _: "no verdict" if next(turn) < 2 else ratings()  # noqa: E731
    with ScriptedServer(answer=judged(rating)) as judge:
        assert scenes(folder / "dialogue", judge.base_url, "--max-unscored", "1") == 0
    return folder / "dialogue"


@pytest.fixture(scope="module")
def suite(folder: Path) -> Path:
    with ScriptedServer(answer="<answer>A</answer>") as server:
        actor = ("--model", "Qwen/Qwen3-8B", "--base-url", server.base_url)
        code = soul("eval", "api", *actor, "--suite", "choice", "--data", "synth:4",
                    "--out", folder / "suite", *FAST)  # fmt: skip
    assert code == 0
    return folder / "suite"


@pytest.fixture(scope="module")
def rejecting(folder: Path) -> Path:
    """A server that accepts no temperature."""
    with ScriptedServer(profile="strict-reasoning", answer=oracle("tomi", 6)) as server:
        assert api(server.base_url, folder / "rejecting", "--temperature", "0.3") == 0
    return folder / "rejecting"


@pytest.fixture(scope="module")
def adapted(folder: Path) -> Path:
    from tests.support.training import policy_of, random_model

    model = random_model(folder / "secret" / "base")
    policy_of(model, lora={"r": 4, "alpha": 8}).save(folder / "secret" / "ours" / "adapter")
    code = soul(
        "eval", "local", "--model", model, "--adapter", folder / "secret" / "ours" / "adapter",
        "--task", "tomi", "--data", "synth:4", "--max-tokens", "8", "--out", folder / "adapted",
        "--max-unscored", "1",
    )  # fmt: skip
    assert code == 0
    return folder / "adapted"


# --- records of Every Eval Ever -------------------------------------------------------------------


def exported(run: Path, out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The record and the samples of a run."""
    assert soul("report", run, "--format", "eee", "--out", out) == 0
    (file,) = (out / "data").glob("*/*/*/*.json")
    made: dict[str, Any] = json.loads(file.read_text())
    samples = out / made["detailed_evaluation_results"]["file_path"]
    assert samples == file.with_name(f"{file.stem}_samples.jsonl")
    return made, [json.loads(line) for line in samples.read_text().splitlines()]


def problems(value: Any, schema: str) -> list[str]:
    loaded = json.loads((vectors_folder() / "eee" / f"{schema}.schema.json").read_text())
    return [error.message for error in validator_for(loaded)(loaded).iter_errors(value)]


@pytest.mark.parametrize(
    "name",
    ["choice", "dialogue", "suite", "rejecting", pytest.param("adapted", marks=pytest.mark.slow)],
)
def test_records_and_samples_are_valid_and_belong_together(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run: Path = request.getfixturevalue(name)
    made, samples = exported(run, tmp_path)
    assert problems(made, "eval") == []
    assert [problems(sample, "instance_level_eval") for sample in samples] == [[]] * len(samples)
    results = {one["evaluation_result_id"]: one for one in made["evaluation_results"]}
    assert len(results) == len(made["evaluation_results"])
    for sample in samples:
        assert sample["evaluation_id"] == made["evaluation_id"]
        assert sample["model_id"] == made["model_info"]["id"]
        assert (
            sample["evaluation_name"] == results[sample["evaluation_result_id"]]["evaluation_name"]
        )
    detail = made["detailed_evaluation_results"]
    scored = [one for one in records(run) if one.score.scored]
    assert detail["total_rows"] == len(samples) == len(scored)
    written = (tmp_path / detail["file_path"]).read_bytes()
    assert detail["checksum"] == hashlib.sha256(written).hexdigest()
    assert str(run.parent) not in json.dumps(made) + written.decode()


def test_a_choice_task_has_its_recorded_scores_and_settings(choice: Path, tmp_path: Path) -> None:
    made, samples = exported(choice, tmp_path)
    cells = summary(choice)["tasks"]["tomi"]
    results = {one["evaluation_result_id"]: one for one in made["evaluation_results"]}
    assert set(results) == {f"tomi/{name}" for name in cells if name.partition("/")[0] == "value"}
    whole, cell = results["tomi/value"], cells["value"]
    assert whole["metric_config"] == {
        "metric_name": "accuracy", "lower_is_better": False, "score_type": "continuous",
        "min_score": 0.0, "max_score": 1.0,
    }  # fmt: skip
    details = whole["score_details"]
    assert details["score"] == cell["mean"] == pytest.approx(28 / 30)
    interval = details["uncertainty"]["confidence_interval"]
    assert (interval["lower"], interval["upper"]) == (cell["ci_low"], cell["ci_high"])
    assert details["uncertainty"]["num_samples"] == 30
    settings = whole["generation_config"]
    assert settings["generation_args"] == {"temperature": 0.3, "top_p": 1.0, "max_tokens": 256}
    part = next(name for name in results if "order=" in name)
    assert results[part]["evaluation_name"] == part.replace("/value", "")
    assert [one["evaluation"]["score"] for one in samples].count(1.0) == 28
    for sample in samples:
        right = sample["evaluation"]["score"] == 1.0
        assert sample["evaluation"]["is_correct"] is right
        assert sample["interaction_type"] == "single_turn"
        parsed = [one["extracted_value"] for one in sample["answer_attribution"]]
        assert parsed == (sample["input"]["reference"] if right else parsed)
        assert bool(parsed) is (sample["metadata"]["status"] == "ok")
        assert sample.get("error") == (None if sample["metadata"]["status"] == "ok" else "no_tag")
    assert made["model_info"] == {
        "name": "m", "id": "m",
        "additional_details": {"deployment_type": "unknown", "model_availability": "unknown",
                               "kind": "api"},
    }  # fmt: skip


def test_an_unscored_dialogue_is_counted_and_is_not_a_zero(dialogue: Path, tmp_path: Path) -> None:
    made, samples = exported(dialogue, tmp_path)
    whole = next(
        one for one in made["evaluation_results"] if one["evaluation_result_id"] == "sotopia/value"
    )
    details = whole["score_details"]["details"]
    assert (details["n"], details["n_scored"]) == ("3", "2")
    assert json.loads(details["unscored"]) == {"judge_error": 1}
    assert whole["score_details"]["score"] > 0
    assert len(samples) == 2 and all(one["evaluation"]["score"] > 0 for one in samples)
    counts = made["detailed_evaluation_results"]["additional_details"]
    assert counts == {"episodes": "3", "unscored": "1"}


def test_a_dialogue_names_its_judge_and_who_says_what(dialogue: Path, tmp_path: Path) -> None:
    made, samples = exported(dialogue, tmp_path)
    for one in made["evaluation_results"]:
        judging = one["metric_config"].get("llm_scoring")
        assert bool(judging) is one["evaluation_result_id"].startswith("sotopia/value")
        if judging:
            (judge,) = judging["judges"]
            assert (judge["model_info"]["name"], judge["temperature"]) == ("j", 0.0)
            assert summary(dialogue)["prompts"]["sotopia"]["judge"][0] in judging["input_prompt"]
    for sample in samples:
        (episode,) = [one for one in records(dialogue) if one.example_id == sample["sample_id"]]
        acted = episode.episode.traces[0].seat
        lines = [(line.seat == acted, line.text) for line in episode.episode.transcript]
        assert {mine for mine, _ in lines} == {True, False}
        assert [(m["role"] == "assistant", m["content"]) for m in sample["messages"]] == lines


def test_a_rejected_setting_is_not_reported_as_used(rejecting: Path, tmp_path: Path) -> None:
    settings = exported(rejecting, tmp_path)[0]["evaluation_results"][0]["generation_config"]
    assert "temperature" not in settings["generation_args"]
    assert json.loads(settings["additional_details"]["rejected_by_server"]) == {"temperature": 1}


def test_a_suite_is_one_record_below_its_name(suite: Path, tmp_path: Path) -> None:
    made, _ = exported(suite, tmp_path)
    names = {one["evaluation_name"].partition("/")[0] for one in made["evaluation_results"]}
    assert names == set(summary(suite)["tasks"]) and len(names) > 2
    assert (tmp_path / "data" / "choice" / "Qwen" / "Qwen3-8B").is_dir()


@pytest.mark.slow
def test_an_adapter_is_part_of_the_models_name(adapted: Path, tmp_path: Path) -> None:
    model = exported(adapted, tmp_path)[0]["model_info"]
    assert model["name"] == "secret/base + ours/adapter"
    assert model["id"] == "secret-base-ours-adapter"
    assert model["additional_details"]["deployment_type"] == "self_deployed"
    actor = summary(adapted)["provenance"]["actor"]
    assert model["additional_details"]["adapter_weights"] == actor["adapter_weights"]


@pytest.mark.parametrize(
    ("model", "identity", "place"),
    [
        ("openai/azure/gpt-4o", "openai/azure/gpt-4o", "openai/azure_gpt-4o"),
        ("org/name@1f2e", "org/name", "org/name"),
        ("/home/anna/models/mine", "models-mine", "unknown/models-mine"),
        ("~/mine", "mine", "unknown/mine"),
        ("../../etc", "etc", "unknown/etc"),
        ("a: b", "a: b", "unknown/a-b"),
    ],
)
def test_the_folder_follows_from_the_models_name(
    choice: Path, tmp_path: Path, model: str, identity: str, place: str
) -> None:
    run = shutil.copytree(choice, tmp_path / "run")
    written = summary(run)
    written["provenance"]["actor"] |= {"model": model, "address": "https://api.example.org/v1"}
    (run / "summary.json").write_text(json.dumps(written))
    made, _ = exported(run, tmp_path / "out")
    assert made["model_info"]["id"] == identity
    assert made["model_info"]["inference_platform"] == "api.example.org"
    assert (tmp_path / "out" / "data" / "tomi" / place).is_dir()


def test_a_second_export_replaces_the_first(choice: Path, tmp_path: Path) -> None:
    exported(choice, tmp_path)
    files = sorted(tmp_path.rglob("*.*"))
    exported(choice, tmp_path)
    assert sorted(tmp_path.rglob("*.*")) == files


def test_a_score_that_is_no_number_has_no_sample(choice: Path, tmp_path: Path) -> None:
    _, whole = exported(choice, tmp_path / "whole")
    run = Path(shutil.copytree(choice, tmp_path / "run"))
    text = (run / "episodes.jsonl").read_text()
    odd, n = re.subn(r'"value": ?(0|1)(\.0)?', '"value": NaN', text, count=1)
    assert n == 1
    (run / "episodes.jsonl").write_text(odd)
    _, lines = exported(run, tmp_path / "out")
    assert len(lines) == len(whole) - 1


def unfinished(run: Path, out: Path) -> Path:
    shutil.copytree(run, out)
    (out / "summary.json").unlink()
    lines = (out / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    (out / "episodes.jsonl").write_bytes(b"".join(lines[:3]))
    return out


def test_runs_without_a_result_have_no_record(
    choice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = unfinished(choice, tmp_path / "runs" / "half")
    silent = tmp_path / "runs" / "silent"
    with ScriptedServer(answer="no verdict") as judge:
        assert scenes(silent, judge.base_url, "--max-unscored", "1") == 0
    capsys.readouterr()
    assert soul("report", silent, "--format", "eee") == 2
    assert "silent: no episode has a score." in capsys.readouterr().err
    assert soul("report", half, "--format", "eee") == 2
    what = three_lines(capsys.readouterr().err)[0]
    assert what.startswith("There is no EEE record of half: unfinished, 3 of 30 episodes")
    assert not (half / "report").exists()
    shutil.copytree(choice, tmp_path / "runs" / "whole")
    assert soul("report", tmp_path / "runs", "--format", "eee", "--out", tmp_path / "out") == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1
    assert any("no record of half: unfinished" in line for line in messages(printed.err))


# --- the table of episodes ------------------------------------------------------------------------


def table(out: Path, *runs: Path) -> list[dict[str, str]]:
    """The rows of the CSV, which are those of the Parquet file."""
    assert soul("report", *runs, "--format", "episodes-csv", "--out", out / "e.csv") == 0
    assert soul("report", *runs, "--format", "episodes-parquet", "--out", out / "e.parquet") == 0
    with (out / "e.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    columns = pq.read_table(out / "e.parquet")
    assert columns.column_names == list(rows[0])
    for row, same in zip(rows, columns.to_pylist(), strict=True):
        for name, value in same.items():
            text = isinstance(value, str | None)
            assert row[name].removeprefix("'") == (value or "") if text else (
                float(row[name]) == value
            ), name  # fmt: skip
    return rows


def test_a_row_per_episode_with_fixed_columns_then_metrics_and_tags(
    choice: Path, dialogue: Path, tmp_path: Path
) -> None:
    rows = table(tmp_path, choice, dialogue)
    assert [row["run"] for row in rows] == ["choice"] * 30 + ["dialogue"] * 3
    names = list(rows[0])
    assert names[: len(COLUMNS) + 1] == ["run", *COLUMNS]
    own = names[len(COLUMNS) + 1 :]
    assert {"metric_goal", "tag_order", "tag_scene"} <= set(own) and own == sorted(own)
    for row, one in zip(rows, [*records(choice), *records(dialogue)], strict=True):
        assert row["example_id"] == one.example_id
        assert (float(row["value"]) if row["value"] else None) == one.score.value
        assert row["tag_order"] == one.tags.get("order", "")
        assert (float(row["cost"]) if row["cost"] else None) == one.episode.usage.cost
        assert one.episode.final and row["reply"].removeprefix("'") == one.episode.final.text
    failed = next(row for row in rows if row["status"] == "unscored")
    assert (failed["value"], failed["reward"], failed["reason"]) == ("", "", "judge_error")
    assert failed["metric_goal"] == "" and failed["transcript"].count("\n") > 2
    scored = next(row for row in rows[30:] if row["value"])
    assert scored["judges"] == "j" and "judge=" in scored["prompts"]


def odd_records() -> Iterator[Record]:
    """Texts that break files, feedback, a replaced line, and numbers that are not finite."""
    texts = [
        '=HYPERLINK("x")',
        "+1",
        "-2",
        "@a",
        "\tb",
        "a,b",
        'say "x"\nand\r\nmore',
        "\ud800",
        "",
    ]
    for i, text in enumerate(texts):
        yield record(i, 1.0, text=text, feedback="=cmd" if i == 0 else "")
    draft = record(0, 0.5, text="replaced")
    yield replace(draft, received=Feedback(text="=cmd", author="j", leak="gold_text"))
    spoken = (Line("a", "=hello"), Line("b", "hi"))
    refined = record(20, 1.0, kind="refined", feedback="look again")
    yield replace(refined, episode=replace(refined.episode, transcript=spoken))
    yield replace(record(21, 1.0), score=Score(value=1.0, reward=None, reason="no_reward",
                                               metrics={"length": None, "m=1": 2.0}))  # fmt: skip


def test_odd_texts_survive_and_a_spreadsheet_reads_no_formula(tmp_path: Path) -> None:
    rows = table(tmp_path, write_records(tmp_path / "odd", odd_records()))
    by_id = {row["example_id"]: row for row in rows}
    assert len(rows) == len(by_id) == 11
    replies = [by_id[f"hitom-{i}"]["reply"] for i in range(1, 9)]
    assert replies == ["'+1", "'-2", "'@a", "'\tb", "a,b", 'say "x"\nand\r\nmore', "?", ""]
    newest = by_id["hitom-0"]
    assert (newest["reply"], newest["value"]) == ("replaced", "0.5")
    assert (newest["feedback"], newest["feedback_leak"]) == ("'=cmd", "gold_text")
    refined = by_id["hitom-20"]
    assert (refined["kind"], refined["feedback"]) == ("refined", "look again")
    assert refined["transcript"] == "a: =hello\nb: hi"
    last = by_id["hitom-21"]
    assert (last["reward"], last["reason"], last["metric_length"]) == ("", "no_reward", "")
    assert last["metric_m=1"] == "2"


def test_without_out_the_files_are_in_the_report_folder(
    choice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(choice, tmp_path / "run")
    for form, name in (("episodes-csv", "episodes.csv"), ("episodes-parquet", "episodes.parquet")):
        assert soul("report", run, "--format", form) == 0
        assert capsys.readouterr().out == f"{run / 'report' / name}\n"
        assert (run / "report" / name).is_file()


def test_without_episodes_there_is_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert soul("report", tmp_path / "run", "--format", "episodes-csv") == 2
    assert three_lines(capsys.readouterr().err)[0] == "There are no episodes to export."


@pytest.mark.slow
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_hundred_thousand_episodes_fit_into_300_mb(tmp_path: Path, form: str) -> None:
    line = record(0, 1.0, text="word " * 60)
    many = (replace(line, key=f"0/{i}/0/draft", example_id=str(i)) for i in range(100_000))
    write_records(tmp_path / "run", many)
    program = "import re, sys; from pathlib import Path; from soulkit.cli.app import main; "
    program += f"main(sys.argv[1:]); {PEAK}"
    words = ("report", tmp_path / "run", "--format", f"episodes-{form}", "--out", tmp_path / "e")
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout.split()[-1]) < 300_000


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        (("--every", 5), "--every"),
        (("--json", "--format", "md"), "--json"),
        (("--format", "eee", "--suite", "tom"), "--suite"),
        (("--format", "episodes-csv", "--details"), "--details"),
    ],
)
def test_an_option_without_effect_is_refused(
    options: tuple[object, ...], ignored: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert soul("report", tmp_path, *options) == 2
    lines = three_lines(capsys.readouterr().err)
    assert lines[0] == f"{ignored} has no effect on this report."
