"""A headline over parts: what it is without one of them, and how surely it and its parts are known.

Rows of UserLLM stand for any task that declares the parts of its headline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from soulkit.eval.comparison.compare import compare_runs
from soulkit.eval.gates import parse_gate
from soulkit.eval.results.batch_statistics import (
    MAX_PARTS,
    LeaveOneOut,
    parts_remark,
    summary_terms,
)
from soulkit.eval.results.cells import missing_parts_text, named_with_origin, suite_lines
from soulkit.eval.results.summary import Cell, Summary, cluster_of, headline, summarise
from soulkit.metrics.intervals import estimate, suite_mean, wilson
from soulkit.metrics.student import t_quantile
from soulkit.report.load import load_runs
from soulkit.report.suites import scales_of
from soulkit.report.tables import markdown
from soulkit.runs.records import drafts
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.scoring import mean_of
from soulkit.tasks.userllm.fields import CSQA, NQ, PRISM
from soulkit.train.setup.data import load_training_data
from soulkit.train.state.summary import TrainSummary, with_dev
from soulkit.types import (
    BatchMetric,
    Completion,
    Episode,
    Line,
    Record,
    Score,
    Trace,
    Turn,
    record_key,
)
from tests.support.evaluation import soul, write_records
from tests.support.road import TASKS, synth_examples, task_of
from tests.support.servers.openai_server import Body, ScriptedServer
from tests.support.training import config

DATA = Path(os.environ.get("SOULKIT_TEST_DATA") or "nowhere") / "commonsenseqa"
QUIZZES = DATA / "dev_rand_split.original_layout_100.jsonl"
real = pytest.mark.skipif(
    not QUIZZES.is_file(), reason="no original files ($SOULKIT_TEST_DATA names their folder)"
)
WORDS = ("apple", "boat", "cloud", "drum", "eagle", "flute", "grape", "hill")


def row(source: str, number: int, value: float | None, **more: Any) -> Record:
    """A scored message; of PRISM a first one, or with `last` a later one."""
    tags = {"source": source, "turn": "later" if "last" in more else "first"}
    tags |= {"last": more.pop("last")} if "last" in more else {}
    name, text = f"{source}{number}", more.pop("text", f"{WORDS[number % 8]} {number}")
    metrics = {"intent_decomposition": 0.0, "ai_detector": value} if source == PRISM else {}
    score = Score(value=value, reward=value, metrics=metrics if value is not None else {},
                  **({} if value is not None else {"reason": "judge_error"}))  # fmt: skip
    said = Trace("user", (Turn((), Completion(text=text)),))
    episode = Episode(example_id=name, task="userllm", traces=(said,),
                      transcript=(Line("user", text),))  # fmt: skip
    return replace(
        Record(key=record_key(0, name, 0, "draft"), task="userllm", example_id=name, rollout=0,
               kind="draft", episode=episode, score=score, cluster=f"about {name}"),
        tags=tags | more.pop("tags", {}), **more,
    )  # fmt: skip


def quizzes(right: int, of: int, **more: Any) -> list[Record]:
    return [row(CSQA, i, float(i < right), **more) for i in range(of)]


def searches(right: int, of: int, **more: Any) -> list[Record]:
    return [row(NQ, i, float(i < right), **more) for i in range(of)]


def chats(of: int, **more: Any) -> list[Record]:
    """First messages that are unlike each other, and ends that are found."""
    half = of // 2
    ends = [row(PRISM, half + i, 1.0, last="yes", text="<|endconversation|>", **more)
            for i in range(of - half)]  # fmt: skip
    return [*(row(PRISM, i, float(i % 2), **more) for i in range(half)), *ends]


def cells_of(records: Sequence[Record], *, training: bool = False) -> dict[str, Cell]:
    task = task_of(records[0].task)
    made = summarise(
        records, command="eval api", model="m", protocol="paper", seconds=1.0, cost=None,
        training=training, **summary_terms([task]),
    )  # fmt: skip
    again = Summary.from_json(json.loads(json.dumps(made.to_json())))
    assert again.tasks == made.tasks
    return made.tasks[task.name]


# -- missing parts ---------------------------------------------------------------------------------


def test_without_a_part_there_is_no_headline_but_its_bounds_and_the_name() -> None:
    cells = cells_of(quizzes(30, 40))
    cell = headline(cells)
    assert (cell.mean, cell.ci_low, cell.ci_high, cell.variance) == (None, None, None, None)
    assert dict(cell.missing) == {"NQ": "no rows", "PRISM": "no rows"} and cell.parts == ("CSQA",)
    assert (cell.worst, cell.best) == pytest.approx((0.75 / 3, 2.75 / 3))
    assert (cell.n_scored, cell.n, cell.n_clusters) == (40, 40, 40) and not cell.not_applicable
    assert cells["headline/commonsense_qa"].mean == 0.75, "the parts that are there have a name"


def test_a_part_without_a_score_is_said_in_other_words_than_one_without_rows() -> None:
    cell = headline(cells_of([*quizzes(40, 40), *[row(NQ, i, None) for i in range(3)]]))
    assert dict(cell.missing) == {"NQ": "unscored", "PRISM": "no rows"} and cell.mean is None
    assert missing_parts_text(cell) == "NQ is unscored; PRISM has no rows"
    assert (cell.worst, cell.best) == pytest.approx((1 / 3, 1.0))
    two = headline(cells_of(quizzes(40, 40)))
    assert missing_parts_text(two) == "NQ and PRISM have no rows"


def test_a_part_that_lacks_parts_of_its_own_leaves_no_headline() -> None:
    """No message was due to end and none ended: how well ends are found is not defined."""
    going_on = [row(PRISM, i, 1.0) for i in range(6)]
    cells = cells_of([*quizzes(40, 40), *searches(20, 40), *going_on])
    prism, whole = cells["headline/prism"], headline(cells)
    assert prism.mean is None and dict(prism.missing) == {"endings": "no rows"}
    assert prism.worst == pytest.approx(3 / 4, abs=0.01) and prism.best == pytest.approx(
        1, abs=0.01
    )
    assert whole.mean is None and dict(whole.missing) == {"PRISM/endings": "no rows"}
    assert whole.worst == pytest.approx((1 + 0.5 + (prism.worst or 0)) / 3)
    stays = [row(PRISM, 9, 1.0, last="no", text="more"), *going_on]
    assert dict(cells_of(stays)["headline/prism"].missing) == {"endings": "undefined"}


def test_all_parts_make_the_headline_and_unscored_rows_its_bounds() -> None:
    cells = cells_of([*quizzes(40, 40), *searches(20, 40), *chats(20)])
    cell = headline(cells)
    parts = [cells[f"headline/{name}"].mean for name in (CSQA, NQ, PRISM)]
    assert cell.mean == pytest.approx(fmean(p for p in parts if p is not None))
    assert not cell.missing and cell.parts == ("CSQA", "NQ", "PRISM") and cell.worst is None
    lost = headline(cells_of([*quizzes(40, 40), *searches(20, 39), row(NQ, 99, None), *chats(20)]))
    assert lost.mean is not None and lost.worst == pytest.approx(lost.mean - (20 / 39 - 0.5) / 3)


def test_a_partial_headline_is_no_member_of_a_suite() -> None:
    suite = load_registry().suite_spec("soul-10")
    mirror = Cell(mean=0.7, n=10, n_scored=10, n_clusters=10, variance=0.01, df=9.0,
                  scale=(0.0, 1.0), headline=True)  # fmt: skip
    for training in (False, True):
        tasks = {"userllm": cells_of(quizzes(40, 40), training=training),
                 "mirrorbench": {"value": mirror}}  # fmt: skip
        lines = {x.name: x for x in suite_lines(suite, tasks, scales_of(load_registry()))}
        conv = lines["CONV"]
        assert (conv.coverage, conv.missing, conv.cell.mean) == ("1 of 2", ("userllm",), None)
        assert (conv.cell.worst, conv.cell.best) == pytest.approx(((1 / 3 + 0.7) / 2, 0.85))
        assert lines["userllm"].lacks and conv.lacks


# -- by the commands -------------------------------------------------------------------------------


def everybody(body: Body) -> str:
    """`ok` from the actor, REFUSED or HUMAN from the judge."""
    if body["model"] != "judge":
        return "ok"
    return "REFUSED" if "REFUSED" in str(body["messages"]) else "HUMAN"


def played(out: Path, rows: Path, url: str, task: str = "userllm") -> int:
    return soul("eval", "api", "--model", "m", "--base-url", url, "--task", task, "--data",
                f"{task}={rows}", "--out", out, "--backoff", "0",
                "--judge", f"endpoint:judge@{url}")  # fmt: skip


@pytest.fixture(params=["made", pytest.param("real", marks=real)])
def csqa(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """CommonsenseQA alone: of made rows, or imported."""
    rows = tmp_path / "csqa.jsonl"
    if request.param == "real":
        assert soul("data", "import", "userllm", QUIZZES, "-o", rows) == 0
        return rows
    assert soul("data", "synth", "userllm", "-n", 60, "-o", tmp_path / "all.jsonl") == 0
    lines = [line for line in (tmp_path / "all.jsonl").read_text().splitlines() if CSQA in line]
    rows.write_text("\n".join(lines) + "\n")
    return rows


def test_an_actor_that_says_ok_to_everybody_has_no_headline_on_quizzes_alone(
    csqa: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, n = tmp_path / "run", len(csqa.read_text().splitlines())
    with ScriptedServer(answer=everybody) as server:
        assert played(out, csqa, server.base_url) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "NQ and PRISM have no rows" in printed and "Ditto" not in printed
    assert f"macro_source \u2013 ({n}/{n})" in printed and "0.333\u20131.000" in printed
    capsys.readouterr()
    for view in (["report", out], ["report", "--suite", "soul-10", out], ["runs", tmp_path],
                 ["report", "--format", "md", out],
                 ["report", "--suite", "soul-10", "--format", "latex", out]):  # fmt: skip
        assert soul(*view) == 0
        shown = capsys.readouterr().out
        assert "NQ and PRISM have no rows" in " ".join(shown.split()), view
        assert "0.930" not in "".join(x for x in shown.splitlines() if "userllm" in x), view
    assert soul("report", "--suite", "soul-10", out) == 0
    assert "CONV mean (0 of 2)" in capsys.readouterr().out
    assert soul("report", "--format", "html", out) == 0
    assert "NQ and PRISM have no rows" in (out / "report" / "index.html").read_text()


def test_a_plan_and_a_training_say_beforehand_which_part_has_no_rows(
    csqa: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soul("eval", "api", "--model", "m", "--base-url", "http://127.0.0.1:9/v1", "--task", "userllm",
         "--data", csqa, "--judge", "endpoint:judge@http://127.0.0.1:9/v1",
         "--dry-run")  # fmt: skip
    words = "userllm: NQ and PRISM have no rows, so the headline has bounds but no mean"
    assert words in " ".join(capsys.readouterr().err.split())
    settings = config(tasks={"userllm": 1.0}, data={"userllm": str(csqa)}, dev_share=0.3,
                      eval_every=1)  # fmt: skip
    remarks = load_training_data(settings).remarks()
    assert "dev score of userllm: mean of CSQA; NQ and PRISM have no rows" in remarks


@real
@pytest.mark.slow
def test_documents_of_the_original_release_lack_their_features(tmp_path: Path) -> None:
    from tests.support.arena import student, verdicts

    documents = DATA.parent / "simulatorarena/document_creation_annotations_for_benchmarking.json"
    rows, out, score = tmp_path / "doc.jsonl", tmp_path / "run", verdicts(writing=4, interaction=3)
    assert soul("data", "import", "sim_doc", documents, "-o", rows) == 0
    rows.write_text("\n".join(rows.read_text().splitlines()[:8]) + "\n")

    def answer(body: Body) -> str:
        say = {"judge": score, "partner": lambda _: "Tell me more."}.get(body["model"], student(3))
        return say(body)

    with ScriptedServer(answer=answer) as server:
        url = server.base_url
        assert soul("eval", "api", "--model", "m", "--base-url", url, "--task", "sim_doc", "--data",
                    f"sim_doc={rows}", "--out", out, "--backoff", "0", "--judge",
                    f"endpoint:judge@{url}", "--partner",
                    f"endpoint:partner@{url}") == 0  # fmt: skip
    cells = load_runs([out], episodes=False)[0].tasks["sim_doc"]
    cell, three = headline(cells), cells["value"].mean
    names = {"writing features": "no rows", "interaction features": "no rows"}
    assert (cell.mean, dict(cell.missing)) == (None, names) and three is not None
    assert (cell.worst, cell.best) == pytest.approx((three * 3 / 5, (three * 3 + 2) / 5))
    assert "Ditto 8B" not in markdown(load_runs([out], episodes=False))


# -- training and comparisons ----------------------------------------------------------------------


def test_training_uses_the_parts_that_are_there_and_says_so() -> None:
    dev = [*quizzes(30, 40), *chats(20)]
    task = task_of("userllm")
    cell = headline(cells_of(dev, training=True))
    assert missing_parts_text(cell) == "mean of CSQA, PRISM; NQ has no rows"
    assert cell.mean == task.headline(dev) and cell.mean is not None
    parts = cells_of(dev)
    assert (
        cell.mean == pytest.approx(fmean((0.75, parts["headline/prism"].mean or 0.0)))
        and cell.method == "strata-t"
    )
    plain = {one.name: getattr(Summary(), one.name) for one in fields(Summary)}
    trained = with_dev(TrainSummary(**plain, steps=3, summary_steps=3), dev, [task])
    kept = headline(trained.tasks["userllm"])
    assert (kept.mean, kept.parts) == (cell.mean, ("CSQA", "PRISM")) and not kept.whole


def written(path: Path, records: Sequence[Record]) -> Path:
    return write_records(path, records)


def test_runs_are_compared_over_the_parts_that_both_have(tmp_path: Path) -> None:
    """B lacks NQ: some of the rows were not played yet."""
    a = written(tmp_path / "a", [*quizzes(30, 40), *searches(10, 40), *chats(20)])
    b = written(tmp_path / "b", [*quizzes(36, 40), *chats(20)])
    result = compare_runs(a, b)
    (task,) = result.tasks
    assert (task.metric, task.over) == ("macro_source", ("CSQA", "PRISM"))
    assert task.paired.difference == pytest.approx((36 - 30) / 40 / 2)
    assert task.paired.n_clusters == 60
    assert (
        "userllm: macro_source covers only the parts that both runs have: CSQA, PRISM"
        in result.remarks
    )
    assert result.as_dict()["tasks"][0]["over"] == ["CSQA", "PRISM"]
    gated = compare_runs(a, b, gates=[parse_gate("userllm>=-0.5")]).gates[0]
    assert "macro_source over CSQA, PRISM" in gated.why
    (conv,) = (mean for mean in compare_runs(a, b, suite="soul-10").means if mean.name == "CONV")
    assert "userllm" in conv.missing and conv.paired.difference is None


def test_a_part_that_one_run_does_not_define_is_left_out_of_the_comparison(tmp_path: Path) -> None:
    """Nothing was due to end: where nothing ended, how well ends are found has no number."""
    whole = [*quizzes(30, 40), *searches(10, 40), *(row(PRISM, i, 1.0) for i in range(9))]
    sides = [[*whole, *(row(PRISM, 20 + i, 1.0, last="no", text=text) for i in range(4))]
             for text in ("more", "<|endconversation|>")]  # fmt: skip
    a, b = (written(tmp_path / name, side) for name, side in zip("ab", sides, strict=True))
    (task,) = compare_runs(a, b).tasks
    assert task.paired.difference is not None and abs(task.paired.difference) < 0.05
    assert task.over == ("CSQA", "NQ", "PRISM")


def test_a_difference_over_parts_adds_the_variances_of_the_parts(tmp_path: Path) -> None:
    a = written(tmp_path / "a", [*quizzes(20, 40), *searches(20, 40), *chats(20)])
    b = written(tmp_path / "b", [*quizzes(30, 40), *searches(24, 40), *chats(20)])
    (task,) = compare_runs(a, b).tasks
    each = [compare_runs(a, b, f"headline/{name}").tasks[0].paired for name in (CSQA, NQ, PRISM)]
    assert (task.over, task.paired.method) == ((), "strata-t")
    assert task.paired.variance == pytest.approx(sum(p.variance or 0 for p in each) / 9)


# -- intervals -------------------------------------------------------------------------------------


def test_a_part_has_the_interval_of_its_own_clusters() -> None:
    cells = cells_of([*quizzes(40, 40), *searches(10, 40), *chats(20)])
    part, alone = cells["headline/commonsense_qa"], cells["value/source=commonsense_qa"]
    assert (part.ci_low, part.ci_high) == pytest.approx((alone.ci_low, alone.ci_high))
    assert part.ci_low == pytest.approx(0.907, abs=0.001) and part.n_clusters == 40
    assert cells["own_words"].n_clusters == 20 and cells["first_turn_diversity"].n_clusters == 10
    assert cells["termination_f1"].n_clusters == 10
    value = cells["value/source=natural_questions"]
    assert cells["headline/natural_questions"].variance == pytest.approx(value.variance)


def test_the_headline_is_a_suite_mean_of_its_parts() -> None:
    cells = cells_of([*quizzes(40, 40), *searches(39, 40), *chats(20)])
    parts = [cells[f"headline/{name}"] for name in (CSQA, NQ, PRISM)]
    whole, cell = suite_mean(parts), headline(cells)
    assert (cell.ci_low, cell.ci_high, cell.df) == (whole.ci_low, whole.ci_high, whole.df)
    assert cell.method == "strata-t" and cell.n_clusters == 100 and parts[0].variance
    assert cell.variance == pytest.approx(sum(p.variance or 0 for p in parts) / 9)


def test_perfect_parts_leave_the_headline_as_unsure_as_the_smallest() -> None:
    """One hundred right answers do not make up for twenty others."""

    def three(records: Sequence[Record]) -> dict[str, BatchMetric]:
        sides = {name: [r.score.value for r in records if r.tags.get("part") == name]
                 for name in "abc"}  # fmt: skip
        return {name: mean_of(values, "rows") for name, values in sides.items() if values}

    from soulkit.tasks.kit.scoring import with_declared_means

    declared = {"all": {name.upper(): name for name in "abc"}}
    records = [row(CSQA, i, 1.0, tags={"part": "aaaabbbbcc"[i // 10]}) for i in range(100)]
    made = summarise(
        records, command="", model="", protocol="", seconds=0.0, cost=None,
        batch={"userllm": lambda rows: with_declared_means(declared, "all", three, rows)},
        headlines={"userllm": "all"},
    ).tasks["userllm"]  # fmt: skip
    least = {name: made[name].ci_low for name in "abc"}
    assert least["c"] == pytest.approx(wilson(1.0, 20, t_quantile(19))[0])
    cell = headline(made)
    assert cell.mean == 1.0 and cell.ci_low is not None and (least["c"] or 0) < cell.ci_low < 0.97


def test_a_matrix_of_picks_has_the_clusters_of_its_targets() -> None:
    targets = "A" * 13 + "B" * 60 + "C" * 127
    records = [
        replace(row(CSQA, i, 1.0, tags={"target": target}), task="mistakes",
                score=Score(value=1.0, reward=1.0, words=target))
        for i, target in enumerate(targets)
    ]  # fmt: skip
    cells = cells_of(records)
    low, high = wilson(0.0, 13, t_quantile(12))
    never = cells["picked_B_for_A"]
    assert (never.n_clusters, never.ci_low, never.ci_high) == (13, low, pytest.approx(high))
    assert high > 0.2 and cells["picked_B_for_B"].n_clusters == 60


def test_a_macro_adds_the_variances_of_its_groups_and_names_one_without_a_score() -> None:
    abilities = ["belief"] * 30 + ["desire"] * 30 + ["emotion"] * 12
    records = [replace(row(CSQA, i, float(i % 3 > 0), tags={"ability": one}), task="tombench")
               for i, one in enumerate(abilities)]  # fmt: skip
    cells = cells_of(records)
    parts = [cells[f"value/ability={name}"] for name in ("belief", "desire", "emotion")]
    assert cells["macro_ability"].parts == ("belief", "desire", "emotion")
    assert cells["macro_ability"].variance == pytest.approx(sum(p.variance or 0 for p in parts) / 9)
    lost = [replace(r, score=Score(value=None, reward=None, reason="judge_error"))
            if r.tags["ability"] == "emotion" else r for r in records]  # fmt: skip
    cell = cells_of(lost)["macro_ability"]
    assert cell.mean is None and dict(cell.missing) == {"emotion": "unscored"}
    assert (cell.worst, cell.best) == pytest.approx((4 / 9, 7 / 9), abs=0.01)


def test_parts_of_the_same_rows_go_together() -> None:
    """Two parts with the same scores are known no better than one; the jackknife sees it."""
    values = [float(i % 4 > 0) for i in range(40)]
    records = [
        replace(row(PRISM, i, value), task="sim_math", tags={"parts": "all", "features": "with"},
                score=Score(value=value, reward=value, metrics={
                    "style/writing": 5 * value, "style/interaction": 5 * value,
                    "features/met": value}))
        for i, value in enumerate(values)
    ]  # fmt: skip
    cell, one = headline(cells_of(records)), estimate(values, range(40), binary=True)
    assert cell.mean == one.mean and cell.variance == pytest.approx(one.variance)
    assert (cell.ci_low, cell.ci_high) == pytest.approx((one.ci_low, one.ci_high), abs=0.005)
    constant = [replace(r, score=replace(r.score, metrics={**r.score.metrics, "features/met": 1.0}))
                for r in records]  # fmt: skip
    wider, part = headline(cells_of(constant)), cells_of(constant)["parts/features_met"]
    seen = (one.variance or 0) * 4 / 9
    assert part.mean == 1.0 and wider.variance == pytest.approx(seen + (part.variance or 0) / 9)


@pytest.mark.parametrize("many", [12, 2 * MAX_PARTS])
def test_the_clusters_of_a_number_are_found_however_many_there_are(many: int) -> None:
    rows = [*quizzes(many, many + 5), *searches(3, 7), *chats(20)]
    batch = LeaveOneOut(task_of("userllm").batch_metrics, rows, cluster_of)
    own = batch.of_metric("headline/natural_questions")
    assert own.clusters == {f"about {NQ}{i}" for i in range(7)} and own.n_parts == 7
    assert batch.of_metric("headline/commonsense_qa").n_clusters == many + 5
    assert batch.of_metric("macro_source") is batch and batch.n_clusters == many + 32


@pytest.mark.parametrize("name", TASKS)
def test_every_number_of_every_task_has_the_clusters_that_it_is_about(name: str) -> None:
    task, examples = task_of(name), synth_examples(name, 8)
    records = [
        Record(key=f"{i}", task=name, example_id=example.id, rollout=0, kind="draft",
               episode=Episode(example_id=example.id, task=name,
                               transcript=(Line("actor", f"{WORDS[i % 8]} {i}"),)),
               score=Score(value=float(i % 3 > 0), reward=0.0, words="A",
                           metrics={m: ends[i % 2] for m, ends in task.spec.metric.scales.items()}),
               cluster=example.cluster, tags=example.tags)
        for i, example in enumerate(examples[:24])
    ]  # fmt: skip
    numbers = task.batch_metrics(records)
    declared = {part for parts in task.spec.metric.parts.values() for part in parts.values()}
    assert declared <= set(numbers), "every declared part is a number of the batch"
    cells = cells_of(records)
    clusters = {cluster_of(r) for r in records}
    less = {c: task.batch_metrics([r for r in drafts(records) if cluster_of(r) != c])
            for c in clusters}  # fmt: skip
    for metric, one in numbers.items():
        about = {c for c in clusters if (other := less[c].get(metric)) is None
                 or (other.n_scored, other.value) != (one.n_scored, one.value)}  # fmt: skip
        if about and one.n:
            assert cells[metric].n_clusters == len(about), metric


# -- rows of one's own -----------------------------------------------------------------------------


def test_rows_of_one_origin_have_its_score_as_their_headline_under_its_name() -> None:
    cell = headline(cells_of(chats(20, origin="my_chats.jsonl")))
    assert cell.origin == "my_chats.jsonl" and cell.whole and cell.parts == ("PRISM",)
    published = cells_of(chats(20))
    assert cell.mean == published["headline/prism"].mean and headline(published).mean is None
    lost = [row(PRISM, i, None, origin="my_chats.jsonl") for i in range(3)]
    assert dict(headline(cells_of(lost)).missing)["PRISM"] == "unscored"


def test_an_origin_is_never_averaged_with_another_or_with_published_rows() -> None:
    own = chats(20, origin="mine.jsonl")
    published = [*quizzes(40, 40), *searches(0, 40)]
    cells = cells_of([*published, *own])
    assert headline(cells).mean is None and dict(headline(cells).missing) == {"PRISM": "no rows"}
    beside = cells["macro_source/origin=mine.jsonl"]
    assert beside.mean == headline(cells_of(own)).mean and beside.beside
    assert (beside.origin, beside.n_clusters) == ("mine.jsonl", 20)
    others = [row(PRISM, 50 + i, 1.0, origin="yours.jsonl") for i in range(5)]
    both = cells_of([*own, *others])
    assert set(headline(both).missing) == {"CSQA", "NQ", "PRISM"} and headline(both).mean is None
    assert both["macro_source/origin=yours.jsonl"].n == 5
    whole = headline(cells_of(own))
    assert (beside.ci_low, beside.ci_high) == (whole.ci_low, whole.ci_high), "that of its parts"


def test_an_origin_beside_others_that_lacks_a_part_has_no_number() -> None:
    """One first message has no diversity."""
    own = [row(PRISM, 0, 1.0, origin="mine.jsonl")]
    name = "macro_source/origin=mine.jsonl"
    beside, alone = cells_of([*quizzes(9, 9), *own])[name], headline(cells_of(own))
    assert (beside.mean, dict(beside.missing)) == (None, dict(alone.missing)) and alone.missing
    assert (beside.worst, beside.best) == (alone.worst, alone.best)
    assert named_with_origin(name, beside) == name, "the file is named once"
    assert task_of("userllm").batch_metrics([*quizzes(9, 9), *own])[name].value is None


def test_training_takes_rows_of_several_origins_as_one_batch(tmp_path: Path) -> None:
    own = [*chats(20, origin="mine.jsonl"), *[row(PRISM, 50 + i, 1.0, origin="yours.jsonl")
                                              for i in range(5)]]  # fmt: skip
    bare = [replace(record, origin="") for record in own]
    cell = headline(cells_of(own, training=True))
    assert cell.mean is not None and cell == headline(cells_of(bare, training=True))
    assert task_of("userllm").headline(own) == cell.mean


@pytest.mark.parametrize(
    ("origins", "evaluated", "trained"),
    [
        (["mine.jsonl"], "", ""),
        (["mine.jsonl", "yours.jsonl"], "CSQA, NQ and PRISM have no rows",
         "mean of PRISM; CSQA and NQ have no rows"),
        (["mine.jsonl", ""], "CSQA and NQ have no rows",
         "mean of PRISM; CSQA and NQ have no rows"),
    ],
)  # fmt: skip
def test_a_plan_knows_the_origins_of_rows(origins: list[str], evaluated: str, trained: str) -> None:
    task, made = task_of("userllm"), synth_examples("userllm", 60)
    prism = [example for example in made if example.tags["source"] == PRISM]
    own = [replace(e, origin=origins[i % len(origins)]) for i, e in enumerate(prism)]
    said = parts_remark(task, own), parts_remark(task, own, dev=True)
    assert said[0] == (evaluated and f"userllm: {evaluated}, so the headline has bounds but "
                       "no mean")  # fmt: skip
    assert said[1] == (trained and f"dev score of userllm: {trained}")


def test_a_headline_of_an_origin_is_named_and_stands_beside_nothing_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = chats(20, origin="my_chats.jsonl")
    written(tmp_path / "run", records)
    made = summarise(records, command="eval api", model="m", protocol="paper", seconds=1.0,
                     cost=None, **summary_terms([task_of("userllm")]))  # fmt: skip
    (tmp_path / "run" / "summary.json").write_text(json.dumps(made.to_json()))
    for view in (["report"], ["report", "--suite", "soul-10"], ["report", "--format", "md"]):
        assert soul(*view, tmp_path / "run") == 0
        shown = capsys.readouterr().out
        assert "my" in shown and "chats.jsonl" in shown and "0.930" not in "".join(
            line for line in shown.splitlines() if "userllm" in line)  # fmt: skip
