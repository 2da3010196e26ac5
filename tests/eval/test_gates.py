"""Gates on the results of one run: what counts as missing, suites, files, exit codes, JUnit."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.errors import ConfigError
from soulkit.eval.gates import GateResult, gates_in, parse_gate, run_gates, write_junit
from soulkit.eval.results.summary import Cell, Summary, summarise
from soulkit.metrics.intervals import estimate
from soulkit.tasks.kit.registry import Registry, load_registry
from soulkit.tasks.kit.spec import Suite
from soulkit.types import Episode, Failure, Record, Score, record_key, unscored
from tests.support.evaluation import api, oracle, soul, three_lines
from tests.support.servers.openai_server import ScriptedServer

REGISTRY = load_registry()


def records(task: str, values: Sequence[float | None], metric: str = "aside") -> list[Record]:
    """One row for each value (None: unscored), with the value as a metric, too."""
    made = []
    for i, value in enumerate(values):
        score = unscored(Failure("judge_error"))
        if value is not None:
            score = Score(value=value, reward=value, metrics={metric: value})
        made.append(Record(
            key=record_key(0, f"{task}{i}", 0, "draft"), task=task, example_id=f"{task}{i}",
            rollout=0, kind="draft", episode=Episode(example_id=f"{task}{i}", task=task),
            score=score, tags={"half": "ab"[i % 2]},
        ))  # fmt: skip
    return made


def summary_of(rows: Sequence[Record], **terms: Any) -> Summary:
    return summarise(rows, command="", model="", protocol="", seconds=0, cost=None, **terms)


def results(
    rows: Sequence[Record], *gates: str, registry: Registry = REGISTRY, **terms: Any
) -> list[GateResult]:
    terms = {"scale": {"tomi": (0.0, 1.0)}, "names": {"tomi": "accuracy"}, **terms}
    return [*run_gates([*map(parse_gate, gates)], summary_of(rows, **terms), rows, registry)]


@pytest.mark.parametrize(("text", "how", "target", "metric"), [
    ("estimate(tomi/accuracy) >= .8", ("estimate",), "tomi", "accuracy"),
    ("mean(soul-10)>=0.7", ("mean",), "soul-10", ""),
    ("estimate(scored(tomi))<1.", ("estimate", "scored"), "tomi", ""),
    ("scored(tomi/value/kind=a (b))>0", ("scored",), "tomi", "value/kind=a (b)"),
])  # fmt: skip
def test_functions_around_a_target(
    text: str, how: tuple[str, ...], target: str, metric: str
) -> None:
    gate = parse_gate(text)
    assert (gate.how, gate.target, gate.metric) == (how, target, metric)


@pytest.mark.parametrize(
    "text", ["median(tomi)>=1", "estimate()>=1", "mean(tomi>=1", "tomi>=1.2.3"]
)
def test_what_is_no_gate(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid gate"):
        parse_gate(text)


def test_an_unscored_row_counts_as_the_worst_value_for_the_gate() -> None:
    rows = records("tomi", [1.0] * 60 + [0.0] * 20 + [None] * 20)
    high, low, scored, point, part = results(
        rows, "tomi/accuracy>=.6", "tomi<=.8", "scored(tomi)>=.6", "estimate(tomi)>=.6",
        "estimate(tomi/accuracy/half=a)>=.6",
    )  # fmt: skip
    as_zero = estimate([r.score.value or 0.0 for r in rows], range(100), binary=True)
    as_one = estimate([1.0 if r.score.value is None else r.score.value for r in rows], range(100),
                      binary=True)  # fmt: skip
    assert (high.value, high.low, high.high) == (0.6, as_zero.ci_low, as_zero.ci_high)
    assert (low.value, low.low, low.high) == (0.8, as_one.ci_low, as_one.ci_high)
    assert (scored.value, scored.outcome) == (0.75, "pass")
    assert [one.outcome for one in (high, low, point, part)] == ["undecided"] * 2 + ["pass"] * 2
    assert (high.n_scored, high.n) == (80, 100)
    assert high.why == "accuracy, 80/100 scored, the others count as the worst"
    assert "the worst" not in scored.why


def test_nothing_scored_fails_where_there_is_a_scale() -> None:
    rows = records("tomi", [None] * 30)
    assert [one.outcome for one in results(rows, "tomi>=.5", "scored(tomi)>=.5", "tomi/x>=0")] == [
        "fail", "undecided", "undecided"
    ]  # fmt: skip


def test_a_metric_without_a_scale_has_no_worst_case() -> None:
    rows = records("tomi", [1.5, 2.0, 2.5, None], "points")
    bare, scored = results(rows, "tomi/points>=1", "scored(tomi/points)>=1")
    assert (bare.outcome, bare.value) == ("undecided", None) and "no worst case" in bare.why
    assert scored.value == 2.0 and scored.n == 4


def test_a_batch_statistic_with_missing_units_has_only_its_bound() -> None:
    cell = Cell(mean=0.9, ci_low=0.8, ci_high=0.95, n_scored=8, n=10, unit="rows", worst=0.72,
                best=0.92, scale=(0, 1))  # fmt: skip
    whole = Summary(tasks={"tomi": {"value": Cell(n=10, n_scored=8), "all": cell}})
    gates = ["tomi/all>=.7", "estimate(tomi/all)>=.7", "scored(tomi/all)>=.7", "tomi/all<=.95"]
    outcomes = [*run_gates([*map(parse_gate, gates)], whole, [], REGISTRY)]
    assert [one.outcome for one in outcomes] == ["undecided", "pass", "pass", "undecided"]
    assert [one.value for one in outcomes] == [0.72, 0.72, 0.9, 0.92]


def test_the_average_of_a_suite_takes_the_worst_of_each_task() -> None:
    suite = Suite(members=("tomi", "hitom"))
    registry = replace(REGISTRY, suites={**REGISTRY.suites, "two": suite})
    rows = [*records("tomi", [1.0] * 50 + [None] * 50), *records("hitom", [1.0, 0.0] * 50)]
    scale = {"tomi": (0.0, 1.0), "hitom": (0.0, 1.0)}
    strict, scored, aside = results(
        rows, "mean(two)>=.4", "scored(two)>=.7", "mean(two/aside)>=.4", registry=registry,
        scale=scale,
    )  # fmt: skip
    assert (strict.value, scored.value, aside.value) == (0.5, 0.75, 0.5)
    assert strict.low is not None and 0.4 < strict.low < 0.5 and strict.outcome == "pass"
    (half,) = results(rows[:100], "two>=0", registry=registry, scale=scale)
    assert half.outcome == "undecided" and "hitom missing" in half.why


def test_a_file_of_gates(tmp_path: Path) -> None:
    file = tmp_path / "gates"
    file.write_text("# limits\ntomi>=.8   # accuracy\n\nestimate(tomi)>=.7\n")
    lines = ["tomi>=.8", "estimate(tomi)>=.7"]
    assert gates_in(file) == lines
    file.write_text(yaml.safe_dump(lines))
    assert gates_in(file) == lines
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="it has none"):
        gates_in(file)


def test_junit_survives_text_that_xml_cannot_hold(tmp_path: Path) -> None:
    odd = 'tomi/value/tag=\x1b[31m<a & "b">\x07\uffff\ud800>=.5'
    (result,) = results(records("tomi", [None]), odd)
    write_junit(tmp_path / "new" / "junit.xml", "soul eval", {result.line(): result})
    (suite,) = ET.parse(tmp_path / "new" / "junit.xml").getroot()
    assert suite.attrib == {"name": "soul eval", "tests": "1", "failures": "1"}
    assert suite[0].attrib["name"] == 'tomi/value/tag=<a & "b">>=.5'
    assert suite[0][0].attrib["type"] == "undecided"


def test_a_finished_run_is_gated_again_without_a_call(tmp_path: Path, capfd: Any) -> None:
    run, junit, config = tmp_path / "run", tmp_path / "junit.xml", tmp_path / "config.yaml"
    config.write_text("gate: [tomi>=.99]\n")
    (tmp_path / "gates").write_text("tomi>=.99\n")
    with ScriptedServer(answer=oracle("tomi", 40)) as server:
        again = (server.base_url, run)
        for wrong, word in (("tomy>=.5", "tomy"), ("tomi>.", "valid"), ("mean(tomi)>0", "a suite"),
                            ("mean(soul-10)>0", "lacks fantom")):  # fmt: skip
            capfd.readouterr()
            assert api(*again, "--gate", wrong, n=40) == 2
            assert word in three_lines(capfd.readouterr().err)[0]
        assert server.requests == [] and not run.exists()
        assert api(*again, "--gate", "tomi/accuracy>=.5", n=40) == 0
        asked = len(server.requests)
        assert "gate tomi/accuracy>=.5: pass, 1.000 [0." in capfd.readouterr().out
        assert api(*again, "--gate", "tomi/acuracy>=.5", n=40) == 2  # no such metric
        assert "'acuracy'" in capfd.readouterr().err
        for options in (("--gates", tmp_path / "gates"), ("--config", config)):
            assert api(*again, *options, "--junit", junit, "--json", n=40) == 1
            printed = json.loads(capfd.readouterr().out)
            assert [one["outcome"] for one in printed["gates"]] == ["undecided"]
            assert printed["gates"][0]["n_scored"] == printed["n"] == 40
            assert ET.parse(junit).getroot()[0].attrib["failures"] == "1"
        assert len(server.requests) == asked
    assert "gates" not in json.loads((run / "summary.json").read_text())


def test_comparisons_write_junit_too(tmp_path: Path, capfd: Any) -> None:
    with ScriptedServer(answer=oracle("tomi", 12)) as server:
        for name in ("a", "b"):
            assert api(server.base_url, tmp_path / name, n=12) == 0
    (tmp_path / "gates").write_text("tomi>=-1\ntomi>=-.01\nestimate(tomi)>=0\n")
    runs = (tmp_path / "a", tmp_path / "b")
    junit = tmp_path / "junit.xml"
    assert soul("compare", *runs, "--gates", tmp_path / "gates", "--junit", junit) == 1
    cases = ET.parse(junit).getroot()[0]
    assert [len(case) for case in cases] == [0, 1, 0]
