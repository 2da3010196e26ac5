"""`soul tasks`: what is listed is what tasks.yaml declares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soulkit.cli import app as cli
from soulkit.cli import console
from soulkit.tasks.kit.registry import load_registry

OWN = """\
suites: {mine: [lights, tomi]}
tasks:
  lights:
    title: Lights
    summary: Is it [red] or green?
    module: lights:Lights
    seats: {driver: actor}
    columns: {scene: {audience: [driver]}}
"""


@pytest.fixture
def soul(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["tasks", *arguments])
        streams = capfd.readouterr()
        return code, streams.out, streams.err

    return run


def test_no_column_name_is_cut_on_a_narrow_terminal(soul, monkeypatch):
    monkeypatch.setattr(console.out, "width", 60)
    code, out, _ = soul("show", "tomi")
    columns = load_registry().spec("tomi").columns
    assert code == 0 and "…" not in out.partition("players:")[0]
    assert all(name in out for name in columns)


def test_list_names_every_task_and_suite(soul):
    registry = load_registry()
    code, out, _ = soul("list")
    assert code == 0 and all(name in out for name in (*registry.specs, *registry.suites))
    listed = json.loads(soul("list", "--json")[1])
    assert [task["name"] for task in listed["tasks"]] == list(registry.specs)
    assert set(listed["suites"]) == set(registry.suites)


def test_without_a_command_the_tasks_are_listed(soul):
    assert soul() == soul("list")


def test_suites_of_the_same_tasks_say_how_they_differ(soul):
    suites = load_registry().suites
    line = next(line for line in soul("list")[1].splitlines() if line.split()[:1] == ["soul-27"])
    assert "soul-23" in line and line.split()[1] == str(len(suites["soul-27"].tasks))
    assert f"soul-27 ({suites['soul-27'].title})" in soul("show", "coser")[1]
    assert "soul tasks list" in soul("list", "--suite", "soul-25")[2].splitlines()[-1]


def test_the_list_names_the_headline_that_tables_and_comparisons_name(soul):
    code, text, _ = soul("list")
    assert code == 0
    listed = {cells[0]: cells[1:] for line in text.splitlines() if (cells := line.split())}
    for name, spec in load_registry().specs.items():
        headline = spec.metric.headline or spec.metric.name
        assert headline.split()[0] in listed[name], name


def test_show_says_that_rows_of_one_person_are_one_cluster(soul):
    clusters = {
        name: next(line for line in soul("show", name)[1].splitlines()
                   if line.startswith("clusters: "))
        for name in ("userllm", "twinvoice", "tomi")
    }  # fmt: skip
    assert clusters["userllm"] == "clusters: person if a row has one, else intent"
    assert clusters["twinvoice"] == "clusters: user_id"
    assert "person" not in clusters["tomi"]


def test_a_suite_narrows_the_list(soul):
    listed = json.loads(soul("list", "--suite", "small", "--json")[1])
    assert [task["name"] for task in listed["tasks"]] == list(load_registry().suite("small"))
    assert set(listed["suites"]) == {"small"}
    code, _, err = soul("list", "--suite", "smal")
    assert code == 2 and "'small'" in err


def test_show_prints_columns_audiences_and_licence(soul):
    spec = load_registry().spec("hitom")
    code, out, _ = soul("show", "hitom")
    assert code == 0 and all(name in out for name in spec.columns)
    assert spec.licence in out and "gold, coach" in out and "reader (actor)" in out
    shown = json.loads(soul("show", "hitom", "--json")[1])
    assert shown["columns"]["story"]["max_words"] == spec.columns["story"].max_words
    code, _, err = soul("show", "hitum")
    assert code == 2 and "'hitom'" in err


def test_show_prints_what_is_the_headline_who_plays_and_how_often_judges_are_asked(soul):
    out = soul("show", "userllm")[1]
    assert "headline: macro_source, over all episodes" in out
    assert "watched in training: first_turn_diversity" in out
    assert "gpt-5.4-nano" in out.partition("players: ")[2].partition("seats: ")[0]
    registry = load_registry()
    asked = {n: s.samples for n, s in registry.specs.items() if set(s.samples.values()) - {1}}
    for name, samples in asked.items():
        line = ", ".join(f"{question} {count}" for question, count in samples.items())
        assert f"samples: {line}" in soul("show", name)[1].splitlines()
    assert "samples: score 1, audit 1" in soul("show", "sotopia")[1]
    plain = soul("show", "hitom")[1]
    assert not any(f"{label}:" in plain for label in ("headline", "watched in training", "samples"))


def test_own_tasks_are_listed_beside_the_built_in_ones(soul, tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(OWN)
    code, out, _ = soul("list", "--tasks", str(path), "--suite", "mine")
    assert code == 0 and "Is it [red] or green?" in out and "tomi" in out
    assert soul("show", "lights", "--tasks", str(path))[0] == 0
    assert soul("list", "--tasks", str(tmp_path / "no.yaml"))[0] == 2


def jsonl(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


PEN = {"story": "1 Ada came.\n2 The pen is in the jar.", "question": "Where is the pen really?",
       "answer": "jar", "cands": ["jar", "box"]}  # fmt: skip


def test_check_passes_rows_made_here_and_says_what_it_could_not_check(soul):
    code, out, _ = soul("check", "tomi", "hitom", "--data", "hitom=synth:7")
    assert code == 0 and "synth:100" in out and "synth:7" in out
    report = json.loads(soul("check", "tomi", "--data", "synth:5", "--json")[1])
    assert report["passed"] and report["not_checked"] == []
    (checked,) = report["tasks"]
    assert (checked["task"], checked["rows"], checked["gold_fails"]) == ("tomi", 5, [])
    code, out, _ = soul("check", "--suite", "small", "--protocol", "reference")
    assert code == 0 and "secret_keeper" in out


def test_check_counts_the_different_texts_of_feedback_by_rules(soul):
    code, out, _ = soul("check", "hitom", "twinvoice", "--data", "synth:30")
    assert code == 0 and "hitom: symbolic feedback: 29 different texts for 30 wrong drafts" in out
    report = json.loads(soul("check", "twinvoice", "--data", "synth:30", "--json")[1])["tasks"][0]
    assert 0 < report["feedback_texts"] < report["feedback_drafts"] == 30
    shown = f"twinvoice: symbolic feedback: {report['feedback_texts']} different texts for 30"
    assert shown in out


def test_check_exits_with_1_and_names_the_row_whose_gold_fails(soul, tmp_path: Path):
    # By the reference, a candidate that stands inside the gold makes the gold unreachable.
    broken = {**PEN, "answer": "tall jar", "cands": ["jar", "tall jar"]}
    path = jsonl(tmp_path / "rows.jsonl", PEN, broken)
    assert soul("check", "tomi", "--data", path)[0] == 0
    code, out, _ = soul("check", "tomi", "--data", path, "--protocol", "reference")
    assert code == 1 and "tomi: gold fails: rows.jsonl:2: <answer>tall jar</answer>" in out
    code, out, _ = soul("check", "--data", f"tomi={path}", "--protocol", "reference", "--json")
    (checked,) = json.loads(out)["tasks"]
    assert code == 1 and [f["source"] for f in checked["gold_fails"]] == ["rows.jsonl:2"]


def test_check_takes_the_released_files_where_they_lie(soul, tmp_path: Path, monkeypatch):
    from soulkit.data.files import write_rows
    from tests.support.road import synth

    write_rows(tmp_path / "hitom_val.parquet", synth("hitom", 3, 1))
    monkeypatch.setenv("SOULKIT_DATA", str(tmp_path))
    (checked,) = json.loads(soul("check", "hitom", "--json")[1])["tasks"]
    assert (checked["rows"], checked["data"]) == (3, str(tmp_path))


@pytest.mark.parametrize("arguments", [
    ("nothing",), ("--data", "rows.jsonl"), ("tomi", "--data", "hitom=synth:3"),
    ("tomi", "--protocol", "papers"), ("tomi", "--data", "synth:0"), ("tomi", "--data", "no.jsonl"),
    ("tomi", "--data", "tommi=synth:3"), ("lights",),
])  # fmt: skip
def test_mistakes_of_check_are_three_lines(soul, tmp_path: Path, arguments: tuple[str, ...]):
    (tmp_path / "mine.yaml").write_text(OWN)
    code, out, err = soul("check", *arguments, "--tasks", str(tmp_path / "mine.yaml"))
    assert (code, out) == (2, "")
    assert [line.split(":")[0] for line in err.splitlines()] == ["error", "why", "fix"]
    assert "soul data pull" not in err
