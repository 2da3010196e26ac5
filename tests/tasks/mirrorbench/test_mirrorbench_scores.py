"""MirrorBench's controls: people at one anchor, simulators at the other, scores between them.

Word statistics beside people: of the whole data set, of one subset, and where there are none.

MirrorBench as it was published: ten messages, a live assistant, one question, open feedback.

Conformance of MirrorBench: every line under `reference`, and where `paper` differs, why.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ConfigError, UnreadableVerdict
from soulkit.metrics import text
from soulkit.metrics.text import mattr, subword_tokens
from soulkit.models.base import Cast
from soulkit.play.engine import FeedbackPolicy
from soulkit.runs.records import load_records
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.kit.loading import load_examples
from soulkit.tasks.mirrorbench.conversations import (
    MEASURES,
    conversation_text,
    lexical_metrics,
    of_tokens,
    read_message,
    spreads,
    word_measures,
)
from soulkit.tasks.mirrorbench.judging import (
    CONTROLS,
    HUMAN,
    PROXY,
    between_anchors,
    calibrated_metrics,
)
from soulkit.tasks.mirrorbench.reference import NEXT, gaps
from soulkit.tasks.mirrorbench.task import MirrorBench
from soulkit.types import ControlRecord, Episode, Example, Record, Score
from tests.support.evaluation import FAST, soul, summary
from tests.support.mirrorbench import (
    TURNS,
    Body,
    answers,
    conversations,
    example,
    kind_of,
    mirrorbench,
    played,
    prompt_of,
    table,
)
from tests.support.road import run
from tests.support.servers.openai_server import ScriptedServer
from tests.support.table import asked_of, in_turn
from tests.support.vectors import Vector, assert_matches, conformance
from tests.tasks.mirrorbench import reference


def draft(number: int, value: float) -> Record:
    return Record(
        key=f"0/{number}/0/draft", task="mirrorbench", example_id=str(number), rollout=0,
        kind="draft", episode=Episode(example_id=str(number), task="mirrorbench"),
        score=Score(value=value, reward=value, metrics={"gteval": value, "pairwise": 0.5}),
    )  # fmt: skip


def control(name: str, number: int, value: float | None) -> ControlRecord:
    metrics = {} if value is None else {"gteval": value, "pairwise": 0.5, "rnr": 1.0, "ctr": 1.0}
    score = Score(value=value, reward=None, metrics=metrics)
    return ControlRecord(
        task="mirrorbench", example_id=str(number), rollout=0, name=name, score=score
    )


SCORES = (0.2, 0.5, 0.7, 0.95)


@pytest.mark.parametrize(("human", "proxy"), [(0.9, 0.3), (0.5, 0.4), (1.0, 0.0)])
def test_scores_are_read_between_the_anchors_as_published(human: float, proxy: float) -> None:
    expected = reference.calibrated(SCORES, human, proxy)
    assert [between_anchors(s, human, proxy) for s in SCORES] == pytest.approx(expected)
    controls = [control(HUMAN, 0, human), control(PROXY, 0, proxy), control(HUMAN, 1, None)]
    metrics = calibrated_metrics([draft(i, s) for i, s in enumerate(SCORES)], controls)
    assert metrics["calibrated/gteval"].value == pytest.approx(sum(expected) / len(expected))
    assert metrics[f"{HUMAN}/gteval"].n == 2 and metrics[f"{HUMAN}/gteval"].n_scored == 1
    # Both anchors of the preference are one half: nothing lies between them.
    assert metrics["calibrated/pairwise"].value is None
    assert metrics["calibrated/pairwise"].n_scored == 0 < metrics["calibrated/pairwise"].n


@pytest.mark.parametrize("anchors", [(0.5, 0.5), (0.3, 0.6), (0.5, 0.47), (None, 0.2)])
def test_anchors_that_do_not_stand_apart_calibrate_nothing(
    anchors: tuple[float | None, float],
) -> None:
    controls = [control(HUMAN, 0, anchors[0]), control(PROXY, 0, anchors[1])]
    metrics = calibrated_metrics([draft(0, 0.5)], controls)
    assert metrics["calibrated/gteval"].value is None and metrics[f"{PROXY}/gteval"].value


def test_a_run_without_controls_of_a_kind_has_no_number_of_it() -> None:
    assert calibrated_metrics([draft(0, 0.5)], []) == {}
    assert set(calibrated_metrics([draft(0, 0.5)], [control(PROXY, 0, 0.4)])) == {
        f"{PROXY}/gteval", f"{PROXY}/pairwise",
    }  # fmt: skip


def likeness(body: Body) -> float:
    """Share of words that the users of two conversations have in common."""
    one, two = ({w for line in text.splitlines() if line.startswith("USER") for w in line.split()}
                for _, text in conversations(body))  # fmt: skip
    return len(one & two) / len(one | two)


def rule(body: Body) -> str:
    """Likeness by words; an assistant's words make a machine."""
    stiff = "Certainly" in json.dumps(body)
    if kind_of(body) != "gteval":
        return answers(rnr="NO" if stiff else "YES", ctr="NO" if stiff else "YES")(body)
    score = 0.2 if stiff and likeness(body) == 1 else likeness(body)
    return json.dumps({"reasoning": "by words", "score": round(score, 3)})


