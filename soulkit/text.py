"""Text from models and files, made safe to show.

What a model writes may hold terminal escape sequences, carriage returns that overwrite a line, or
bidirectional overrides that reorder it. Everything that reaches a terminal or a report goes through
`sanitise` first. Scores and records keep the original text: only the showing is cleaned. What a
user gave as an address is read here as well, for all who send requests.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from urllib.parse import SplitResult, urlsplit

# Whole escape sequences go first: removing only their ESC would leave "[31m" behind.
_ESCAPES = re.compile(
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # system commands: titles, links
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c\n]*(?:\x1b\\|\x9c)?"  # device control strings
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # control sequences: colours, cursor moves
    r"|\x1b[ -/]*[0-~]?"  # two-character escapes
)
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1 without tab and newline
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional marks, overrides and isolates
    "\u2028\u2029\ufeff\ud800-\udfff]"  # line separators, byte order mark, lone surrogates
)


def sanitise(text: str) -> str:
    """`text` without escape sequences, controls (tab and newline stay) and bidi overrides.

    Carriage returns of Windows line ends vanish with the other controls, their newlines stay.
    """
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


_MARKS_IN_A_ROW = 30
"""Of a longer run the rest is nobody's writing; sorting a run costs the square of its length."""


@cache
def combining_marks(least: int) -> re.Pattern[str]:
    """Runs of at least `least` marks that join the letter before them, in whatever form."""
    every = map(chr, range(0x300, 0x1F000))
    marks = "".join(c for c in every if unicodedata.combining(unicodedata.normalize("NFKD", c)[0]))
    return re.compile(f"[{re.escape(marks)}]{{{least},}}")


def normalised(text: str) -> str:
    """NFKC in time that grows with the length: of a long run of combining marks the first stay."""
    if not text.isascii():
        runs = combining_marks(_MARKS_IN_A_ROW + 1)
        text = runs.sub(lambda run: run[0][:_MARKS_IN_A_ROW], text)
    return unicodedata.normalize("NFKC", text)


def web_address(text: str) -> SplitResult | None:
    """The parts of an http or https address; None when no request could be sent to it."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if usable else None


def one_line(text: str, limit: int = 0) -> str:
    """Sanitised text on one line, white space folded; cut to `limit` characters when it is > 0."""
    line = " ".join(sanitise(text).split())
    return line if limit <= 0 or len(line) <= limit else line[: max(limit - 1, 0)] + "…"
