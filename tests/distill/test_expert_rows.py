"""Rows and players that `soul distill` takes from the training runs of its experts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.data.files import write_rows
from soulkit.distill.config import DistillConfig
from soulkit.distill.expert_rows import (
    _places,
    note_rows,
    rows_and_players_words,
    with_rows_and_players,
)
from soulkit.distill.experts import Expert, find_experts
from soulkit.distill.generalist import generalist_config
from soulkit.distill.measure import measured_tasks, measurements
from soulkit.distill.sample import find_overlaps, sample_config, training_work, work_aside
from soulkit.errors import DataError, RunError
from soulkit.eval.config import load_work
from soulkit.runs.folder import read_config
from soulkit.runs.jsonl import read_jsonl
from soulkit.train.setup.data import load_training_data
from soulkit.trust import TrustError
from tests.support.distilling import distillation, small_base
from tests.support.evaluation import soul, three_lines, visitor
from tests.support.road import synth_rows
from tests.support.training import config as training

pytestmark = pytest.mark.torch

TRAIN = ("--steps", 1, "--max-tokens", 4, "--lora-r", 2, "--threads", 1, "--device", "cpu")
ROLLOUTS = ("--prompts", 2, "--group-size", 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder in which two experts were trained as a user would, and the partner's address:
    tomi on a file with a relative name, which answers in its format, and secret_keeper on made
    rows of another seed."""
    home = tmp_path_factory.mktemp("home")
    small_base(home / "base", words=[json.dumps(row) for row in story_rows(30)])
    write_rows(home / "stories.jsonl", story_rows(30), data_source="tomi")
    before = Path.cwd()
    os.chdir(home)
    with visitor() as url:
        try:
            assert soul("train", "sft", "--model", "base", "--task", "tomi", "--data",
                        "tomi=stories.jsonl", "--limit", 24, "--steps", 30, "--batch", 8,
                        "--lr", 2e-2, "--threads", 1, "--out", "experts/tomi") == 0  # fmt: skip
            assert soul("train", "grpo", "--model", "base", "--task", "secret_keeper", "--data",
                        "synth:10", "--seed", 5, "--partner", f"endpoint:visitor@{url}", *TRAIN,
                        *ROLLOUTS, "--out", "experts/keeper") == 0  # fmt: skip
        finally:
            os.chdir(before)
        yield home, url


def story_rows(n: int) -> list[dict[str, Any]]:
    return [dict(row.fields) for row in synth_rows("tomi", f"synth:{n}", 0, "train")]


