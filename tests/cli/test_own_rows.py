"""Rows made of somebody's own file: they say of which, and whose each is, up to the report.

`soul data synth TASK --stories N`: stories of every kind with all their questions.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import write_rows
from soulkit.data.rows import Column, dev_split
from soulkit.report.load import load_runs
from soulkit.runs.records import load_records
from soulkit.tasks.kit.loading import examples_to_inspect
from soulkit.tasks.tom.generate import rows_for_stories
from soulkit.types import Example
from tests.support.drafting import built, description, intent, reactions, review, rows_in, search
from tests.support.evaluation import FAST, soul, three_lines
from tests.support.prism import conversation, utterances, write_conversations, write_lines
from tests.support.road import import_rows, synth, task_of
from tests.support.servers.openai_server import ScriptedServer

PEOPLE, EACH = 3, 8
DRAFTS: dict[str, Callable[[Any], str]] = {
    "userllm": intent, "mirrorbench": description, "twinvoice": reactions,
}  # fmt: skip


def chat(number: int, **more: Any) -> dict[str, Any]:
    """A chat of one of a few people, who all are after the same few things."""
    word = f"blimey{number % PEOPLE}"
    texts = [f"{word}, what of boats {number}?", f"Boats {number}: they float.",
            f"{word}, that is number {number} for me", "Quite so."]  # fmt: skip
    messages = [{"role": ("user", "assistant")[n % 2], "content": t} for n, t in enumerate(texts)]
    return {"id": str(uuid.UUID(int=number + 1)), "user_id": f"p{number % PEOPLE}",
            "messages": messages, **more}  # fmt: skip


def rows_of(
    task: str, source: Path, out: Path, draft: Callable[[Any], str]
) -> list[dict[str, Any]]:
    with (
        ScriptedServer(answer=draft) as drafter,
        ScriptedServer(answer=lambda _: review()) as judge,
    ):
        assert built(task, source, out, drafter, judge, "--concurrency", 4) == 0
    return rows_in(out)


@pytest.fixture(scope="module", params=DRAFTS)
def own(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A task, and rows of it that were built of a file of chats."""
    task, folder = request.param, tmp_path_factory.mktemp(request.param)
    source = write_lines(folder / "my chats.jsonl", map(chat, range(PEOPLE * EACH)))
    rows_of(task, source, folder / "rows.jsonl", DRAFTS[task])
    return task, folder / "rows.jsonl"


def examples(task: str, path: Path) -> tuple[Example, ...]:
    return examples_to_inspect(task_of(task), str(path)).examples


# -- what a row says -----------------------------------------------------------------------------


def test_rows_of_an_own_file_say_which(own: tuple[str, Path]) -> None:
    task, path = own
    rows = rows_in(path)
    assert {row["origin"] for row in rows} == {"my chats.jsonl"}
    assert {example.origin for example in examples(task, path)} == {"my chats.jsonl"}
    if task == "userllm":
        assert {row["source"] for row in rows} == {"prism"}, "the scoring rule stays"
        assert not any("PRISM" in row["licence"] + row["provenance"] for row in rows)
    if task == "mirrorbench":
        assert {row["dataset"] for row in rows} == {"recorded"}, "an id like OASST's is no OASST"


def test_rows_of_one_person_are_one_cluster(own: tuple[str, Path]) -> None:
    task, path = own
    played = examples(task, path)
    assert len(played) > PEOPLE and len({example.cluster for example in played}) == PEOPLE
    train, dev = dev_split(played, 0.4)
    assert train and dev and not {e.cluster for e in train} & {e.cluster for e in dev}


@pytest.mark.parametrize("task", ["userllm", "mirrorbench"])
def test_rows_without_a_person_cluster_as_before(task: str, tmp_path: Path) -> None:
    without = ({k: v for k, v in chat(n).items() if k != "user_id"} for n in range(6))
    source = write_lines(tmp_path / "chats.jsonl", without)
    rows = rows_of(task, source, tmp_path / "rows.jsonl", DRAFTS[task])
    assert not any("person" in row for row in rows)
    played = examples(task, tmp_path / "rows.jsonl")
    assert len({example.cluster for example in played}) == 6


def test_the_person_is_no_part_of_what_a_row_says(own: tuple[str, Path]) -> None:
    task, path = own
    for row in rows_in(path)[:4]:
        other = {k: v for k, v in row.items() if k not in ("person", "origin", "user_id")}
        assert task_of(task).example(row).id == task_of(task).example(other).id


@pytest.mark.parametrize("layout", ["conversations", "utterances"])
def test_rows_of_a_published_file_have_no_origin(layout: str, tmp_path: Path) -> None:
    source = tmp_path / f"{layout}.jsonl"
    if layout == "utterances":
        write_lines(source, utterances(map(conversation, range(4))))
    else:
        write_conversations(source, 4)
    rows = rows_of("userllm", source, tmp_path / "rows.jsonl", intent)
    assert rows and not any("origin" in row for row in rows)
    assert {row["person"] for row in rows} <= {"user0", "user1", "user2"}
    assert all(row["provenance"].startswith("PRISM, ") for row in rows)


