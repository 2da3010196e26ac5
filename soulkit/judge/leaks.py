"""Does a feedback give the answer away?

Three ways: it holds the gold text, it names the gold letter, or it is *answerable*: a blind reader
who sees question, options and feedback, but not the story, picks the gold above chance. The lexical
reader knows which options the feedback mentions and trusts either the mentioned or the unmentioned
ones, whichever serves it better; a model can read blind as well. Leaking feedback is dropped and
counted, never shown to the actor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from soulkit.judge.verdict import has_word, tagged_letter
from soulkit.models.base import Player
from soulkit.types import Call, Feedback, Segment

SIGNIFICANCE = 0.05


@dataclass(frozen=True, slots=True)
class LeakView:
    """What a blind reader may see, and what it must not find out."""

    question: str
    options: tuple[str, ...]
    gold: str
    letter: str = ""


def _plain(text: str) -> str:
    return text.replace("_", " ").lower()


def names_gold(text: str, view: LeakView) -> bool:
    return has_word(_plain(text), _plain(view.gold))


def names_letter(text: str, letter: str) -> bool:
    """`option B`, `answer: B`, `(B)`, `<answer>B`, `B.` before a word; a bare article `a` is none."""
    if not letter:
        return False
    pattern = (
        rf"(?i:\b(?:option|answer|letter|choice)\b\W{{0,3}}(?:is\W{{1,3}})?){letter}\b"
        rf"|\({letter}\)|(?i:<answer>)\s*{letter}\b|(?:^|\s){letter}[.)]\s"
    )
    return re.search(pattern, text) is not None


def lexical_share(text: str, view: LeakView) -> float:
    """Probability that the lexical blind reader picks the gold, in [1/n, 1] at its best reading."""
    plain = _plain(text)
    mentioned = {o for o in view.options if has_word(plain, _plain(o))}
    rest = set(view.options) - mentioned
    shares = [1 / len(side) for side in (mentioned, rest) if view.gold in side]
    return max(shares, default=1 / max(len(view.options), 1))


def above_chance(hits: int, reads: int, chance: float) -> bool:
    """Whether `hits` of `reads` is more than guessing gives (one-sided binomial test)."""
    tail = sum(
        math.comb(reads, k) * chance**k * (1 - chance) ** (reads - k)
        for k in range(hits, reads + 1)
    )
    return tail < SIGNIFICANCE


def check(feedback: Feedback, view: LeakView | None) -> Feedback:
    """The feedback with `leak`, `blind` and `chance` filled by the rules that need no model."""
    if view is None or not view.options:
        return feedback
    chance = 1 / len(view.options)
    share = lexical_share(feedback.text, view)
    leak = ""
    if names_gold(feedback.text, view):
        leak = "gold_text"
    elif names_letter(feedback.text, view.letter):
        leak = "gold_letter"
    elif share > max(chance, 0.5):
        leak = "answerable"
    return replace(feedback, leak=leak, blind=share, chance=chance)


def _blind_prompt(text: str, view: LeakView) -> str:
    options = "\n".join(f"{chr(65 + i)}. {o}" for i, o in enumerate(view.options))
    return (
        "You cannot see the story that this question is about. Someone left a remark on it.\n\n"
        f"Question: {view.question}\n{options}\n\nRemark: {text}\n\n"
        "Pick the most likely option from the remark alone. Reply with its letter in <answer> tags."
    )


async def read_blind(
    feedback: Feedback, view: LeakView, reader: Player, calls: Sequence[Call]
) -> Feedback:
    """Let a model read blind once per call; `answerable` when it beats chance (binomial test)."""
    hits = 0
    for call in calls:
        prompt = _blind_prompt(feedback.text, view)
        completion = await reader.complete((Segment("user", prompt),), call)
        letter, status = tagged_letter(completion.text, "paper")
        index = ord(letter) - 65 if status == "ok" else -1
        hits += 0 <= index < len(view.options) and view.options[index] == view.gold
    chance = 1 / len(view.options)
    leak = feedback.leak or ("answerable" if above_chance(hits, len(calls), chance) else "")
    return replace(feedback, leak=leak, blind=hits / len(calls), chance=chance)
