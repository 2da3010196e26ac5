"""TwinVoice: which of four reactions would this person have written?

{"user_id": "u7", "dimension": "social", "conversation_history": ["rain again. great.", "who reads
manuals"], "anchor_post": "The bus was on time.", "answer_choices": ["Lovely news!", "a miracle.
sure.", "I beg to differ, sir.", "Yay, buses!!"], "answer_idx": 1, "capability": "tone"}

A person appears on social media (`social`), in chats (`interpersonal`) or as a character of a novel
(`narrative`). Only the latest entries of a long history are shown. Generated rows have invented
people, each with one distinctive trait; the four reactions differ only in that trait.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soulkit.data.literals import item_text
from soulkit.data.rows import content_hash
from soulkit.errors import RowError
from soulkit.tasks.kit.choice import (
    LETTERS,
    LetteredTask,
    check_gold,
    opening,
    read_options,
    read_state,
)
from soulkit.tasks.kit.prompting import Texts, keep_latest, total_words
from soulkit.tasks.kit.scoring import macro
from soulkit.types import BatchMetric, Example, Protocol, Record, Score

DIMENSIONS = ("social", "interpersonal", "narrative")

LOOK_AT: dict[str, tuple[Callable[[str], float], float]] = {
    "how long this person's sentences run": (lambda t: len(_words(t)) / _sentences(t), 6.0),
    "how much this person says at once": (lambda t: float(len(_words(t))), 14.0),
    "how loudly this person writes": (lambda t: float("!" in t or "！" in t), 0.6),
    "how often this person asks back": (lambda t: float("?" in t or "？" in t), 0.6),
    "whether this person bothers with capitals": (lambda t: float(t != t.lower()), 0.6),
    "whether this person closes sentences": (lambda t: float(t.rstrip()[-1:] in ".。!！?？"), 0.6),
    "whether this person trails off": (lambda t: float("..." in t or "…" in t), 0.6),
}
"""Aspect of style → (measure of a text, deviation from which a reaction is remarked on)."""

TEXTS = Texts(__file__)
SHORT = "Compare with what they said before."


class TwinVoice(LetteredTask):
    question_column = "anchor_post"

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        history = tuple(_entry(item) for item in fields.get("conversation_history") or ())
        choices = fields["answer_choices"]
        index = _index(fields["answer_idx"], min(len(choices), len(LETTERS)), self.protocol)
        options = read_options(None, choices)
        if self.protocol == "paper":
            check_gold(LETTERS[index], options)
        entries = [item for item in history if item]
        return {
            **fields,
            "conversation_history": tuple(entries),
            "options": options,
            "answer_choices": tuple(choices),
            "answer_idx": index,
            "dimension": str(fields.get("dimension") or "").strip().lower() or None,
            # Without a name, equal histories are the only sign of the same person.
            "user_id": fields.get("user_id") or content_hash("twinvoice", {"history": entries}),
        }

    def gold_letter(self, example: Example) -> str:
        return LETTERS[example.fields["answer_idx"]]

    def within_budget(self, view: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        """The latest history entries that fit both budgets: words, and number of entries."""
        fitted, cuts = super().within_budget(view)
        name = "conversation_history"
        entries = tuple(view.get(name) or ())
        most = int(self.spec.options.get("history_entries", len(entries)))
        old = max(len(entries) - most, 0)
        shown, cut = keep_latest(entries[old:], self.spec.columns[name].max_words)
        if cut := cut + total_words(entries[:old]):
            cuts[name] = cut
        return ({**fitted, name: shown} if name in view else fitted), cuts

    def lessons(self, example: Example, score: Score | None) -> Iterable[str]:
        state = read_state(score)
        first = opening(
            state,
            "The draft heard this person well; rely on the same signs again.",
            "The draft is not in this person's voice.",
        )
        chosen = self.options(example).get(score.words) if score and state == "wrong" else None
        off = misfit(chosen, example.fields["conversation_history"]) if chosen else None
        closer = [f"Its reaction does not fit {off}; measure that first."] if off else []
        kind = str(example.fields.get("capability") or "")
        for text in (*closer, TEXTS["advice"].get(kind, TEXTS["general"]), TEXTS["general"]):
            yield f"{first} {text}".strip()
        yield SHORT

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """`macro_dimension`: the mean of the dimensions' accuracies."""
        mean = macro(records, "dimension")
        return {} if mean is None else {"macro_dimension": mean}


