"""Which side of a data set is learned: the shipped table `corpora.yaml`, and what overrules it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from soulkit.errors import DataError, did_you_mean

HUMAN, ASSISTANT = "human", "assistant"
SIDES = (HUMAN, ASSISTANT)
"""Sides that are no speaker's name."""


@dataclass(frozen=True, slots=True)
class CorpusRule:
    """What the table says of one data set."""

    side: str
    """`human` or `assistant`."""
    turns: int | None = None
    """So many messages stay of a longer conversation."""


@cache
def corpus_rules() -> dict[str, CorpusRule]:
    """Name (`data_source`) → its rule, for every name of the shipped table."""
    import yaml

    table = yaml.safe_load(Path(__file__).with_name("corpora.yaml").read_text(encoding="utf-8"))
    limits = table["turns"]
    return {
        name: CorpusRule(side, limits.get(name))
        for side in SIDES
        for names in table[side].values()
        for name in names
    }


def listed_rule(data_source: str | None, name: str | None) -> CorpusRule | None:
    """What the table says of a row: by its `data_source`, else by its source's `name`."""
    rules = corpus_rules()
    return next((rules[mark] for mark in (data_source, name) if mark and mark in rules), None)


def rule_for(data_source: str | None, name: str | None, place: str) -> CorpusRule:
    """The rule of a row: by its `data_source`, else by its source's `name`; `place` says where.

    DataError where nothing says who is learned.
    """
    rule = listed_rule(data_source, name)
    if rule is not None:
        return rule
    mark = data_source or name
    way_out = "Say who is learned: --side human, --side assistant, or --side NAME of a speaker."
    if mark is None:
        raise DataError(
            f"Nothing says who is learned in {place}.",
            "The row has no data_source, and its source has neither a side nor a name.",
            way_out,
        )
    raise DataError(
        f"Nobody knows who is learned in the data set '{mark}' ({place}).",
        f"corpora.yaml has no such name.{_near(mark)}",
        way_out,
    )


def _near(name: str) -> str:
    hint = did_you_mean(name, corpus_rules())
    return f" {hint}" if hint.startswith("Did") else ""
