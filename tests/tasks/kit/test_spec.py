"""The built-in suites: what is in them, and that every file of SOUL is some task's.

`--option NAME=VALUE`: a value is of the kind that the task's own is of, or it is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from soulkit.cli import app as cli
from soulkit.errors import ConfigError
from soulkit.report.published import publications
from soulkit.runs.folder import plain_config
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.spec import BOOKKEEPING, TaskSpec, option_value
from soulkit.tasks.kit.user_code import Hook
from soulkit.train.config import TrainConfig
from tests.support.evaluation import api, records, soul, summary, three_lines, visit
from tests.support.servers.openai_server import ScriptedServer

ROLES = ("judge", "auditor", "partner", "environment", "coach")

ALIGNX = tuple(f"alignx_{part}" for part in ("demo", "pair", "ugc", "arbitrary", "history16"))


def test_soul_27_is_one_task_for_each_evaluation_file() -> None:
    registry = load_registry()
    names = registry.suite("soul-27")
    files = [file for name in names for file in registry.spec(name).files.eval]
    assert len(names) == len(set(names)) == len(files) == len(set(files)) == 27
    train = {file for name in names for file in registry.spec(name).files.train}
    assert len(train) == 23, "the five AlignX splits share one training file"


@pytest.mark.parametrize(("suite", "table"), [("soul-10", 0), ("soul-23", 1)])
def test_a_suite_has_the_rows_of_its_published_table_in_their_order(suite: str, table: int) -> None:
    declared, published = load_registry().suite_spec(suite), publications()[table]
    assert list(declared.members) == list(published.figures)
    assert declared.published[0] == published.name and declared.average == "macro"


def test_soul_23_counts_alignx_once_and_so_does_soul_27() -> None:
    registry = load_registry()
    card = registry.suite_spec("soul-23")
    assert len(card.members) == 23 and card.tasks_of("alignx") == ALIGNX
    assert list(card.axes) == ["CONV", "SS", "COG", "ROLE", "EVAL"]
    assert {card.axis_of(m) for m in card.members} == set(card.axes) and card.axis_of("x") == ""
    files = registry.suite_spec("soul-27")
    assert (files.members, files.axes, files.groups) == (card.members, card.axes, card.groups)
    assert files.average == card.average and files.parts and not card.parts
    assert registry.suite_spec("choice").average == ""


def test_an_axis_of_a_suite_is_the_axis_of_its_tasks() -> None:
    registry = load_registry()
    for name in ("soul-10", "soul-23"):
        suite = registry.suite_spec(name)
        for member in suite.members:
            axes = {registry.spec(task).axis for task in suite.tasks_of(member)}
            assert axes == {suite.axis_of(member)}, member


def test_the_printed_average_is_the_mean_of_the_printed_rows() -> None:
    paper = publications()[0]
    for i, model in enumerate(paper.models):
        mean = fmean(row[i] for row in paper.figures.values())
        # The source rounds both the rows and their mean to three places.
        assert paper.mean(list(paper.figures), model) == pytest.approx(mean, abs=0.001)
    assert paper.mean(["hitom", "nowhere"], "Ditto 8B") is None
    assert paper.mean(["fantom", "hitom"], "Ditto 8B") == pytest.approx((0.95 + 0.78) / 2)


def declared(tmp_path: Path, suite: str) -> Path:
    file = tmp_path / "tasks.yaml"
    file.write_text(f"suites:\n  mine: {suite}\n")
    return file


def test_a_suite_of_ones_own_may_be_a_list_or_say_more(tmp_path: Path) -> None:
    plain = load_registry(declared(tmp_path, "[tomi, hitom, tomi]")).suite_spec("mine")
    assert plain.members == plain.tasks == ("tomi", "hitom") and not plain.average
    more = "{axes: {A: [both], B: [fantom]}, groups: {both: [tomi, hitom]}, average: macro}"
    other = tmp_path / "other"
    other.mkdir()
    registry = load_registry(declared(other, more))
    assert registry.suite("mine") == ("tomi", "hitom", "fantom")
    assert registry.suite_spec("mine").members == ("both", "fantom")


@pytest.mark.parametrize(
    ("suite", "words"),
    [
        ("{members: [tomi], axes: {A: [hitom]}}", "must contain every member exactly once"),
        ("{members: [tomi], groups: {both: [hitom]}}", "are not members"),
        ("{members: [both, tomi], groups: {both: [tomi, hitom]}}", "the suite counts"),
        ("{title: nothing}", "has no members"),
        ("{members: [tomi], averages: macro}", "average"),
        ("{members: [tommi]}", "tomi"),
        ("{members: [hitom], groups: {hitom: [tomi, fantom]}}", "has the name of a task"),
    ],
)
def test_a_suite_that_does_not_add_up_is_refused(tmp_path: Path, suite: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_registry(declared(tmp_path, suite))
    assert words in f"{caught.value.what} {caught.value.why} {caught.value.way_out}"


def test_soul_23_and_soul_27_have_the_same_members() -> None:
    registry = load_registry()
    assert set(registry.suite("soul-23")) == set(registry.suite("soul-27"))


def test_evaluating_a_suite_names_every_member_that_cannot_be_played(
    capsys: pytest.CaptureFixture[str],
) -> None:
    registry = load_registry()
    missing = [n for n in registry.suite("soul-27") if registry.spec(n).rows_only]
    if not missing:
        pytest.skip("every member can be played")
    run = ["eval", "api", "--suite", "soul-27", "--model", "m"]
    assert cli.main([*run, "--base-url", "http://127.0.0.1:9/v1"]) == 2
    error, _, fix = capsys.readouterr().err.splitlines()
    assert all(name in error for name in missing)
    assert "--playable" in fix


def test_the_suites_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tasks", "list", "--suite", "soul-10", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [t["name"] for t in listed["tasks"]] == list(load_registry().suite("soul-10"))


@pytest.mark.parametrize(
    ("text", "usual", "value"),
    [("7", 6, 7), ("0.5", 1.0, 0.5), ("true", False, True), ("No", True, False), ("3", "x", "3"),
     ("[1]", [], "[1]"), (4, 6, 4)],
)  # fmt: skip
def test_a_value_is_of_the_usual_kind(text: Any, usual: Any, value: Any) -> None:
    assert option_value("o", text, usual) == value
    assert type(option_value("o", text, usual)) is type(value)


@pytest.mark.parametrize(("text", "usual"), [("few", 6), ("1.5", 6), ("maybe", True), ("x", 0.5),
     ("nan", 0.5), ("inf", 30.0)])  # fmt: skip
def test_another_kind_is_refused(text: str, usual: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        option_value("o", text, usual)
    assert text[:60] in caught.value.what and all(caught.value.lines())
    whole = type(usual) is int
    assert ("a whole number" in caught.value.why) is whole


@pytest.mark.parametrize(
    ("name", "text", "usual"),
    [("max_turns", "0", 8), ("paper_rounds", "0", 20), ("max_turns", "-1", 8), ("words", "-3", 60),
     ("share", "nan", 0.2), ("wait_s", "inf", 30.0)],
)  # fmt: skip
def test_a_number_that_leaves_nothing_to_play_is_refused(name: str, text: str, usual: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        option_value(name, text, usual)
    assert text in caught.value.what and "or more" in caught.value.why
    assert option_value("leave_from", "0", 5) == 0


def test_a_run_plays_by_its_options_and_is_another_run_with_others(
    tmp_path: Any, capfd: Any
) -> None:
    with ScriptedServer(answer="I cannot say.") as actor, ScriptedServer(answer=visit) as other:
        partner = ("--partner", f"endpoint:v@{other.base_url}")
        args = (actor.base_url, tmp_path / "run", *partner)
        assert api(*args, "--option", "max_turns=5", task="secret_keeper", n=2) == 0
        assert {len(r.episode.traces[0].turns) for r in records(tmp_path / "run")} == {5}
        capfd.readouterr()
        assert api(*args, "--option", "max_turns=6", task="secret_keeper", n=2) == 2
    assert "option" in " ".join(three_lines(capfd.readouterr().err))
    assert summary(tmp_path / "run")["tasks"]["secret_keeper"]["turns"]["mean"] == 5


def test_training_takes_options_too_and_refuses_what_no_task_has(tmp_path: Any, capfd: Any) -> None:
    config = TrainConfig(method="grpo", model="m", tasks={"tomi": 1.0}, option={"max_turns": "5"})
    assert plain_config(config.identity())["option"] == {"max_turns": "5"}
    command = (
        "plan",
        "train",
        "grpo",
        "--model",
        tmp_path,
        "--task",
        "tomi",
        "--data",
        "tomi=synth:4",
    )
    assert soul(*command, "--option", "max_turns=5") == 2
    what, _, fix = three_lines(capfd.readouterr().err)
    assert "max_turns" in what and "soul tasks show" in fix


def test_what_a_declaration_leaves_out() -> None:
    spec = TaskSpec(title="T", summary="S", seats={"a": "actor"}, columns={})
    assert spec.rows_only and set(spec.columns) == set(BOOKKEEPING)
    written = spec.model_dump(exclude={"title", "summary", "seats", "columns"})
    assert {name: value for name, value in written.items() if value not in ("", (), {})} == {
        "players": {**dict.fromkeys(ROLES), "training": dict.fromkeys(ROLES),
                    "reference": dict.fromkeys(ROLES)},
        "metric": {"name": "accuracy", "binary": True, "low": 0.0, "high": 1.0, "scales": {},
                   "beside": (), "less_is_better": (), "headline": "", "parts": {}, "watched": ()},
        "files": {"train": (), "eval": (), "data_source": ()},
        "size": None, "declaration": None,
        "feedback": {"coaches": (), "below": 1.0, "until_step": None, "max_words": 120,
                     "gold_in_reference": False, "kind": "coach"},
        "evaluation_only": False,
    }  # fmt: skip
    with pytest.raises(ValidationError, match="frozen"):
        spec.title = "Another"


def read_file(
    path: Path, *, task: str, half: Literal["cotp", "vp"] = "vp", rows: int | None = None,
    share: float = 0.5, names: Path | None = None, mark: str = "", deep: bool = False,
) -> tuple[object, ...]:  # fmt: skip
    return path, task, half, rows, share, names, mark, deep


def test_options_of_a_hook_are_of_its_types() -> None:
    hook, path = Hook("mine", read_file), Path("rows.json")
    assert hook(path) == (path, "mine", "vp", None, 0.5, None, "", False)
    texts = {"--half": "cotp", "--rows": "3", "--share": "0.25", "--names": "n.csv",
             "--mark": "7", "deep": "true"}  # fmt: skip
    assert hook(path, options=texts) == (
        path, "mine", "cotp", 3, 0.25, Path("n.csv"), "7", True,
    )  # fmt: skip
    shown = [option.describe() for option in hook.options.values()]
    assert shown == ["--half cotp|vp (vp)", "--rows INT", "--share FLOAT (0.5)", "--names PATH",
                     "--mark STR ()", "--deep BOOL (False)"]  # fmt: skip


@pytest.mark.parametrize(("flag", "text", "says"), [
    ("--half", "cot", "Allowed: cotp, vp."), ("--rows", "three", "Allowed: int values."),
    ("--share", "half", "Allowed: float values."),
    ("--haf", "vp", "Its options are: --half cotp|vp (vp)"),
])  # fmt: skip
def test_an_option_that_does_not_fit_a_hook(flag: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Hook("mine", read_file)(Path("f"), options={flag: text})
    assert says in caught.value.why and flag in caught.value.what
