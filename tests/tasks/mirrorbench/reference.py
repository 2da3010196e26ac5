"""Published arithmetic of MirrorBench that no command runs: what vectors alone check.

The published code holds three questions beside the one that it asks (pairwise, rubric, critique),
calibration and an aggregation that nothing calls.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist, fmean, stdev
from typing import Any

from soulkit.metrics.student import t_quantile
from soulkit.metrics.text import z_score
from soulkit.tasks.mirrorbench.conversations import MEASURES
from soulkit.tasks.mirrorbench.reference import clipped_score

_BLOCK = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)
_SMALL = 31
"""Up to so many values Student's t is used, rounded as tables have it."""
RAISES = "RAISE"


# -- reading -------------------------------------------------------------------------------------


def extract_json(text: str | None) -> dict[str, Any] | None:
    """The object of a judge's reply: the whole, that of a fenced block, else the longest one."""
    for whole in (text or "", *(_BLOCK.findall(text or ""))):
        try:
            value = json.loads(whole.strip())
        except ValueError:
            continue
        return value if isinstance(value, dict) else None
    return max(_objects(text or ""), key=lambda one: one[1], default=(None, 0))[0]


def _objects(text: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Every object in the text, with its length."""
    decoder = json.JSONDecoder()
    for place, sign in enumerate(text):
        if sign == "{":
            try:
                value, end = decoder.raw_decode(text, place)
            except ValueError:
                continue
            yield value, end - place


# -- scores --------------------------------------------------------------------------------------


def similarity(verdicts: Sequence[Any]) -> float:
    """The mean of the clipped scores; 0.5 where nothing was said, 0 where the score breaks."""
    read = [verdict for verdict in verdicts if isinstance(verdict, Mapping)]
    if RAISES in verdicts:
        return 0.0
    try:
        return fmean(clipped_score(verdict["score"]) for verdict in read) if read else 0.5
    except (TypeError, ValueError, KeyError):
        return 0.0


def seed(metric: str, episode: str, base: int, salt: str) -> int:
    text = f"{base}:{metric}:{episode}:{salt}"
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)


def proxy_first(number: int) -> bool:
    return random.Random(number).random() < 0.5


def pairwise(texts: Sequence[str], episode: str, base: int) -> dict[str, float]:
    """One comparison in a drawn order, and the two controls, which keep theirs."""
    first = proxy_first(seed("pairwise", episode, base, "pairwise-1.1"))
    sides = (first, True, True)
    names = ("score", "hh", "pp")
    return {
        name: _preference(text, side) for name, text, side in zip(names, texts, sides, strict=True)
    }


def _preference(text: str, first: bool) -> float:
    verdict = extract_json(text)
    if verdict is None:
        return 0.5
    if verdict.get("verdict") == "Tie":
        return 0.5
    return float(verdict.get("verdict") == ("A" if first else "B"))


def yes_share(texts: Sequence[str]) -> float:
    """The share of YES among what can be read; 0 where nothing can."""
    verdicts = [one for text in texts if (one := extract_json(text)) is not None]
    yes = [str(one.get("verdict", "")).upper() == "YES" for one in verdicts]
    return fmean(yes) if yes else 0.0


# -- over a batch --------------------------------------------------------------------------------


def mean_and_stdev(values: Sequence[float]) -> dict[str, float]:
    mean = fmean(values) if values else 0.0
    return {"mean": mean, "stdev": stdev(values) if len(values) > 1 else 0.0}


def mean_stdev_ci(values: Sequence[float], confidence: float) -> dict[str, float]:
    """With the half-width of an interval: t for few values at 95 %, else the normal quantile."""
    numbers, n = mean_and_stdev(values), len(values)
    if n < 2:
        return {**numbers, "half_width": 0.0}
    if confidence == 0.95 and n <= _SMALL:
        quantile = round(t_quantile(n - 1, confidence), 3)
    else:
        quantile = NormalDist().inv_cdf(0.5 + confidence / 2)
    return {**numbers, "half_width": quantile * numbers["stdev"] / n**0.5}


def safe_z_score(value: float, mean: float, deviation: float) -> float:
    return z_score(value, mean, deviation) or 0.0


def anchors(hh: Sequence[float], pp: Sequence[float]) -> dict[str, float] | None:
    return {"hh_mean": fmean(hh), "pp_mean": fmean(pp)} if hh and pp else None


def calibrated(scores: Sequence[float], hh: float, pp: float) -> list[float]:
    return [clipped_score((score - pp) / max(1e-6, hh - pp)) for score in scores]


def aggregates(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The published numbers of a batch; z-scores and judges' means in one average."""
    if not results:
        return {}
    numbers: dict[str, float] = {}
    averaged: list[float] = []
    for measure in MEASURES:
        words = _words(results, measure)
        numbers |= words
        averaged += [value for name, value in words.items() if name.endswith("_zscore")]
    for name in ("gteval", "pairwise", "rnr", "ctr"):
        scores = _column(results, "scores", name)
        if scores:
            numbers |= _pairs(results, scores) if name == "pairwise" else _judged(name, scores)
            averaged.append(fmean(scores))
    return {**numbers, "avg": fmean(averaged)} if averaged else numbers


def _column(results: Sequence[Mapping[str, Any]], group: str, name: str) -> list[float]:
    values = [(result.get(group) or {}).get(name) for result in results]
    return [value for value in values if value is not None]


def _words(results: Sequence[Mapping[str, Any]], measure: str) -> dict[str, float]:
    people = _column(results, "human_lexical", measure)
    proxies = _column(results, "proxy_lexical", measure)
    if not proxies:
        return {}
    spread = mean_and_stdev(people)
    scores = [safe_z_score(value, spread["mean"], spread["stdev"]) for value in proxies]
    return {
        f"{measure}_zscore": fmean(scores), f"{measure}_raw": fmean(proxies),
        f"{measure}_human_baseline": spread["mean"],
    }  # fmt: skip


def _judged(name: str, scores: Sequence[float]) -> dict[str, float]:
    numbers = mean_stdev_ci(scores, 0.95)
    return {name: numbers["mean"], f"{name}_ci": numbers["half_width"]}


def _pairs(results: Sequence[Mapping[str, Any]], scores: Sequence[float]) -> dict[str, float]:
    hh = _column(results, "control_scores", "hh_pairwise")
    pp = _column(results, "control_scores", "pp_pairwise")
    ends = anchors(hh, pp)
    if ends is None:
        return {"pairwise_raw": fmean(scores)}
    return {
        "pairwise_raw": fmean(scores),
        "pairwise_calibrated": fmean(calibrated(scores, ends["hh_mean"], ends["pp_mean"])),
        "pairwise_hh_anchor": ends["hh_mean"], "pairwise_pp_anchor": ends["pp_mean"],
        "pairwise_gap": ends["hh_mean"] - ends["pp_mean"],
    }  # fmt: skip