# -- rows ----------------------------------------------------------------------------------------


def _entry(item: Any) -> str:
    """A history entry as text; a pair of context and reply becomes two lines."""
    if isinstance(item, Mapping):
        parts = ((str(k).strip(), str(v).strip()) for k, v in item.items() if v is not None)
        return "\n  ".join(f"{k}: {v}" for k, v in parts if v)
    return item_text(item, "entries of the history")


def _index(value: Any, n: int, protocol: Protocol) -> int:
    """The gold's index among the letters; DataError if it is out of range.

    `reference` counts negative ones from the end and accepts only integers; `paper` also accepts
    other spellings of integers.
    """
    index = value if protocol == "reference" else _whole(value)
    low, high = (-len(LETTERS), len(LETTERS)) if protocol == "reference" else (0, n)
    if isinstance(index, int) and low <= index < high:
        return index % len(LETTERS)
    what = f"The gold index {value!r:.20} is not an index of the row's {n} reactions."
    raise RowError(what, "answer_idx counts the reactions from 0.")


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"\s*\d+\s*", value):
        return int(value)
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None


# -- voice ---------------------------------------------------------------------------------------


def misfit(reaction: str, history: Sequence[str]) -> str | None:
    """The aspect in which a reaction deviates most from the person's usual style.

    The direction is not revealed, so nothing follows about the other reactions. None if the
    reaction fits, or if fewer than three entries are known.
    """
    texts = [_spoken(entry) for entry in history]
    if len(texts) < 3:
        return None
    worst, furthest = None, 1.0
    for name, (measure, threshold) in LOOK_AT.items():
        usual = sum(measure(text) for text in texts) / len(texts)
        off = abs(measure(reaction) - usual) / threshold
        if off > furthest:
            worst, furthest = name, off
    return worst


def _spoken(entry: str) -> str:
    """The person's own words in an entry that also contains its context."""
    parts = re.split(r"(?:UserReply|Replied|Said):\s*", entry)
    return parts[-1].strip().strip('"') or entry


