"""What a reader of `soul report` learns beside the headline, task by task, on the whole road."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from soulkit.eval.summary import Cell, Summary
from soulkit.report import html, table
from soulkit.report.load import RunData
from tests.support.evaluation import api, oracle, soul, summary
from tests.support.servers.openai_server import ScriptedServer

TYPES = ("true_belief", "false_belief", "second_order_false_belief")
EXPECTED = {
    "hitom": (
        *(f"value/order={order}" for order in range(5)),
        *(f"joint_order_{order}" for order in range(5)),
        *(f"value/length={length}" for length in (1, 2, 3)),
        "value/deception=False",
        "value/deception=True",
    ),
    "paratomi": (
        *(f"value/story={kind}" for kind in TYPES),
        *(f"value/order={order}" for order in range(3)),
        "value/question=memory",
        "value/question=reality",
    ),
    "tomi": (
        *(f"value/story={kind}" for kind in TYPES),
        *(f"value/order={order}" for order in range(3)),
        "value/question=memory",
        "value/question=reality",
    ),
    "mmtom": tuple(f"value/type={t}" for t in (1.1, 1.2, 1.3, 2.1, 2.2, 2.3, 2.4)),
    "socsci210": (
        *(f"value/type={kind}" for kind in ("binary", "categorical", "ordinal")),
        *("exact", "shift", "study_macro", "constant_best", "constant_middle"),
    ),
}


@pytest.mark.parametrize("task", EXPECTED)
def test_the_report_shows_every_break_down(
    task: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = tmp_path / "run"
    with ScriptedServer(answer=oracle(task, 30)) as server:
        assert api(server.base_url, run, task=task, n=30) == 0
    cells = summary(run)["tasks"][task]
    assert cells["value"]["mean"] == 1.0
    capfd.readouterr()
    assert soul("report", run, "--details") == 0
    shown = capfd.readouterr().out
    for name in EXPECTED[task]:
        assert cells[name]["n_scored"] > 0, name
        assert name.removeprefix("value/") in shown, name


def test_what_belongs_beside_a_headline_stands_there() -> None:
    cell = Cell(mean=1.0, n_scored=2, n=2)
    metrics = {
        "believability": cell, "secret": replace(cell, beside=True), "value": cell,
        "value/side=a": cell,
    }  # fmt: skip
    order = [name for name, _ in table.in_order(metrics)]
    assert order == ["value", "secret", "value/side=a", "believability"]
    summary = Summary(
        command="eval api", model="m", protocol="paper", seconds=1.0, tasks={"t": metrics}
    )
    runs = [RunData(name=n, path=Path(n), kind="eval", summary=summary) for n in ("one", "two")]
    assert table.beside(runs, "t") == [("secret", [replace(cell, beside=True)] * 2)]
    assert "secret" in html.render(runs) and "believability" in html.render(runs)
    lines = [line.split() for line in table.terminal_text(runs).splitlines() if line.strip()]
    heads = [line[0] for line in lines]
    assert heads.index("secret") == heads.index("t") + 1  # also where runs stand side by side
