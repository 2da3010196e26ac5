"""What a character reads of a scene before it speaks, each part within its word budget.

Its own profile and its thoughts have a budget each; the profiles of all others share one fairly, so
that one long profile does not push out the rest. A part that is cut loses its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soulkit.tasks.budgets import share_fairly
from soulkit.tasks.coser.circumstance import MENTAL

PROFILES, SUMMARY = "profiles", "plot_summary"
"""Fields that are made of others: what is generally known of each character, and the plot."""


def fitted_view(
    fields: Mapping[str, Any], seat: str, own_words: int, others_words: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """(what a character's prompt is made of, words cut by part), of the fields that it may see."""
    public, cuts = fields[PROFILES], {}
    parts = {"profile": public.get(seat, ""), "thought": fields.get(f"{MENTAL}{seat}", "")}
    texts: dict[str, str] = {}
    for part, text in parts.items():
        (item,), cuts[part] = share_fairly([{part: text}], own_words)
        texts[part] = item[part]
    names = [name for name in public if name != seat]
    items, cuts["others"] = share_fairly([{"profile": public[n]} for n in names], others_words)
    others = [{"name": n, "profile": i["profile"]} for n, i in zip(names, items, strict=True)]
    view = {
        "name": seat, **texts, "others": others, "book": fields["book"],
        "scenario": fields["scenario"], "plot": fields.get(SUMMARY, ""),
        "thoughts": not fields["wo_thought"],
    }  # fmt: skip
    return view, {part: count for part, count in cuts.items() if count}
