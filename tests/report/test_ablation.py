"""The comparison of methods: numbers against hand-made runs, and a page that stands alone."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.metrics.intervals import estimate
from soulkit.report import ablation
from soulkit.report.ablation import FinalScore, write_ablation
from tests.support.evaluation import soul
from tests.support.servers.openai_server import ScriptedServer

TEN = (
    "grpo", "ditto", "ditto:lambda_fb=0", "ditto:only_copy", "rltf-sd", "erl", "sdpo-token",
    "sdpo-logits", "sdpo-token+grpo", "sdpo-logits+grpo",
)  # fmt: skip


def lines(level: float, steps: int, seed: str, refined: bool) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for step in range(steps):
        reward = 0.3 + level * (1 - math.exp(-step / 8)) + rng.gauss(0, 0.03)
        rows.append({
            "step": step, "reward/draft": reward, "rollouts/draft": 64 if refined else 128,
            "reward/refined": reward + 0.1 if refined else None, "rollouts/refined": 60 * refined,
            "gap/loo": 0.1 if refined else None, "kl/base": 0.002 * step,
            "policy/entropy": 1.5 - 0.01 * step,
            "tokens/per_turn": 20 + rng.random(),
            "trained/draft": 900, **({"trained/copy": 800} if refined else {}),
        })  # fmt: skip
        if step % 5 == 4:
            rows.append({"step": step, "eval/tomi": reward + 0.05, "eval/hitom": reward - 0.05})
    return rows


def made(
    out: Path, arms: Sequence[str] = TEN, seeds: int = 3, steps: int = 30,
    failed: Sequence[tuple[str, int]] = (),
) -> Path:  # fmt: skip
    """A folder as `soul train ablate` leaves it, with invented metrics."""
    noted = []
    for index, arm in enumerate(arms):
        for seed in range(seeds):
            path = f"{arm.replace(':', '-')}/seed_{seed}"
            broken = (arm, seed) in failed
            noted.append({
                "arm": arm, "method": arm.partition(":")[0], "seed": seed, "path": path,
                "status": "failed" if broken else "finished",
                "reason": "<b>no</b> memory" if broken else "", "steps": steps,
                "prompts_per_step": 16, "group_size": 4,
            })  # fmt: skip
            if broken:
                continue
            folder = out / path
            folder.mkdir(parents=True)
            every = lines(0.1 + 0.04 * index, steps, f"{arm}{seed}", "ditto" in arm or arm == "erl")
            (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in every))
            (folder / "summary.json").write_text(
                json.dumps({"command": "train", "seconds": 60.0 + seed})
            )
            config = {"model": "m", "tasks": {"tomi": 1.0, "hitom": 1.0}}
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
            (folder / "conditions.json").write_text('{"players": {}, "tasks": {}}')
    (out / "ablation.json").write_text(json.dumps({"runs": noted}))
    return out


def rewards(out: Path, arm: str, seed: int) -> list[float]:
    text = (out / arm.replace(":", "-") / f"seed_{seed}" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    return [line["reward/draft"] for line in rows if "reward/draft" in line]


def test_final_rewards_and_paired_differences(tmp_path: Path) -> None:
    out = made(tmp_path, ("grpo", "ditto"))
    grpo, ditto = ablation.load_ablation(out).rows
    final = {
        arm: [sum(rewards(out, arm, s)[-10:]) / 10 for s in range(3)] for arm in ("grpo", "ditto")
    }
    assert ditto.final.seeds == pytest.approx(final["ditto"])
    mean = estimate(final["ditto"], range(3))
    assert (ditto.final.low, ditto.final.high) == pytest.approx((mean.ci_low, mean.ci_high))
    differences = [b - a for a, b in zip(final["grpo"], final["ditto"], strict=True)]
    assert ditto.final_difference is not None and grpo.final_difference is None
    assert ditto.final_difference.seeds == pytest.approx(differences)
    assert ditto.final_difference.mean == pytest.approx(sum(differences) / 3)
    assert ditto.dev.mean is not None and (grpo.drafts, grpo.refined) == (128, 0)
    assert ditto.trained == {"draft": 900, "copy": 800}
    assert ablation.rollouts_text(ditto) == "124 = 64 + 60 refined"


def test_intervals_over_seeds_stay_on_the_scale_that_the_runs_recorded(tmp_path: Path) -> None:
    out = made(tmp_path, ("grpo", "ditto"), steps=12)
    cells = {"value": {"mean": 0.99, "n": 8, "n_scored": 8, "scale": [0.0, 1.0]}}
    for path in sorted(out.glob("*/seed_*")):
        seed, best = int(path.name[-1]), path.parent.name == "ditto"
        reward = 1.0 if best else 0.97 + 0.01 * seed
        lines = [{"step": s, "reward/draft": reward, "kl/base": 0.1} for s in range(12)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        (path / "summary.json").write_text(json.dumps({"tasks": {"tomi": cells}}))
    table = ablation.load_ablation(out)
    grpo, ditto = table.rows
    assert ditto.final.mean == 1.0 and ditto.final.high == 1.0
    assert ditto.final.low is not None and ditto.final.low < 1.0  # three seeds prove little
    assert grpo.final.high is not None and 0.98 < grpo.final.high < 1.0
    curves = {chart.title: chart.panels[0].curves for chart in table.curves}
    assert curves["Rewards"][-1].high == [1.0] * 12
    assert curves["Policy"][-1].high == [None] * 12
    assert ditto.final_difference is not None and ditto.final_difference.low is not None
    assert -1.0 <= ditto.final_difference.low < ditto.final_difference.high <= 1.0


def test_differences_use_only_the_seeds_that_both_have(tmp_path: Path) -> None:
    out = made(tmp_path, ("grpo", "ditto"), failed=[("grpo", 1)])
    table = ablation.load_ablation(out)
    assert table.rows[1].final_difference is not None
    assert len(table.rows[1].final_difference.seeds) == 2 and len(table.rows[1].final.seeds) == 3
    assert [ablation.missing_text(m) for m in table.missing] == [
        "grpo seed 1 failed: <b>no</b> memory"
    ]


def test_without_the_first_method_there_is_no_difference(tmp_path: Path) -> None:
    out = made(tmp_path, ("grpo", "ditto"), failed=[("grpo", s) for s in range(3)])
    (row,) = ablation.load_ablation(out).rows
    assert row.arm == "ditto" and row.final_difference is None
    write_ablation(ablation.load_ablation(out), tmp_path / "report")


def test_nothing_finished_is_still_a_page(tmp_path: Path) -> None:
    out = made(tmp_path, ("grpo",), failed=[("grpo", s) for s in range(3)])
    page = write_ablation(ablation.load_ablation(out), tmp_path / "report").read_text()
    assert "Without a complete result" in page and "<b>no</b>" not in page


def test_a_failed_final_evaluation_hides_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One arm is evaluated on other rows, one not at all; the others keep their differences."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    arms = ("grpo", "erl", "rltf-sd", "ditto")
    out = made(tmp_path / "out", arms, seeds=1, steps=12)
    with ScriptedServer(answer="<answer>A</answer>") as server:
        for name, rows in (("grpo", 8), ("erl", 4)):
            end = out / name / "seed_0" / "final-eval"
            assert not soul("eval", "api", "--model", "m", "--base-url", server.base_url, "--task",
                            "tombench", "--data", f"synth:{rows}", "--out", end)  # fmt: skip
    for name in ("base", "rltf-sd/seed_0"):
        shutil.copytree(out / "grpo" / "seed_0" / "final-eval", out / name / "final-eval")
    state = json.loads((out / "ablation.json").read_text())
    state["runs"][-1] |= {"status": "failed", "reason": "the judge is down"}
    (out / "ablation.json").write_text(json.dumps(state))
    summary = out / "ditto" / "seed_0" / "summary.json"
    assert [row.arm for row in ablation.load_ablation(out).rows] == [*arms[:3]]  # not trained
    summary.write_text(json.dumps({"command": "train", "seconds": 60.0, "steps": 12}))
    whole = ablation.load_ablation(out)
    assert [row.arm for row in whole.rows] == [*arms]
    assert whole.rows[3].final_difference is not None and whole.rows[3].final.mean is not None
    assert len(whole.missing) == 1
    shown = {one.arm: one.difference for one in whole.finals if one.metric == "accuracy"}
    assert list(shown) == ["base model", *arms[:3]]
    assert shown["erl"] is None and shown["grpo"] is None
    for arm in ("base model", "rltf-sd"):
        assert (one := shown[arm]) is not None and one.mean == 0
    figure = {"published": {"table": "ditto_paper"}, "differs": "nothing."}
    grid = ablation.reproduction_grid(out, whole, figure)
    rows = {row.cells[0].text: [cell.text for cell in row.cells[1:]] for row in grid.rows}
    assert rows["ditto"][:3] == ["–"] * 3 and rows["ditto"][-1] == "1 min 00 s"
    assert any("ditto seed 0 failed: the judge is down" in note for note in grid.notes)


def test_the_headline_names_the_judge_whose_scores_the_table_shows(tmp_path: Path) -> None:
    table = ablation.load_ablation(made(tmp_path, ("grpo", "ditto")))
    rows = (table.rows[0], replace(table.rows[1], judged_difference=table.rows[1].final_difference))
    final = FinalScore("ditto", "t", "m", rows[1].final, rows[1].final_difference, 1, 1)
    both = replace(table, rows=rows, finals=(final,), eval_judge="endpoint:k")
    assert "final judge score of ditto" in ablation.method_finding(both)
    assert ablation.methods_grid(both).head[1] == "final judge score"
    alone = replace(both, eval_judge="")
    assert "final evaluation of ditto" in ablation.method_finding(alone)


def test_one_seed_has_no_interval_and_says_so(tmp_path: Path) -> None:
    table = ablation.load_ablation(made(tmp_path, ("grpo", "ditto"), seeds=1))
    assert table.rows[0].final.low is None
    assert any("no interval" in note for note in ablation.method_notes(table))
    assert "[" not in ablation.stat_text(table.rows[0].final)


def test_the_page_leads_with_the_method_that_differs_clearly(tmp_path: Path) -> None:
    table = ablation.load_ablation(made(tmp_path, ("grpo", "ditto")))
    said = ablation.method_finding(table)
    moved = table.rows[1].final_difference
    assert moved is not None and moved.low is not None and moved.low > 0
    assert said.startswith(
        f"The final reward of ditto differs from that of grpo by +{moved.mean:.3f}"
    )
    unclear = replace(moved, low=-moved.low)
    rows = (table.rows[0], replace(table.rows[1], final_difference=unclear))
    assert ablation.method_finding(replace(table, rows=rows)).startswith(
        "No method differs clearly"
    )
    assert f"<h1>{said}</h1>" in write_ablation(table, tmp_path / "report").read_text()


def test_different_budgets_are_told(tmp_path: Path) -> None:
    table = ablation.load_ablation(made(tmp_path, ("grpo", "rltf-sd", "ditto"), seeds=1, steps=2))
    assert not any("Budgets differ" in note for note in ablation.method_notes(table))  # 128 and 124
    path = tmp_path / "grpo" / "seed_0" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"rollouts/draft": 128', '"rollouts/draft": 64'))
    assert any(
        "Budgets differ" in note for note in ablation.method_notes(ablation.load_ablation(tmp_path))
    )


class _Open(HTMLParser):
    """Tags that are open; remote addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.remote: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br", "img"):
            self.stack.append(tag)
        self.remote += [v for k, v in attrs if k in ("src", "href") and v and "//" in v]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


