"""AlignX's original rows, and those of its P-Soups benchmark, which have the same layout.

Example record: {"prompt": ..., "chosen": ..., "rejected": ..., "profile": "Young, High Openness",
"Pair-wise Comparative Feedback": [{"prompt": ..., "chosen": ..., "rejected": ...}]}; AlignX itself
also has "Demographic Information" and "User-Generated Content".

A record holds several kinds of evidence about a person, a split shows one or all of them. Importing
for a split keeps its kinds and all their items, save a compared pair that is the very question: it
would show the answer. A record that has none of them is no row of that split. None has sixteen
items, so there is no importer for that split. The files state no terms of use; every row says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow, RawRow, read_rows
from soulkit.data.literals import literal_list
from soulkit.tasks.importing import BadRecord, Imported, need, wrong_shape

LICENCE = "none stated by the source (JinaLeejnl/AlignX)"
_FIELDS = ("prompt", "chosen", "rejected")
_ORIGINAL = {
    "demographic": "Demographic Information",
    "profile": "profile",
    "icl_pairs": "Pair-wise Comparative Feedback",
    "ugc": "User-Generated Content",
}
_COUNTS = {"icl_pairs": "n_icl", "ugc": "n_ugc"}
_KEPT: dict[str, tuple[str, ...]] = {
    "alignx_demo": ("demographic", "profile"),
    "alignx_pair": ("icl_pairs",),
    "alignx_ugc": ("ugc",),
    "alignx_arbitrary": tuple(_ORIGINAL),
}


def import_alignx(path: Path, *, task: str) -> Imported:
    """Rows of one split from a .json or .jsonl file of AlignX or P-Soups.

    Raises DataError when no record has the fields.
    """
    raw, bad = read_rows(path)
    if not any(all(name in row.fields for name in _FIELDS) for row in raw):
        raise wrong_shape(path, _FIELDS, "Give a file of AlignX or of its P-Soups benchmark.")
    rows: list[dict[str, Any]] = []
    shown = 0
    for index, record in enumerate(raw):
        try:
            evidence, left_out = _evidence(record, _KEPT[task])
            rows.append(_row(record, evidence, index))
            shown += left_out > 0
        except BadRecord as error:
            bad.append(BadRow(record.source, str(error)))
    notes = [f"The licence of these rows: {LICENCE}. Use them for tests of your own only."]
    if shown:
        notes.append(f"{shown} rows had their own answer among the compared pairs; it is left out.")
    return Imported(rows=tuple(rows), bad=tuple(bad), notes=tuple(notes))


def _row(raw: RawRow, evidence: dict[str, Any], index: int) -> dict[str, Any]:
    post, chosen, rejected = need(raw, *_FIELDS)
    if chosen.strip() == rejected.strip():
        raise BadRecord("its two replies say the same")
    counts = {_COUNTS[name]: len(evidence[name]) for name in _COUNTS if name in evidence}
    direction = raw.fields.get("ground_truth_persona")
    return {
        "raw_prompt": post,
        "chosen": chosen,
        "rejected": rejected,
        **evidence,
        **counts,
        **({"ground_truth_persona": direction} if direction else {}),
        "index": index,
        "provenance": raw.source,
        "licence": LICENCE,
    }


def _evidence(raw: RawRow, columns: tuple[str, ...]) -> tuple[dict[str, Any], int]:
    """(column → evidence, items left out because they show the answer)."""
    evidence: dict[str, Any] = {}
    left_out = 0
    for name in columns:
        value = raw.fields.get(_ORIGINAL[name])
        if name in _COUNTS and value:
            items = [_texts(item) for item in _listed(value, name)]
            value = [item for item in items if not _same(item, raw)]
            left_out += len(items) - len(value)
        if value:
            evidence[name] = value
    if not evidence:
        raise BadRecord(f"it has none of {', '.join(_ORIGINAL[name] for name in columns)}")
    return evidence, left_out


def _listed(value: Any, name: str) -> list[Any]:
    items = literal_list(value)
    if items is None or not all(isinstance(item, dict) for item in items):
        raise BadRecord(f"its {_ORIGINAL[name]} is no list of objects")
    return items


def _texts(item: dict[str, Any]) -> dict[str, str]:
    """An item without the numbers that come with it (preference directions)."""
    return {k: v for k, v in item.items() if isinstance(v, str)}


def _same(item: dict[str, str], raw: RawRow) -> bool:
    """Whether a compared pair is the question of the row, its answer included."""
    names = ("prompt", "chosen")
    return all(item.get(k, "").strip() == str(raw.fields.get(k)).strip() for k in names)
