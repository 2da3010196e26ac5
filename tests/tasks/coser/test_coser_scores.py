"""What CoSER's critics make of a scene: the published formula, missing verdicts, forged ones.

Conformance: CoSER's readers, likeness, marks and scenes. `reference` gives every line's result.

What it does otherwise on purpose is named below.

The published circumstances ($SOULKIT_TEST_DATA), checked and played against scripted servers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.errors import UnreadableVerdict
from soulkit.tasks.coser.judging import (
    ASPECTS,
    anchored,
    flaw_score,
    plain_bleu,
    plain_rouge_l,
    scene_value,
    scripted_environment,
)
from soulkit.tasks.coser.scene import (
    END,
    ENVIRONMENT,
    candidates,
    label_in,
    speakers,
    with_label,
    without_bracketed,
)
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.kit.loading import examples_to_inspect
from soulkit.tasks.kit.selfcheck import check_task
from soulkit.tasks.sotopia.actions import action_json
from soulkit.types import BatchMetric, Episode, Example, Line, Record, Score
from tests.support.coser import (
    SCENE,
    Body,
    book_table,
    coser,
    critics,
    names,
    scene_records,
    scene_row,
    scored,
    slug_of,
    whose_turn,
)
from tests.support.evaluation import FAST, records, soul, start, summary, value
from tests.support.road import original, run
from tests.support.servers.openai_server import ScriptedServer
from tests.support.table import asked_of
from tests.support.vectors import Vector, assert_matches, conformance, vectors_folder
from tests.tasks.coser import reference

KNOWN = {"storyline_consistency": 10, "anthropomorphism": 10, "character_fidelity": 17,
         "storyline_quality": 12}  # fmt: skip
POINTS = {"storyline_consistency": 69.5, "anthropomorphism": 69.5, "character_fidelity": 34.5,
          "storyline_quality": 59.5}  # fmt: skip


@pytest.mark.parametrize(("severity", "points"), [(10, 69.5), (17, 34.5), (12, 59.5)])
def test_the_published_formula(severity: int, points: float) -> None:
    assert flaw_score(severity, 13) == pytest.approx(points)
    assert scene_value(POINTS) == pytest.approx(0.5825)


@given(st.integers(0, 200), st.integers(0, 40))
def test_points_stay_on_their_scale_and_fall_with_severity(severity: int, messages: int) -> None:
    points = flaw_score(severity, messages)
    assert 0 <= points <= 100
    assert flaw_score(severity + 1, messages) <= points <= flaw_score(severity, messages + 1)


@pytest.mark.parametrize(("mark", "points"), [(1, 0.0), (5, 44.4), (7, 66.7), (10, 100.0)])
def test_the_published_marks(mark: int, points: float) -> None:
    assert anchored(mark) == points


def test_the_papers_worked_example_through_the_command(tmp_path: Path) -> None:
    """Thirteen messages of characters among the surroundings' one; four critics of known taste."""
    order = names([ENVIRONMENT, *["Jost", "Lene"] * 6, END])
    judge = critics(KNOWN)

    def answer(body: Body) -> str:
        if body["model"] == "judge":
            return judge(body)
        if body["model"] == "environment":
            return order(body) if whose_turn(body) else "The wind turns."
        return "[I must not say it.] (looks away) The boat, then."

    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"circumstance": SCENE}) + "\n", encoding="utf-8")
    with ScriptedServer(answer=answer) as server:
        url = server.base_url
        code = soul(
            "eval", "api", "--model", "actor", "--base-url", url, "--task", "coser",
            "--data", f"coser={rows}", "--environment", f"endpoint:environment@{url}",
            "--judge", f"endpoint:judge@{url}", "--out", tmp_path / "run", *FAST,
        )  # fmt: skip
    assert code == 0
    (record,) = records(tmp_path / "run")
    metrics = record.score.metrics
    assert [line.seat for line in record.episode.transcript].count(ENVIRONMENT) == 1
    assert metrics["lines"] == 13 and record.episode.stop == "ended"
    assert {slug: metrics[slug] for slug in ASPECTS} == pytest.approx(POINTS)
    assert {slug: metrics[f"flaws/{slug}"] for slug in ASPECTS} == pytest.approx(KNOWN)
    assert record.score.value == record.score.reward == pytest.approx(0.5825)
    assert value(tmp_path / "run", "coser")["mean"] == pytest.approx(0.5825)
    assert metrics["bleu"] is None or 0 <= metrics["bleu"] <= 1
    verdicts = [verdict.purpose for verdict in record.score.verdicts]
    assert verdicts == list(ASPECTS), "four questions, each asked for itself"


