"""Rating sheets: what people are shown to be rated, and what they send back.

    cards (an episode, or two of one row) + attention checks ──shuffled for each rater──▶ pages
    filled rows ──checked against the key──▶ labels, bad rows, who failed a check

A card is blind: it bears a random id, the sides of a pair change places by chance and again from
rater to rater, and nothing says which model spoke. The key says what each id stands for; it never
goes to a rater. An attention check is a card whose text asks for certain answers: whoever reads the
texts gives them.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from soulkit.data.files import BadRow
from soulkit.judge.reliability import Grade
from soulkit.text import sanitise
from soulkit.types import Line, Record

PREFERENCE = "preference"
SIDES = ("A", "B", "Tie")
CANNOT_TELL = "?"
COLUMNS = ("sheet", "task", "example", "rollout", "dimension", "label", "rater")
MAX_LABELS = 101
_SHOWN_OF_CHECK = 12
"""Words of a real text that an attention check begins with, so that nobody sees it at a glance."""


@dataclass(frozen=True, slots=True)
class RatingScale:
    """The labels of one dimension, lowest first."""

    dimension: str
    labels: tuple[str, ...]
    numeric: bool

    def grade(self, label: str) -> Grade:
        return float(label) if self.numeric else label

    @property
    def ends(self) -> tuple[float, float]:
        """Lowest and highest value; of names 0 and 1, since shares of them are counted."""
        return (float(self.labels[0]), float(self.labels[-1])) if self.numeric else (0.0, 1.0)


PAIR_SCALE = RatingScale(PREFERENCE, SIDES, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingCard:
    """One thing to be rated: an episode, or two of the same row side by side."""

    task: str
    cluster: str
    example_id: str
    keys: tuple[str, ...]
    """The records it shows, in the order of the key; none for an attention check."""
    setting: str
    sides: tuple[tuple[Line, ...], ...]
    seats: tuple[str, ...]
    """Who of the speakers is to be rated."""
    scales: tuple[RatingScale, ...]
    example: str = ""
    """The blind id of the row; `rollout` that of the episode among those of the row."""
    rollout: str = ""
    prints: tuple[str, ...] = ()
    """`text_print` of each record."""
    expected: Mapping[str, str] = field(default_factory=dict)
    """Dimension → the only right label, of an attention check."""

    @property
    def blind(self) -> str:
        return f"{self.task}/{self.example}/{self.rollout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RaterSheet:
    """What one rater gets: the cards in an order of their own."""

    name: str
    """`<sheet>.<number of the rater>`."""
    rater: str
    cards: tuple[RatingCard, ...]
    """Their sides as this rater sees them."""


# -- making --------------------------------------------------------------------------------------


def episode_card(
    record: Record, scales: Sequence[RatingScale], hidden: Sequence[str]
) -> RatingCard:
    """One episode, its texts sanitised and without the `hidden` names."""
    return RatingCard(
        task=record.task,
        cluster=record.cluster or record.example_id,
        example_id=record.example_id,
        keys=(record.key,),
        setting=blinded(record.prompt, hidden),
        sides=(_lines(record, hidden),),
        seats=tuple(dict.fromkeys(trace.seat for trace in record.episode.traces)),
        prints=(text_print(record),),
        scales=tuple(scales),
    )


def pair_card(one: Record, two: Record, hidden: Sequence[str]) -> RatingCard:
    """Two episodes of the same row."""
    card = episode_card(one, (PAIR_SCALE,), hidden)
    return replace(
        card,
        keys=(one.key, two.key),
        prints=(*card.prints, text_print(two)),
        sides=(*card.sides, _lines(two, hidden)),
    )


def text_print(record: Record) -> str:
    """What was said, by whom, as 12 hex digits: keys are the same in the run of another model."""
    lines = [(line.seat, line.text) for line in record.episode.transcript]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:12]


def blinded(text: str, hidden: Sequence[str]) -> str:
    """`text` without control characters and without names that would say whose it is."""
    clean = sanitise(text)
    for name in hidden:
        clean = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "[model]", clean, flags=re.IGNORECASE)
    return clean


def _lines(record: Record, hidden: Sequence[str]) -> tuple[Line, ...]:
    return tuple(Line(line.seat, blinded(line.text, hidden)) for line in record.episode.transcript)


def with_blind_ids(cards: Sequence[RatingCard], rng: random.Random) -> list[RatingCard]:
    """The cards with random ids; those of one row share the row's."""
    rows = {(card.task, card.example_id): "" for card in cards}
    tokens = rng.sample(range(16**5, 16**6), len(rows))
    names = {row: f"{token:06x}" for row, token in zip(rows, tokens, strict=True)}
    counts: dict[str, int] = {}
    blind = []
    for card in rng.sample(cards, len(cards)):
        name = names[card.task, card.example_id]
        counts[name] = counts.get(name, 0) + 1
        blind.append(replace(card, example=name, rollout=str(counts[name])))
    return blind


