"""Published arithmetic of UserLLM that no command runs: what vectors alone check."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from soulkit.tasks.userllm.metrics import first_turn_diversity, termination_scores

_CJK = ((0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF))


def tokenize_fallback(text: str | None) -> list[str]:
    """The published words where the `regex` package is missing: Chinese and kana sign by sign."""
    tokens: list[str] = []
    word = ""
    for sign in [*(text or "").lower(), " "]:
        ideograph = any(low <= ord(sign) <= high for low, high in _CJK)
        if (sign.isalnum() or sign == "_") and not ideograph:
            word += sign
            continue
        if word:
            tokens.append(word)
            word = ""
        if ideograph or unicodedata.category(sign)[0] in "PS":
            tokens.append(sign)
    return tokens


def reference_detector_score(response: Any) -> float | None:
    """How human a detection service finds a text; None when its answer does not say.

    The newer field is taken as it is; the older one says how likely the text is a machine's.
    """
    if not isinstance(response, Mapping):
        return None
    human = _as_number(response.get("fraction_human"))
    if human is not None:
        return human
    names = ("ai_likelihood", "aiLikelihood")
    machine = next((x for n in names if (x := _as_number(response.get(n))) is not None), None)
    return None if machine is None else 1 - machine


def _as_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def reference_aggregates(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The batch metrics of the published helper; 0 for what nothing is known of."""
    first = [str(r.get("generated_output") or "") for r in results
             if r.get("is_first_turn") and _counts(r, "first_turn_diversity")]  # fmt: skip
    ends = [(r["pred_endconversation"], r["true_endconversation"]) for r in results
            if _counts(r, "termination_f1") and _both_known(r)]  # fmt: skip
    overlap = [r for r in results if r.get("has_intent")]
    return {
        "first_turn_diversity": first_turn_diversity(first) or 0.0,
        "intent_decomposition": _mean(overlap, "intent_decomposition"),
        "termination_f1": termination_scores([p for p, _ in ends], [t for _, t in ends])[2],
        **{
            n: _mean(results, n)
            for n in ("ai_detector_score", "role_adherence", "intent_adherence")
        },
    }


def _both_known(result: Mapping[str, Any]) -> bool:
    names = ("pred_endconversation", "true_endconversation")
    return all(isinstance(result.get(name), bool) for name in names)


def _counts(result: Mapping[str, Any], metric: str) -> bool:
    """A result that lists its metrics counts for those alone."""
    listed = result.get("related_metrics")
    return not (isinstance(listed, list) and listed) or metric in listed


def _mean(results: Iterable[Mapping[str, Any]], metric: str) -> float:
    entries = [r.get(metric) for r in results if _counts(r, metric)]
    numbers = [float(value) for value in entries if value is not None]
    return sum(numbers) / len(numbers) if numbers else 0.0


def adherence_fields(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """(question, what the assistant suggested instead), None unless both are there."""
    names = ("question", "assistant_suggestion_turn")
    question, suggestion = (str(row.get(name) or "").strip() for name in names)
    return (question, suggestion) if question and suggestion else None
