"""A pilot of an evaluation: its interval covers the true cost, and no call is made twice."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from soulkit.eval.pilot import PilotRow, plan_from_pilot
from soulkit.eval.run.session import pilot_work
from soulkit.play.plan import Load, Plan, PlayerTerms, Work, plan_loads
from soulkit.tasks.kit.registry import load_registry
from soulkit.types import Example
from tests.support.evaluation import FAST, examples, soul, summary
from tests.support.servers.openai_server import ScriptedServer
from tests.support.training import random_model

PRICES = ("--price-in", 1, "--price-out", 4)


def talkative(body: dict[str, Any]) -> str:
    """An answer whose length depends on the prompt: 10 to 400 words, longer than planned."""
    rng = random.Random(json.dumps(body["messages"]))
    return " ".join(["well"] * rng.randrange(10, 400)) + " <answer>A</answer>"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ScriptedServer]:
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    monkeypatch.chdir(tmp_path)
    with ScriptedServer(answer=talkative) as running:
        yield running


def command(server: ScriptedServer, *more: object) -> tuple[object, ...]:
    """Two tasks, one of them with a partner; the address does not look like this machine's own."""
    url = server.base_url.replace("127.0.0.1", "0.0.0.0")
    prices = Path("prices.yaml")
    prices.write_text(json.dumps({"prices": [{"model": "p", "in": 2, "out": 8}]}))
    return ("eval", "api", "--model", "m", "--base-url", url, "--task", "tomi,secret_keeper",
            "--data", "synth:40", "--partner", f"endpoint:p@{url}", "--prices", prices, *PRICES,
            "--max-tokens", 500, *FAST, *more)  # fmt: skip


def calls(run: Path) -> int:
    """The distinct calls of a run."""
    return sum(one["calls"] for of in summary(run)["costs"].values() for one in of.values())