def attention_check(donor: RatingCard, number: int, rng: random.Random) -> RatingCard:
    """A card that begins like `donor` and then says what to answer."""
    expected = {scale.dimension: rng.choice(scale.labels) for scale in donor.scales}
    wishes = "; ".join(f"for “{name}” choose {label}" for name, label in expected.items())
    sides = list(donor.sides)
    side = rng.randrange(len(sides))
    lines = list(sides[side]) or [Line("", "")]
    last = max(
        (i for i, line in enumerate(lines) if line.seat in donor.seats), default=len(lines) - 1
    )
    begin = " ".join(lines[last].text.split()[:_SHOWN_OF_CHECK])
    text = f"{begin} … (This is a check that texts are read. Please answer here: {wishes}.)"
    sides[side] = (*lines[:last], Line(lines[last].seat, text), *lines[last + 1 :])
    return replace(
        donor,
        example_id=f"check {number}",
        keys=(),
        prints=(),
        sides=tuple(sides),
        expected=expected,
    )


def rater_sheets(
    cards: Sequence[RatingCard], raters: int, sheet: str, seed: int
) -> list[RaterSheet]:
    """The cards for each rater, shuffled; the sides of a pair are exchanged for half of the pairs,
    and for the next rater in the other half. Checks keep their sides, which their text names."""
    exchanged = exchanged_pairs(cards, seed)
    sheets = []
    for number in range(1, raters + 1):
        shuffled = random.Random(f"{seed}/rater/{number}").sample(cards, len(cards))
        shown = tuple(
            replace(card, sides=card.sides[::-1])
            if is_exchanged(card.blind, exchanged, number) and len(card.keys) > 1
            else card
            for card in shuffled
        )
        name = f"{sheet}.{number}"
        sheets.append(RaterSheet(name=name, rater=f"rater {number}", cards=shown))
    return sheets


def is_exchanged(blind: str, exchanged: Iterable[str], number: int) -> bool:
    """Whether rater `number` (from 1) sees the sides of a pair in the other order than the key."""
    return (blind in exchanged) == (number % 2 == 1)


