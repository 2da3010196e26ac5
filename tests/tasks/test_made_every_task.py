"""Every task file of SOUL has made rows that load: no benchmark's data is needed to try it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soulkit.cli import app as cli
from soulkit.data.files import read_rows, write_rows
from soulkit.tasks.loading import load_examples
from soulkit.tasks.registry import load_registry
from tests.support.road import makeable, synth, task_of

SOUL = (
    "alignx_arbitrary", "alignx_demo", "alignx_history16", "alignx_pair", "alignx_ugc",
    "behaviorchain", "coser", "fantom", "hitom", "humanllm", "humanual_book", "humanual_chat",
    "humanual_email", "humanual_news", "humanual_opinion", "humanual_politics", "lifechoices",
    "mirrorbench", "mistakes", "paratomi", "sim_doc", "sim_math", "social_r1", "socsci210",
    "sotopia", "twinvoice", "userllm",
)  # fmt: skip
ROWS = 50


def test_the_list_is_the_suite() -> None:
    suites = load_registry().suites
    if "soul-27" not in suites:
        pytest.skip("the suite soul-27 is not declared")
    assert sorted(suites["soul-27"].tasks) == sorted(SOUL) and len(set(SOUL)) == 27


@pytest.mark.parametrize("name", SOUL)
def test_fifty_made_rows_are_written_checked_and_loaded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name not in makeable():
        pytest.skip(f"rows of {name} cannot be made")
    path, copy = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    assert cli.main(["data", "synth", name, "-n", str(ROWS), "--seed", "3", "-o", str(path)]) == 0
    capsys.readouterr()
    assert cli.main(["data", "check", str(path), "--json"]) == 0
    (checked,) = json.loads(capsys.readouterr().out)["tasks"]
    assert (checked["task"], checked["rows"], checked["bad"]) == (name, ROWS, [])
    assert not checked["ignored"], "a made row has no column that its task does not know"
    assert checked["usable"] >= 0.9 * ROWS
    write_rows(copy, [row.fields for row in read_rows(path)[0]])
    task = task_of(name)
    one, other = (load_examples(task, [file], strict=True) for file in (path, copy))
    assert [e.id for e in one.examples] == [e.id for e in other.examples]
    assert synth(name, 10, 3) == synth(name, ROWS, 3)[:10] != synth(name, 10, 5)
