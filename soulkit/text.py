"""Safe display of text from models and files; formatting of sizes, money, times and lists.

Model text may contain terminal escape sequences, carriage returns that overwrite a line, or
bidirectional overrides that reorder it. Everything shown in a terminal or report goes through
`sanitise` first; scores and records keep the original text. The module also parses addresses given
by the user.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
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
    "\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]"  # line separators, noncharacters, surrogates
)


def sanitise(text: str) -> str:
    """`text` without escape sequences, controls (tab and newline stay) and bidi overrides.

    Carriage returns of Windows line ends vanish with the other controls, their newlines stay.
    """
    return text if text.isprintable() else _CONTROLS.sub("", _ESCAPES.sub("", text))


_MARKS_IN_A_ROW = 30
"""Combining marks kept of a longer run. Real text has no longer runs, and sorting takes quadratic
time."""


_SIGNS_KEPT = 1 << 18


class SignTable(dict[int, str]):
    """A table for `str.translate` that computes the replacement of a character on first use.

    Translating costs the same for every script, while a regular expression slows down with each
    replaced character and each range in its class.
    """

    def __init__(self, spell: Callable[[str], str]) -> None:
        """`spell` returns the replacement of one character and depends on nothing else."""
        super().__init__()
        self._spell = spell

    def __missing__(self, code: int) -> str:
        if len(self) >= _SIGNS_KEPT:
            self.clear()
        self[code] = spelling = self._spell(chr(code))
        return spelling


def is_mark(sign: str) -> bool:
    """Whether a character combines with the letter before it, in any form."""
    return bool(unicodedata.combining(unicodedata.normalize("NFKD", sign)[0]))


@cache
def _mark_runs() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """(possible runs of too many marks, surplus marks in such a run).

    A character class of two-byte characters is a fast table; with others it is searched in full
    for each character. So the first pattern counts all other characters as marks.
    """
    low = [chr(c) for c in range(0x300, 0x10000) if is_mark(chr(c))]
    high = [chr(c) for c in range(0x10000, 0x1F000) if is_mark(chr(c))]
    marks = re.escape("".join(low))
    gaps = _complement(sorted(map(ord, low)))
    more = _MARKS_IN_A_ROW
    loose = rf"[^{gaps}][^{gaps}]{{{more}}}[^{gaps}]*+"
    strict = rf"[{marks}{re.escape(''.join(high))}]{{{more + 1},}}"
    return re.compile(loose), re.compile(strict)


def _complement(codes: list[int]) -> str:
    """All characters up to U+FFFF except `codes`, as ranges for a regular expression class."""
    pairs = zip([-1, *codes], [*codes, 0x10000], strict=True)
    ranges = ((before + 1, after - 1) for before, after in pairs if after - before > 1)
    return "".join(rf"\u{first:04x}-\u{last:04x}" for first, last in ranges)


def _without_heaps(text: str) -> str:
    loose, strict = _mark_runs()

    def shortened(run: re.Match[str]) -> str:
        if not any(map(is_mark, run[0][:: _MARKS_IN_A_ROW + 1])):
            return run[0]  # a surplus run would include one of these characters
        return strict.sub(lambda marks: marks[0][:_MARKS_IN_A_ROW], run[0])

    return loose.sub(shortened, text)


def normalised(text: str) -> str:
    """NFKC in linear time; a long run of combining marks is shortened."""
    return text if text.isascii() else unicodedata.normalize("NFKC", _without_heaps(text))


_WORD_SIGNS = SignTable(lambda sign: sign if sign.isalnum() else " ")


def words_only(text: str) -> str:
    """The letters and digits of `text`; everything between them becomes one space."""
    return " ".join(text.translate(_WORD_SIGNS).split())


def web_address(text: str) -> SplitResult | None:
    """The parts of an http or https address; None if it is not a usable address."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if usable else None


def duration(seconds: float, decimals: int = 0) -> str:
    """`42 s` (with one decimal `4.2 s`), `3 min 05 s` or `2 h 07 min`."""
    if (exact := round(max(seconds, 0.0), decimals)) < 60:
        return f"{exact:.{decimals}f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def byte_size(count: float) -> str:
    """A number of bytes as `512 B`, `3.4 MB` or `1.2 GB`, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def short_count(number: int) -> str:
    """A large number as `9,120`, `61.4k` or `3.1M`."""
    if number < 10_000:
        return f"{number:,}"
    return f"{number / 1000:.1f}k" if number < 1_000_000 else f"{number / 1e6:,.1f}M"


def dollars(amount: float | None) -> str:
    """US dollars: `$0.0420`, `$3.10`, `unknown`."""
    if amount is None:
        return "unknown"
    return f"${amount:,.4f}" if 0 < amount < 1 else f"${amount:,.2f}"


def join_and(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *most, last = [*names] or [""]
    return f"{', '.join(most)} and {last}" if most else last


def with_stop(text: str, ends: tuple[str, ...] = (".", "!", "?")) -> str:
    """`text` with a full stop, unless it has one of `ends`."""
    return text if text.endswith(ends) else f"{text}."


def counted(number: int, noun: str) -> str:
    """`1 row`, `3 rows`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def word_count(text: str) -> int:
    """Words of a text, for estimates of tokens; four additional UTF-8 bytes of characters outside
    ASCII count as one more, because Chinese, for example, has no spaces between words."""
    return len(text.split()) + (len(text.encode("utf-8", "surrogatepass")) - len(text)) // 4


def listed(counts: Mapping[str, int]) -> str:
    """`1 failed request, 3,000 system messages`, from counts by name in the plural."""
    names = {n: re.sub(r"(?:(i)e)?s\b", lambda m: "y" if m[1] else "", n, count=1) for n in counts}
    return ", ".join(f"{count:,} {names[n] if count == 1 else n}" for n, count in counts.items())


def one_line(text: str, limit: int = 0) -> str:
    """Sanitised text on one line, white space folded; cut to `limit` characters when it is > 0."""
    line = " ".join(sanitise(text).split())
    return line if limit <= 0 or len(line) <= limit else line[: max(limit - 1, 0)] + "…"