def exchanged_pairs(cards: Sequence[RatingCard], seed: int) -> list[str]:
    """The pairs that odd raters see in the other order: for the key."""
    pairs = sorted(card.blind for card in cards if len(card.keys) > 1)
    return sorted(random.Random(f"{seed}/sides").sample(pairs, len(pairs) // 2))


def empty_rows(sheet: RaterSheet) -> Iterator[dict[str, str]]:
    """The rows of a sheet, to be filled in: one for each card and dimension."""
    for card in sheet.cards:
        for scale in card.scales:
            row = (
                sheet.name,
                card.task,
                card.example,
                card.rollout,
                scale.dimension,
                "",
                sheet.rater,
            )
            yield dict(zip(COLUMNS, row, strict=True))


# -- reading back --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FilledRow:
    """One answer as it came: where it stands, and its columns."""

    source: str
    columns: Mapping[str, str]


@dataclass
class FilledSheets:
    """What the filled sheets of all raters came to."""

    labels: list[dict[str, Any]] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    unrated: int = 0
    """Rows left empty, or marked as not to be told."""
    checks: dict[str, list[bool]] = field(default_factory=dict)
    """Rater → whether each of the checks they answered was right."""

    @property
    def failed(self) -> list[str]:
        """Raters who gave a wrong answer to a check."""
        return sorted(rater for rater, answers in self.checks.items() if not all(answers))

    @property
    def raters(self) -> list[str]:
        return sorted({label["rater"] for label in self.labels})

    def without(self, raters: Sequence[str]) -> list[dict[str, Any]]:
        return [label for label in self.labels if label["rater"] not in raters]


def read_filled(rows: Iterable[FilledRow], key: Mapping[str, Any]) -> FilledSheets:
    """The labels of filled rows, by the key of their sheet. What fits no card is a bad row."""
    filled = FilledSheets()
    answers: dict[tuple[str, str, str], str] = {}
    for row in rows:
        try:
            _read_row(row, key, filled, answers)
        except ValueError as error:
            filled.bad.append(BadRow(row.source, str(error)))
    return filled


def _read_row(
    row: FilledRow,
    key: Mapping[str, Any],
    filled: FilledSheets,
    answers: dict[tuple[str, str, str], str],
) -> None:
    columns = {name: str(row.columns.get(name) or "").strip() for name in COLUMNS}
    number = _rater_number(columns["sheet"], key)
    blind = f"{columns['task']}/{columns['example']}/{columns['rollout']}"
    card = key["cards"].get(blind)
    if card is None:
        raise ValueError(f"the sheet has no card '{blind}'")
    dimension, rater = columns["dimension"], columns["rater"] or f"rater {number}"
    scales = {PREFERENCE: PAIR_SCALE} if card["pair"] else scales_in(key, columns["task"])
    if dimension not in scales:
        raise ValueError(f"'{blind}' is not rated by '{dimension}', but by {', '.join(scales)}")
    if columns["label"] in ("", CANNOT_TELL):
        filled.unrated += 1
        return
    label = _label_on(scales[dimension], columns["label"])
    if answers.setdefault((rater, blind, dimension), row.source) != row.source:
        first = answers[rater, blind, dimension]
        raise ValueError(f"{rater} has rated this already, in {first}")
    if card["expected"]:
        filled.checks.setdefault(rater, []).append(card["expected"][dimension] == label)
        return
    filled.labels.append(_label_line(card, blind, dimension, label, rater, number, key))


def _rater_number(name: str, key: Mapping[str, Any]) -> int:
    sheet, _, number = name.rpartition(".")
    if sheet != key["sheet"] or not number.isascii() or not number.isdigit():
        raise ValueError(f"it is of sheet '{name}', and the key is that of '{key['sheet']}'")
    return int(number)


def scales_in(key: Mapping[str, Any], task: str) -> dict[str, RatingScale]:
    """The scales of a task as a key has them."""
    return {
        name: RatingScale(name, tuple(scale["labels"]), scale["numeric"])
        for name, scale in key["scales"].get(task, {}).items()
    }


def _label_on(scale: RatingScale, text: str) -> str:
    if text in scale.labels:
        return text
    same = [label for label in scale.labels if _same(label, text, scale.numeric)]
    if not same:
        ends = (
            f"{scale.labels[0]} to {scale.labels[-1]}" if scale.numeric else ", ".join(scale.labels)
        )
        raise ValueError(f"'{text[:40]}' is no label of '{scale.dimension}', which has {ends}")
    return same[0]


def _same(label: str, text: str, numeric: bool) -> bool:
    """A spreadsheet writes 7 as 7.0, and a hasty rater `lively` as `Lively`."""
    if not numeric:
        return label.casefold() == text.casefold()
    try:
        return float(text.replace("\u2212", "-")) == float(label)
    except ValueError:
        return False


def _label_line(
    card: Mapping[str, Any], blind: str, dimension: str, label: str, rater: str, number: int,
    key: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    line = {
        "task": card["task"], "key": card["keys"][0], "cluster": card["cluster"],
        "example": card["example_id"], "rollout": card["rollout"],
        "dimension": dimension, "label": label, "rater": rater,
        "prints": list(card.get("prints", ())),
    }  # fmt: skip
    if card["pair"]:
        turned = is_exchanged(blind, key["exchanged"], number)
        sides = dict(zip(SIDES, ("B", "A", "Tie"), strict=True))
        line |= {"other": card["keys"][1], "label": sides[label] if turned else label,
                 "shown": label}  # fmt: skip
    return line
