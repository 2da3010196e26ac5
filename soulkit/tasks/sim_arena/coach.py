"""Coaching somebody who plays a real person: what a coach is shown, and what rules can say.

Judges saw the person's own words. So of what they wrote a coach gets the sentences that do not
repeat them, and rules speak of the person's manner alone: how long the messages are, how they are
written, when there are no more. Neither tells what the person said or what the answer is.

    “Starts with 'i dont get it at all'. Far more formal than the student.”  →  the second sentence
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from soulkit.judge.leaks import echoes_reference, grams, tokens
from soulkit.tasks.sim_arena.judging import mean_words
from soulkit.tasks.sim_arena.play import Utterance
from soulkit.types import Score

FAR = 2.0
"""So many times as long is another manner."""
COPIED = 8
"""So many words in a row of the text before the person are no question of theirs."""
RUBRIC = (
    "similarity score", "key differences", "No Match", "feature list", "fulfillment rate",
    "document rating",
)  # fmt: skip
"""Words of the rubric that nobody in a chat would use."""
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")


def style_notes(score: Score, messages: Sequence[str], public: str) -> str:
    """What the judges saw, without the sentences that repeat something of `messages`."""
    lines = []
    for title, text in _remarks(score):
        sentences = [s for s in _SENTENCE.split(text) if s and not _echoes(s, messages, public)]
        if sentences:
            lines.append(f"{title}: {' '.join(sentences)}")
    return "\n".join(dict.fromkeys(lines))


def _echoes(sentence: str, messages: Sequence[str], public: str) -> bool:
    """Whether it repeats a message, a short one whole or a good part of a long one, or a run that
    goes over several."""
    return any(
        echoes_reference(sentence, text, public) for text in (*messages, "\n".join(messages))
    )


def _remarks(score: Score) -> Iterator[tuple[str, str]]:
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
    messages = [turn.text for turn in turns if turn.text]
    texts = list(_form(turns))
    if not messages:
        return [*texts, "Nothing was said before it was over: ask what this person would ask."]
    texts += _length(messages, human)
    texts += _marks(messages, human)
    texts += _copies(messages, shown)
    if len(set(messages)) < len(messages):
        texts.append("The same message came twice: bring something new each time.")
    return [*texts, *_end(turns, len(messages), len(human), most_turns)]


def playing_advice() -> str:
    """What can be said before anything was played."""
    return (
        "Write as this one person does, not as an assistant would: one thought a message, in the "
        "person's own spelling and tone, no summary of what was said and no flourish. React to "
        "the last reply as somebody does who does not see the end yet, and stop as soon as the "
        "matter is settled."
    )


def _form(turns: Sequence[Utterance]) -> Iterator[str]:
    if any(turn.status == "salvaged" for turn in turns):
        yield "Some turns were not in the form that is asked for: the tag first, then the message."
    if any(turn.status == "empty" for turn in turns):
        yield "A turn held nothing: every turn is a message, or the phrase that ends the chat."


def _length(messages: Sequence[str], human: Sequence[str]) -> Iterator[str]:
    ratio = mean_words(messages) / max(mean_words(human), 1.0)
    if ratio > FAR:
        yield "Your messages are far longer than this person's: cut them down to what they need."
    elif ratio < 1 / FAR:
        yield "Your messages are far shorter than this person's: say more in each of them."


def _marks(messages: Sequence[str], human: Sequence[str]) -> Iterator[str]:
    """On capitals at the beginning and marks at the end, where the two differ in most messages."""
    for has, more, less in _HABITS:
        gap = _share(has, messages) - _share(has, human)
        if abs(gap) > 0.5:
            yield more if gap > 0 else less


def _begins_large(text: str) -> bool:
    return _LARGE.match(text) is not None


def _ends_marked(text: str) -> bool:
    """Whether a mark stands behind the last word; looked for from the end, since a search for one
    with no word behind it costs the square of a message of marks."""
    behind = _WORD_SIGN.split(text)[-1]
    return any(mark in behind for mark in ".!?")


_LARGE, _WORD_SIGN = re.compile(r"\W*[A-Z]"), re.compile(r"\w")
_HABITS: tuple[tuple[Callable[[str], bool], str, str], ...] = (
    (
        _begins_large,
        "This person seldom begins a message with a capital letter.",
        "This person begins messages with a capital letter.",
    ),
    (
        _ends_marked,
        "This person seldom ends a message with a full stop or another mark.",
        "This person ends messages with a mark.",
    ),
)


def _share(has: Callable[[str], bool], texts: Sequence[str]) -> float:
    return sum(map(has, texts)) / max(len(texts), 1)


def _copies(messages: Sequence[str], shown: str) -> Iterator[str]:
    runs = grams(tokens(shown), COPIED)
    if any(runs & grams(tokens(message), COPIED) for message in messages):
        yield "A message copied what lies before both of you: ask about it instead."


def _end(turns: Sequence[Utterance], count: int, human: int, most_turns: int) -> Iterator[str]:
    ended = any(turn.ended for turn in turns)
    if ended and FAR * count < human:
        yield "You were content far sooner than this person: stay, and follow it up."
    elif not ended and count >= most_turns > human:
        yield "You never ended the chat: this person stops once the matter is settled."


def mark_lines(metrics: Mapping[str, float | None]) -> list[str]:
    """The numbers of a draft in words, as the coach's template shows them."""
    entries = {
        "style/writing": "the manner of writing: {:.1f} on a scale from 1 to 5",
        "style/interaction": "the manner of dealing with the other side: {:.1f} from 1 to 5",
        "features/met": "traits of the person that showed: {:.0%}",
        "features/writing": "traits of writing that showed: {:.0%}",
        "features/interaction": "traits of behaviour that showed: {:.0%}",
        "document/rating": "the document that came of it: {:.1f} on a scale from 1 to 10",
    }
    numbers: dict[str, Any] = {name: metrics.get(name) for name in entries}
    return [entries[name].format(value) for name, value in numbers.items() if value is not None]
