"""AlignX: which of two replies to a post would this particular person prefer?

{"raw_prompt": "How do I start running at fifty?", "chosen": "Week one: walk two minutes, run
one.", "rejected": "Listen to your body!", "demographic": "Engineer, likes plans.", "icl_pairs":
[{"prompt": ..., "chosen": ..., "rejected": ...}], "ugc": [{"prompt": ..., "comment": ...}]}

What the actor knows about the person depends on the split. Many models favour one position, so
`paper` plays every row in both orders: two examples that differ only in `flip`. `reference` plays
one order per row, drawn from its index. Importing for a split keeps its kinds of evidence.
Generated rows have invented people with one decisive taste; both replies give the same advice.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from soulkit.data.files import RawRow
from soulkit.data.literals import literal_list, structure
from soulkit.data.rows import content_hash
from soulkit.errors import RowError
from soulkit.judge.verdict import spoken, tagged_letter, tagged_text
from soulkit.tasks.kit.base import READABLE
from soulkit.tasks.kit.choice import LetteredTask, opening, read_state
from soulkit.tasks.kit.coaching import first_safe_lesson
from soulkit.tasks.kit.importing import BadRecord, Imported, import_records, need
from soulkit.tasks.kit.made_rows import Row
from soulkit.tasks.kit.prompting import Texts, share_fairly
from soulkit.tasks.kit.scoring import ROWS, mean_of, row_mean, row_plays
from soulkit.types import BatchMetric, Episode, Example, Record, Score

EVIDENCE = {"icl_pairs": ("prompt", "chosen", "rejected"), "ugc": ("prompt", "comment")}
"""Column → the texts that each of its items must have."""
_COUNTS = {"icl_pairs": "n_icl", "ugc": "n_ugc"}
_SHOWN = 2
"""How many items of a kind are shown if the row does not say."""
_REPLIES = ("raw_prompt", "chosen", "rejected")
_NAMED = re.compile(r"[*`\"'\s]*(?:reply|response)\s+\(?([AB])\)?[.*`\"'\s]*", re.IGNORECASE)


class AlignX(LetteredTask):
    """The five splits, which differ only in their rows."""

    letters, question_column = "AB", "raw_prompt"

    # -- rows ---------------------------------------------------------------------------------

    def examples(
        self, row: Mapping[str, Any], *, source: str = "", split: str = "test"
    ) -> tuple[Example, ...]:
        """The row in both orders, unless its `flip` selects one."""
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
        """DataError for a row in which neither reply can be the preferred one."""
        check_texts(fields)
        if fields["chosen"].strip() == fields["rejected"].strip():
            what = "The row's two replies are equal."
            raise RowError(what, "Neither of two equal replies can be preferred.")

    def _shown(
        self, fields: Mapping[str, Any], column: str, count: int
    ) -> tuple[dict[str, str], ...]:
        """The items to show, except those about the row's own post with one of its replies."""
        items = items_of(fields, column, count)
        return tuple(item for item in items if not _answers(item, fields))

    def _flip(self, fields: Mapping[str, Any]) -> bool:
        """Whether the gold is the second reply."""
        if fields.get("flip") is not None:
            return bool(fields["flip"])
        return self.drawn(fields)

    def drawn(self, fields: Mapping[str, Any]) -> bool:
        """The order of a row that does not specify one."""
        # By content, so that a row keeps its order in another file, under another index.
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
            return (letter, status) if letter in self.letters else ("", "malformed")
        named = _NAMED.fullmatch(tagged_text(text, "paper") or "")
        return (named.group(1).upper(), "salvaged") if named else ("", status)

    def measures(self, example: Example, answer: str) -> dict[str, float | None]:
        """`picked_a`: 1 if the answer picks the first position, else 0."""
        return {"picked_a": float(answer == "A") if answer else None}

    def gold_letter(self, example: Example) -> str:
        return "B" if example.fields["flip"] else "A"

    def wrong_completion(self, example: Example) -> str | None:
        """The other letter, even if the replies differ only in punctuation."""
        return "<answer>A</answer>" if example.fields["flip"] else "<answer>B</answer>"

    def options(self, example: Example) -> dict[str, str]:
        return {"A": str(example.fields["response_a"]), "B": str(example.fields["response_b"])}

    # -- feedback and summary -----------------------------------------------------------------

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        """How to use the row's information; never anything about either reply."""
        begun = opening(
            read_state(score),
            "What the draft weighed was what counts for this person.",
            "The draft passed over what counts for this person.",
        )
        kinds = [TEXTS["lessons"][kind] for kind in ("persona", *EVIDENCE) if example.fields[kind]]
        # With two very short replies, one may contain a word of a lesson; then say less.
        return first_safe_lesson(
            ((begun, *kinds, TEXTS["order"]), (begun, TEXTS["order"]), (begun,)),
            self.leak_view(example),
        )

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """`row_accuracy`: the mean over rows of their accuracy in both orders (the headline).

        Per play of rows in both orders: `consistency` (both answers readable, and the same reply
        picked in both orders), `right_in_both` (the gold picked in both), and `position_bias`
        (picks of the first position minus picks of the second, divided by all readable picks; 1
        means always the first). A pair with an unscored order has no value.
        """
        metrics = {"row_accuracy": row_mean(records)}
        pairs = [play for plays in row_plays(records).values() for play in plays if len(play) == 2]
        if pairs:
            # The gold's letter changes between the orders: the same reply has another letter.
            metrics["consistency"] = _over(pairs, lambda p: sorted(map(_pick, p)) == ["A", "B"])
            metrics["right_in_both"] = _over(pairs, lambda p: all(r.score.value == 1 for r in p))
            metrics["position_bias"] = _lean(pairs)
        return {name: metric for name, metric in metrics.items() if metric.n}