def test_a_repetition_may_weigh_more_than_any_other_flaw() -> None:
    lines = [Line("Lene", "Well."), Line("Jost", "Well.")]

    def judge(body: Body) -> str:
        repeated = [{"instance": "Well.", "severity": 10}]
        verdict = {"reasoning": "The same again.", "flaws": []}
        with_it = slug_of(body) == "storyline_quality"
        return json.dumps(verdict | ({"repetitions": repeated} if with_it else {}))

    score = scored(scene_row(), lines, judge=judge)
    assert score.metrics["storyline_quality"] == pytest.approx(53.0)
    assert score.metrics["anthropomorphism"] == 100.0

    def harsh(body: Body) -> str:
        flaw = {"instance": "Well.", "type": "any", "severity": 6}
        return json.dumps({"reasoning": "Too much.", "flaws": [flaw]})

    with pytest.raises(UnreadableVerdict):
        scored(scene_row(), lines, judge=harsh)


def test_critics_read_no_thoughts_and_a_scene_of_their_dimension_alone() -> None:
    prompts: dict[str, str] = {}
    fair = critics()

    def judge(body: Body) -> str:
        prompts[slug_of(body)] = str(body["messages"][0]["content"])
        return fair(body)

    lines = [Line("Lene", '[Axe!] "Sit," she said.\nJost: "No."'), Line(ENVIRONMENT, "Wind.")]
    scored(scene_row(continue_from=1), lines, judge=judge)
    assert set(prompts) == set(ASPECTS) and len(set(prompts.values())) == 4
    for prompt in prompts.values():
        assert "Axe!" not in prompt and "wet" not in prompt and "He suspects" not in prompt
        assert "The first 1 messages of it were taken from the book" in prompt
        assert "Jost: “(shakes his coat) The rope was new, Lene.”" in prompt
        (line,) = [x for x in prompt.splitlines() if x.startswith("Lene: “") and "Sit," in x]
        assert line.count("“") == 1 and "Jost:" in line, "nobody writes another's line"
        assert "Lene confesses quietly" not in prompt and "Lene admits that" in prompt


def test_a_message_of_thoughts_alone_buys_no_tolerance() -> None:
    lines = [Line("Lene", "[I wait.]")] * 9 + [Line("Lene", "Well.")]
    score = scored(scene_row(), lines, judge=critics({"anthropomorphism": 5}))
    assert score.metrics["lines"] == 1
    assert score.metrics["anthropomorphism"] == pytest.approx(76.5)


def test_facts_of_a_scene() -> None:
    score = scored(scene_row(), [Line("Lene", "Well.")] * 3)
    assert score.metrics["lines_per_character"] == 3 and score.metrics["characters_heard"] == 0.5
    same = scored(scene_row(), [Line(one["character"], one["message"])
                                for one in SCENE["dialogues"]])  # fmt: skip
    assert same.metrics["bleu"] in (None, pytest.approx(1.0))
    assert same.metrics["rouge_l"] in (None, pytest.approx(1.0))


