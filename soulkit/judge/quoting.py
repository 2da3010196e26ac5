"""Text of a model inside somebody else's prompt: data, never instructions.

What an actor or a partner wrote is put between two marks that it cannot contain: they carry a
digest of the very text, and whatever in it looks like such a mark is bent. Control characters go,
and a text beyond reason is cut in the middle. In a transcript each utterance is one line.

    <transcript 9f2c41d07b3e>
    Ana: “Would you take forty?”
    Ben: “He said ’yes’, more or less.”
    </transcript 9f2c41d07b3e>
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from soulkit.text import one_line, sanitise
from soulkit.types import Episode, Line

MAX_FENCED_CHARS = 60_000
"""Characters of one fenced text; about 15,000 tokens."""
_MARK = re.compile(r"<(?=(?:\s*/\s*)?[A-Za-z][\w-]*(?:\s[^<>]{0,80})?/?>)")


def fence(text: str, label: str) -> str:
    """`text` between an opening and a closing mark named `label`."""
    clean = _MARK.sub("\u2039", shortened(sanitise(text), MAX_FENCED_CHARS))
    digest = hashlib.sha256(clean.encode("utf-8", "replace")).hexdigest()[:12]
    return f"<{label} {digest}>\n{clean}\n</{label} {digest}>"


def utterance(text: str) -> str:
    """Speech on one line, its quotation marks bent: it cannot end its own line in a transcript, nor
    begin somebody else's."""
    return one_line(text).replace('"', "\u201d")


def shortened(text: str, max_chars: int) -> str:
    """`text`, or its beginning and end with a note between them on what was left out."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[… {left_out} characters left out …]\n{text[-half:]}"


NO_LABELS: Mapping[str, str] = MappingProxyType({})


def transcript(
    lines: Iterable[Line], labels: Mapping[str, str] = NO_LABELS, mark: str = "transcript"
) -> str:
    """The lines between two marks named `mark`; empty between them where nobody spoke.

    `labels` is what a seat is called there (otherwise its own name). A label stands outside the
    quotation marks, so what could end it, a line break or a quotation mark, is taken out of it.
    """
    return fence("\n".join(_quoted(line, labels) for line in lines), mark)


def utterances(episode: Episode) -> list[str]:
    """What the acted seats said, turn by turn, as everybody heard it."""
    seats = {trace.seat for trace in episode.traces}
    return [line.text for line in episode.transcript if line.seat in seats]


def _quoted(line: Line, labels: Mapping[str, str]) -> str:
    label = one_line(labels.get(line.seat, line.seat)).translate(_NO_MARKS)
    return f"{label}: \u201c{utterance(line.text).translate(_BENT)}\u201d"


_NO_MARKS = dict.fromkeys(map(ord, '"\u201c\u201d\u201e\u201f\uff02'))
_BENT = str.maketrans("\u201c\u201d\u201e\u201f\uff02", "\u2018\u2019\u2018\u2018\u2019")
