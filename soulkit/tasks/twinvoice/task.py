"""TwinVoice: which of four reactions would this person have written?

Example row: {"user_id": "u7", "dimension": "social", "conversation_history": ["rain again. great.",
"who reads manuals"], "anchor_post": "The bus was on time.", "answer_choices": ["Lovely news!",
"a miracle. sure.", "I beg to differ, sir.", "Yay, buses!!"], "answer_idx": 1}. A person is met on
social media (`social`), in chats (`interpersonal`) or as a character of a novel (`narrative`);
`capability` names what the row asks for, where it is known (opinion, memory, reasoning, words,
tone, syntax). Of a long history the latest entries are shown, as in the original benchmark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from soulkit.tasks.kit.prompting import keep_latest, total_words
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
"""What to look at → (its measure of a text, how far off the usual a reaction must be to say so)."""

_ADVICE = {
    "opinion": "Find where this person took sides on something of this kind; people keep to that.",
    "memory": "Find what this person told about their own life; the reaction has to agree with it.",
    "reasoning": "Find the rule that this person gave for cases like this one and apply it.",
    "words": "List the expressions that come back in what they said before, then look for them.",
    "tone": "Name the mood in which they usually speak before you compare.",
    "syntax": "Look at the shape of their sentences: length, capitals, marks, how they end.",
}
_GENERAL = (
    "Go through what they said before three times: for opinions, for facts about their life, for "
    "their manner of writing. Compare every reaction with all three."
)
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
            # Without a name, equal histories are the only sign of being one person.
            "user_id": fields.get("user_id") or content_hash("twinvoice", {"history": entries}),
        }

    def gold_letter(self, example: Example) -> str:
        return LETTERS[example.fields["answer_idx"]]

    def within_budget(self, view: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        """The latest entries of the history, as many as the budgets for words and entries allow."""
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
        for text in (*closer, _ADVICE.get(kind, _GENERAL), _GENERAL):
            yield f"{first} {text}".strip()
        yield SHORT

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """`macro_dimension`: the mean over the dimensions of their accuracies."""
        mean = macro(records, "dimension")
        return {} if mean is None else {"macro_dimension": mean}


# -- rows ----------------------------------------------------------------------------------------


def _entry(item: Any) -> str:
    """One thing said, as text; a pair of context and reply becomes two lines."""
    if isinstance(item, Mapping):
        parts = ((str(k).strip(), str(v).strip()) for k, v in item.items() if v is not None)
        return "\n  ".join(f"{k}: {v}" for k, v in parts if v)
    return item_text(item, "entries of the history")


def _index(value: Any, n: int, protocol: Protocol) -> int:
    """The place of the gold among the letters; DataError for no such place.

    `reference` counts negative ones from the end and takes whole numbers only; `paper` reads their
    other spellings too.
    """
    index = value if protocol == "reference" else _whole(value)
    low, high = (-len(LETTERS), len(LETTERS)) if protocol == "reference" else (0, n)
    if isinstance(index, int) and low <= index < high:
        return index % len(LETTERS)
    what = f"The gold place {value!r:.20} is none of the row's {n} reactions."
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
    """What to look at in which a reaction is furthest from what a person usually writes.

    The direction stays untold, so that nothing follows for the other reactions. None when the
    reaction is like the others, or too little is known (fewer than three entries).
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
    """The person's own words in an entry that also tells what they reacted to."""
    parts = re.split(r"(?:UserReply|Replied|Said):\s*", entry)
    return parts[-1].strip().strip('"') or entry


def _words(text: str) -> list[str]:
    """Words; in scripts without blanks, every two characters count as one."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]{1,2}|[^\W_]+", text)


def _sentences(text: str) -> int:
    return max(len(re.findall(r"[.!?。！？…]+", text)), 1)
