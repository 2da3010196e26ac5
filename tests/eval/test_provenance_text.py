"""Who judged, on which rows, by which model: in the head of a run, and whole on its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.eval.comparison.provenance_text import provenance_facts, revision_text, role_text
from soulkit.report.load import load_runs
from soulkit.runs.conditions import provenance_of, rows_hash, with_provenance
from tests.support.evaluation import api, oracle, soul, summary
from tests.support.servers.openai_server import ScriptedServer

URL = "http://127.0.0.1:9/v1"
ORIGIN: dict[str, Any] = {
    "players": {"judge": [{"kind": "endpoint", "model": "j", "address": URL}]},
    "tasks": {
        "sotopia": {"roles": ["judge", "partner"], "rows": {"n": 450, "sha256": "3fa9c1d2" * 8}},
        "coser": {"roles": ["judge"], "players": {"judge": [{"model": "k", "address": URL}]}},
        "tomi": {"roles": [], "rows": {"n": 6, "sha256": ""}},
    },
    "actor": {"model": "m", "weights": "0123456789abcdef", "adapter_weights": "fedcba9876543210"},
}


def test_the_head_of_a_run_names_its_judges_rows_and_revision() -> None:
    facts = dict(provenance_facts(ORIGIN))
    assert facts["judge"] == f"j@{URL}, k@{URL} for coser"
    assert facts["rows"] == "sotopia 450 (3fa9c1d2); tomi 6"
    assert facts["revision"] == "0123456789ab + adapter fedcba987654"
    assert "partner" not in facts and role_text(ORIGIN, "partner") == ""
    assert provenance_facts({}) == [] and revision_text({"revision": "abc"}) == "abc"


def test_judges_of_single_tasks_are_not_named_for_all() -> None:
    """Two judges that each score one task are no panel of two."""
    one, two = ({"model": name, "address": URL} for name in "jk")
    split = {
        "players": {"judge": [one, two]},
        "tasks": {
            "sotopia": {"roles": ["judge"], "players": {"judge": [one]}},
            "coser": {"roles": ["judge"], "players": {"judge": [two]}},
            "tomi": {"roles": []},
        },
    }
    assert role_text(split, "judge") == f"j@{URL} for sotopia, k@{URL} for coser"
    split["tasks"]["coser"] = {"roles": ["judge"], "players": {"judge": [one, two]}}
    assert role_text(split, "judge") == f"j@{URL} and k@{URL}, j@{URL} for sotopia"
    split["tasks"] |= dict.fromkeys(("sim_doc", "userllm"), split["tasks"]["sotopia"])
    split["tasks"]["coser"] = {"roles": ["judge"], "players": {"judge": [two]}}
    many = f"k@{URL} for coser, j@{URL} for sotopia, sim_doc and userllm"
    assert role_text(split, "judge") == many


def test_a_judge_that_no_task_asks_is_not_named() -> None:
    rules = {**ORIGIN, "tasks": {"tomi": ORIGIN["tasks"]["tomi"]}}
    assert "judge" not in dict(provenance_facts(rules))


def test_rows_are_one_hash_in_whatever_order_they_come() -> None:
    rows = {"a": "1", "b": "2"}
    assert rows_hash(rows) == rows_hash(dict(reversed(rows.items())))
    assert len({rows_hash(one) for one in (rows, {**rows, "b": "3"}, {"a": "1"}, {"c": "1"})}) == 4


def test_every_form_of_a_report_shows_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(answer=oracle("tomi", 6)) as server:
        assert api(server.base_url, tmp_path / "run") == 0
    rows = summary(tmp_path / "run")["provenance"]["tasks"]["tomi"]["rows"]
    capfd.readouterr()
    assert soul("report", tmp_path / "run", "--json") == 0
    (shown,) = json.loads(capfd.readouterr().out)["runs"].values()
    assert shown["provenance"]["tasks"]["tomi"]["rows"] == rows
    for form in ("terminal", "md", "html"):
        out = tmp_path / f"report.{form}"
        assert soul("report", tmp_path / "run", "--format", form, "--out", out) == 0
        assert f"tomi 6 ({rows['sha256'][:8]})" in out.read_text().replace("\\", "")
    assert rows["sha256"] in (tmp_path / "report.html").read_text()


def test_an_older_run_is_gathered_by_its_files_and_a_bare_summary_by_nothing(
    tmp_path: Path,
) -> None:
    with ScriptedServer(answer=oracle("tomi", 6)) as server:
        assert api(server.base_url, tmp_path / "run") == 0
    line = summary(tmp_path / "run")
    written = line.pop("provenance")
    gathered = provenance_of(tmp_path / "run", line)
    assert {**written, "dates": None} == {**gathered, "dates": None}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(line))
    (run,) = load_runs([tmp_path / "run"])
    assert run.provenance["tasks"] == written["tasks"]
    bare = tmp_path / "bare"
    bare.mkdir()
    assert set(provenance_of(bare, {"protocol": "paper"})) <= {"protocol", "dates"}
    assert with_provenance(bare, {"n": 1})["provenance"]["dates"]["finished"]