def check_texts(fields: Mapping[str, Any]) -> None:
    """DataError for a row without a post or one of its replies."""
    blank = [name for name in _REPLIES if not str(fields[name]).strip()]
    if blank:
        what = f"The row's {' and '.join(blank)} is blank."
        raise RowError(what, "A row needs a post and two replies.")


def describe(value: Any) -> str:
    """A description (text, a list of statements, or a mapping) as text; "" for None."""
    value = structure(value)
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {describe(v)}" for name, v in value.items() if v is not None)
    if isinstance(value, list | tuple):
        return ", ".join(describe(item) for item in value if item is not None)
    return "" if value is None else str(value).strip()


def items_of(fields: Mapping[str, Any], column: str, count: int) -> tuple[dict[str, str], ...]:
    """The first `count` items of a column as texts; items with a blank text are dropped."""
    value = structure(fields.get(column))
    if value is None or value == "":
        return ()
    entries = [structure(item) for item in value] if isinstance(value, list | tuple) else [None]
    items = [item for item in entries if isinstance(item, Mapping)]
    if len(items) < len(entries):
        why = f"Each item should have {', '.join(EVIDENCE[column])}; found {value!r:.60}."
        raise RowError(f"The row's '{column}' is not a list of objects.", why)
    shown = [
        {k: describe(item.get(k)) for k in EVIDENCE[column]} for item in items[: max(count, 0)]
    ]
    return tuple(item for item in shown if all(item.values()))


def _answers(item: Mapping[str, str], fields: Mapping[str, Any]) -> bool:
    """Whether an item is about the row's own post and has one of its two replies."""
    post, *replies = (str(fields[name]).strip() for name in _REPLIES)
    return item["prompt"] == post and any(text in replies for text in item.values())


def _scored(pair: Sequence[Record]) -> bool:
    return all(record.score.scored for record in pair)


def _over(
    pairs: Sequence[Sequence[Record]], holds: Callable[[Sequence[Record]], bool]
) -> BatchMetric:
    return mean_of([float(holds(pair)) if _scored(pair) else None for pair in pairs], ROWS)


