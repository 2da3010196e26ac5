"""A reporter that records its messages."""

from __future__ import annotations

from soulkit.reporting import Reporter


class Heard(Reporter):
    """A reporter that appends notes and phases to `lines`."""

    def __init__(self, lines: list[str] | None = None) -> None:
        self.lines: list[str] = [] if lines is None else lines

    def note(self, line: str) -> None:
        self.lines.append(line)

    def warn(self, line: str) -> None:
        self.note(line)

    def phase(self, what: str, *, alone: bool = False) -> None:
        self.lines.append(what)