def test_the_reference_judges_silence_and_asks_one_question() -> None:
    marks = {aspect.title: {"reasoning": "r", "score": 4} for aspect in ASPECTS.values()}
    players: dict[str, Any] = {"actor": "", "judge": json.dumps(marks)}
    (record,) = scene_records(protocol="reference", **players)
    assert record.score.value == pytest.approx(0.333)
    assert [verdict.purpose for verdict in record.score.verdicts] == ["score"]


# -- books that were trained on, and others ------------------------------------------------------


def tagged(values: dict[str, list[float | None]]) -> list[Record]:
    row = scene_row()
    episode = coser().wrong(row)
    return [
        Record(
            key=f"{tag}{i}", task="coser", example_id=f"{tag}{i}", rollout=0, kind="draft",
            episode=replace(episode), score=Score(value=worth, reward=worth), tags={"tag": tag},
        )
        for tag, several in values.items() for i, worth in enumerate(several)
    ]  # fmt: skip


def test_the_gap_between_books() -> None:
    metrics = coser().summarise(tagged({"id": [0.8, 0.6, None], "ood": [0.5], "made": [0.1]}))
    assert metrics["in_distribution"].value == pytest.approx(0.7)
    assert (metrics["in_distribution"].n, metrics["in_distribution"].n_scored) == (3, 2)
    gap = metrics["distribution_gap"]
    assert gap.value == pytest.approx(0.2)
    assert replace(gap, value=None) == BatchMetric(
        value=None, n=4, n_scored=3, unit="scenes", low=-1.0, high=1.0
    )


def test_there_is_no_gap_without_both_sides() -> None:
    assert coser().summarise(tagged({"made": [0.4]})) == {}
    assert set(coser().summarise(tagged({"ood": [0.4]}))) == {"out_of_distribution"}
    lost = coser().summarise(tagged({"ood": [None], "id": [0.4]}))["distribution_gap"]
    assert (lost.value, lost.n, lost.n_scored) == (None, 2, 1)


BACKENDS = {
    "nltk-backend": "the dependency-free path is taken: another tokeniser gives another number",
    "rouge-package-backend": "the dependency-free path is taken",
    "rouge-package-recursion-error": "the dependency-free path is taken",
}
JUDGED = {
    "judge-failure-becomes-zero": "a failed judge leaves the scene unscored",
    "think-format-halves-reward": "all that the characters of a scene do has one reward",
    "fraction-truncated-toward-zero": "a fraction is no mark",
    "boolean-counts-as-one": "a truth value is no mark",
}
FORMULAS = {"parse_json", "evaluate"}
"""What no command runs."""
SEEDS = 12
"""Enough to draw either of two candidates."""


@conformance("coser.parse", formula=FORMULAS)
def test_parse(vector: Vector) -> None:
    text = vector.input["text"]
    match vector.family:
        case "remove_inner_thoughts":
            actual: Any = None if text is None else without_bracketed(text)
        case "add_speaker_name":
            actual = None if text is None else with_label(text, vector.input["speaker"])
        case "extract_nsp":
            actual = label_in(text)
        case _:
            actual = action_json(text)
    assert_matches(actual, vector.expected["result"])


@conformance("coser.lexical", differ=BACKENDS)
def test_likeness(vector: Vector) -> None:
    inputs, expected = vector.input, vector.expected
    if vector.family == "bleu_rouge":
        actual: Any = reference.likeness_of(
            inputs["reference"], inputs["simulation"], inputs["continue_from"]
        )
        return assert_matches(actual, expected)
    if inputs["backend"] == "nltk_tokens":
        actual = reference.unsmoothed_bleu(inputs["reference_tokens"], inputs["simulation_tokens"])
    else:
        measure = plain_bleu if vector.family == "bleu" else plain_rouge_l
        actual = measure(inputs["reference"], inputs["simulation"])
    return assert_matches(actual, expected["result"])


