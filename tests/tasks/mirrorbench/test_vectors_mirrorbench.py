"""Conformance of MirrorBench: every line under `reference`, and where `paper` differs, why."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from soulkit.errors import UnreadableVerdict
from soulkit.metrics import ngrams
from soulkit.models.base import Cast
from soulkit.tasks.base import Rollout
from soulkit.tasks.mirrorbench.conversations import conversation_text, read_message
from soulkit.tasks.mirrorbench.lexical import of_tokens, spreads
from soulkit.tasks.mirrorbench.reference import gaps
from soulkit.tasks.mirrorbench.task import MirrorBench
from soulkit.types import Episode, Example, Score
from tests.support.mirrorbench import Body, in_turn, mirrorbench, run, table
from tests.support.vectors import Vector, assert_matches, load_vectors
from tests.tasks.mirrorbench import reference

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
LEXICAL = {"mattr", "hdd", "yules_k", "episode_gaps"}
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
    "mattr": lambda i: {"result": ngrams.mattr(i["tokens"], i["window"])},
    "hdd": lambda i: {"result": ngrams.hdd(i["tokens"], i["sample_size"])},
    "yules_k": lambda i: {"result": ngrams.yules_k(i["tokens"])},
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


@pytest.mark.parametrize("vector", load_vectors("mirrorbench.lexical", formula=FORMULAS))
def test_lexical(vector: Vector) -> None:
    count = COUNTED[vector.family]
    if vector.raises:
        with pytest.raises(ValueError):
            count(vector.input)
        return
    assert_matches(count(vector.input), vector.expected)


def lines(name: str, *families: str) -> list[Any]:
    """The lines of these functions; the line that says that the file is missing stays."""
    every = load_vectors(name, formula=FORMULAS)
    return [p for p in every if p.values[0] is None or p.values[0].family in families]


@pytest.mark.parametrize("vector", lines("mirrorbench.lexical", "safe_z_score"))
def test_people_who_are_all_alike_have_no_spread(vector: Vector) -> None:
    inputs = vector.input
    same = "zero-variance-gives-zero" in vector.quirks
    assert (ngrams.z_score(inputs["value"], inputs["mean"], inputs["stdev"]) is None) is same


@pytest.mark.parametrize("vector", lines("mirrorbench.lexical", "mean_and_stdev"))
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


@pytest.mark.parametrize("vector", load_vectors("mirrorbench.parse", formula=FORMULAS))
def test_parse(vector: Vector) -> None:
    match vector.family:
        case "extract_json":
            actual: Any = {"result": reference.extract_json(vector.input["text"])}
        case "clean_user_turn":
            actual = {"turns": turns_after(vector.input["text"], "reference")}
        case _:
            actual = {"result": conversation_text(vector.input["turns"])}
    assert_matches(actual, vector.expected)


@pytest.mark.parametrize("vector", lines("mirrorbench.parse", "clean_user_turn"))
def test_messages_under_paper(vector: Vector) -> None:
    text = vector.input["text"] or ""
    message, status = read_message(text, "paper")
    usual = "".join(turn["content"] for turn in vector.expected["turns"])
    if not set(vector.quirks) & set(REPAIRED):
        assert message == usual
    else:
        assert message != usual and status == "salvaged", "a repair that repairs nothing"


# -- judged --------------------------------------------------------------------------------------

EPISODES = [p for p in load_vectors("mirrorbench.judged") if not p.values[0]
            or not p.values[0].family]  # fmt: skip


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


@pytest.mark.parametrize("vector", EPISODES)
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
    outputs, asked = vector.input["user_outputs"], len(episode.traces[0].turns)
    missing = [*outputs, *[None] * asked][asked - 1] is None  # over HTTP it is an empty reply
    assert score.metrics["num_turn"] == expected["metrics"]["mirrorbench/num_turn"] + missing


@pytest.mark.parametrize("vector", EPISODES)
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


@pytest.mark.parametrize("vector", lines("mirrorbench.judged", "gteval", "pairwise", "rnr", "ctr"))
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