def test_people_stand_at_their_anchor_and_a_machine_below(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer="Certainly! How.") as actor, ScriptedServer(answer=rule) as judge:
        code = soul(
            "eval", "api", "--model", "m", "--base-url", actor.base_url, "--out", out,
            "--task", "mirrorbench", "--data", "synth:4", "--controls",
            "--judge", f"endpoint:j@{judge.base_url}", *FAST,
        )  # fmt: skip
        n_requests = len(judge.requests)
    assert code == 0
    calls = {one.name: dict(one.calls)["judge"] for one in CONTROLS}
    assert calls == {HUMAN: 13, PROXY: 7} and n_requests == 4 * (13 + 13 + 7)
    cells = summary(out)["tasks"]["mirrorbench"]
    assert cells[f"{HUMAN}/gteval"]["mean"] == 1 == cells[f"{HUMAN}/ctr"]["mean"]
    assert cells[f"{PROXY}/gteval"]["mean"] == pytest.approx(0.2)
    records = load_records(out / "episodes.jsonl")
    raw = [float(r.score.metrics["gteval"] or 0) for r in records]
    expected = [between_anchors(value, 1.0, 0.2) for value in raw]
    assert cells["calibrated/gteval"]["mean"] == pytest.approx(sum(expected) / 4)
    assert cells["calibrated/pairwise"]["mean"] is None
    (remark,) = [line for line in capsys.readouterr().err.splitlines() if "is undefined" in line]
    assert remark.startswith("mirrorbench: calibrated/pairwise is undefined: human_human (0.50)")
    assert "calibrated/gteval" not in remark


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
    ratio = mattr(subword_tokens("tram tram tram") or [])
    assert metrics["lexical/mattr_z"] == pytest.approx((ratio - mean) / deviation)
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
    # What varies in a subset varies with its own people, however many others were played.
    people = {r.cluster for r in load_records(tmp_path / "5" / "episodes.jsonl")
              if r.tags["subset"] == "clariq"}  # fmt: skip
    n_people = whole["lexical/mattr_z/clariq"]["n_clusters"]
    assert n_people == len(people) < whole["value"]["n_clusters"]
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
        "from soulkit.tasks.mirrorbench.conversations import word_measures\n"
        "print(word_measures(['hello']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": "."})  # fmt: skip
    assert done.stdout.strip() == str(dict.fromkeys(MEASURES))
    assert None not in word_measures(["hello"]).values()


LONG = [
    {"role": role, "content": f"{role} {i}"} for i in range(12) for role in ("user", "assistant")
]


def similar(score: float) -> str:
    return json.dumps({"reasoning": "Too long.", "score": score})