def test_drafted_questions_have_no_origin(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "NQ.jsonl", [{"question": "who sang it", "answer": ["Ann"]}])
    assert not any("origin" in row for row in
                   rows_of("userllm", source, tmp_path / "rows.jsonl", search))  # fmt: skip


@pytest.mark.parametrize(("kind", "origin"), [("unguided", None), (None, "mine.jsonl")])
def test_an_own_file_that_is_laid_out_like_prism_is_not_prism(
    kind: str | None, origin: str | None, tmp_path: Path
) -> None:
    record = {**conversation(0), "conversation_type": kind, "intent": "learn of bees"}
    rows = import_rows("userllm", write_lines(tmp_path / "mine.jsonl", [record])).rows
    assert rows and {row.get("origin") for row in rows} == {origin}
    assert {row["provenance"].startswith("PRISM") for row in rows} == {origin is None}


def test_a_column_of_that_name_of_a_tasks_own_means_what_the_task_says() -> None:
    task = task_of("tomi")
    columns = {**task.spec.columns, "origin": Column(audience=("reader",))}
    task.spec = task.spec.model_copy(update={"columns": columns})
    row = {"story": "1 Ada left.", "question": "Who?", "answer": "Ada", "origin": "Norway"}
    assert task.example(row).origin == "" and task_of("tomi").example(row).origin == "Norway"


# -- through a run -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation of own rows beside rows without an origin."""
    folder = tmp_path_factory.mktemp("own")
    source = write_lines(folder / "mine.jsonl", map(chat, range(PEOPLE * 2)))
    rows = rows_of("userllm", source, folder / "built.jsonl", intent)
    quiz = {"question": "Where do fish live?", "answerKey": "A", "id": "q",
            "choices": {"label": ["A", "B"], "text": ["sea", "tree"]}}  # fmt: skip
    rows += import_rows("userllm", write_lines(folder / "quiz.jsonl", [quiz])).rows
    write_rows(folder / "rows.jsonl", rows, data_source="userllm")
    with ScriptedServer(answer="ok then") as actor, ScriptedServer(answer="HUMAN") as judge:
        assert soul("eval", "api", "--model", "m", "--base-url", actor.base_url, "--task",
                    "userllm", "--data", folder / "rows.jsonl", "--judge",
                    f"endpoint:j@{judge.base_url}", "--out", folder / "run", "--max-unscored", 1,
                    "--backoff", 0) == 0  # fmt: skip
    return folder / "run"


def test_the_origin_is_kept_in_records_and_summary(run: Path) -> None:
    records = load_records(run / "episodes.jsonl")
    assert {record.origin for record in records} == {"mine.jsonl", ""}
    assert {record.origin for record in load_records(run / "episodes.jsonl", light=True)} == {
        "mine.jsonl", "",
    }  # fmt: skip
    summary = json.loads((run / "summary.json").read_text())
    n = sum(record.origin == "mine.jsonl" for record in records)
    assert n > 1 and summary["origins"] == {"userllm": {"mine.jsonl": n}}
    (loaded,) = load_runs([run])
    assert loaded.summary is not None
    assert loaded.summary.origins == {"userllm": {"mine.jsonl": n}}
    assert summary["provenance"]["tasks"]["userllm"]["origins"] == {"mine.jsonl": n, "published": 1}


def test_intervals_go_by_person(run: Path) -> None:
    cells = json.loads((run / "summary.json").read_text())["tasks"]["userllm"]
    assert cells["macro_source/origin=mine.jsonl"]["n_clusters"] == PEOPLE
    assert cells["value"]["n_clusters"] == 1, "published rows alone"