@pytest.mark.slow
def test_the_page_stands_alone_and_names_every_method(tmp_path: Path) -> None:
    table = ablation.load_ablation(made(tmp_path))
    page = write_ablation(table, tmp_path / "report").read_text()
    reader = _Open()
    reader.feed(page)
    assert reader.stack == [] and reader.remote == [] and "<script" not in page
    for arm in TEN:
        assert page.count(arm) >= 3
    drawn = {p.stem for p in (tmp_path / "report" / "figures").iterdir()}
    assert drawn >= {"results", "rewards", "evaluation-during-training", "policy"}
    saved = json.loads((tmp_path / "report" / "comparison.json").read_text())
    dev = [one for one in saved["curves"] if one["figure"] == "Evaluation during training"]
    assert [one["label"] for one in dev if one["panel"] == "tomi"] == list(TEN)
    assert dev[0]["steps"] == [4, 9, 14, 19, 24, 29] and len(dev[0]["low"]) == 6
    assert [row["arm"] for row in saved["rows"]] == list(TEN) and saved["first"] == "grpo"


def test_a_sweep_is_drawn_against_its_setting_from_three_values_on(tmp_path: Path) -> None:
    swept = ["ditto:lambda_fb=1", "ditto:lambda_fb=0", "ditto:lambda_fb=5E-1"]
    arms = ["grpo", *swept, "ditto:lora.r=8", "ditto:lora.r=16", "ditto:only_copy"]
    whole = ablation.load_ablation(made(tmp_path, arms))
    (chart,) = [c for c in ablation.ablation_charts(whole) if c.name == "sweep"]
    (panel,) = chart.panels
    (curve,) = panel.curves
    assert panel.axis == "lambda_fb" and curve.label == "ditto"
    assert list(curve.steps) == [0, 0.5, 1]
    finals = {row.arm: row.final for row in whole.rows}
    assert panel.rules == [("grpo", finals["grpo"].mean)]
    alone = replace(whole, rows=tuple(row for row in whole.rows if row.arm in swept))
    (own,) = ablation.sweep_charts(alone)
    assert not own.panels[0].rules  # the first method is a point of the curve
    assert list(curve.values) == [finals[swept[i]].mean for i in (1, 2, 0)]
    assert list(curve.low) == [finals[swept[i]].low for i in (1, 2, 0)]
    assert chart.title == "Final draft reward by setting"
    assert chart.title in write_ablation(whole, tmp_path / "page").read_text("utf-8")
    ends = [replace(row, judged=replace(row.final, mean=i)) for i, row in enumerate(alone.rows)]
    (judged,) = ablation.sweep_charts(replace(alone, rows=tuple(ends), eval_judge="oracle"))
    assert judged.title == "Final judge score by setting"
    assert list(judged.panels[0].curves[0].values) == [1, 2, 0]