def test_ten_messages_are_played_and_judged_and_the_assistant_is_generated() -> None:
    task = mirrorbench("reference")
    row = example("reference", turns=LONG)
    assert task.calls(row) == {"actor": 5, "judge": 1, "partner": 4}
    (record,), requests = played(task, row, judge=similar(0.7), partner="Fine.")
    assert len(asked_of(requests, "actor")) == 5 and len(asked_of(requests, "partner")) == 4
    last = asked_of(requests, "actor")[-1]["messages"]
    assert last[-1]["content"] == f"AI: Fine.\n\n{NEXT}" and last[1]["content"] == NEXT
    assert "USER: user 11" in prompt_of(asked_of(requests, "partner")[0])
    (judged,) = asked_of(requests, "judge")
    assert "ASSISTANT: assistant 3\nUSER: user 4\n</real" in prompt_of(judged)
    assert record.score.value == 0.7 and "pairwise" not in record.score.metrics
    assert record.score.metrics["num_turn"] == 11


def test_an_opening_assistant_is_generated_too() -> None:
    turns = [{"role": "assistant", "content": "which year"}, {"role": "user", "content": "last"}]
    task = mirrorbench("reference")
    (record,), requests = played(
        task, example("reference", turns=turns), judge=similar(0.1), partner="Which one?"
    )
    assert record.episode.transcript[0].text == "Which one?"
    assert len(asked_of(requests, "partner")) == 1


def test_scores_are_clipped_and_silence_is_judged() -> None:
    task = mirrorbench("reference")
    (record,), _ = played(task, example("reference"), actor="", judge=similar(1.5))
    assert record.score.value == 1.0 and record.episode.stop == "empty"


def test_feedback_below_the_gate_holds_the_real_messages() -> None:
    task, row = mirrorbench("reference"), example("reference")
    actor = in_turn(["hello there", "and so"], then="train?")
    policy = FeedbackPolicy(when="task")
    (draft, refined), requests = played(
        task, row, policy, actor=actor, judge=similar(0.3), coach="Be shorter."
    )
    (prompt,) = map(prompt_of, asked_of(requests, "coach"))
    assert "Too long." in prompt and "hello there" not in prompt and "Lyon" not in prompt
    assert draft.received is not None and draft.received.text.startswith("Be shorter.")
    assert all(turn["content"] in draft.received.text for turn in TURNS if turn["role"] == "user")
    assert draft.received.usable and refined.kind == "refined"
    (alone,), _ = played(task, row, policy, judge=similar(0.4), coach="Be shorter.")
    assert alone.received is None


def test_a_replayed_assistant_is_none_of_it() -> None:
    with pytest.raises(ConfigError, match="no assistant 'replay' under reference"):
        mirrorbench("reference", assistant="replay")


