"""A difference is put between runs that were measured the same way, and between no others.

Real evaluations over HTTP that differ in exactly one thing, through `soul compare` and
`soul report`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import write_rows
from soulkit.eval.run.provenance import player_of
from soulkit.models.local.weights import weights_hash
from soulkit.models.players.players import Players
from soulkit.models.players.settings import RoleSettings
from soulkit.runs.conditions import PlayerFacts
from soulkit.runs.records import load_records
from tests.support import judged
from tests.support.evaluation import api, oracle, soul, three_lines
from tests.support.road import synth
from tests.support.servers.answers import answer
from tests.support.servers.openai_server import Body, Fault, ScriptedServer

ROWS = 6


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer=answer) as running:
        yield running


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conditions")
    rows = synth("sotopia", ROWS + 2, 1)
    write_rows(folder / "rows.jsonl", rows[:ROWS])
    write_rows(folder / "others.jsonl", rows[2:])
    return folder


def evaluated(server: ScriptedServer, home: Path, out: Path, **other: Any) -> Path:
    """A finished evaluation; `other` replaces single options."""
    at = f"@{server.base_url}"
    options: dict[str, Any] = {
        "model": "m", "base_url": server.base_url, "task": "sotopia", "backoff": 0, "out": out,
        "data": home / "rows.jsonl", "partner": f"endpoint:p{at}", "judge": [f"endpoint:j{at}"],
        "max_tokens": 60, **other,
    }  # fmt: skip
    words: list[Any] = []
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name.replace('_', '-')}", one]
    assert soul("eval", "api", *words) == 0
    return out


@pytest.fixture(scope="module")
def plain(server: ScriptedServer, home: Path) -> Path:
    return evaluated(server, home, home / "plain")


def refused(a: Path, b: Path, capfd: Any, *words: str) -> str:
    """What `compare` says; with --force-mixed it names the same in the result."""
    capfd.readouterr()
    assert soul("compare", a, b) == 2
    what, _, fix = three_lines(capfd.readouterr().err)
    assert "not measured the same way" in what
    rows = all(line.strip().startswith("rows ") for line in what.partition(": ")[2].split(";"))
    assert ("--shared-rows" if rows else "--force-mixed") in fix
    assert all(word in what for word in words), what
    assert soul("compare", a, b, "--force-mixed", "--json") == 0
    mixed = json.loads(capfd.readouterr().out)["mixed"]
    assert mixed and all(any(word in line for line in mixed) for word in words), mixed
    assert all(line in what for line in mixed)
    return what


def compared(a: Path, b: Path, capfd: Any) -> dict[str, Any]:
    """The result of a comparison that is allowed, whose text names its remarks."""
    capfd.readouterr()
    assert soul("compare", a, b, "--json") == 0
    comparison: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert comparison["mixed"] == []
    assert soul("compare", a, b) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert all(line in shown for line in comparison["remarks"])
    return comparison


CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "judge": ({"judge": "endpoint:k@{url}"}, ("judge endpoint:j@", "endpoint:k@")),
    "rows": ({"data": "{home}/others.jsonl"}, ("rows 6 vs 6, 4 in both",)),
    "much": (
        {"judge_samples": 2, "judge_order": "seeded", "partner": "actor", "limit": 4,
         "auditor": "endpoint:w@{url}", "protocol": "reference"},
        ("judge samples 1 vs 2", "judge order both vs seeded", "partner endpoint:p@",
         "actor:m@", "rows 6 vs 4, 4 in both", "auditor endpoint:j@", "endpoint:w@",
         "protocol paper vs reference"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_refused_by_name(
    case: str, server: ScriptedServer, home: Path, plain: Path, tmp_path: Path, capfd: Any
) -> None:
    changes, words = CASES[case]
    other = {
        name: value.format(url=server.base_url, home=home) if isinstance(value, str) else value
        for name, value in changes.items()
    }
    what = refused(plain, evaluated(server, home, tmp_path / "b", **other), capfd, *words)
    assert case == "much" or what.count("sotopia: ") == 1, what


def test_every_form_of_a_report_names_what_differs(
    server: ScriptedServer, home: Path, plain: Path, tmp_path: Path, capfd: Any
) -> None:
    with ScriptedServer(answer=answer) as second:
        b = evaluated(server, home, tmp_path / "b", judge=f"endpoint:j@{second.base_url}", limit=4)
    refused(plain, b, capfd, "judge endpoint:j@", second.base_url)
    assert soul("compare", plain, b, "--force-mixed", "--json") == 0
    mixed = json.loads(capfd.readouterr().out)["mixed"]
    assert soul("report", plain, b, "--json") == 0
    (pair,) = json.loads(capfd.readouterr().out)["unlike"]
    assert pair["mixed"] == mixed and len(mixed) == 2
    for form in ("terminal", "md", "html"):
        out = tmp_path / f"report.{form}"
        assert soul("report", plain, b, "--format", form, "--out", out) == 0
        shown = " ".join(out.read_text().replace("\\", "").split())
        assert shown.count("not measured the same way") == 2, form


@pytest.mark.parametrize("model", ["j", "m"])
def test_a_setting_that_one_server_refused_is_a_condition(
    home: Path, tmp_path: Path, capfd: Any, model: str
) -> None:
    """The judge's is refused, the actor's is named."""
    refusing = False

    def script(index: int, body: Body) -> Fault | None:
        if not (refusing and body["model"] == model and "temperature" in body):
            return None
        return Fault.status_error(400, "temperature is not supported", param="temperature")

    with ScriptedServer(answer=answer, script=script) as server:
        a = evaluated(server, home, tmp_path / "a", limit=2)
        refusing = True
        b = evaluated(server, home, tmp_path / "b", limit=2)
    role = {"j": "judge", "m": "actor"}[model]
    words = f"{role} sampled with all settings vs without temperature (100 % of calls)"
    if model == "m":
        assert compared(a, b, capfd)["remarks"] == [f"sotopia: {words}"]
    else:
        refused(a, b, capfd, words)
    assert compared(b, b, capfd)["remarks"] == []


# -- rows ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def essays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluations of 6 essays, of 4 of these, of 4 where one of these says something else, and one
    of 4 by another judge."""
    folder = tmp_path_factory.mktemp("essays")
    rows = judged.write_rows(folder / "rows.jsonl", 6, human=True)
    lines = rows.read_text().splitlines(keepends=True)
    four = folder / "four.jsonl"
    with ScriptedServer(answer=judged.judge()) as judge:
        judged.evaluated(folder / "six", rows, judge.base_url)
        four.write_text("".join(lines[2:]))
        judged.evaluated(folder / "four", four, judge.base_url)
        other = ("--judge", f"endpoint:k@{judge.base_url}")
        judged.evaluated(folder / "alone", four, judge.base_url, *other)
        four.write_text("".join(lines[2:]).replace("lively", "merry", 1))
        judged.evaluated(folder / "changed", four, judge.base_url)
    return folder