def test_a_pilot_measures_the_cost_and_its_run_goes_on(
    server: ScriptedServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert soul("plan", *command(server), "--json") == 0
    assumed = json.loads(capfd.readouterr().out)
    assert assumed["pilot"] is None and not server.requests
    out = tmp_path / "run"
    assert soul("plan", *command(server, "--out", out, "--pilot", 24, "--max-cost", 5)) == 0
    printed = capfd.readouterr()
    assert "cost of the pilot: about $" in printed.err and "95 % interval $" in printed.out
    assert "pilot: 24 rows of 2 tasks cost $0." in printed.out and str(out) in printed.out
    assert "measured over assumed: actor 1.00 × calls, " in printed.out
    assert "--pilot N" not in printed.out
    first = len(server.requests)
    lines = (out / "episodes.jsonl").read_text().splitlines()
    assert len(lines) == 24 and not (out / "summary.json").exists()

    assert soul("plan", *command(server, "--out", out, "--pilot", 24, "--yes", "--json")) == 0
    plan = json.loads(capfd.readouterr().out)
    assert len(server.requests) == first  # every reply is in the ledger
    low, high = plan["cost_range"]
    assert low < plan["cost"] < high and plan["pilot"]["interval"] == [low, high]
    assert plan["pilot"]["ratios"]["partner"]["reply_tokens"] > 1.3
    assert plan["pilot"]["rows"] == 24 and plan["pilot"]["tasks"] == 2

    assert soul(*command(server, "--out", out, "--yes")) == 0
    assert "95 % interval $" in capfd.readouterr().err  # of the rest
    assert len(server.requests) == calls(out)
    true = summary(out)["cost"]
    before = assumed["cost_range"]
    assert low < true < high and high - low < (before[1] - before[0]) / 2
    assert abs(plan["cost"] - true) < abs(assumed["cost"] - true) / 2
    assert summary(out)["n"] == 80


def test_plans_of_api_models_do_not_look_for_a_gpu(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("soulkit.eval.planning.device_memory")
    assert soul("plan", *command(server)) == 0


def test_a_pilot_without_prices_has_no_cost(
    server: ScriptedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    url = server.base_url
    words = ("eval", "api", "--model", "m", "--base-url", url, "--task", "tomi", *FAST,
             "--data", "synth:4", "--pilot", 2, "--out", "run")  # fmt: skip
    assert soul("plan", *words) == 0
    assert "pilot: 2 rows of 1 task; run keeps their replies" in capfd.readouterr().out
    assert soul("plan", *words, "--json") == 0
    assert json.loads(capfd.readouterr().out)["pilot"]["cost"] is None


def test_without_a_folder_the_run_finds_its_pilot(
    server: ScriptedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    assert soul("plan", *command(server, "--pilot", 4, "--yes")) == 0
    first = len(server.requests)
    assert soul(*command(server, "--yes")) == 0
    (run,) = Path("runs").iterdir()
    assert len(server.requests) == calls(run) > first


def test_a_pilot_must_be_confirmed_and_keeps_to_the_limit(
    server: ScriptedServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert soul("plan", *command(server, "--out", tmp_path / "run", "--pilot", 4)) == 2
    assert "--max-cost" in capfd.readouterr().err and not server.requests
    spent = ("--out", tmp_path / "run", "--pilot", 20, "--max-cost", 0.003)
    assert soul("plan", *command(server, *spent)) == 2
    assert "at most 0.003 US dollars" in capfd.readouterr().err
    first = len(server.requests)
    assert 0 < first < 60


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--pilot", 0, "--dry-run"), "--pilot '0': Input should be greater than or equal to 1"),
        (("--pilot", 5), "--pilot has no effect here"),
        (("--bounds",), "--bounds has no effect here"),
        (("--pilot", 5, "--dry-run", "--ledger", "off"), "--pilot does not work with --ledger off"),
    ],
)
def test_refused_options(
    words: tuple[object, ...], error: str, server: ScriptedServer,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert soul(*command(server, *words)) == 2
    assert error in capfd.readouterr().err and not server.requests


# --- the estimate ---------------------------------------------------------------------------------


def works(n: int) -> list[Work]:
    registry = load_registry()
    return [Work(registry.task(name), examples(name, n)) for name in ("tomi", "hitom")]


@pytest.mark.parametrize(("n", "counts"), [(1, [1]), (5, [3, 2]), (50, [6, 6])])
def test_rows_are_spread_over_the_tasks(n: int, counts: list[int]) -> None:
    chosen = pilot_work(works(6), n, seed=0)
    assert [len(part.examples) for part in chosen] == counts
    more = {e.id for part in pilot_work(works(6), n + 1, seed=0) for e in part.examples}
    assert {e.id for part in chosen for e in part.examples} <= more
    if n == 5:
        assert chosen != pilot_work(works(6), n, seed=1)


def planned(work: list[Work]) -> Plan:
    actor = PlayerTerms(role="actor", name="m", limit=9000, prices=(1.0, 4.0))
    return plan_loads([Load(work, lambda _: [actor])])


def true_cost(example: Example) -> float:
    """What the row's call really costs, with a long tail."""
    rng = random.Random(example.id)
    return 0.0005 * rng.lognormvariate(0, 0.6) * (3 if example.task == "hitom" else 1)


def row_of(part: Work, example: Example) -> PilotRow:
    plan = planned([Work(part.task, (example,))])
    amounts = {("actor", name): 1.0 for name in ("calls", "prompt_tokens", "reply_tokens",
                                                 "seconds")}  # fmt: skip
    amounts["actor", "cost"] = true_cost(example)
    return PilotRow(part.task.name, example.cluster, PilotRow.of(
        part.task.name, example, plan, {}).planned, amounts)  # fmt: skip


def test_the_interval_covers_the_true_cost_as_often_as_it_says(tmp_path: Path) -> None:
    work = works(150)
    rows = {e.id: row_of(part, e) for part in work for e in part.examples}
    true, whole = sum(true_cost(e) for part in work for e in part.examples), planned(work)
    covered = 0
    for seed in range(200):
        chosen = [rows[e.id] for part in pilot_work(work, 20, seed) for e in part.examples]
        plan = plan_from_pilot(whole, chosen, tmp_path, 20 / 300)
        assert plan.cost is not None and plan.cost_range is not None
        low, high = plan.cost_range
        assert low < plan.cost < high
        covered += low <= true <= high
    assert covered >= 174  # 87 %: the costs are skewed, and rows of a story are alike


def test_few_rows_share_one_ratio_and_one_row_has_no_interval(tmp_path: Path) -> None:
    work = works(30)
    whole = planned(work)
    chosen = [row_of(part, e) for part in pilot_work(work, 3, 0) for e in part.examples]
    plan = plan_from_pilot(whole, chosen, tmp_path)
    ratio = [after.asked[0].cost / before.asked[0].cost  # type: ignore[operator]
             for before, after in zip(whole.tasks, plan.tasks, strict=True)]  # fmt: skip
    assert ratio[0] == pytest.approx(ratio[1]) and plan.cost_range is not None
    one = plan_from_pilot(whole, chosen[:1], tmp_path)
    assert one.cost_range is None and one.pilot is not None and one.cost != whole.cost


def test_a_model_in_this_process_is_played_and_not_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its calls cost nothing and are in no ledger, so the plan of it stays as it is."""
    model = random_model(tmp_path / "tiny", max_context=2048)
    local = ("eval", "local", "--model", model, "--task", "tomi", "--data", "synth:6",
             "--max-tokens", 4, "--device", "cpu", "--out", tmp_path / "run")  # fmt: skip
    assert soul("plan", *local, "--json") == 0
    before = json.loads(capfd.readouterr().out)
    assert soul("plan", *local, "--pilot", 2, "--json") == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["tasks"] == before["tasks"] and plan["pilot"]["ratios"] == {}
    assert soul("plan", *local, "--pilot", 2) == 0
    assert "measured over" not in capfd.readouterr().out
    assert len((tmp_path / "run" / "episodes.jsonl").read_text().splitlines()) == 2