@pytest.mark.parametrize("most", [0, -1])
def test_no_messages_are_no_conversation(most: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot play {most} messages"):
        mirrorbench("reference", reference_messages=most)


REPAIRED = {
    "judge-failure-becomes-midrange": "the episode is unscored",
    "judge-error-becomes-zero": "the episode is unscored",
    "nan-score-becomes-full-reward": "NaN is no score: the judge is asked again, then unscored",
    "percent-score-clamped-to-one": "a score off the scale is asked for again",
    "prefix-after-think-kept": "a label is taken away behind thinking, too",
    "api-error-text-becomes-a-turn": "an error is an error; what a partner says is its line",
    "tokenizer-failure-gives-zero-gap": "without a tokenizer there is no number",
    "zero-variance-gives-zero": "a z-score among people who are all alike is undefined",
    "inverted-anchors-saturate": "anchors that do not stand apart calibrate nothing",
}
"""Quirk → what soulkit does instead: in `paper`, and with failures of models in both protocols."""
FORMULAS = {
    "safe_z_score", "mean_and_stdev", "mean_stdev_ci", "derive_anchors", "rng_seed",
    "apply_linear_calibration", "aggregates", "extract_json", "gteval", "pairwise", "rnr", "ctr",
}  # fmt: skip
"""What no command runs: these go through `reference.py`."""
Inputs = Mapping[str, Any]


def side(inputs: Inputs) -> dict[str, Any]:
    number = reference.seed(
        inputs["metric_name"], inputs["episode_id"], inputs["base_seed"], inputs["salt"]
    )
    return {"result": str(number), "proxy_first": reference.proxy_first(number)}


def distances(inputs: Inputs) -> dict[str, float | None]:
    real, simulated = (
        of_tokens(" ".join(inputs[f"{who}_user_turns"]).split()) for who in ("human", "proxy")
    )
    return gaps(real, simulated)


COUNTED: dict[str, Callable[[Inputs], Any]] = {
    "mattr": lambda i: {"result": text.mattr(i["tokens"], i["window"])},
    "hdd": lambda i: {"result": text.hdd(i["tokens"], i["sample_size"])},
    "yules_k": lambda i: {"result": text.yules_k(i["tokens"])},
    "episode_gaps": distances,
    "safe_z_score": lambda i: {"result": reference.safe_z_score(i["value"], i["mean"], i["stdev"])},
    "mean_and_stdev": lambda i: reference.mean_and_stdev(i["values"]),
    "mean_stdev_ci": lambda i: reference.mean_stdev_ci(i["values"], i["confidence"]),
    "derive_anchors": lambda i: (
        reference.anchors(i["hh_scores"], i["pp_scores"]) or {"result": None}
    ),
    "apply_linear_calibration": lambda i: {
        "result": reference.calibrated(i["scores"], i["hh_mean"], i["pp_mean"])
    },
    "rng_seed": side,
    "aggregates": lambda i: {"result": reference.aggregates(i["results"])},
}


@conformance("mirrorbench.lexical", formula=FORMULAS)
def test_lexical(vector: Vector) -> None:
    count = COUNTED[vector.family]
    if vector.raises:
        with pytest.raises(ValueError):
            count(vector.input)
        return
    assert_matches(count(vector.input), vector.expected)


@conformance("mirrorbench.lexical", fns={"safe_z_score"}, formula=FORMULAS)
def test_people_who_are_all_alike_have_no_spread(vector: Vector) -> None:
    inputs = vector.input
    same = "zero-variance-gives-zero" in vector.quirks
    assert (text.z_score(inputs["value"], inputs["mean"], inputs["stdev"]) is None) is same


@conformance("mirrorbench.lexical", fns={"mean_and_stdev"}, formula=FORMULAS)
def test_spreads_of_people(vector: Vector) -> None:
    people = [{"mattr": float(value)} for value in vector.input["values"]]
    spread = spreads(people)["mattr"]
    if vector.expected["stdev"] == 0:
        assert spread is None
    else:
        assert_matches(spread, [vector.expected["mean"], vector.expected["stdev"]])


# -- parse ---------------------------------------------------------------------------------------


def turns_after(text: str | None, protocol: str) -> list[dict[str, str]]:
    """The simulated turns after one generation."""
    task = mirrorbench(protocol)
    row = task.example({"task_description": "t", "turns": [{"role": "user", "content": "a"}]})
    episode, _ = conversation(task, row, [text], [])
    return [{"role": line.seat, "content": line.text} for line in episode.transcript]


def conversation(
    task: MirrorBench, row: Example, actor: list[str | None], partner: list[str | None]
) -> tuple[Episode, list[Body]]:
    """A conversation over HTTP; whoever has no line left says nothing."""
    with table(actor=in_turn(actor), partner=in_turn(partner)) as (cast, requests):
        return run(cast, task.play(row, cast, Rollout())), requests


@conformance("mirrorbench.parse", formula=FORMULAS)
def test_parse(vector: Vector) -> None:
    match vector.family:
        case "extract_json":
            actual: Any = {"result": reference.extract_json(vector.input["text"])}
        case "clean_user_turn":
            actual = {"turns": turns_after(vector.input["text"], "reference")}
        case _:
            actual = {"result": conversation_text(vector.input["turns"])}
    assert_matches(actual, vector.expected)


@conformance("mirrorbench.parse", fns={"clean_user_turn"})
def test_messages_under_paper(vector: Vector) -> None:
    text = vector.input["text"] or ""
    message, status = read_message(text, "paper")
    usual = "".join(turn["content"] for turn in vector.expected["turns"])
    if not set(vector.quirks) & set(REPAIRED):
        assert message == usual
    else:
        assert message != usual and status == "salvaged", "a repair that repairs nothing"


# -- judged --------------------------------------------------------------------------------------


def as_read(verdict: Any) -> str:
    """The reply of a judge whose verdict would be read so."""
    return json.dumps(verdict) if isinstance(verdict, Mapping) else ""


def scored(vector: Vector, protocol: str) -> tuple[Score, Episode, Example]:
    task = mirrorbench(protocol)
    row = task.example(vector.input["row"] | {"task_description": "a plant"})
    inputs = vector.input
    users = in_turn(inputs["user_outputs"])
    partner = in_turn(inputs["assistant_outputs"])
    judge = as_read(inputs["verdict"])
    with table(actor=users, partner=partner, judge=judge) as (cast, _):

        async def road(cast: Cast = cast) -> tuple[Score, Episode]:
            episode = await task.play(row, cast, Rollout())
            return await task.score(row, episode, cast), episode

        score, episode = run(cast, road())
    return score, episode, row


def simulated_text(episode: Episode) -> str:
    return conversation_text([{"role": x.seat, "content": x.text} for x in episode.transcript])


def strict(verdict: Any) -> bool:
    """Whether a judge's reply can be read at all: truth values and words are no scores."""
    score = verdict.get("score") if isinstance(verdict, Mapping) else None
    return isinstance(score, int | float) and not isinstance(score, bool) and score == score


@conformance("mirrorbench.judged", fns={""})
def test_judged_over_http(vector: Vector) -> None:
    """What the judge said in the form asked for is the published number; nothing else is one."""
    if not strict(vector.input["verdict"]):
        with pytest.raises(UnreadableVerdict):
            scored(vector, "reference")
        return
    score, episode, row = scored(vector, "reference")
    expected = vector.expected
    assert_matches([score.reward, score.metrics["gteval"]], [expected["reward"]] * 2)
    assert score.value == score.reward and score.protocol == "reference"
    assert simulated_text(episode) == expected["proxy_conversation"]
    real = conversation_text(mirrorbench("reference").messages(row))
    assert real == expected["real_conversation"]
    outputs, n_turns = vector.input["user_outputs"], len(episode.traces[0].turns)
    missing = [*outputs, *[None] * n_turns][n_turns - 1] is None  # over HTTP it is an empty reply
    assert score.metrics["num_turn"] == expected["metrics"]["mirrorbench/num_turn"] + missing


@conformance("mirrorbench.judged", fns={""})
def test_judged_numbers(vector: Vector) -> None:
    """The published numbers, failures of the judge included, with words for tokens."""
    inputs, expected = vector.input, vector.expected
    value = reference.similarity([inputs["verdict"]])
    real = [t["content"] for t in inputs["row"]["turns"] if t["role"] == "user"]
    simulated = [line.removeprefix("USER: ") for line in expected["proxy_conversation"].splitlines()
                 if line.startswith("USER: ")]  # fmt: skip
    distance = distances({"human_user_turns": real, "proxy_user_turns": simulated})
    logged = {f"mirrorbench/{name}": number for name, number in distance.items()}
    metrics = {
        **dict.fromkeys(("mirrorbench/reward", "mirrorbench/gteval", "all/score", "all/score_v1"),
                        value),
        **logged, "mirrorbench/num_turn": expected["metrics"]["mirrorbench/num_turn"],
    }  # fmt: skip
    assert_matches((value, metrics), [expected["reward"], expected["metrics"]])


@conformance("mirrorbench.judged", fns={"gteval", "pairwise", "rnr", "ctr"}, formula=FORMULAS)
def test_questions_that_are_never_asked(vector: Vector) -> None:
    inputs = vector.input
    match vector.family:
        case "gteval":
            first = next((v for v in inputs["verdicts"] if v is not None), None)
            actual: Any = {"score": reference.similarity(inputs["verdicts"]), "first_result": first}
        case "pairwise":
            texts = inputs["judge_texts"]
            actual = reference.pairwise(texts, inputs["episode_id"], inputs["base_seed"])
        case "rnr":
            actual = {"score": reference.yes_share(inputs["judge_texts"])}
        case _:
            actual = {"score": reference.yes_share(inputs["judge_texts"][1::2])}
    assert_matches(actual, vector.expected)
