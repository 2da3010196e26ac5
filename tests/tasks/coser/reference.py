"""Published arithmetic and readers of CoSER that no command runs: what vectors alone check."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from soulkit.tasks.coser.judging import HIGHEST, LOWEST, Marks, anchored, plain_bleu, plain_rouge_l
from soulkit.tasks.coser.scene import without_bracketed
from soulkit.tasks.sotopia.actions import action_json

TITLES = [name.alias or "" for name in Marks.model_fields.values()]
"""The dimensions in the order in which they are asked about one by one."""


def unsmoothed_bleu(gold: Sequence[str], words: Sequence[str]) -> float:
    """BLEU-4 over given tokens; an order without a match counts as the smallest float."""
    counts = [_matches(gold, words, order) for order in range(1, 5)]
    if not counts[0][0]:
        return 0.0
    shares = [(match or sys.float_info.min) / max(total, 1) for match, total in counts]
    brevity = 1.0 if len(words) > len(gold) else math.exp(1 - len(gold) / len(words))
    return brevity * math.exp(sum(map(math.log, shares)) / 4)


def _matches(gold: Sequence[str], words: Sequence[str], order: int) -> tuple[int, int]:
    def grams(tokens: Sequence[str]) -> Counter[tuple[str, ...]]:
        return Counter(tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1))

    made, limits = grams(words), grams(gold)
    return sum(min(n, limits[gram]) for gram, n in made.items()), sum(made.values())


def likeness_of(
    gold: Sequence[Mapping[str, str]], played: Sequence[Mapping[str, str]], after: int
) -> dict[str, float]:
    """BLEU and ROUGE-L of dialogues: names on the recorded side alone."""
    reference = "\n".join(f"{one['character']}: {one['message']}" for one in gold[after:])
    text = "\n".join(one["content"] for one in played[after:])
    return {"bleu": plain_bleu(reference, text), "rouge_l": plain_rouge_l(reference, text)}


def for_judges(messages: Sequence[Mapping[str, str]], name: str, text: str) -> list[dict[str, str]]:
    """Messages without thoughts; the environment's stay, the predictor's go."""
    return [
        {**one, text: one[text] if one[name] == "Environment" else without_bracketed(one[text])}
        for one in messages
        if one[name] != "NSP"
    ]


def evaluate(
    circumstance: Mapping[str, Any], inputs: Mapping[str, Any], ask: Callable[[], str]
) -> dict[str, Any]:
    """The reference's judging in free text: all dimensions at once (two attempts), or one call for
    each (three); a reply without JSON is given to a repair call, `ask` again."""
    if inputs["judge_mode"] == "combined":
        answer = _valid(ask, 2, TITLES) or {}
        points = {title: _points(answer.get(title)) for title in TITLES}
    else:
        points = {t: _points((_valid(ask, 3, [t]) or {}).get(t)) for t in TITLES}
    gold = for_judges(circumstance["dialogues"], "character", "message")
    played = for_judges(inputs["simulation"], "role", "content")
    reward = sum(points.values()) / len(points) / 100
    likeness = likeness_of(gold, played, inputs["continue_from"])
    return {"reward": reward, "dimension_scores": points, **likeness}


def _valid(ask: Callable[[], str], attempts: int, titles: Sequence[str]) -> dict[str, Any] | None:
    for _ in range(attempts):
        text = ask()
        value = action_json(text) if text else None
        if text and not value:
            value = action_json(ask())
        if isinstance(value, dict) and all(_in_range(value.get(title)) for title in titles):
            return value
    return None


def _in_range(mark: Any) -> bool:
    score = mark.get("score") if isinstance(mark, Mapping) else None
    if not isinstance(score, int | float) or not math.isfinite(score):
        return False
    return LOWEST <= int(score) <= HIGHEST


def _points(mark: Any) -> float:
    return 0.0 if mark is None else anchored(int(mark["score"]))