def _lean(pairs: Sequence[Sequence[Record]]) -> BatchMetric:
    """The bias of picks towards the first (1) or the second position (-1)."""
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
        index = fields.get("index") or 0
        try:
            return random.Random(int(index)).random() < 0.5
        except (TypeError, ValueError) as error:
            what = f"The row's index is {index!r:.60}."
            raise RowError(what, "The order of its replies is drawn from this number.") from error

    def parse(self, text: str) -> tuple[str, str]:
        match = _TAGGED.search(spoken(text, "reference"))
        return (match.group(1), "ok") if match else ("", "no_tag")


LICENCE = "none stated by the source (JinaLeejnl/AlignX)"
_FIELDS = ("prompt", "chosen", "rejected")
_ORIGINAL = {
    "demographic": "Demographic Information",
    "profile": "profile",
    "icl_pairs": "Pair-wise Comparative Feedback",
    "ugc": "User-Generated Content",
}
_KEPT: dict[str, tuple[str, ...]] = {
    "alignx_demo": ("demographic", "profile"),
    "alignx_pair": ("icl_pairs",),
    "alignx_ugc": ("ugc",),
    "alignx_arbitrary": tuple(_ORIGINAL),
}


def import_alignx(path: Path, *, task: str) -> Imported:
    """Rows of one split from a .json or .jsonl file of AlignX or P-Soups.

    Raises DataError if no record has the fields.
    """
    with_answer = []

    def row(record: RawRow, _: int) -> Row:
        evidence, left_out = _evidence(record, _KEPT[task])
        made = _imported_row(record, evidence)
        with_answer.extend([made] if left_out else [])
        return made

    def notes(*_: Any) -> Iterator[str]:
        yield f"The licence of these rows: {LICENCE}. Use them only for your own tests."
        if shown := len(with_answer):
            yield f"{shown} rows had their own answer among the compared pairs; it was removed."

    return import_records(
        path, row, fields=_FIELDS, way_out="Give a file of AlignX or its P-Soups benchmark.",
        licence=LICENCE, notes=notes,
    )  # fmt: skip


def _imported_row(raw: RawRow, evidence: dict[str, Any]) -> Row:
    post, chosen, rejected = need(raw, *_FIELDS)
    if chosen.strip() == rejected.strip():
        raise BadRecord("its two replies are equal")
    counts = {_COUNTS[name]: len(evidence[name]) for name in _COUNTS if name in evidence}
    direction = raw.fields.get("ground_truth_persona")
    about = {"ground_truth_persona": direction} if direction else {}
    return {
        "raw_prompt": post,
        "chosen": chosen,
        "rejected": rejected,
        **evidence,
        **counts,
        **about,
    }


def _evidence(raw: RawRow, columns: tuple[str, ...]) -> tuple[dict[str, Any], int]:
    """(column → evidence, number of items removed because they show the answer)."""
    evidence: dict[str, Any] = {}
    left_out = 0
    for name in columns:
        value = raw.fields.get(_ORIGINAL[name])
        if name in _COUNTS and value:
            items = [_texts(item) for item in _listed(value, name)]
            value = [item for item in items if not _same(item, raw)]
            left_out += len(items) - len(value)
        if value:
            evidence[name] = value
    if not evidence:
        raise BadRecord(f"it has none of {', '.join(_ORIGINAL[name] for name in columns)}")
    return evidence, left_out


def _listed(value: Any, name: str) -> list[Any]:
    items = literal_list(value)
    if items is None or not all(isinstance(item, dict) for item in items):
        raise BadRecord(f"its {_ORIGINAL[name]} is not a list of objects")
    return items


def _texts(item: dict[str, Any]) -> dict[str, str]:
    """An item without its numbers (preference directions)."""
    return {k: v for k, v in item.items() if isinstance(v, str)}


def _same(item: dict[str, str], raw: RawRow) -> bool:
    """Whether a compared pair is the row's own question and answer."""
    names = ("prompt", "chosen")
    return all(item.get(k, "").strip() == str(raw.fields.get(k)).strip() for k in names)


TEXTS = Texts(__file__)