def test_other_rows_are_refused_with_the_command_that_compares_the_shared_ones(
    essays: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b = essays / "six", essays / "four"
    assert soul("compare", a, b) == 2
    what, why, fix = three_lines(capfd.readouterr().err)
    assert "essay: rows 6 vs 4, 4 in both" in what
    assert len(f"{what} {why}".split()) < 25
    command = fix.partition(": ")[2]
    assert command == f"soul compare {a} {b} --shared-rows"
    assert soul(*command.split()[1:]) == 0
    assert "shared rows only: essay 4 of 6 in A and 4 in B" in capfd.readouterr().out


@pytest.mark.parametrize(("other", "left"), [("four", 4), ("changed", 3)])
@pytest.mark.parametrize("swapped", [False, True])
def test_everything_is_computed_over_the_shared_rows(
    other: str, left: int, swapped: bool, essays: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b = (essays / name for name in ((other, "six") if swapped else ("six", other)))
    assert soul("compare", a, b, "--shared-rows", "--json") == 0
    result = json.loads(capfd.readouterr().out)
    counts = (4, 6) if swapped else (6, 4)
    assert result["shared_rows"] == {"essay": {"rows": left, "a": counts[0], "b": counts[1]}}
    (task,) = result["tasks"]
    assert result["mixed"] == []
    assert task["n_a"] == task["n_b"] == task["n_shared"] == task["n_clusters"] == left
    records = [load_records(run / "episodes.jsonl") for run in (a, b)]
    ids = {r.example_id for r in records[0]} & {r.example_id for r in records[1]}
    if other == "four":
        means = [sum(r.score.value or 0 for r in side if r.example_id in ids) / left
                 for side in records]  # fmt: skip
        assert [task["mean_a"], task["mean_b"]] == pytest.approx(means)


def test_what_else_differs_is_still_refused(
    essays: Path, plain: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for flags in ((), ("--shared-rows",)):
        assert soul("compare", essays / "six", essays / "alone", *flags) == 2
        what, _, fix = three_lines(capfd.readouterr().err)
        assert "judge " in what and "--force-mixed" in fix and "--shared-rows" not in fix
        assert ("rows 6 vs 4" in what) == (not flags)
    assert soul("compare", essays / "six", essays / "six", "--shared-rows") == 0


def test_runs_without_a_common_row_and_trainings_have_nothing_to_cut(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        with ScriptedServer() as server:
            assert api(server.base_url, tmp_path / name, "--seed", seed, n=10) == 0
    assert soul("compare", tmp_path / "a", tmp_path / "b") == 2
    what, _, fix = three_lines(_last(capfd))
    assert "have no row in common" in what and "rows 10 vs 10, 0 in both" in what
    assert str(tmp_path / "b" / "config.yaml") in fix
    assert "--shared-rows" not in fix and "judge" not in fix
    assert soul("compare", tmp_path / "a", tmp_path / "b", "--shared-rows") == 2
    assert "share no row" in three_lines(_last(capfd))[0]
    recorded = Path(__file__).parents[1] / "recorded" / "ditto"
    assert soul("compare", recorded, recorded, "--shared-rows") == 2
    assert "one of these runs is a training run" in three_lines(_last(capfd))[0]


def test_a_number_over_a_batch_is_that_of_the_shared_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`hitom`: its joint accuracy over stories comes out as if only these rows had been played."""
    for name, n in (("long", 20), ("short", 12)):
        with ScriptedServer(answer=oracle("hitom", 20)) as server:
            assert api(server.base_url, tmp_path / name, task="hitom", n=n) == 0
    a, b = tmp_path / "long", tmp_path / "short"
    capfd.readouterr()
    assert soul("compare", a, b, "--shared-rows", "--json") == 0
    result = json.loads(capfd.readouterr().out)
    (task,) = result["tasks"]
    assert result["shared_rows"]["hitom"] == {"rows": 12, "a": 20, "b": 12}
    assert task["mean_a"] == task["mean_b"] == 1.0


def _last(capfd: pytest.CaptureFixture[str]) -> str:
    return "\n".join(capfd.readouterr().err.splitlines()[-3:])


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]


def cut_short(run: Path, out: Path, episodes: int) -> Path:
    """A copy as a killed process leaves it."""
    shutil.copytree(run, out)
    (out / "summary.json").unlink()
    lines = (run / "episodes.jsonl").read_text().splitlines(keepends=True)[:episodes]
    (out / "episodes.jsonl").write_text("".join(lines))
    return out


def test_an_unfinished_run_is_no_run_of_fewer_rows(
    server: ScriptedServer, home: Path, plain: Path, tmp_path: Path, capfd: Any
) -> None:
    half = cut_short(plain, tmp_path / "half", 4)
    comparison = compared(plain, half, capfd)
    assert comparison["remarks"] == ["sotopia: B is unfinished: 4 of 6 rows played"]
    assert comparison["tasks"][0]["n_shared"] == 4
    fewer = evaluated(server, home, tmp_path / "fewer", limit=4)
    capfd.readouterr()
    assert soul("compare", half, fewer) == 2
    assert "rows 6 vs 4, 4 in both" in three_lines(capfd.readouterr().err)[0]


def test_a_run_is_not_finished_with_another_scorer(tmp_path: Path, capfd: Any) -> None:
    """One mean would mix two scorers, and the record would name the newer one only."""
    home = Path(shutil.copytree(judged.EXAMPLE.parent, tmp_path / "task"))
    rows = judged.write_rows(tmp_path / "rows.jsonl", 4)
    with (
        ScriptedServer(answer=judged.judge()) as judge,
        ScriptedServer(answer=judged.essay) as actor,
    ):
        command = (
            "eval", "api", "--model", "m", "--base-url", actor.base_url, "--tasks",
            home / "tasks.yaml", "--task", "judged_task", "--data", f"judged_task={rows}",
            "--judge", f"endpoint:j@{judge.base_url}", "--backoff", 0, "--out",
        )  # fmt: skip
        assert soul(*command, tmp_path / "whole") == 0
        half = cut_short(tmp_path / "whole", tmp_path / "half", 2)
        before = (half / "conditions.json").read_text()
        code = home / "task.py"
        code.write_text(code.read_text().replace("quality.score / 10", "quality.score / 20"))
        capfd.readouterr()
        assert soul(*command, half) == 2
        what, _, fix = three_lines("\n".join(capfd.readouterr().err.splitlines()[-3:]))
        assert "a different 'code' for the task judged_task" in what and "soul rescore" in fix
        assert (half / "conditions.json").read_text() == before


def test_a_checkpoint_that_was_trained_further_is_another_judge(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    digests = []
    for content in (b"a" * 100_000, b"a" * 100_000, b"a" * 99_999 + b"b"):
        weights.write_bytes(content)
        digests.append(weights_hash(tmp_path))
    assert digests[0] == digests[1] != digests[2]
    here, there = (PlayerFacts(model="j", path="/j", weights=digest) for digest in digests[1:])
    assert not here.same_as(there) and here.same_as(PlayerFacts(model="k", path="/j"))


def test_a_script_is_what_it_says_and_not_its_path(tmp_path: Path) -> None:
    facts = []
    for name, line in (("a", "Hello."), ("b", "Hello."), ("c", "No.")):
        (tmp_path / f"{name}.yaml").write_text(f"replies: ['{line}']\n")
        script = RoleSettings(kind="scripted", model=str(tmp_path / f"{name}.yaml"))
        facts.append(player_of("partner", script, 1, PlayerFacts(), Players()))
    assert facts[0].same_as(facts[1]) and not facts[0].same_as(facts[2])


def test_a_model_served_with_other_flags_is_another_judge() -> None:
    players = [RoleSettings(kind="vllm", model="no/model", args=args)
               for args in ({}, {"quantization": "fp8"})]  # fmt: skip
    plain, smaller = (player_of("judge", one, 1, PlayerFacts(), None) for one in players)
    assert (plain.args, smaller.args) == ("none", "--quantization=fp8")
    assert not plain.same_as(smaller)


# -- runs without a record -------------------------------------------------------------------------


def test_a_run_that_does_not_record_its_conditions_is_compared_with_none(
    plain: Path, tmp_path: Path, capfd: Any
) -> None:
    bare = Path(shutil.copytree(plain, tmp_path / "bare"))
    (bare / "conditions.json").unlink()
    assert soul("compare", plain, bare) == 2
    assert "sotopia: B did not record its conditions" in three_lines(_last(capfd))[0]
    assert soul("compare", plain, bare, "--force-mixed") == 0
    capfd.readouterr()
    assert soul("report", plain, bare) == 0
    assert "bare did not record its conditions" in " ".join(capfd.readouterr().out.split())


# -- several tasks ---------------------------------------------------------------------------------
