"""SocSci210 in its instruction layout, as replications of SOCRATES write it.

    {"instruction": "...", "input": "Demographics: Age: 74; ...\\n\\nScenario: You read ... Only
     return an integer from 1 to 5, ...", "output": "Response: 2", "study_id": "yuazs",
     "condition_num": 1}

The scale stands only in the scenario's words. Records that state none (amounts of money), and those
whose recorded answer is off the scale they state, are bad rows with the reason: their value could
not be told. Everybody in a study and condition meets the same question, so the place of a record in
the file is kept as its index.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soulkit.data.files import RawRow
from soulkit.tasks.importing import BadRecord, Imported, need, of_shape, rows_from
from soulkit.tasks.socsci210.scales import read_scale

_FIELDS = ("input", "output")
_RESPONSE = re.compile(r"\s*(?:Response:)?\s*(-?\d+(?:\.\d+)?)\s*")
_PARTS = re.compile(
    r"\s*Demographics:\s*(?P<persona>.*?)\s*Scenario:\s*(?P<told>.*?)\s*", re.DOTALL
)
LICENCE = "not stated by the source; see the terms of SocSci210 and TESS"


def import_socsci210(path: Path) -> Imported:
    """Rows of an instruction-layout file (JSON lines)."""
    raw, bad = of_shape(path, _FIELDS, "Give JSON lines with instruction, input and output.")
    rows = rows_from(raw, bad, _row)
    return Imported(rows=tuple(rows), bad=tuple(bad), notes=_notes(rows))


def _row(raw: RawRow, index: int) -> dict[str, Any]:
    text, output = need(raw, *_FIELDS)
    answer = _RESPONSE.fullmatch(output)
    if answer is None:
        raise BadRecord(f"its output '{output:.40}' holds no number")
    parts = _PARTS.fullmatch(text)
    persona, question = (parts["persona"], parts["told"]) if parts else ("", text.strip())
    scale = read_scale(question)
    if scale is None:
        raise BadRecord("its question states no scale, so a distance means nothing")
    response = float(answer[1]) if "." in answer[1] else int(answer[1])
    if not scale.low <= response <= scale.high:
        where = f"from {scale.low} to {scale.high}"
        raise BadRecord(f"its recorded answer {answer[1]} is off the scale {where} that it states")
    return {
        "prompt_text": text.strip(),
        "persona": persona or None,
        "response": response,
        "r_min": scale.low,
        "r_max": scale.high,
        "response_type": scale.kind,
        "study_id": raw.fields.get("study_id"),
        "condition_id": raw.fields.get("condition_num"),
        "index": index,
        "provenance": raw.source,
        "licence": LICENCE,
    }


def _notes(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    studies = len({row["study_id"] for row in rows})
    kinds = {kind: sum(row["response_type"] == kind for row in rows)
             for kind in ("ordinal", "binary", "categorical")}  # fmt: skip
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    return (
        f"{len(rows)} rows of {studies} studies ({counted}); a scale whose every point has a name "
        "is read as a list of options.",
    )