@pytest.fixture
def home(made: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that may be changed, as the working folder."""
    shutil.copytree(made[0], tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


def settled(*tasks: str, **settings: Any) -> tuple[DistillConfig, dict[str, Expert]]:
    folders = {"tomi": "experts/tomi", "secret_keeper": "experts/keeper"}
    config = distillation({task: folders[task] for task in tasks or folders}, **settings)
    return config, {e.task: e for e in with_rows_and_players(config, find_experts(config))}


def learned(run: str) -> set[str]:
    """The ids of the rows that a training run drew, by its own road."""
    return {row.id for _, row in load_training_data(training(**read_config(Path(run)))).pool}


@pytest.mark.slow
def test_the_bare_command_runs_to_the_end_and_again(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The keeper's expert has learned nothing; that of tomi, whose run names its rows, is enough.
    words = ("distill", "--experts", "experts/tomi", "--model", "base", "--min-reward", 0)
    assert soul("plan", *words, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert soul(*words, "--out", "out") == 0
    said = capsys.readouterr()
    noted = json.loads(Path("out/rows.json").read_text())["tomi"]
    assert plan["stages"][0]["episodes"] == 4 * len(noted["training"])
    assert plan["stages"][-1]["episodes"] == 3 * len(noted["held_out"])
    held = f"held out of tomi: {len(noted['held_out'])} rows in {len(noted['clusters'])} clusters"
    for text in (said.err, " ".join(said.out.split()), plan["stages"][0]["remarks"][1]):
        assert held in text and "but the expert was, so its gain" in text
    taught = {row["example_id"] for row in read_jsonl(Path("out/selected.jsonl"))}
    asked = {r["example_id"] for r in read_jsonl(Path("out/samples/tomi/episodes.jsonl"))}
    measured = {r["example_id"] for side in ("base", "expert", "generalist")
                for r in read_jsonl(Path(f"out/measured/{side}/tomi/episodes.jsonl"))}  # fmt: skip
    assert taught and taught <= asked == set(noted["training"])
    assert measured == set(noted["held_out"])
    assert asked | measured == learned("experts/tomi") and not asked & measured
    selected = Path("out/selected.jsonl").read_bytes()
    assert soul(*words, "--out", "out") == 0  # finished: everything is found
    assert Path("out/selected.jsonl").read_bytes() == selected
    assert "samples: the selection is already made" in capsys.readouterr().err


def test_rows_are_those_of_each_experts_run_and_players_too(
    home: Path, made: tuple[Path, str]
) -> None:
    config, experts = settled()
    for task, run in (("tomi", "experts/tomi"), ("secret_keeper", "experts/keeper")):
        rows = experts[task].rows
        assert rows is not None and rows.held_out
        assert {*rows.train, *rows.held_out} == learned(run)
        found = load_work(sample_config(config, experts[task]))[0].examples
        assert {row.id for row in found} == set(rows.train)
        clusters = {row.cluster for row in found}
        assert len(rows.clusters) >= 2 and not clusters & set(rows.clusters)
    keeper = sample_config(config, experts["secret_keeper"])
    assert keeper.data == {"secret_keeper": "synth:10@5"} and keeper.seed == config.seed == 0
    (partner,) = keeper.cast_as("partner", "secret_keeper")
    assert partner.base_url == made[1]
    players = f"players of secret_keeper, as in its expert's training: partner {partner.written()}"
    assert players in rows_and_players_words(config, list(experts.values()))
    sides = measurements(config, list(experts.values()), home / "out")
    assert {p.config.split for p in sides} == {"train"} and len(sides) == 6


def test_on_policy_learns_the_same_rows(home: Path) -> None:
    config, experts = settled(by="opd", max_tokens=4)
    several = list(experts.values())
    training_settings = generalist_config(config, several, home / "out")
    drawn = {row.id for _, row in load_training_data(training_settings).pool}
    overlaps = find_overlaps(config, training_work(config, several), work_aside(config, several))
    left_out = {row for one in overlaps.values() for row in one}
    assert drawn == {i for e in several if e.rows for i in e.rows.train} - left_out
    assert training_settings.cast_as("partner", "secret_keeper")


@pytest.mark.parametrize(
    ("settings", "held", "own"),
    [
        ({"data": {"tomi": "synth:18"}}, ["secret_keeper", "tomi"], ["secret_keeper"]),
        ({"held_out": {"tomi": "synth:6"}}, ["secret_keeper", "tomi"], ["secret_keeper", "tomi"]),
        ({"data": {"*": "synth:18"}, "held_out": {"*": "synth:6"}}, ["secret_keeper", "tomi"], []),
        ({"limit": 9}, ["secret_keeper", "tomi"], ["secret_keeper", "tomi"]),
    ],
)
def test_what_the_command_names_goes_first(
    home: Path, settings: dict[str, Any], held: list[str], own: list[str]
) -> None:
    config, experts = settled(**settings)
    assert measured_tasks(config, list(experts.values())) == held
    assert sorted(t for t, e in experts.items() if e.rows and e.rows.run) == own
    for task, expert in experts.items():
        assert bool(expert.rows and expert.rows.held_out) != bool(config.held_out_source(task))
        if expert.rows and config.limit:
            assert len(expert.rows.train) + len(expert.rows.held_out) == config.limit
    words = "\n".join(rows_and_players_words(config, list(experts.values())))
    assert ("held out of tomi" in words) is not bool(config.held_out_source("tomi"))


@pytest.mark.slow
def test_an_experts_own_dev_rows_are_held_out(home: Path) -> None:
    assert soul("train", "sft", "--model", "base", "--task", "tomi", "--data",
                "tomi=stories.jsonl", "--eval-every", 1, *TRAIN[:2], *TRAIN[4:],
                "--out", "runs/deep/tomi") == 0  # fmt: skip
    shutil.rmtree("experts/tomi")
    Path("runs/deep/tomi").rename("experts/tomi")
    config, experts = settled("tomi")
    rows = experts["tomi"].rows
    assert rows is not None and rows.dev
    material = load_training_data(training(**read_config(Path("experts/tomi"))))
    assert set(rows.held_out) == {row.id for _, row in material.dev}
    assert set(rows.train) == {row.id for _, row in material.pool}
    assert "which was not trained on them" in " ".join(
        rows_and_players_words(config, [experts["tomi"]])
    )


def test_a_relative_file_is_found_from_another_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_rows(tmp_path / "stories.jsonl", story_rows(6), data_source="tomi")  # another file
    monkeypatch.chdir(tmp_path)
    config = distillation({"tomi": "home/experts/tomi"}, model="home/base")
    (expert,) = with_rows_and_players(config, find_experts(config))
    assert expert.rows is not None and expert.rows.source == str(home / "stories.jsonl")
    Path("stories.jsonl").unlink()
    _changed(home)
    with pytest.raises(DataError, match="gives only 13 of the 24 rows"):
        with_rows_and_players(config, find_experts(config))


def test_pulled_rows_and_absolute_paths_lie_in_one_place(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    run, file = tmp_path / "run", str(tmp_path / "rows.jsonl")
    assert list(_places(None, run)) == [None] and list(_places(file, run)) == [file]
    assert list(_places("rows.jsonl", run)) == ["rows.jsonl", file]


def _gone(home: Path) -> None:
    (home / "stories.jsonl").unlink()


def _changed(home: Path) -> None:
    write_rows(home / "stories.jsonl", story_rows(18), data_source="tomi")


def _others(home: Path) -> None:
    rows = [{**row, "question": f"{row['question']} "} for row in story_rows(30)]
    rows[0]["question"] = "Where is it?"
    write_rows(home / "stories.jsonl", rows, data_source="tomi")


def _unrecorded(home: Path) -> None:
    (home / "experts/tomi/conditions.json").unlink()


def _emptied(home: Path) -> None:
    (home / "experts/tomi/conditions.json").write_text('{"players": {}, "tasks": {}}')


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_gone, "stories.jsonl"),
        (_changed, "gives only 13 of the 24 rows"),
        (_others, "gives only 0 of the 24 rows"),
        (_unrecorded, "lists no rows for tomi"),
        (_emptied, "lists no rows for tomi"),
    ],
)
def test_rows_that_are_gone_or_have_changed_are_refused(
    home: Path, capsys: pytest.CaptureFixture[str], change: Any, what: str
) -> None:
    change(home)
    assert soul("distill", "--experts", "experts/tomi", "--out", "out") == 2
    lines = three_lines(capsys.readouterr().err)
    assert what in lines[0] and "--data" in lines[2] and not Path("out").exists()


def test_an_expert_without_a_run_names_no_rows(home: Path) -> None:
    shutil.copytree("experts/tomi/model", "alone")
    config = distillation({"tomi": "alone"})
    with pytest.raises(DataError, match="no training data") as caught:
        with_rows_and_players(config, find_experts(config))
    assert "is not in a training run" in caught.value.why and "--data" in caught.value.way_out


def test_a_strangers_run_needs_trust(home: Path) -> None:
    path = Path("experts/tomi/config.yaml")
    settings = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**settings, "concurrency": 7}))
    config = distillation({"tomi": "experts/tomi"})
    with pytest.raises(TrustError, match=r"not known to be yours") as caught:
        with_rows_and_players(config, find_experts(config))
    assert "stories.jsonl" in caught.value.why
    assert with_rows_and_players(config, find_experts(config), trust=True)[0].rows is not None


def test_rows_noted_at_the_start_stay(home: Path) -> None:
    _, experts = settled("tomi")
    out = home / "out"
    out.mkdir()
    note_rows(out, list(experts.values()))
    note_rows(out, list(experts.values()))
    _, others = settled("tomi", limit=12)
    with pytest.raises(RunError, match="have changed since"):
        note_rows(out, list(others.values()))
