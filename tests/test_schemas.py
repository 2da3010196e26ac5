"""The shipped schemas match the types, real files follow them, and other tools read those files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.eval.results.summary import recorded_summary
from soulkit.runs.conditions import with_provenance
from soulkit.runs.jsonl import SUMMARY_SCHEMA, pack_lines, packed_file, schema_file, write_json
from soulkit.runs.records import RecordWriter, load_records, record_line
from soulkit.train.state.metrics import lines_of_step, read_step_lines
from soulkit.train.state.summary import TrainSummary
from soulkit.types import ControlRecord, Record, Score, Verdict
from tests.support.evaluation import api
from tests.support.servers.openai_server import ScriptedServer

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).parent / "recorded"


def generator() -> ModuleType:
    path = ROOT / "scripts" / "schemas.py"
    spec = importlib.util.spec_from_file_location("schemas", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mixed() -> list[Record]:
    """Drafts and refined episodes, judged ones and a conversation, with other tags and metrics."""
    files = [RECORDED / name / "episodes.jsonl" for name in ("ditto", "judged", "after")]
    files.append(RECORDED / "scene.jsonl")
    return [record for file in files for record in load_records(file)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder that `soul eval` just wrote."""
    out = tmp_path_factory.mktemp("schemas") / "run"
    with ScriptedServer(answer="<answer>A</answer>") as server:
        assert api(server.base_url, out) == 0
    return out


# -- schemas ---------------------------------------------------------------------------------------


def test_the_schemas_are_those_of_the_types() -> None:
    module = generator()
    for name, schema in module.schemas().items():
        text = schema_file(name).read_text(encoding="utf-8")
        assert text == module.text_of(schema), "stale: run .venv/bin/python scripts/schemas.py"


def validator(schema: str) -> Callable[[Any], list[str]]:
    """The errors of a value under a schema."""
    jsonschema = pytest.importorskip("jsonschema")
    loaded = json.loads(schema_file(f"soulkit/{schema}@1").read_text(encoding="utf-8"))
    checker = jsonschema.Draft202012Validator(loaded)
    return lambda value: [f"{e.json_path}: {e.message}" for e in checker.iter_errors(value)]


def test_the_lines_of_episodes_follow_their_schema(played: Path) -> None:
    against = validator("episodes")
    lines = [json.loads(line) for line in (played / "episodes.jsonl").read_text().splitlines()]
    assert len(lines) == 6 and lines[0]["schema"] == "soulkit/episodes@1"
    for line in [*lines, *json.loads(json.dumps([record_line(record) for record in mixed()]))]:
        assert against(line) == []
    assert against({**lines[0], "rollout": "first"}) and against({**lines[0], "schema": "x"})


def test_controls_follow_their_schema() -> None:
    verdict = Verdict(judge="j", purpose="control/human", said={"score": 3}, replies=1)
    score = Score(value=1.0, reward=None, verdicts=(verdict,))
    control = ControlRecord(task="t", example_id="e", rollout=0, name="human", score=score)
    line = json.loads(json.dumps(record_line(control)))
    assert validator("controls")(line) == [] and validator("controls")({**line, "score": 1})


def test_the_lines_of_metrics_follow_their_schema() -> None:
    against = validator("metrics")
    steps = [
        line for name in ("ditto", "sft", "canaries")
        for line in read_step_lines(RECORDED / name / "metrics.jsonl")
    ]  # fmt: skip
    lines = json.loads(json.dumps([one for step in steps for one in lines_of_step(step)]))
    assert len(lines) > 5 and any("loss/total" in line for line in lines)
    for line in lines:
        assert against(line) == []
    assert against({**lines[0], "reward/draft": "high"})


def test_summaries_follow_their_schema(played: Path) -> None:
    against = validator("summary")
    written = json.loads((played / "summary.json").read_text())
    assert written["schema"] == SUMMARY_SCHEMA and against(written) == []
    for name in ("ditto", "canaries"):
        folder = RECORDED / name
        old = TrainSummary.from_json(json.loads((folder / "summary.json").read_text()))
        assert against(json.loads(json.dumps(with_provenance(folder, old.to_json())))) == []
    assert against({**written, "tasks": []})


def test_newer_summaries_and_steps_are_refused_by_name(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"schema": "soulkit/summary@9", "n": 1})
    with pytest.raises(DataError, match=r"summary\.json' has the schema 'soulkit/summary@9'"):
        recorded_summary(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"schema": "soulkit/metrics@2", "step": 0}\n')
    with pytest.raises(DataError, match=r"Line 1 of .* has the schema 'soulkit/metrics@2'"):
        read_step_lines(tmp_path / "metrics.jsonl")


# -- other tools -----------------------------------------------------------------------------------


@pytest.fixture(params=["plain", "packed"])
def episodes(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file with episodes of several tasks, as it stands while a run plays or when it is done."""
    path = tmp_path / "episodes.jsonl"
    writer = RecordWriter(path)
    writer.write(*mixed())
    writer.close()
    if request.param == "plain":
        return path
    assert pack_lines(path, least=1)
    return packed_file(path)


def means() -> dict[str, float]:
    """Task → mean value of the drafts."""
    values: dict[str, list[float]] = {}
    for record in mixed():
        if record.kind == "draft" and record.score.value is not None:
            values.setdefault(record.task, []).append(record.score.value)
    return {task: sum(several) / len(several) for task, several in values.items()}


def test_pandas_reads_the_records(episodes: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_json(episodes, lines=True)
    assert len(frame) == len(mixed())
    drafts = frame[frame["kind"] == "draft"]
    values = drafts["score"].str["value"].astype(float).groupby(drafts["task"]).mean()
    assert values.to_dict() == pytest.approx(means())
    messages = frame.iloc[-1]["episode"]["messages"]
    assert messages[0]["role"] == "system" and len(messages) > 20


def test_duckdb_reads_the_records(episodes: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    rows = duckdb.sql(
        f"SELECT task, avg(score.value) FROM read_json('{episodes}', sample_size=-1) "
        "WHERE kind = 'draft' GROUP BY task"
    ).fetchall()
    assert dict(rows) == pytest.approx(means())
    ((count,),) = duckdb.sql(
        "SELECT max(len(episode.messages)) FROM "
        f"read_json('{episodes}', sample_size=-1) WHERE task = 'sotopia'"
    ).fetchall()
    assert count > 20


@pytest.mark.slow
def test_datasets_reads_the_records(episodes: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.load_dataset(
        "json", data_files=str(episodes), split="train", chunksize=2**30, cache_dir=tmp_path / "c"
    )
    values: dict[str, list[float]] = {}
    for row in table:
        if row["kind"] == "draft":
            values.setdefault(row["task"], []).append(row["score"]["value"])
    assert {task: sum(v) / len(v) for task, v in values.items()} == pytest.approx(means())
    assert table[-1]["episode"]["messages"][0]["role"] == "system"
