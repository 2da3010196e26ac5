"""AlignX: which of two replies to a post would this very person rather receive?

What is known of the person differs by split: a description (demo), replies that they compared
before (pair), comments they wrote (ugc), any of these (arbitrary), or sixteen earlier items.

Example row: {"raw_prompt": "How do I start running at fifty?", "chosen": "Week one: walk two
minutes, run one, six times.", "rejected": "Listen to your body!", "demographic": "Engineer, likes
plans.", "icl_pairs": [{"prompt": ..., "chosen": ..., "rejected": ...}], "ugc": [{"prompt": ...,
"comment": ...}], "n_icl": 2, "n_ugc": 2, "index": 7}.

Which reply stands first matters to many models. `paper` plays every row in both orders: two
examples that differ in `flip` alone, whose ids share their beginning, so that a subset by id keeps
them together. Over such pairs the summary says how consistent the picks are and which place they
lean to. `reference` has one order a row, drawn from the row's index; equal replies are played,
items on the row's own post are shown, and only a capital letter alone between the tags is an
answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from soulkit.data.literals import structure
from soulkit.data.rows import content_hash
from soulkit.errors import RowError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import spoken, tagged_letter, tagged_text
from soulkit.tasks.kit.base import READABLE
from soulkit.tasks.kit.choice import ChoiceTask, opening, read_state
from soulkit.tasks.kit.coaching import first_safe_lesson
from soulkit.tasks.kit.prompting import share_fairly
from soulkit.tasks.kit.scoring import ROWS, mean_of, row_mean, row_plays
from soulkit.types import BatchMetric, Episode, Example, Record, Score

EVIDENCE = {"icl_pairs": ("prompt", "chosen", "rejected"), "ugc": ("prompt", "comment")}
"""Column → the texts that each of its items must have."""
_COUNTS = {"icl_pairs": "n_icl", "ugc": "n_ugc"}
_SHOWN = 2
"""How many items of a kind are shown when the row does not say."""
_REPLIES = ("raw_prompt", "chosen", "rejected")
_NAMED = re.compile(r"[*`\"'\s]*(?:reply|response)\s+\(?([AB])\)?[.*`\"'\s]*", re.IGNORECASE)


class AlignX(ChoiceTask):
    """One class for the five splits; they differ in their rows."""

    # -- rows ---------------------------------------------------------------------------------

    def examples(
        self, row: Mapping[str, Any], *, source: str = "", split: str = "test"
    ) -> tuple[Example, ...]:
        """The row in both orders, unless it says which one by `flip`."""
        if row.get("flip") is not None:
            return super().examples(row, source=source, split=split)
        return tuple(
            self.example({**row, "flip": flip}, source=source, split=split)
            for flip in (False, True)
        )

    def example(self, row: Mapping[str, Any], *, source: str = "", split: str = "test") -> Example:
        example = super().example(row, source=source, split=split)
        return replace(example, id=f"{example.id}-{'ba' if example.fields['flip'] else 'ab'}")

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        self.check(fields)
        counts = {n: _SHOWN if fields.get(n) is None else fields[n] for n in _COUNTS.values()}
        flip = self._flip(fields)
        replies = (fields["chosen"], fields["rejected"])
        return {
            **fields,
            **counts,
            **{name: self._shown(fields, name, counts[n]) for name, n in _COUNTS.items()},
            "persona": describe(fields.get("demographic")) or describe(fields.get("profile")),
            "flip": flip,
            "response_a": replies[flip],
            "response_b": replies[not flip],
        }

    def check(self, fields: Mapping[str, Any]) -> None:
        """DataError on a row in which no reply can be the preferred one."""
        check_texts(fields)
        if fields["chosen"].strip() == fields["rejected"].strip():
            what = "The row's two replies say the same."
            raise RowError(what, "Neither of two equal replies can be the preferred one.")

    def _shown(
        self, fields: Mapping[str, Any], column: str, count: int
    ) -> tuple[dict[str, str], ...]:
        """The items to show, without any that is the very question of the row."""
        items = items_of(fields, column, count)
        return tuple(item for item in items if not _answers(item, fields))

    def _flip(self, fields: Mapping[str, Any]) -> bool:
        """Whether the gold stands second."""
        if fields.get("flip") is not None:
            return bool(fields["flip"])
        return self.drawn(fields)

    def drawn(self, fields: Mapping[str, Any]) -> bool:
        """The order of a row that names none."""
        # By content: a row keeps its order in another file, under another index.
        return int(content_hash("", {name: fields[name] for name in _REPLIES}), 16) % 2 == 1

    def tags(self, fields: Mapping[str, Any]) -> dict[str, str]:
        kinds = [kind for kind in ("persona", *EVIDENCE) if fields[kind]]
        gold = "B" if fields["flip"] else "A"
        return {**super().tags(fields), "gold": gold, "evidence": "+".join(kinds) or "none"}

    def within_budget(self, view: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        fitted, cuts = super().within_budget(view)
        for name in EVIDENCE:
            if name in view:
                fitted[name], cut = share_fairly(view[name], self.spec.columns[name].max_words)
                cuts.update({name: cut} if cut else {})
        return fitted, cuts

    # -- answers ------------------------------------------------------------------------------

    def parse(self, text: str) -> tuple[str, str]:
        letter, status = tagged_letter(text, "paper")
        if letter:
            return (letter, status) if letter in ("A", "B") else ("", "malformed")
        named = _NAMED.fullmatch(tagged_text(text, "paper") or "")
        return (named.group(1).upper(), "salvaged") if named else ("", status)

    def grade(self, example: Example, answer: str) -> float:
        return float(answer == self.gold_letter(example))

    def measures(self, example: Example, answer: str) -> dict[str, float | None]:
        """`picked_a`: how often the first reply is picked, whatever it says."""
        return {"picked_a": float(answer == "A") if answer else None}

    def gold_letter(self, example: Example) -> str:
        return "B" if example.fields["flip"] else "A"

    def gold_text(self, example: Example) -> str:
        return str(example.fields["chosen"])

    def gold_completion(self, example: Example) -> str:
        return f"<answer>{self.gold_letter(example)}</answer>"

    def wrong_completion(self, example: Example) -> str | None:
        """The other letter, even where the replies differ in their punctuation only."""
        return "<answer>A</answer>" if example.fields["flip"] else "<answer>B</answer>"

    def leak_view(self, example: Example) -> LeakView:
        replies = (str(example.fields["response_a"]), str(example.fields["response_b"]))
        return LeakView(
            str(example.fields["raw_prompt"]), replies, self.gold_text(example), ("A", "B")
        )

    # -- feedback and summary -----------------------------------------------------------------

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        """How to read what the row offers; never anything about either reply."""
        begun = opening(
            read_state(score),
            "What the draft weighed was what counts for this person.",
            "The draft passed over what counts for this person.",
        )
        kinds = [_LESSONS[kind] for kind in ("persona", *EVIDENCE) if example.fields[kind]]
        # Of two very short replies, one may hold a word of a lesson: then less is said.
        return first_safe_lesson(
            ((begun, *kinds, _ORDER), (begun, _ORDER), (begun,)), self.leak_view(example)
        )

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        return self.within_budget(super().coach_view(example, episode, score))[0]

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """`row_accuracy`: the mean over rows of their accuracy over both orders (the headline).

        Over rows that were played in both orders, by play: `consistency`: both replies to be read,
        and the same reply picked in both orders; `right_in_both`: the gold picked in both;
        `position_bias`: picks of the first place minus picks of the second, over all picks that
        could be read: 1 is always the first. A pair with an unscored order has no value.
        """
        metrics = {"row_accuracy": row_mean(records)}
        pairs = [play for plays in row_plays(records).values() for play in plays if len(play) == 2]
        if pairs:
            # The gold changes its letter between the orders: the same reply means another letter.
            metrics["consistency"] = _over(pairs, lambda p: sorted(map(_pick, p)) == ["A", "B"])
            metrics["right_in_both"] = _over(pairs, lambda p: all(r.score.value == 1 for r in p))
            metrics["position_bias"] = _lean(pairs)
        return {name: metric for name, metric in metrics.items() if metric.n}


_LESSONS = {
    "persona": "Turn the description of the person into two or three wishes on tone, length and "
    "content, and hold every reply against each of them.",
    "icl_pairs": "Put the replies that they preferred earlier beside those they passed over, write "
    "down what sets the first group apart, and look for just that.",
    "ugc": "Their own comments show how they talk and what they care about: people like to be "
    "answered the way they write.",
}
_ORDER = (
    "Judge by the person and not by what you would like yourself, and check that the verdict stays "
    "the same with the replies in the other order."
)


def check_texts(fields: Mapping[str, Any]) -> None:
    """DataError on a row without a post or one of its replies."""
    blank = [name for name in _REPLIES if not str(fields[name]).strip()]
    if blank:
        what = f"The row's {' and '.join(blank)} is blank."
        raise RowError(what, "A post and two replies are needed to ask which reply is preferred.")


def describe(value: Any) -> str:
    """A description as text, from text, a list of statements, or traits by name ("" for None)."""
    value = structure(value)
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {describe(v)}" for name, v in value.items() if v is not None)
    if isinstance(value, list | tuple):
        return ", ".join(describe(item) for item in value if item is not None)
    return "" if value is None else str(value).strip()


def items_of(fields: Mapping[str, Any], column: str, count: int) -> tuple[dict[str, str], ...]:
    """The first `count` items of a column as texts; one with a blank text is not replaced."""
    value = structure(fields.get(column))
    if value is None or value == "":
        return ()
    entries = [structure(item) for item in value] if isinstance(value, list | tuple) else [None]
    items = [item for item in entries if isinstance(item, Mapping)]
    if len(items) < len(entries):
        why = f"Each item should have {', '.join(EVIDENCE[column])}; found {value!r:.60}."
        raise RowError(f"The row's '{column}' is no list of objects.", why)
    shown = [
        {k: describe(item.get(k)) for k in EVIDENCE[column]} for item in items[: max(count, 0)]
    ]
    return tuple(item for item in shown if all(item.values()))


def _answers(item: Mapping[str, str], fields: Mapping[str, Any]) -> bool:
    """Whether an item is on the row's own post and has one of its two replies."""
    post, *replies = (str(fields[name]).strip() for name in _REPLIES)
    return item["prompt"] == post and any(text in replies for text in item.values())


