"""The whole benchmark in one command: every file's task, with the players that its makers had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.metrics.ngrams import subword_tokens
from soulkit.report.grid import suite_grid
from soulkit.report.load import load_runs
from soulkit.report.suites import suite_table
from soulkit.runs.records import load_records
from soulkit.tasks.registry import load_registry
from tests.support.evaluation import soul, summary
from tests.support.servers.anybody import Anybody
from tests.support.servers.openai_server import Body, ScriptedServer

SUITE = "soul-27"
PRICES = {"gpt-5.4": (2.5, 15), "gpt-5.4-mini": (0.75, 4.5), "gpt-5-nano": (0.05, 0.4)}
LIMIT = 20


def subwords(text: str) -> int:
    ids = subword_tokens(text)
    assert ids is not None
    return len(ids)


def prices(folder: Path) -> Path:
    file = folder / "prices.yaml"
    lines = [{"model": model, "in": a, "out": b} for model, (a, b) in PRICES.items()]
    file.write_text(json.dumps({"prices": lines}))
    return file


def loads(plan: dict[str, Any], task: str) -> tuple[int, int]:
    """(calls, tokens) that a plan expects of a task."""
    (part,) = [part for part in plan["tasks"] if part["task"] == task]
    tokens = sum(one["prompt_tokens"] + one["reply_tokens"] for one in part["asked"])
    return sum(one["usual_calls"] for one in part["asked"]), tokens


def test_every_file_is_played_as_its_makers_did_and_the_plan_was_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bpe_openai")
    out = tmp_path / "run"
    # Replies as long as a plan assumes: 120, 500 and 60 tokens, about.
    everybody = Anybody(line=108, verdict=430, happening=54)
    with ScriptedServer(answer=everybody, count=subwords) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        # Nine rows of UserLLM are the fewest that have every part of its headline.
        command = ("eval", "api", "--model", "gpt-5.4-mini", "--data", "synth:3",
                   "--data", "userllm=synth:9", "--prices", prices(tmp_path))  # fmt: skip
        assert soul("plan", *command, "--json") == 0
        plan = json.loads(capsys.readouterr().out)
        assert not server.requests
        assert soul(*command, "--suite", SUITE, "--out", out) == 0
        players = {str(body["model"]) for body in server.requests}
    assert players == set(PRICES)
    costs = summary(out)["costs"]
    tasks = load_registry().suite(SUITE)
    assert set(costs) == set(tasks) and len(tasks) == 27
    whole = [(0, 0), (0, 0)]
    for task in tasks:
        planned = loads(plan, task)
        asked_for = tuple(
            sum(one[what] for one in costs[task].values()) for what in ("calls", "tokens")
        )
        for expected, counted in zip(planned, asked_for, strict=True):
            assert expected == pytest.approx(counted, rel=0.2), task
        whole = [tuple(map(sum, zip(*pair, strict=True)))
                 for pair in zip(whole, (planned, asked_for), strict=True)]  # fmt: skip
    for expected, counted in zip(*whole, strict=True):
        assert expected == pytest.approx(counted, rel=0.2)
    paid = sum(one["cost"] for roles in costs.values() for one in roles.values())
    assert plan["cost"] == pytest.approx(paid, rel=0.2)
    assert plan["cost_limit"] > plan["cost"] and not plan["unpriced"]
    check_table(out, paid)


def check_table(out: Path, paid: float) -> None:
    """One table: the lines of the model card, its axes, what is covered and what it cost."""
    registry = load_registry()
    runs = load_runs([out], episodes=False)
    table = suite_table(runs, SUITE, registry)
    assert not table.partial and not table.absent
    card = registry.suite_spec("soul-23")
    assert [line.name for line in table.lines if line.level in ("task", "group")] == [*card.members]
    assert [line.name for line in table.lines if line.level == "axis"] == [*card.axes]
    same = suite_table(runs, "soul-23", registry)
    assert [line.runs[0].cell for line in same.lines] == [line.runs[0].cell for line in table.lines]
    grid = suite_grid(table)
    cost = grid.head.index("cost")
    rows = {row.cells[0].text.strip(): row.cells[cost].text for row in grid.rows}
    assert rows[f"{SUITE} mean (23 of 23; 27 of 27 tasks)"] == f"${paid:,.4f}"
    assert len(rows) == 23 + 5 + 5 + 1 and all(text.startswith("$") for text in rows.values())


@pytest.mark.parametrize("task", [*load_registry().suite(SUITE), "tau_usi"])
def test_replies_that_end_at_their_limit_are_truncated_in_every_task(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, everybody = tmp_path / "run", Anybody()

    def answer(body: Body) -> str:
        return "well " * (2 * LIMIT) if body["model"] == "chatterer" else everybody(body)

    with ScriptedServer(answer=answer) as server:
        roles = ("judge", "auditor", "partner", "environment")
        players = [part for r in roles for part in (f"--{r}", f"endpoint:{r}@{server.base_url}")]
        code = soul("eval", "api", "--model", "chatterer", "--base-url", server.base_url, "--task",
                    task, "--data", "synth:2", "--max-tokens", LIMIT, "--out", out,
                    *players)  # fmt: skip
    records = load_records(out / "episodes.jsonl")
    assert code == 1 and {record.score.status for record in records} == {"truncated"}
    assert all(record.score.value is not None for record in records)
    metric = load_registry().spec(task).metric
    cell = summary(out)["tasks"][task]["value"]
    assert (cell["worst"], cell["best"]) == pytest.approx((metric.low, metric.high))
    assert "truncated, more than --max-unscored" in capsys.readouterr().err