@cache
def default_circumstance() -> dict[str, Any]:
    path = vectors_folder() / "coser.judged.jsonl"
    lines = map(json.loads, path.read_text("utf-8").splitlines())
    shared = next(one["input"] for one in lines if "fixture" in one.get("quirk", ""))
    circumstance: dict[str, Any] = shared["circumstance"]
    return circumstance


def row_of(vector: Vector) -> Example:
    row = dict(vector.input["row"])
    circumstance = row["circumstance"]
    if circumstance == "@default":
        row["circumstance"] = default_circumstance()
    elif "@default_with" in circumstance:
        row["circumstance"] = {**default_circumstance(), **circumstance["@default_with"]}
    return coser("reference").example(row)


def outcome(vector: Vector, row: Example, seed: int) -> tuple[Episode, Score, int]:
    """(the scene, its score, questions to the judge), over HTTP."""
    replies = {name: iter(vector.input[f"{name}_outputs"])
               for name in ("character", "nsp", "environment")}  # fmt: skip
    verdicts = iter(vector.input["verdicts"])

    def says(name: str) -> Any:
        return lambda _: next(replies[name], None) or ""

    def judge(_: Body) -> str:
        verdict = next(verdicts, None)
        return json.dumps(verdict) if verdict else ""

    task = coser("reference")
    with book_table(
        actor=says("character"),
        predictor=says("nsp"),
        surroundings=says("environment"),
        judge=judge,
    ) as (cast, requests):

        async def both() -> tuple[Episode, Score]:
            episode = await task.play(row, cast, Rollout(seed=seed))
            return episode, await task.score(row, episode, cast)

        episode, score = run(cast, both())
        return episode, score, len(asked_of(requests, "judge"))


def conversation(vector: Vector) -> list[tuple[str, str]]:
    lines = vector.expected["conversation"]
    return [(one["role"], one["content"]) for one in lines if one["role"] != "NSP"]


def fitting(vector: Vector, row: Example) -> tuple[Episode, Score, int]:
    """The outcome under the first seed that draws what the line drew; else under the last."""
    for seed in range(SEEDS):
        last = outcome(vector, row, seed)
        heard_lines = [(line.seat, line.text) for line in last[0].transcript]
        if "conversation" not in vector.expected or heard_lines == conversation(vector):
            break
    return last


@conformance("coser.judged", fns={""}, differ=JUDGED)
def test_scenes_and_marks(vector: Vector) -> None:
    row, expected = row_of(vector), vector.expected
    episode, score, judge_calls = fitting(vector, row)
    if "conversation" in expected:
        lines = [(line.seat, line.text) for line in episode.transcript]
        assert lines == conversation(vector)
        for place, drawn in enumerate(expected["random_candidates"]):
            assert drawn in all_draws(row), place
        fallbacks = episode.notes.get("next_speaker", {"fallback": 0})["fallback"]
        assert fallbacks >= len(expected["random_candidates"])
    traces = {trace.seat for trace in episode.traces if any(t.completion.text for t in trace.turns)}
    assert len(traces) == expected["n_outputs"] and judge_calls == expected["judge_calls"]
    assert traces == set(expected["outputs"])
    if not expected["n_outputs"]:
        return
    metrics = expected["metrics"]
    assert_matches(score.value, expected["reward"])
    assert_matches(score.reward, metrics["coser/reward"])
    assert set(expected["outputs"].values()) == {expected["reward"]}
    measured = {f"coser/{aspect.title}": score.metrics[slug] for slug, aspect in ASPECTS.items()}
    measured |= {f"coser/{name}": score.metrics[name] for name in ("bleu", "rouge_l")}
    assert_matches(measured, {name: metrics[name] for name in measured})


def all_draws(row: Example) -> list[list[str]]:
    """From whom one is drawn after each speaker, in order of names."""
    names = speakers(row.fields)
    preferred = [*row.fields["major_characters"], ENVIRONMENT]
    return [sorted(candidates(names, preferred, name, 0).drawn_from) for name in names]