def _scored(pair: Sequence[Record]) -> bool:
    return all(record.score.scored for record in pair)


def _over(
    pairs: Sequence[Sequence[Record]], holds: Callable[[Sequence[Record]], bool]
) -> BatchMetric:
    """The share of pairs of which something holds."""
    return mean_of([float(holds(pair)) if _scored(pair) else None for pair in pairs], ROWS)


def _lean(pairs: Sequence[Sequence[Record]]) -> BatchMetric:
    """How picks lean to the first place (1) or the second (-1)."""
    scored = [pair for pair in pairs if _scored(pair)]
    letters = [letter for pair in scored for record in pair if (letter := _pick(record))]
    lean = (letters.count("A") - letters.count("B")) / len(letters) if letters else None
    return BatchMetric(
        value=lean, n=len(pairs), n_scored=len(scored), unit=ROWS, low=-1.0, high=1.0
    )


def _pick(record: Record) -> str:
    return record.score.words if record.score.status in READABLE else ""


_TAGGED = re.compile(r"<answer>\s*([AB])\s*</answer>")


class AlignXReference(AlignX):
    def examples(
        self, row: Mapping[str, Any], *, source: str = "", split: str = "test"
    ) -> tuple[Example, ...]:
        return (self.example(row, source=source, split=split),)

    def check(self, fields: Mapping[str, Any]) -> None:
        check_texts(fields)

    def _shown(
        self, fields: Mapping[str, Any], column: str, count: int
    ) -> tuple[dict[str, str], ...]:
        return items_of(fields, column, count)

    def drawn(self, fields: Mapping[str, Any]) -> bool:
        return random.Random(int(fields.get("index") or 0)).random() < 0.5

    def parse(self, text: str) -> tuple[str, str]:
        match = _TAGGED.search(spoken(text, "reference"))
        return (match.group(1), "ok") if match else ("", "no_tag")