@dataclass(frozen=True, slots=True)
class Post:
    """A post and the advice on it: three steps, in order."""

    post: str
    steps: tuple[str, str, str]
    thing: str
    people: str

    @property
    def words(self) -> dict[str, str]:
        """The values that fill a reply."""
        steps = dict(zip(("first", "second", "third"), self.steps, strict=True))
        starts = {name.capitalize(): step[:1].upper() + step[1:] for name, step in steps.items()}
        return {**steps, **starts, "thing": self.thing, "people": self.people}


@dataclass(frozen=True, slots=True)
class Taste:
    """One end of an axis: how it shows in a person, in their comments, and in a reply."""

    traits: tuple[str, ...]
    comments: tuple[str, ...]
    reply: str

    def answer(self, topic: Post) -> str:
        """The reply that a person of this taste prefers."""
        return self.reply.format(**topic.words)


@cache
def all_posts() -> tuple[Post, ...]:
    return tuple(Post(**topic) for topic in TEXTS["topics"])


@cache
def axes() -> tuple[tuple[Taste, Taste], ...]:
    return tuple((Taste(**low), Taste(**high)) for low, high in TEXTS["axes"])


TASKS = tuple(f"alignx_{s}" for s in ("demo", "pair", "ugc", "arbitrary", "history16"))
_JOBS = ("nurse", "bus driver", "lawyer", "florist", "roofer", "librarian", "student", "cook")
_AGES = ("twenties", "thirties", "forties", "fifties", "sixties")
_HOBBIES = ("chess", "pottery", "choir singing", "bird watching", "old radios", "swimming")
_KINDS = ("demographic", "icl_pairs", "ugc")
_ITEMS = 4
_HISTORY = 8


def rows(n: int, seed: int, *, task: str) -> list[Row]:
    """`n` rows of the split `alignx_<split>`; row i depends only on (split, seed, i)."""
    split = task.removeprefix("alignx_")
    return [_made_row(random.Random(f"alignx/{split}/{seed}/{i}"), split, i) for i in range(n)]


def _made_row(rng: random.Random, split: str, index: int) -> Row:
    taste, other = rng.sample(rng.choice(axes()), 2)
    topic, *earlier = rng.sample(all_posts(), len(all_posts()))
    row: Row = {
        "raw_prompt": topic.post,
        "chosen": taste.answer(topic),
        "rejected": other.answer(topic),
        "index": index,
    }
    if split == "history16":
        pairs, posts = earlier[:_HISTORY], rng.sample(all_posts(), _HISTORY)
        return {**row, **_pairs(pairs, taste, other), **_comments(posts, taste, rng)}
    kinds = {"demo": _KINDS[:1], "pair": _KINDS[1:2], "ugc": _KINDS[2:]}.get(split)
    for kind in kinds or rng.sample(_KINDS, rng.randint(1, len(_KINDS))):
        if kind == "demographic":
            row[kind] = _person(taste, rng)
        elif kind == "icl_pairs":
            row |= _pairs(earlier[:_ITEMS], taste, other)
        else:
            row |= _comments(earlier[-_ITEMS:], taste, rng)
    return row


def _person(taste: Taste, rng: random.Random) -> str:
    sentences = [
        f"A {rng.choice(_JOBS)} in their {rng.choice(_AGES)}.",
        rng.choice(taste.traits),
        f"Spends free evenings on {rng.choice(_HOBBIES)}.",
    ]
    rng.shuffle(sentences)
    return " ".join(sentences)


def _pairs(posts: Sequence[Post], taste: Taste, other: Taste) -> Row:
    pairs = [
        {"prompt": t.post, "chosen": taste.answer(t), "rejected": other.answer(t)} for t in posts
    ]
    return {"icl_pairs": pairs, "n_icl": len(pairs)}


def _comments(posts: Sequence[Post], taste: Taste, rng: random.Random) -> Row:
    order = rng.sample(taste.comments, len(taste.comments))
    texts = (order[i % len(order)] for i in range(len(posts)))
    comments = [{"prompt": t.post, "comment": text} for t, text in zip(posts, texts, strict=True)]
    return {"ugc": comments, "n_ugc": len(comments)}