@conformance("coser.judged", fns={"evaluate"}, formula=FORMULAS)
def test_a_judge_of_free_text(vector: Vector) -> None:
    row, texts, calls = row_of(vector), iter(vector.input["judge_texts"]), 0

    def ask() -> str:
        nonlocal calls
        calls += 1
        return next(texts, "")

    actual = reference.evaluate(row.fields, vector.input, ask)
    assert_matches({**actual, "calls": calls}, vector.expected)


def served(body: Body) -> str:
    if body["model"] == "judge":
        return critics({"anthropomorphism": 9})(body)
    if body["model"] == "environment":
        return scripted_environment(body["messages"])
    return "[Not a word of it.] (steps closer) Then tell me what you would do in my place."


def evaluate(out: Path, file: Path, *options: str) -> None:
    with ScriptedServer(answer=served) as server:
        url = server.base_url
        code = soul(
            "eval", "api", "--model", "actor", "--base-url", url, "--task", "coser", "--data",
            f"coser={file}", "--environment", f"endpoint:environment@{url}", "--judge",
            f"endpoint:judge@{url}", "--out", out, *FAST, *options,
        )  # fmt: skip
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["paper", "reference"])
def test_twenty_published_golds_pass(protocol: str) -> None:
    task = coser(protocol)
    report = check_task(task, examples_to_inspect(task, str(original("coser/sample_20.jsonl"))))
    assert (report.rows, report.gold_fails, report.wrong_passes, report.breaks, report.bad) == (
        20, (), (), (), (),
    )  # fmt: skip


@pytest.mark.slow
def test_the_two_hundred_circumstances_play_to_their_ends(tmp_path: Path) -> None:
    evaluate(tmp_path / "run", original("coser/test_set.json"))
    played = records(tmp_path / "run")
    assert len(played) == 200 and all(record.score.scored for record in played)
    assert {record.tags["tag"] for record in played} == {"id", "ood"}
    for record in played:
        episode, metrics = record.episode, record.score.metrics
        assert episode.stop in ("ended", "max_rounds") and 6 <= len(episode.transcript) <= 20
        speakers = {line.seat for line in episode.transcript} - {ENVIRONMENT}
        assert {trace.seat for trace in episode.traces} == speakers
        assert metrics["next_speaker/fallback"] == 0.0
        assert not any("Not a word" in line.text for line in episode.transcript)
    batch = summary(tmp_path / "run")["tasks"]["coser"]
    assert batch["in_distribution"]["n"] == batch["out_of_distribution"]["n"] == 100
    assert batch["distribution_gap"]["n_scored"] == 200


@pytest.mark.slow
def test_the_reference_plays_them_as_well(tmp_path: Path) -> None:
    evaluate(tmp_path / "run", original("coser/sample_20.jsonl"), "--protocol", "reference")
    played = records(tmp_path / "run")
    assert len(played) == 20 and {record.score.value for record in played} == {1.0}
    assert all(len(record.episode.transcript) <= 10 for record in played)


@pytest.mark.slow
def test_made_scenes_play_with_the_served_script(tmp_path: Path) -> None:
    """The command as a process of its own speaks for the surroundings of made rows."""
    served_script = start("serve", "--script", "coser", "--port", 0)
    try:
        assert served_script.stdout is not None
        url = served_script.stdout.readline().strip()
        with ScriptedServer(answer=served) as server:
            code = soul(
                "eval", "api", "--model", "actor", "--base-url", server.base_url, "--task", "coser",
                "--data", "synth:3", "--environment", f"endpoint:scripted-environment@{url}",
                "--judge", f"endpoint:judge@{server.base_url}", "--out", tmp_path / "run", *FAST,
            )  # fmt: skip
        assert code == 0
    finally:
        served_script.terminate()
        served_script.communicate()
    for record in records(tmp_path / "run"):
        assert record.score.scored and len(record.episode.transcript) >= 6
        assert record.score.metrics["next_speaker/fallback"] == 0.0
