"""A rating sheet as one HTML page: opens without a network, saves a file, keeps what was filled in.

What models wrote is text, never markup; a content security policy with the hash of the one script
would stop anything that slipped through.
"""

from __future__ import annotations

from pathlib import Path

from soulkit.judge.sheets import PREFERENCE, RaterSheet
from soulkit.report.html import environment, script_hash
from soulkit.runs.jsonl import write_aside

SCRIPT = "sheet_script.html.j2"


def render_sheet(sheet: RaterSheet, guide: str = "") -> str:
    """The page of one rater; `guide` is text that stands above the cards."""
    return environment().get_template("sheet.html.j2").render(
        sheet=sheet,
        guide=guide,
        preference=PREFERENCE,
        script=SCRIPT,
        script_hash=script_hash(SCRIPT),
        questions=sum(len(card.scales) for card in sheet.cards),
    )  # fmt: skip


def write_sheet_page(sheet: RaterSheet, path: Path, guide: str = "") -> Path:
    """Render into `path`, written aside and renamed. Returns `path`."""
    write_aside(path, render_sheet(sheet, guide).encode("utf-8", "replace"))
    return path