@pytest.mark.parametrize("form", ["table", "md", "html"])
def test_tables_show_the_origin_and_no_published_figure(
    form: str, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / f"page.{form}"
    assert soul("report", run, "--format", form, "--out", out) == 0
    text = " ".join(out.read_text().replace("\\", "").split())
    assert "rows from mine.jsonl" in text
    assert "0.930" not in text and "Ditto 8B" not in text
    assert "Published figures are shown only for published rows" in text
    assert "userllm (mine.jsonl)" in text


def test_a_rescored_run_keeps_it(run: Path) -> None:
    before = json.loads((run / "summary.json").read_text())["origins"]
    assert soul("rescore", run, "--out", run.with_name("again")) == 0
    again = json.loads((run.with_name("again") / "summary.json").read_text())
    assert again["origins"] == before


# -- of a task whose headline is its mean score ------------------------------------------------


@pytest.fixture(scope="module")
def reactions_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Evaluations of rows of these origins; an empty one stands for rows of nobody's own."""
    folder = tmp_path_factory.mktemp("reactions")
    source = write_lines(folder / "mine.jsonl", map(chat, range(PEOPLE * EACH)))
    rows = rows_of("twinvoice", source, folder / "built.jsonl", reactions)

    def played(name: str, *origins: str) -> Path:
        places = [dict(row, origin=origins[i % len(origins)]) for i, row in enumerate(rows)]
        kept = [{k: v for k, v in row.items() if k != "origin" or v} for row in places]
        write_rows(folder / f"{name}.jsonl", kept, data_source="twinvoice")
        with ScriptedServer(answer="<answer>A</answer>") as actor:
            assert soul("eval", "api", "--model", "m", "--base-url", actor.base_url, "--task",
                        "twinvoice", "--data", folder / f"{name}.jsonl", "--out", folder / name,
                        *FAST) == 0  # fmt: skip
        return folder / name

    return played


def cells_in(run: Path, task: str) -> dict[str, Any]:
    cells: dict[str, Any] = json.loads((run / "summary.json").read_text())["tasks"][task]
    return cells


def test_a_mean_score_of_own_rows_is_not_averaged_with_published_ones(
    reactions_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = reactions_run("mixed", "mine.jsonl", "")
    records, cells = load_records(run / "episodes.jsonl"), cells_in(run, "twinvoice")
    own = [r.score.value or 0.0 for r in records if r.origin]
    rest = [r.score.value or 0.0 for r in records if not r.origin]
    assert (cells["value"]["n"], cells["value"]["mean"]) == (len(rest), sum(rest) / len(rest))
    beside = cells["value/origin=mine.jsonl"]
    assert (beside["n"], beside["mean"]) == (len(own), sum(own) / len(own)) and beside["beside"]
    capsys.readouterr()
    for metric, values in (("", rest), ("accuracy", rest), ("accuracy/origin=mine.jsonl", own)):
        assert soul("compare", run, run, "--json", *(["--metric", metric] if metric else [])) == 0
        (task,) = json.loads(capsys.readouterr().out)["tasks"]
        assert task["mean_a"] == pytest.approx(sum(values) / len(values))
        assert task["n_shared"] == len(values)


def test_rows_of_several_own_files_alone_have_a_number_for_each(
    reactions_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = reactions_run("both", "mine.jsonl", "yours.jsonl")
    cells = cells_in(run, "twinvoice")
    assert (
        cells["value"]["mean"] is None
        and "several of your files" in cells["value"]["not_applicable"]
    )
    assert {"value/origin=mine.jsonl", "value/origin=yours.jsonl"} <= cells.keys()
    capsys.readouterr()
    assert soul("compare", run, run) == 2
    advice = capsys.readouterr().err
    assert "--metric 'accuracy/origin=mine.jsonl'" in advice and "'value'" not in advice
    assert soul("compare", run, run, "--metric", "accuracy/origin=mine.jsonl") == 0
    capsys.readouterr()
    assert soul("report", run, reactions_run("one", "mine.jsonl")) == 0
    shown = capsys.readouterr().out
    assert "accuracy/origin=yours.jsonl" in shown and "value/" not in shown
    assert "twinvoice (mine.jsonl, yours.jsonl)" in " ".join(shown.split()), "each file once"


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_two_hundred_stories_of_every_kind_are_six_thousand_questions() -> None:
    assert soul("data", "synth", "hitom", "--stories", 200, "--seed", 2) == 0
    lines = Path("hitom_synth_6000_s2.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    kinds = Counter((r["question_order"], r["story_length"], r["deception"]) for r in rows)
    assert len(rows) == 6000 and len(kinds) == 30 and set(kinds.values()) == {200}
    stories = Counter(row["story"] for row in rows)
    assert len(stories) == 1200 and set(stories.values()) == {5}
    assert all(f". {row['correct_answer']}" in row["choices"] for row in rows)


@pytest.mark.parametrize("task", ["tomi", "paratomi"])
def test_story_types_and_questions_come_equally_often(task: str) -> None:
    rows = synth(task, rows_for_stories(task, 2), 0)
    assert len(rows) == 36 and set(Counter(r["story_type"] for r in rows).values()) == {12}
    assert Counter(row["order"] for row in rows) == {0: 12, 1: 12, 2: 12}


def test_paraphrased_stories_say_the_same_thing_in_many_ways() -> None:
    rows = synth("paratomi", 180, 0)
    words = Counter(s.split()[1] for row in rows for s in row["story"] if "strolled" not in s)
    assert len(words) > 30
    assert len({tuple(row["story"]) for row in rows}) == 180


def test_fewer_stories_are_the_beginning_of_more() -> None:
    assert (
        synth("hitom", rows_for_stories("hitom", 1), 4)
        == synth("hitom", rows_for_stories("hitom", 2), 4)[:30]
    )


@pytest.mark.parametrize(
    "arguments",
    [("hitom", "--stories", "2", "-n", "5"), ("hitom", "--stories", "0"),
     ("secret_keeper", "--stories", "2"), ("nothing", "--stories", "2")],
)  # fmt: skip
def test_what_has_no_stories_says_so(
    arguments: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert soul("data", "synth", *arguments) == 2
    assert all(three_lines(capfd.readouterr().err))


def test_only_stories_are_counted_in_kinds() -> None:
    with pytest.raises(ValueError, match="not for 'coser'"):
        rows_for_stories("coser", 1)  # type: ignore[arg-type]
