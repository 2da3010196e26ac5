"""Tables keep the names of their rows and every number, however narrow the terminal is."""

from __future__ import annotations

import io

import pytest

from soulkit.report.fitting import FittingTable
from soulkit.report.table import literal_text, plain_table

HEADS = ("task", "A", "B \u2212 A", "95% CI", "p (Holm)", "shared", "clusters")
ROWS = (
    ("alignx_arbitrary row_accuracy", "0.500", "\u22120.150", "\u22120.284 to \u22120.016",
     "0.4733", "440", "no spread in 11"),
    ("all (suite)", "0.519", "\u22120.115", "\u22120.202 to \u22120.012", "\u2013", "200",
     "9: few"),
)  # fmt: skip


def printed(width: int) -> str:
    from rich.console import Console

    table = plain_table()
    for head in HEADS:
        table.add_column(head, justify="left" if head == "task" else "right")
    for row in ROWS:
        table.add_row(*map(literal_text, row))
    screen = Console(file=io.StringIO(), width=width, highlight=False)
    screen.print(FittingTable(table))
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    return str(text)


@pytest.mark.parametrize("width", [200, 100, 80, 72, 60, 40, 24])
def test_every_word_is_there(width: int) -> None:
    words = printed(width).split()
    for row in ROWS:
        assert all(words.count(word) >= 1 for text in row for word in text.split()), width
    assert "\u2026" not in printed(width)


def test_it_is_one_line_a_row_where_there_is_room() -> None:
    lines = [line for line in printed(120).splitlines() if line.strip()]
    assert len(lines) == 2 + len(ROWS) and "\u22120.284 to \u22120.016" in lines[2]


def test_without_room_each_row_is_a_paragraph() -> None:
    lines = printed(40).splitlines()
    at = lines.index(ROWS[0][0])
    assert lines[at + 1].strip().startswith("A 0.500 · B \u2212 A \u22120.150")
    assert ROWS[1][0] in lines


def test_names_of_break_downs_fold_nowhere() -> None:
    """The space before such a name is a part of it."""
    from rich.console import Console

    shown = plain_table()
    for head in ("metric", "clusters"):
        shown.add_column(head)
    shown.add_row(*map(literal_text, (" secret=surprise", "11 of these, few events")))
    screen = Console(file=io.StringIO(), width=30)
    screen.print(FittingTable(shown))
    assert "secret=surprise" in screen.file.getvalue()  # type: ignore[attr-defined]
