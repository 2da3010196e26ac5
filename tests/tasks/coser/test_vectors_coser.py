"""Conformance: CoSER's readers, likeness, marks and scenes. `reference` gives every line's result.

What it does otherwise on purpose is named below.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from soulkit.tasks.base import Rollout
from soulkit.tasks.coser.circumstance import ENVIRONMENT, speakers
from soulkit.tasks.coser.flaws import ASPECTS
from soulkit.tasks.coser.lexical import plain_bleu, plain_rouge_l
from soulkit.tasks.coser.speakers import candidates, label_in
from soulkit.tasks.coser.speech import with_label, without_bracketed
from soulkit.tasks.sotopia.actions import parse_json
from soulkit.types import Episode, Example, Score
from tests.support.coser import Body, book_table, coser
from tests.support.road import run
from tests.support.vectors import Vector, assert_matches, load_vectors, vectors_folder
from tests.tasks.coser import reference

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


def family(name: str, of: str, **options: Any) -> list[Any]:
    """The lines of one function; the others are another test's."""
    params = load_vectors(name, formula=FORMULAS, **options)
    return [p for p in params if p.values[0] is None or p.values[0].family == of]


@pytest.mark.parametrize("vector", load_vectors("coser.parse", formula=FORMULAS))
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
            actual = parse_json(text)
    assert_matches(actual, vector.expected["result"])


@pytest.mark.parametrize("vector", load_vectors("coser.lexical", differ=BACKENDS))
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
        says("character"), predictor=says("nsp"), surroundings=says("environment"), judge=judge
    ) as (cast, requests):

        async def both() -> tuple[Episode, Score]:
            episode = await task.play(row, cast, Rollout(seed=seed))
            return episode, await task.score(row, episode, cast)

        episode, score = run(cast, both())
        return episode, score, sum(body["model"] == "judge" for body in requests)


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


@pytest.mark.parametrize("vector", family("coser.judged", "", differ=JUDGED))
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


@pytest.mark.parametrize("vector", family("coser.judged", "evaluate"))
def test_a_judge_of_free_text(vector: Vector) -> None:
    row, texts, calls = row_of(vector), iter(vector.input["judge_texts"]), 0

    def ask() -> str:
        nonlocal calls
        calls += 1
        return next(texts, "")

    actual = reference.evaluate(row.fields, vector.input, ask)
    assert_matches({**actual, "calls": calls}, vector.expected)
