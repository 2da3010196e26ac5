"""Word statistics beside people: of the whole data set, of one subset, and where there are none."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from soulkit.metrics.ngrams import mattr, subword_tokens
from soulkit.runs.records import load_records
from soulkit.tasks.loading import load_examples
from soulkit.tasks.mirrorbench.lexical import MEASURES, lexical_metrics, word_measures
from soulkit.types import Episode, Record, Score
from tests.support.evaluation import FAST, soul, summary
from tests.support.mirrorbench import TURNS, answers, mirrorbench
from tests.support.servers.openai_server import ScriptedServer

WORDS = ("tram", "tram tram", "the red tram or the blue one", "a a a b")


def rows() -> list[dict[str, object]]:
    """Four people of one subset, one of another; what an assistant says counts for nobody."""
    people = [*WORDS, "alone"]
    return [
        {
            "task_description": f"asks about trams ({i})",
            "turns": [{"role": "user", "content": text}, {"role": "assistant", "content": "x y z"}],
            "dataset": "clariq" if text in WORDS else "qulac",
            "conversation_id": f"c{i}",
        }
        for i, text in enumerate(people)
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows())))
    return path


def test_people_are_those_of_the_whole_file_whatever_is_played(file: Path) -> None:
    task = mirrorbench()
    every = load_examples(task, [file]).examples
    (one,) = load_examples(task, [file], limit=1).examples
    assert one.fields == next(e for e in every if e.id == one.id).fields
    ratios = [mattr(subword_tokens(text) or []) for text in WORDS]
    clariq = next(e for e in every if e.fields["subset"] == "clariq")
    mean, deviation = clariq.fields["people"]["mattr"]
    assert mean == pytest.approx(statistics.fmean(ratios))
    assert deviation == pytest.approx(statistics.stdev(ratios))
    metrics = lexical_metrics(["tram tram tram"], clariq.fields)
    own = mattr(subword_tokens("tram tram tram") or [])
    assert metrics["lexical/mattr_z"] == pytest.approx((own - mean) / deviation)
    silent = lexical_metrics([""], clariq.fields)
    assert silent["lexical/mattr"] == 0 and silent["lexical/mattr_z"] == -mean / deviation


def test_one_person_or_people_all_alike_are_no_measure(file: Path) -> None:
    lonely = next(
        e for e in load_examples(mirrorbench(), [file]).examples if e.fields["subset"] == "qulac"
    )
    metrics = lexical_metrics(["hello"], lonely.fields)
    assert metrics["lexical/mattr"] == 1 and metrics["lexical/mattr_z"] is None
    row = {"task_description": "t", "turns": TURNS}
    assert lexical_metrics(["hello"], mirrorbench().example(row).fields)["lexical/hdd_z"] is None


def test_an_evaluation_of_some_rows_says_where_they_stand_among_all(
    file: Path, tmp_path: Path
) -> None:
    """The same rows get the same z-scores; the summary has them by subset, with their number."""
    z_scores, cells = [], {}
    for limit in ("5", "2"):
        out = tmp_path / limit
        with ScriptedServer(answer="tram tram") as actor, ScriptedServer(answer=answers()) as judge:
            assert soul(
                "eval", "api", "--model", "m", "--base-url", actor.base_url, "--out", out,
                "--task", "mirrorbench", "--data", f"mirrorbench={file}", "--limit", limit,
                "--judge", f"endpoint:j@{judge.base_url}", *FAST,
            ) == 0  # fmt: skip
        records = load_records(out / "episodes.jsonl")
        z_scores.append({r.example_id: r.score.metrics["lexical/mattr_z"] for r in records})
        cells = summary(out)["tasks"]["mirrorbench"]
        again = tmp_path / f"again{limit}"
        assert soul("rescore", out, "--out", again) == 0
        assert summary(again)["tasks"]["mirrorbench"] == cells
    every, some = z_scores
    assert some.items() <= every.items() and len(some) == 2
    whole = summary(tmp_path / "5")["tasks"]["mirrorbench"]
    assert whole["lexical/mattr_z/clariq"]["n_scored"] == 4
    assert whole["lexical/mattr_z/qulac"]["mean"] is None
    assert whole["lexical/mattr_z/qulac"]["n"] == 1
    assert whole["macro_subset"]["mean"] == pytest.approx(0.75)


def test_subsets_weigh_alike() -> None:
    records = [
        Record(
            key=f"0/{i}/0/draft", task="mirrorbench", example_id=str(i), rollout=0, kind="draft",
            episode=Episode(example_id=str(i), task="mirrorbench"), tags={"subset": subset},
            score=Score(value=value, reward=value, metrics={"lexical/hdd_z": value}),
        )
        for i, (subset, value) in enumerate([("a", 0.0), ("a", 0.2), ("b", 0.9)])
    ]  # fmt: skip
    metrics = mirrorbench().summarise(records)
    assert metrics["macro_subset"].value == pytest.approx(0.5)
    assert metrics["lexical/hdd_z/a"].value == pytest.approx(0.1)
    assert metrics["lexical/mattr_z/b"].value is None and metrics["lexical/mattr_z/b"].n == 1
    lost = replace(records[0], score=Score(value=None, reward=None, status="unscored"))
    assert mirrorbench().summarise([lost, *records[1:]])["lexical/hdd_z/a"].n_scored == 1


def test_without_the_tokenizer_nothing_is_said() -> None:
    code = (
        "import sys; sys.modules['bpe_openai'] = None\n"
        "from soulkit.tasks.mirrorbench.lexical import word_measures\n"
        "print(word_measures(['hello']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": "."})  # fmt: skip
    assert done.stdout.strip() == str(dict.fromkeys(MEASURES))
    assert None not in word_measures(["hello"]).values()
