"""How far the labels of a file agree with rules that know the right answer: what such audits say.

The audit itself belongs to a task, whose declaration names it (`audit: audit:audit_labels`): rules
that can answer a row are rules about one benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from soulkit.data.files import write_objects


@dataclass(frozen=True, slots=True)
class Agreement:
    """Rows on which label and tracker agree, of those that were read."""

    agreed: int
    total: int

    @property
    def share(self) -> float | None:
        return self.agreed / self.total if self.total else None


@dataclass(frozen=True, slots=True)
class Dispute:
    """A row whose label is not the tracker's answer."""

    id: str
    question: str
    gold: str
    tracker: str | None
    """None: by the rules nobody in the chain ever formed that belief."""
    order: str
    deception: str
    length: str
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LabelAudit:
    """What an audit found."""

    overall: Agreement
    by: Mapping[str, Mapping[str, Agreement]]
    """Tag (`order`, `deception`, `length`, `prompting_type`, ...) → value → agreement."""
    disputed: tuple[Dispute, ...]
    unread: tuple[str, ...]
    """Ids of the rows whose story or question could not be read."""
    contradictions: int
    """Pairs of one story and one question that carry different labels within the file."""


def write_disputed(report: LabelAudit, path: Path, *, replace: bool = True) -> int:
    """Write the disputed rows as JSON lines; returns how many."""
    return write_objects(path, map(asdict, report.disputed), replace=replace)
