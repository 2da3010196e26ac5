"""Controls through the command: asked beside the episodes, kept, priced, resumed and replayed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from soulkit.eval.comparison.compare import compare_runs
from soulkit.eval.results.batch_statistics import calibrated
from soulkit.eval.run.resume import shared_controls
from soulkit.models.ledger.view import LedgerView
from soulkit.runs.folder import read_config
from soulkit.runs.records import CONTROLS, load_controls
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.loading import load_examples
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.selfcheck import check_task
from soulkit.types import ControlRecord, Score
from tests.support.evaluation import records, soul, summary, three_lines
from tests.support.judged import essay, first_message, opinion, topic
from tests.support.servers.openai_server import Body, ScriptedServer

TASKS = Path(__file__).parents[1] / "support" / "anchored_task" / "tasks.yaml"
ROWS = 6
Answer = Callable[[Body], str]


def kind(body: Body) -> str:
    """Who is asked what: `actor`, `score`, `human` or `proxy`."""
    text = first_message(body)
    if "How alike" in text:
        return "human" if "a person wrote" in text else "proxy"
    return "score" if "How good" in text else "actor"


def player(human: int = 9, proxy: int = 3, points: int = 6) -> Answer:
    """Everybody: the actor, and a judge whose anchors and points are known."""

    def answer(body: Body) -> str:
        marks = {"human": human, "proxy": proxy}
        asked_for = kind(body)
        if asked_for in marks:
            return json.dumps({"alike": marks[asked_for]})
        return essay(body) if asked_for == "actor" else opinion(points + topic(body) % 3 - 1)

    return answer


def write_rows(path: Path, n: int = ROWS) -> Path:
    rows = [{"topic": f"topic {i}", "human": f"a person wrote {i}"} for i in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def command(url: str, out: Path, rows: Path, *more: object) -> list[str]:
    words = (
        "eval", "api", "--model", "m", "--base-url", url, "--judge", f"endpoint:j@{url}",
        "--tasks", TASKS, "--task", "anchored", "--data", f"anchored={rows}", "--backoff", 0,
        "--repeats", 2, *(("--out", out) if out.name else ()), *more,
    )  # fmt: skip
    return [str(word) for word in words]


def counts(server: ScriptedServer, start_at: int = 0) -> dict[str, int]:
    return dict(Counter(kind(body) for body in server.requests[start_at:]))


def cells(out: Path) -> dict[str, Any]:
    by_metric: dict[str, Any] = summary(out)["tasks"]["anchored"]
    return by_metric


def means(out: Path) -> dict[str, float]:
    return {name: cell["mean"] for name, cell in cells(out).items()}


def figures(out: Path) -> dict[str, Any]:
    """A summary without what a clock or the money decides."""
    every = summary(out)
    every["provenance"].pop("dates")
    return {k: v for k, v in every.items() if k not in ("seconds", "cost", "costs")}


def in_order(out: Path) -> list[ControlRecord]:
    return sorted(load_controls(out), key=lambda control: control.key)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


@pytest.fixture
def run(tmp_path: Path, rows: Path) -> Path:
    """A finished run with controls; its server is gone."""
    out = tmp_path / "run"
    with ScriptedServer(answer=player()) as server:
        assert soul(*command(server.base_url, out, rows, "--controls")) == 0
    return out


# -- asking ----------------------------------------------------------------------------------------


def test_each_control_is_asked_as_often_as_it_says_and_the_plan_counts_it(
    tmp_path: Path, rows: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer=player()) as server:
        planned = command(server.base_url, Path(), rows, "--controls", "--dry-run", "--json")
        assert soul(*planned) == 0
        plan = json.loads(capfd.readouterr().out)
        assert not server.requests
        assert soul(*command(server.base_url, out, rows, "--controls")) == 0
        calls = counts(server)
    assert calls == {"actor": 12, "score": 12, "human": 12, "proxy": 24}
    by_task = {task["task"]: task for task in plan["tasks"]}
    # A judge's calls are counted with a re-ask each.
    assert by_task["anchored"]["calls"] == {"actor": 12, "judge": 24}
    assert by_task["anchored controls"]["calls"] == {"judge": 2 * (12 + 24)}
    assert plan["episodes"] == 12
    with LedgerView(out / "ledger.sqlite") as view:
        purposes = Counter(stored.entry.call.purpose for stored in view.entries())
    assert purposes == {"": 24, "control/human_human": 12, "control/proxy_proxy": 24}
    made = load_controls(out)
    assert Counter(control.name for control in made) == {"human_human": 6, "proxy_proxy": 12}
    assert all(len(control.score.verdicts) == 2 for control in made)
    assert soul("ledger", "verify", out) == 0


def test_calibrated_numbers_stand_beside_the_headline(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    every = cells(run)
    assert every["value"]["headline"] and every["value"]["mean"] == pytest.approx(0.6)
    assert every["anchor/human_human"]["mean"] == pytest.approx(0.9)
    assert every["anchor/proxy_proxy"]["n_scored"] == 12
    assert every["calibrated"]["mean"] == pytest.approx((0.6 - 0.3) / (0.9 - 0.3))
    assert every["calibrated"]["ci_low"] < 0.5 < every["calibrated"]["ci_high"]
    assert summary(run)["controls"]["anchored"]["human_human"] == {"n": 6, "n_scored": 6}
    capfd.readouterr()
    assert soul("report", run) == 0
    assert "calibrated" in capfd.readouterr().out


def test_nobody_is_asked_unless_told_to_and_a_finished_run_gets_them_later(
    tmp_path: Path, rows: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer=player()) as server:
        assert soul(*command(server.base_url, out, rows)) == 0
        assert counts(server) == {"actor": 12, "score": 12}
        told = capfd.readouterr().err
        assert "--controls" in told and "anchored (human_human, proxy_proxy)" in told
        assert not (out / CONTROLS).exists() and "calibrated" not in cells(out)
        before = len(server.requests)
        assert soul(*command(server.base_url, out, rows, "--controls")) == 0
        assert counts(server, before) == {"human": 12, "proxy": 24}
        after = len(server.requests)
        assert soul(*command(server.base_url, out, rows)) == 0
        assert len(server.requests) == after
    assert cells(out)["calibrated"]["mean"] == pytest.approx(0.5)


def test_what_controls_cost_is_part_of_what_is_confirmed(
    tmp_path: Path, rows: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "prices.yaml"
    table.write_text("prices:\n  - {model: m, in: 1, out: 2}\n  - {model: j, in: 1, out: 2}\n")
    prices, costs = ("--prices", table), {}
    for on in ((), ("--controls",)):
        words = command("http://192.0.2.1:9/v1", Path(), rows, *prices, *on, "--dry-run", "--json")
        assert soul(*words) == 0
        costs[on] = json.loads(capfd.readouterr().out)["cost_limit"]
    assert costs[("--controls",)] > 2 * costs[()]
    limit = (costs[()] + costs[("--controls",)]) / 2
    out = tmp_path / "run"
    words = command("http://192.0.2.1:9/v1", out, rows, *prices, "--controls", "--max-cost", limit)
    assert soul(*words) == 2
    assert "cost" in three_lines(capfd.readouterr().err)[0].lower()
    assert not out.exists()


# -- failures --------------------------------------------------------------------------------------


def test_an_unreadable_control_is_unscored_and_asked_about_again(
    tmp_path: Path, rows: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, mumbles = tmp_path / "run", [True]

    def answer(body: Body) -> str:
        unclear = mumbles[0] and kind(body) == "human" and topic(body) == 2
        return "hm" if unclear else player()(body)

    with ScriptedServer(answer=answer) as server:
        words = command(server.base_url, out, rows, "--controls")
        assert soul(*words) == 0
        lost = [control for control in load_controls(out) if not control.score.scored]
        assert [(c.name, c.score.reason) for c in lost] == [("human_human", "judge_error")]
        assert "asked 2 times" in lost[0].score.words
        assert counted(out) == {"n": 6, "n_scored": 5, "unscored": {"judge_error": 1}}
        remark = "controls of anchored: human_human 5/6 scored (judge_error 1)"
        assert remark in capfd.readouterr().err
        assert cells(out)["anchor/human_human"]["n_scored"] == 5
        assert cells(out)["value"]["n_scored"] == 12
        mumbles[0], before = False, len(server.requests)
        assert soul(*words) == 0
        assert counts(server, before) == {"human": 2}
    assert counted(out) == {"n": 6, "n_scored": 6}
    assert "0 of 12 episodes left to play, controls left: 1" in capfd.readouterr().err


def counted(out: Path) -> dict[str, Any]:
    numbers: dict[str, Any] = summary(out)["controls"]["anchored"]["human_human"]
    return numbers


def test_a_draft_without_a_score_has_no_control_of_its_own(tmp_path: Path, rows: Path) -> None:
    out = tmp_path / "run"

    def unsure(body: Body) -> str:
        lost = kind(body) == "score" and topic(body) == 1
        return "hm" if lost else player()(body)

    with ScriptedServer(answer=unsure) as server:
        code = soul(*command(server.base_url, out, rows, "--controls", "--max-unscored", 0.5))
        assert code == 0
        assert counts(server)["proxy"] == 20 and counts(server)["human"] == 12
    assert Counter(c.score.reason for c in load_controls(out)) == {"": 16, "unscored_draft": 2}


# -- again -----------------------------------------------------------------------------------------


def test_a_replay_asks_nobody(tmp_path: Path, run: Path, rows: Path) -> None:
    address, again = str(read_config(run)["base_url"]), tmp_path / "again"
    replay = ("--ledger", "replay", "--ledger-file", run / "ledger.sqlite")
    words = command(address, again, rows, "--controls", *replay)  # nobody listens there any more
    assert soul(*words) == 0
    assert cells(again) == cells(run)
    assert in_order(again) == in_order(run)


def test_rescoring_judges_controls_as_well(
    tmp_path: Path, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    assert soul("rescore", run, "--out", same) == 0
    assert means(same) == pytest.approx(means(run))
    assert "0 of 18 controls" in " ".join(capfd.readouterr().out.split())
    with ScriptedServer(answer=player(human=8, proxy=2)) as server:
        judge = f"endpoint:k@{server.base_url}"
        words = ("rescore", run, "--ask", "--judge", judge, "--out", other)
        assert soul(*words, "--dry-run", "--json") == 0
        plan = json.loads(capfd.readouterr().out)
        assert soul(*words) == 0
        calls = counts(server)
    assert calls == {"score": 12, "human": 12, "proxy": 24}
    assert plan["calls"] == sum(calls.values())
    assert cells(other)["anchor/human_human"]["mean"] == pytest.approx(0.8)
    assert {v.judge for c in load_controls(other) for v in c.score.verdicts} == {"k"}


def test_runs_with_and_without_controls_may_be_compared(tmp_path: Path, rows: Path) -> None:
    folders = {}
    with ScriptedServer(answer=player()) as server, ScriptedServer(answer=player()) as other:
        for name, url, more in (
            ("with", server.base_url, ("--controls",)),
            ("without", server.base_url, ()),
            ("both", server.base_url, ("--controls", "--temperature", 0.5)),
        ):
            folders[name] = tmp_path / name
            assert soul(*command(url, folders[name], rows, *more)) == 0
        assert not other.requests
    mixed = compare_runs(folders["with"], folders["without"], trust=True)
    assert mixed.mixed == ()
    assert "controls exist only in A, so they are not compared (anchored)" in mixed.remarks
    (task,) = compare_runs(folders["with"], folders["both"], "calibrated", trust=True).tasks
    assert (task.paired.mean_a, task.paired.difference) == (pytest.approx(0.5), 0.0)


def test_a_control_that_nobody_scored_was_not_asked_with_other_prompts(
    tmp_path: Path, run: Path, rows: Path
) -> None:
    def mute(body: Body) -> str:
        return "no idea" if kind(body) == "human" else player()(body)

    silent = tmp_path / "silent"
    with ScriptedServer(answer=mute) as server:
        assert soul(*command(server.base_url, silent, rows, "--controls")) == 0
    shared = shared_controls(run, silent, ["anchored"])
    assert shared.remarks == () and shared.sides.keys() == {"anchored"}
    lines = (silent / CONTROLS).read_text(encoding="utf-8").splitlines()
    edited = [{**one, "score": {**one["score"], "prompts": {"alike": "other"}}}
              for one in map(json.loads, lines)]  # fmt: skip
    (silent / CONTROLS).write_text("".join(json.dumps(one) + "\n" for one in edited))
    (remark,) = shared_controls(run, silent, ["anchored"]).remarks
    assert "different prompts" in remark


def test_a_control_leaves_a_batch_with_its_cluster(run: Path) -> None:
    task = load_registry(TASKS).task("anchored")
    drafts, controls = records(run), load_controls(run)
    part = [record for record in drafts if record.cluster != drafts[0].cluster]
    metrics = calibrated(task, controls)(part)
    assert metrics["anchor/human_human"].n == ROWS - 1
    assert metrics["anchor/proxy_proxy"].n == 2 * (ROWS - 1)
    assert "calibrated" not in calibrated(task, ())(part)
    strange = ControlRecord(
        task="other", example_id="x", rollout=0, name="human_human",
        score=Score(value=0.0, reward=0.0),
    )  # fmt: skip
    assert calibrated(task, [*controls, strange])(part) == metrics


# -- for authors -----------------------------------------------------------------------------------


def test_a_task_shows_its_controls(capfd: pytest.CaptureFixture[str]) -> None:
    assert soul("tasks", "show", "mirrorbench") == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "controls: human_human (per row: judge 13); proxy_proxy (per episode: judge" in shown
    # The class of a task of one's own is not imported for showing its declaration.
    assert soul("tasks", "show", "anchored", "--tasks", TASKS) == 0
    assert "controls:" not in capfd.readouterr().out


def test_the_check_of_a_task_asks_about_its_controls(rows: Path) -> None:
    task = load_registry(TASKS).task("anchored")
    loaded = load_examples(task, [rows])
    checked = check_task(task, loaded)
    assert checked.breaks == () and "alike" not in checked.unrendered

    class Forgetful(type(task)):  # type: ignore[misc]
        control = Task.control

    broken = check_task(Forgetful(task.name, task.spec), loaded)
    assert ["does not define control()" in line.why for line in broken.breaks] == [True, True]


# -- kills -----------------------------------------------------------------------------------------
