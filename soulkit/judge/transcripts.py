"""A transcript as a judge or a coach reads it: whoever says whatever, one utterance a line.

    <transcript 9f2c41d07b3e>
    Ana: “Would you take forty?”
    Ben: “He said ’yes’, more or less.”
    </transcript 9f2c41d07b3e>

Quotation marks inside a speech are bent, so that it neither ends its own line nor begins somebody
else's, and the whole stands between the marks of `fence`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from soulkit.judge.fence import fence, utterance
from soulkit.text import one_line
from soulkit.types import Episode, Line

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
