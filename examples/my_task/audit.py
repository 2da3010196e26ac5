"""Check the labels of `my_task` against a rule: the meant option is not the literal reading.

The literal reading is the option that shares the most words with what was said. If it is labelled
as meant, the row is disputed, and a person should check it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from soulkit.tasks import Agreement, DisputedLabel, LabelAudit
from soulkit.types import Example

SHORT = 4
"""Words with fewer letters are ignored."""


def audit_labels(path: Path, examples: Iterable[Example]) -> LabelAudit:
    """Compare the labels with the rule; rows without a literal reading count as agreeing."""
    outcomes: dict[str, list[bool]] = {}
    disputed: list[DisputedLabel] = []
    for example in examples:
        literal = literal_reading(example.fields["said"], example.fields["options"])
        agrees = literal != example.fields["meant"]
        outcomes.setdefault(example.tags.get("kind", ""), []).append(agrees)
        if not agrees:
            disputed.append(_dispute(example))
    everything = [agrees for kind in outcomes.values() for agrees in kind]
    return LabelAudit(
        overall=_agreement(everything),
        by={"kind": {kind: _agreement(outcomes[kind]) for kind in sorted(outcomes)}},
        disputed=tuple(disputed),
        unread=(),
        contradictions=0,
    )


def literal_reading(words: str, options: Iterable[str]) -> str | None:
    """The option that shares the most words with what was said; None without a clear winner."""
    shared = {option: len(_words(option) & _words(words)) for option in options}
    most = max(shared.values())
    nearest = [option for option, count in shared.items() if count == most]
    return nearest[0] if most and len(nearest) == 1 else None


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"\w+", text.lower()) if len(word) >= SHORT}


def _agreement(outcomes: list[bool]) -> Agreement:
    return Agreement(sum(outcomes), len(outcomes))


def _dispute(example: Example) -> DisputedLabel:
    return DisputedLabel(
        id=example.source,
        question=example.fields["said"],
        gold=example.fields["meant"],
        tracker=None,
        order="",
        deception="",
        length="",
        tags=dict(example.tags),
    )