def _words(text: str) -> list[str]:
    """Words; in scripts without spaces, every two characters count as one."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]{1,2}|[^\W_]+", text)


def _sentences(text: str) -> int:
    return max(len(re.findall(r"[.!?。！？…]+", text)), 1)


_SHAPES: dict[str, Callable[[str], str]] = {
    "lower": lambda t: f"{t} keeps coming up these days".lower(),
    "trail": lambda t: f"Well... {t}... it keeps coming up...",
    "ask": lambda t: f"{_start(t)} keeps coming up, doesn't it? Or is it just me?",
    "shout": lambda t: f"{t} KEEPS COMING UP!!".upper(),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A person's posts, the anchor, and four reactions, of which the first is theirs."""

    posts: tuple[str, ...]
    anchor: str
    reactions: tuple[str, ...]


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends only on (seed, i), so fewer rows are a prefix of more."""
    return [_made_row(i, seed) for i in range(n)]


def _made_row(i: int, seed: int) -> dict[str, Any]:
    rng = random.Random(f"twinvoice/{seed}/{i}")
    capability = list(CASES)[i % len(CASES)]
    # Over eighteen rows every capability meets every dimension.
    dimension = DIMENSIONS[(i + i // len(CASES)) % len(DIMENSIONS)]
    case = CASES[capability](rng)
    reactions = list(case.reactions)
    rng.shuffle(reactions)
    return {
        "id": f"tv{seed}-{i}",
        "user_id": f"p{seed}-{i}",
        "dimension": dimension,
        "capability": capability,
        "conversation_history": [_dressed(dimension, text, rng) for text in case.posts],
        "anchor_post": case.anchor,
        "answer_choices": reactions,
        "answer_idx": reactions.index(case.reactions[0]),
        "index": i,
    }


def _dressed(dimension: str, text: str, rng: random.Random) -> str:
    if dimension == "interpersonal":
        return f"Asked: {rng.choice(TEXTS['openers'])} Replied: {text}"
    if dimension == "narrative":
        return f"Scene: The company sat {rng.choice(TEXTS['places'])}. Said: {text}"
    return text


def _opinion(rng: random.Random) -> Case:
    topic, *others = rng.sample(TEXTS["topics"], 5)
    stance, *rest = rng.sample(TEXTS["sides"], 4)
    small = [f"{_start(other)} came up at breakfast." for other in others]
    posts = [
        *small,
        stance[0].format(t=topic),
        f"Asked about {topic} once more. I have not changed.",
    ]
    rng.shuffle(posts)
    return Case(tuple(posts), f"Where do you stand on {topic}?",
                tuple(side[1].format(t=topic) for side in (stance, *rest)))  # fmt: skip


def _memory(rng: random.Random) -> Case:
    kin, other = rng.sample(TEXTS["kin"], 2)
    home, decoy, *rest = rng.sample(TEXTS["cities"], 4)
    topics = rng.sample(TEXTS["topics"], 3)
    posts = [f"My {kin} lives in {home}.", f"My {other} moved to {decoy}.",
            *(f"{_start(t)} came up at breakfast." for t in topics)]  # fmt: skip
    rng.shuffle(posts)
    return Case(tuple(posts), f"Remind me, where does your {kin} live?",
                tuple(f"In {city}, as ever." for city in (home, decoy, *rest)))  # fmt: skip


def _reasoning(rng: random.Random) -> Case:
    rule, cases = rng.choice(TEXTS["rules"])
    anchor = rng.choice(list(cases))
    rest = [reaction for case, reaction in cases.items() if case != anchor]
    small = [f"{_start(t)} came up at breakfast." for t in rng.sample(TEXTS["topics"], 4)]
    posts = [*small, rule]
    rng.shuffle(posts)
    return Case(tuple(posts), anchor, (cases[anchor], *rest))


def _pet_words(rng: random.Random) -> Case:
    topic, *others = rng.sample(TEXTS["topics"], 6)
    pet_word, *rest = rng.sample(TEXTS["pet_words"], 4)
    posts = tuple(f"{_start(pet_word)}, {other} came up." for other in others)
    reactions = tuple(f"{_start(word)}, {topic} came up." for word in (pet_word, *rest))
    return Case(posts, f"What do you think of {topic}?", reactions)


def _tone(rng: random.Random) -> Case:
    topic, *others = rng.sample(TEXTS["topics"], 6)
    habit, *rest = rng.sample(list(TEXTS["tones"]), 4)
    posts = tuple(_start(rng.choice(TEXTS["tones"][habit]).format(t=other)) for other in others)
    reactions = (
        _start(rng.choice(TEXTS["tones"][tone]).format(t=topic)) for tone in (habit, *rest)
    )
    return Case(posts, f"What do you think of {topic}?", tuple(reactions))


def _syntax(rng: random.Random) -> Case:
    topic, *others = rng.sample(TEXTS["topics"], 6)
    form, *rest = rng.sample(list(_SHAPES), 4)
    posts = tuple(_SHAPES[form](other) for other in others)
    return Case(posts, f"What do you think of {topic}?",
                tuple(_SHAPES[shape](topic) for shape in (form, *rest)))  # fmt: skip


def _start(text: str) -> str:
    return text[:1].upper() + text[1:]


CASES: dict[str, Callable[[random.Random], Case]] = {
    "opinion": _opinion,
    "memory": _memory,
    "reasoning": _reasoning,
    "words": _pet_words,
    "tone": _tone,
    "syntax": _syntax,
}
"""Capability → the function that generates its cases."""
