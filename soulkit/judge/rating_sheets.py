"""Rating sheets: the cards that people rate, and the labels that they return.

    cards (an episode, or two of one row) + attention checks ──shuffled for each rater──▶ pages
    filled rows ──checked against the key──▶ labels, bad rows, raters who failed a check

Cards are blind: they have random ids, the sides of a pair are exchanged at random and between
raters, and nothing shows which model spoke. The key maps ids to episodes and is never given to a
rater. An attention check is a card whose text asks for certain answers.
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
"""Words of a real text at the start of an attention check, to make it look like other cards."""


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
        """Lowest and highest value; 0 and 1 for named labels, which are counted as shares."""
        return (float(self.labels[0]), float(self.labels[-1])) if self.numeric else (0.0, 1.0)


PAIR_SCALE = RatingScale(PREFERENCE, SIDES, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingCard:
    """One card to rate: an episode, or two episodes of the same row side by side."""

    task: str
    cluster: str
    example_id: str
    keys: tuple[str, ...]
    """Keys of the shown records, in the order of the key; none for an attention check."""
    setting: str
    sides: tuple[tuple[Line, ...], ...]
    seats: tuple[str, ...]
    """The seats to rate."""
    scales: tuple[RatingScale, ...]
    example: str = ""
    """Blind id of the row."""
    rollout: str = ""
    """Number of the episode among those of the row."""
    prints: tuple[str, ...] = ()
    """`text_print` of each record."""
    expected: Mapping[str, str] = field(default_factory=dict)
    """Dimension → the correct label of an attention check."""

    @property
    def blind(self) -> str:
        return f"{self.task}/{self.example}/{self.rollout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RaterSheet:
    """The cards of one rater, in this rater's order."""

    name: str
    """`<sheet>.<rater number>`."""
    rater: str
    cards: tuple[RatingCard, ...]
    """The cards, with sides as this rater sees them."""


# -- making --------------------------------------------------------------------------------------


def episode_card(
    record: Record, scales: Sequence[RatingScale], hidden: Sequence[str]
) -> RatingCard:
    """A card for one episode, with sanitised texts and without the `hidden` names."""
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
    """A card for two episodes of the same row."""
    card = episode_card(one, (PAIR_SCALE,), hidden)
    return replace(
        card,
        keys=(one.key, two.key),
        prints=(*card.prints, text_print(two)),
        sides=(*card.sides, _lines(two, hidden)),
    )


def text_print(record: Record) -> str:
    """Hash (12 hex digits) of the spoken lines. Unlike record keys, it differs between models."""
    lines = [(line.seat, line.text) for line in record.episode.transcript]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:12]


def blinded(text: str, hidden: Sequence[str]) -> str:
    """`text` without control characters and without names that reveal the model."""
    clean = sanitise(text)
    for name in hidden:
        clean = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "[model]", clean, flags=re.IGNORECASE)
    return clean


def _lines(record: Record, hidden: Sequence[str]) -> tuple[Line, ...]:
    return tuple(Line(line.seat, blinded(line.text, hidden)) for line in record.episode.transcript)


def with_blind_ids(cards: Sequence[RatingCard], rng: random.Random) -> list[RatingCard]:
    """The cards with random ids; cards of one row share the row's id."""
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
    """A card that starts like `donor` and then tells the rater what to answer."""
    expected = {scale.dimension: rng.choice(scale.labels) for scale in donor.scales}
    wishes = "; ".join(f"for “{name}” choose {label}" for name, label in expected.items())
    sides = list(donor.sides)
    side = rng.randrange(len(sides))
    lines = list(sides[side]) or [Line("", "")]
    last = max(
        (i for i, line in enumerate(lines) if line.seat in donor.seats), default=len(lines) - 1
    )
    begin = " ".join(lines[last].text.split()[:_SHOWN_OF_CHECK])
    text = f"{begin} … (This card checks that you read the texts. Please answer: {wishes}.)"
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
    """Shuffled cards for each rater. Sides are exchanged in half of the pairs, and in the other
    half for the next rater. Attention checks keep their sides, because their text names them."""
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
    """Whether rater `number` (from 1) sees the sides of a pair in the reverse order of the key."""
    return (blind in exchanged) == (number % 2 == 1)


def exchanged_pairs(cards: Sequence[RatingCard], seed: int) -> list[str]:
    """The pairs that odd-numbered raters see in reverse order."""
    pairs = sorted(card.blind for card in cards if len(card.keys) > 1)
    return sorted(random.Random(f"{seed}/sides").sample(pairs, len(pairs) // 2))


def empty_rows(sheet: RaterSheet) -> Iterator[dict[str, str]]:
    """The rows of a sheet to fill in, one per card and dimension."""
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
    """One filled-in row: its place in the file, and its columns."""

    source: str
    columns: Mapping[str, str]


@dataclass
class FilledSheets:
    """The contents of the filled sheets of all raters."""

    labels: list[dict[str, Any]] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    unrated: int = 0
    """Number of rows that are empty or marked as undecidable."""
    checks: dict[str, list[bool]] = field(default_factory=dict)
    """Rater → whether each answered attention check was correct."""

    @property
    def failed(self) -> list[str]:
        """Raters with a wrong answer to an attention check."""
        return sorted(rater for rater, answers in self.checks.items() if not all(answers))

    @property
    def raters(self) -> list[str]:
        return sorted({label["rater"] for label in self.labels})

    def without(self, raters: Sequence[str]) -> list[dict[str, Any]]:
        return [label for label in self.labels if label["rater"] not in raters]


def read_filled(rows: Iterable[FilledRow], key: Mapping[str, Any]) -> FilledSheets:
    """Read filled rows with the key of their sheet. A row that fits no card is a bad row."""
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
        raise ValueError(f"'{blind}' has no dimension '{dimension}', only {', '.join(scales)}")
    if columns["label"] in ("", CANNOT_TELL):
        filled.unrated += 1
        return
    label = _label_on(scales[dimension], columns["label"])
    if answers.setdefault((rater, blind, dimension), row.source) != row.source:
        first = answers[rater, blind, dimension]
        raise ValueError(f"{rater} already rated this in {first}")
    if card["expected"]:
        filled.checks.setdefault(rater, []).append(card["expected"].get(dimension) == label)
        return
    filled.labels.append(_label_line(card, blind, dimension, label, rater, number, key))


def _rater_number(name: str, key: Mapping[str, Any]) -> int:
    sheet, _, number = name.rpartition(".")
    if sheet != key["sheet"] or not number.isascii() or not number.isdigit():
        raise ValueError(f"it belongs to sheet '{name}', but the key is for '{key['sheet']}'")
    return int(number)


def scales_in(key: Mapping[str, Any], task: str) -> dict[str, RatingScale]:
    """The scales that a key gives for a task."""
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
        raise ValueError(f"'{text[:40]}' is not a label of '{scale.dimension}' ({ends})")
    return same[0]


def _same(label: str, text: str, numeric: bool) -> bool:
    """Whether both are the same label; 7 equals 7.0 (spreadsheets), `lively` equals `Lively`."""
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
