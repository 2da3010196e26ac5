"""Published figures stand beside published rows alone, and one footnote says what else differs."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import write_rows
from soulkit.eval.conditions import read_conditions
from soulkit.report.context import other_rows, published_beside, rows_digest
from soulkit.report.load import load_runs
from soulkit.report.published import CAVEAT, Stated, publications
from soulkit.runs.provenance import rows_print
from tests.support.evaluation import FAST, soul
from tests.support.road import synth
from tests.support.servers.openai_server import ScriptedServer

IMPORTED = {"provenance": "Hi-ToM, Hi-ToM_data.json:1", "licence": "Apache-2.0 (Hi-ToM)"}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "released": ("hitom_val.parquet", {}),
    "imported": ("hitom.jsonl", IMPORTED),
    "own": ("own.jsonl", {}),
    "drafted": ("drafts.jsonl", {**IMPORTED, "provenance": "Hi-ToM, x:1; drafted by a"}),
    "of an own file": ("built.jsonl", {**IMPORTED, "origin": "mine.jsonl"}),
    "training rows": ("hitom_rl_train.parquet", {}),
}
SAID = {
    "made": "made here", "own": "own.jsonl", "drafted": "drafts.jsonl",
    "of an own file": "mine.jsonl", "training rows": "hitom_rl_train.parquet",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of rows → a run on such rows."""
    folder = tmp_path_factory.mktemp("rows")
    rows = synth("hitom", 4, 3)
    sources = {"made": "synth:4"}
    for kind, (name, more) in ROWS.items():
        write_rows(folder / name, [{**row, **more} for row in rows], data_source="hitom")
        sources[kind] = str(folder / name)
    paths = {}
    with ScriptedServer(answer="<answer>A</answer>") as server:
        for kind, source in sources.items():
            paths[kind] = folder / f"run {kind}"
            assert soul("eval", "api", "--model", "m", "--base-url", server.base_url, "--task",
                        "hitom", "--data", source, "--out", paths[kind], *FAST) == 0  # fmt: skip
    return paths


def text_of(form: str, out: Path, *arguments: object) -> str:
    assert soul("report", *arguments, "--format", form, "--out", out / f"page.{form}") == 0
    return " ".join((out / f"page.{form}").read_text().replace("\\", "").split())


FORMS = ("table", "md", "html")
SUITE = ("--suite", "soul-10")


@pytest.mark.parametrize("suite", [(), SUITE])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["released", "imported"])
def test_figures_stand_beside_published_rows(
    kind: str, form: str, suite: tuple[str, ...], runs: dict[str, Path], tmp_path: Path
) -> None:
    text = text_of(form, tmp_path, runs[kind], *suite)
    assert "Ditto 8B" in text and "0.780" in text and "alone, released" not in text


@pytest.mark.parametrize("suite", [(), SUITE])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SAID)
def test_other_rows_have_none_and_one_line_says_why(
    kind: str, form: str, suite: tuple[str, ...], runs: dict[str, Path], tmp_path: Path
) -> None:
    text = text_of(form, tmp_path, runs[kind], *suite)
    assert "Ditto 8B" not in text and "0.780" not in text and CAVEAT not in text
    assert text.count("Published figures stand beside published rows alone") == 1
    assert f"hitom ({SAID[kind]})" in text


def test_one_run_on_other_rows_is_enough(runs: dict[str, Path], tmp_path: Path) -> None:
    both = published_beside(load_runs([runs["released"], runs["made"]]))
    assert both.tables == () and "hitom (made here)" in both.left_out and not both.footnote


def test_a_suite_shows_figures_of_the_tasks_that_have_published_rows(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    with ScriptedServer(answer="<answer>A</answer>") as server:
        assert soul("eval", "api", "--model", "m", "--base-url", server.base_url, "--task",
                    "hitom,paratomi", "--data", f"hitom={Path(runs['released']).parent}",
                    "--data", "paratomi=synth:3", "--out", tmp_path / "run",
                    *FAST) == 0  # fmt: skip
    assert "paratomi (made here)" in text_of("md", tmp_path, tmp_path / "run", *SUITE)
    text_of("csv", tmp_path, tmp_path / "run", *SUITE)
    with (tmp_path / "page.csv").open() as file:
        lines = {row["name"]: row for row in csv.DictReader(file) if row["column"] == "Ditto 8B"}
    assert lines["hitom"]["mean"] == "0.78" and lines["lifechoices"]["mean"] == "0.8"
    assert not {"paratomi", "COG", "all"} & lines.keys()


def test_the_footnote_of_a_suite_speaks_of_the_figures_that_it_shows(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """UserLLM has another judge than the paper, and no figure beside these rows."""
    with ScriptedServer(answer="<answer>A</answer>") as server:
        assert soul("eval", "api", "--model", "m", "--base-url", server.base_url, "--task",
                    "hitom,userllm", "--data", f"hitom={Path(runs['released']).parent}",
                    "--data", "userllm=synth:3", "--judge", f"endpoint:j@{server.base_url}",
                    "--max-unscored", "1", "--backoff", "0",
                    "--out", tmp_path / "run") == 0  # fmt: skip
    text = text_of("md", tmp_path, tmp_path / "run", *SUITE)
    assert "userllm (made here)" in text and "(userllm)" not in text and "judge gpt" not in text


def test_rows_with_the_hash_that_a_source_states_are_published(runs: dict[str, Path]) -> None:
    (run,), side = load_runs([runs["own"]]), read_conditions(runs["own"])
    stated = Stated(rows={"hitom": rows_digest(side.rows("hitom") or {})})
    table = publications()[0]
    assert other_rows(table, ["hitom"], [(run, side)]) == {"hitom": "own.jsonl"}
    assert other_rows(replace(table, stated=stated), ["hitom"], [(run, side)]) == {}


def test_an_older_run_on_made_rows_has_none_either(runs: dict[str, Path], tmp_path: Path) -> None:
    for kind, left in (("made", {"hitom": "made here"}), ("own", {})):
        record = json.loads((runs[kind] / "provenance.json").read_text())
        assert sum(record["tasks"]["hitom"].pop("origins").values()) == 4
        old = tmp_path / kind
        old.mkdir()
        for name in ("config.yaml", "summary.json", "episodes.jsonl"):
            (old / name).write_bytes((runs[kind] / name).read_bytes())
        (old / "provenance.json").write_text(json.dumps(record))
        (run,) = load_runs([old])
        assert other_rows(publications()[0], ["hitom"], [(run, read_conditions(old))]) == left


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suite", [(), SUITE])
def test_everything_that_differs_stands_in_one_footnote(
    form: str, suite: tuple[str, ...], runs: dict[str, Path], tmp_path: Path
) -> None:
    text = text_of(form, tmp_path, runs["released"], *suite)
    footnote = text[text.index(CAVEAT) :]
    for said in ("Ditto paper: ", "temperature", "the source does not state", "Ditto-8B"):
        if suite and said == "Ditto-8B":
            continue  # a table of another suite
        assert said in footnote
    assert "not comparable:" not in text


def test_the_rows_are_recorded_with_the_run(runs: dict[str, Path]) -> None:
    for kind, said in {"released": "published", "imported": "published", **SAID}.items():
        entry = json.loads((runs[kind] / "provenance.json").read_text())["tasks"]["hitom"]
        assert entry["origins"] == {said: 4}
        assert rows_print(entry["rows"])["n"] == 4
