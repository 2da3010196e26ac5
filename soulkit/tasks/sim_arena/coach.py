"""Coaching somebody who plays a real person: what a coach is shown, and what rules can say.

Judges saw the person's own words. So of what they wrote a coach gets the sentences that do not
repeat them, and rules speak of the person's manner alone: how long the messages are, how they are
written, when there are no more. Neither tells what the person said or what the answer is.

    “Starts with 'i dont get it at all'. Far more formal than the student.”  →  the second sentence
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from soulkit.judge.leaks import LeakView, grams, tokens
from soulkit.tasks.kit.coaching import remarks_without_secrets
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.sim_arena.judging import mean_words
from soulkit.tasks.sim_arena.play import Utterance
from soulkit.types import Score

TEXTS = Texts(__file__)
FAR = 2.0
"""So many times as long is another manner."""
COPIED = 8
"""So many words in a row of the text before the person are no question of theirs."""
RUBRIC = (
    "similarity score", "key differences", "No Match", "feature list", "fulfillment rate",
    "document rating",
)  # fmt: skip
"""Words of the rubric that nobody in a chat would use."""
_CAPITAL, _WORD_SIGN = re.compile(r"\W*[A-Z]"), re.compile(r"\w")


def style_notes(score: Score, view: LeakView) -> str:
    """What the judges saw, fenced, without the sentences that repeat something of the person's."""
    return remarks_without_secrets(_judges_remarks(score), replace(view, private=()), ends=".!?;")


def _judges_remarks(score: Score) -> Iterator[tuple[str, str]]:
    """(what it is about, what a judge wrote about it)."""
    titles = {"writing_style": "manner of writing", "interaction_style": "manner of dealing"}
    for verdict in score.verdicts:
        for difference in verdict.said.get("key_differences") or ():
            yield titles.get(verdict.purpose, verdict.purpose), str(difference)
        for result in verdict.said.get("results") or ():
            seen = "shown" if result["classification"] == "Match" else "not shown"
            yield f"{result['feature_name']} ({seen})", str(result["analysis"])


# -- rules -----------------------------------------------------------------------------------------


def draft_remarks(
    turns: Sequence[Utterance], human: Sequence[str], shown: str, most_turns: int
) -> list[str]:
    """What rules can tell from a draft; `shown` is what the person has before them."""
    texts: Mapping[str, str] = TEXTS["remarks"]
    return [texts[name] for name in _remarks(turns, human, shown, most_turns)]


def _remarks(
    turns: Sequence[Utterance], human: Sequence[str], shown: str, most_turns: int
) -> Iterator[str]:
    statuses, messages = {turn.status for turn in turns}, [turn.text for turn in turns if turn.text]
    if "salvaged" in statuses:
        yield "form"
    if "empty" in statuses:
        yield "empty_turn"
    if not messages:
        yield "silent"
        return
    ratio = mean_words(messages) / max(mean_words(human), 1.0)
    if ratio > FAR or ratio < 1 / FAR:
        yield "long" if ratio > FAR else "short"
    for habit, has in (("capitals", _begins_large), ("marks", _ends_marked)):
        gap = _share(has, messages) - _share(has, human)
        if abs(gap) > 0.5:
            yield f"less_{habit}" if gap > 0 else f"more_{habit}"
    runs = grams(tokens(shown), COPIED)
    if any(runs & grams(tokens(message), COPIED) for message in messages):
        yield "copied"
    if len(set(messages)) < len(messages):
        yield "twice"
    ended = any(turn.ended for turn in turns)
    if ended and FAR * len(messages) < len(human):
        yield "ended_early"
    elif not ended and len(messages) >= most_turns > len(human):
        yield "no_end"


def _begins_large(text: str) -> bool:
    return _CAPITAL.match(text) is not None


def _ends_marked(text: str) -> bool:
    """Whether a mark stands behind the last word; looked for from the end, since a search for one
    with no word behind it costs the square of a message of marks."""
    behind = _WORD_SIGN.split(text)[-1]
    return any(mark in behind for mark in ".!?")


def _share(has: Callable[[str], bool], texts: Sequence[str]) -> float:
    return sum(map(has, texts)) / max(len(texts), 1)


def mark_lines(metrics: Mapping[str, float | None]) -> list[str]:
    """The numbers of a draft in words, as the coach's template shows them."""
    numbers = {name: metrics.get(name) for name in TEXTS["marks"]}
    return [TEXTS["marks"][name].format(n) for name, n in numbers.items() if n is not None]
