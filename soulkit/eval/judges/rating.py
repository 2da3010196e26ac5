"""Rating sheets for people: draw judged episodes of a run, write the sheets, import the labels.

No model is asked and no task code runs: verdicts come from the episodes, and scales from the run's
ledger. The sampling unit is the cluster (a story, a conversation, or a row with its rollouts).
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from soulkit.data.files import BadRow
from soulkit.errors import ConfigError, DataError, RunError
from soulkit.eval.results.rescore import command_of
from soulkit.judge.rating_sheets import (
    COLUMNS,
    MAX_LABELS,
    PAIR_SCALE,
    FilledRow,
    FilledSheets,
    RaterSheet,
    RatingCard,
    RatingScale,
    attention_check,
    empty_rows,
    episode_card,
    exchanged_pairs,
    pair_card,
    rater_sheets,
    read_filled,
    with_blind_ids,
)
from soulkit.judge.reliability import Grade, dimensions
from soulkit.models.ledger.view import LedgerView
from soulkit.parse import ParseError, decoded, json_or_none, parse_json, read_limited
from soulkit.runs.folder import read_config
from soulkit.runs.jsonl import read_value, stored_json, write_aside, write_json
from soulkit.runs.records import drafts, load_records
from soulkit.text import counted
from soulkit.types import Record

_NUMBER = ("score", "value", "rating")
_MAX_ASKED = 5
"""Episodes per task whose judge questions are looked up; all have the same form."""
_STEPS = 10
"""Steps of a fractional scale."""


@dataclass(frozen=True, slots=True)
class GradedEpisode:
    """An episode with all grades that judges gave it."""

    record: Record
    grades: Mapping[str, tuple[Grade, ...]]
    """Dimension → the grades of all verdicts."""

    @property
    def cluster(self) -> str:
        return self.record.cluster or self.record.example_id


def graded_episodes(folder: Path) -> dict[str, list[GradedEpisode]]:
    """Task → its scored drafts that a judge graded, sorted by key.

    RunError for a training run; DataError, naming the tasks, if no judge was asked.
    """
    command = command_of(folder)
    if command.startswith("train"):
        raise RunError(
            f"{folder} was made by 'soul {command}'.",
            "A rating sheet is about one model, but a training run has drafts of many checkpoints.",
            "Give the folder of a soul eval run.",
        )
    records = drafts(load_records(folder / "episodes.jsonl"))
    graded: dict[str, list[GradedEpisode]] = {}
    for record in sorted(records, key=lambda r: (r.task, r.key)):
        grades = _grades_of(record)
        if record.score.scored and grades:
            graded.setdefault(record.task, []).append(GradedEpisode(record, grades))
    if not graded:
        names = ", ".join(sorted({record.task for record in records})) or "none played"
        raise DataError(
            f"{folder} contains no episode that a judge graded.",
            f"Its tasks ({names}) are scored by rules, or their verdicts were not recorded.",
            "Give the run of a judged task. soul tasks list shows which tasks use a judge.",
        )
    return graded


def _grades_of(record: Record) -> dict[str, tuple[Grade, ...]]:
    """Dimension → grades; dimensions of purposes other than `score` are named `purpose/field`."""
    grades: dict[str, tuple[Grade, ...]] = {}
    for verdict in record.score.verdicts:
        for part, grade in ({} if verdict.problem else dimensions(verdict)).items():
            name = part if verdict.purpose == "score" else f"{verdict.purpose}/{part}"
            grades[name] = (*grades.get(name, ()), grade)
    return grades


def dimensions_of(episodes: Sequence[GradedEpisode]) -> list[str]:
    """The dimensions that judges graded for the score, else those for all purposes."""
    names = list(dict.fromkeys(name for episode in episodes for name in episode.grades))
    return [name for name in names if "/" not in name] or names


# -- scales --------------------------------------------------------------------------------------


def rating_scales(
    folder: Path,
    episodes: Sequence[GradedEpisode],
    names: Sequence[str],
    stated: Mapping[str, RatingScale],
) -> list[RatingScale]:
    """The scale of each dimension: the one in `stated`, else the one in the judge's form, else the
    text labels that judges gave.

    ConfigError for a numeric dimension with an unknown range.
    """
    asked_scales = _asked_scales(folder, [e.record.example_id for e in episodes[:_MAX_ASKED]])
    scales = []
    for name in names:
        scale = stated.get(name) or asked_scales.get(name.rpartition("/")[2])
        labels = {grade for e in episodes for grade in e.grades.get(name, ())}
        if scale is None and labels and all(isinstance(label, str) for label in labels):
            scale = RatingScale(name, tuple(sorted(map(str, labels))), False)
        if scale is None:
            raise _unknown_scale(name)
        scales.append(RatingScale(name, scale.labels, scale.numeric))
    return scales


def known_scales(folder: Path, episodes: Sequence[GradedEpisode]) -> dict[str, RatingScale]:
    """The scale of each dimension whose judge form is in the run's ledger."""
    asked_scales = _asked_scales(folder, [e.record.example_id for e in episodes[:_MAX_ASKED]])
    names = dict.fromkeys(name for episode in episodes for name in episode.grades)
    scales = {name: asked_scales.get(name.rpartition("/")[2]) for name in names}
    return {
        name: RatingScale(name, scale.labels, scale.numeric)
        for name, scale in scales.items()
        if scale is not None
    }


def _unknown_scale(name: str) -> ConfigError:
    return ConfigError(
        f"The scale of '{name}' is unknown.",
        "The run has no ledger, or its ledger has no judge question with that scale.",
        f"Write --scale {name}=0:10 for whole numbers, or --scale {name}=good,poor for labels.",
    )


def stated_scales(texts: Sequence[str]) -> dict[str, RatingScale]:
    """`NAME=0:10` and `NAME=good,poor` as scales by dimension; ConfigError for anything else."""
    scales = {}
    for text in texts:
        name, _, values = text.rpartition("=")
        labels = _whole_numbers(values) if ":" in values else tuple(values.split(","))
        if not name or len(labels) < 2 or len(set(labels)) < len(labels) or "" in labels:
            raise ConfigError(
                f"'{text}' is not a valid scale.",
                f"A scale has a name and 2 to {MAX_LABELS} distinct labels.",
                "Write --scale quality=0:10 or --scale style=plain,lively.",
            )
        scales[name] = RatingScale(name, labels, ":" in values)
    return scales


def _whole_numbers(values: str) -> tuple[str, ...]:
    low, _, high = values.partition(":")
    try:
        first, last = int(low), int(high)
    except ValueError:
        return ()
    return tuple(str(i) for i in range(first, last + 1)) if last - first < MAX_LABELS else ()


def _asked_scales(folder: Path, examples: Sequence[str]) -> dict[str, RatingScale]:
    """Field → its scale in the forms that judges of these examples had to fill in.

    Only the ledger in the run's own folder is read. A field whose forms differ is left out.
    """
    path, scales = folder / "ledger.sqlite", dict[str, set[RatingScale]]()
    if not path.is_file():
        return {}
    with LedgerView(path) as view:
        for schema in _schemas(view, examples):
            for name, node in _object(schema.get("properties")).items():
                scale = _scale_of(name, node, schema)
                scales.setdefault(name, set()).update(() if scale is None else (scale,))
    return {name: next(iter(forms)) for name, forms in scales.items() if len(forms) == 1}


def _schemas(view: LedgerView, examples: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    for example in examples:
        for stored in view.entries(example=example, role="judge"):
            form = stored.request.sampling.get("form") if stored.request else None
            if isinstance(form, Mapping):
                yield _object(json_or_none(str(form.get("schema", "{}"))))


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _scale_of(name: str, node: Any, schema: Mapping[str, Any]) -> RatingScale | None:
    node = _resolved_schema(node, schema)
    parts = _object(node.get("properties"))
    inner = next((f for f in _NUMBER if f in parts), None)
    if inner is not None:
        node = _resolved_schema(parts[inner], schema)
    if isinstance(node.get("enum"), list):
        return RatingScale(name, tuple(map(str, node["enum"])), False)
    if node.get("type") == "boolean":
        return RatingScale(name, ("false", "true"), False)
    low, high = node.get("minimum"), node.get("maximum")
    numbers = isinstance(low, int | float) and isinstance(high, int | float)
    if node.get("type") not in ("integer", "number") or not numbers or low >= high:
        return None
    if node["type"] == "integer":
        labels = _whole_numbers(f"{low:.0f}:{high:.0f}")
    else:
        labels = tuple(f"{low + (high - low) * i / _STEPS:g}" for i in range(_STEPS + 1))
    return RatingScale(name, labels, True) if labels else None


def _resolved_schema(node: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    if reference := str(_object(node).get("$ref") or ""):
        node = _object(schema.get("$defs")).get(reference.rpartition("/")[2])
    return dict(_object(node))


def chosen_dimensions(
    task: str, episodes: Sequence[GradedEpisode], chosen: Sequence[str]
) -> list[str]:
    """The dimensions in `chosen` that judges of the task graded; without `chosen`, those of
    `dimensions_of`."""
    if not chosen:
        return dimensions_of(episodes)
    return [name for name in chosen if any(name in episode.grades for episode in episodes)]


def headline_grade(episode: GradedEpisode) -> float:
    """The score of an episode."""
    assert episode.record.score.value is not None
    return episode.record.score.value


KEY, LABELS = "key.json", "labels.jsonl"
SCHEMA = "soulkit/rating-key/1"
HIDDEN_FROM = 4
"""Minimum length of hidden model names; shorter ones may be ordinary words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetRequest:
    """Settings of `soul judge sheet`."""

    run: Path
    sample: int = 50
    """Clusters per task."""
    seed: int = 0
    raters: int = 1
    pairs: bool = False
    checks: int = 2
    dimensions: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSheet:
    """The sheets of all raters and the key to them."""

    sheets: tuple[RaterSheet, ...]
    key: Mapping[str, Any]


def sheet_folder(run: Path) -> Path:
    """Default folder of a sheet: next to the run, because the run folder may be shared."""
    whole = run.resolve()
    return whole.with_name(f"{whole.name}-sheet")


def draw_sheet(request: SheetRequest) -> DrawnSheet:
    """Draw clusters and make a sheet for each rater. UserError if there is nothing to rate."""
    graded = graded_episodes(request.run)
    hidden = _names_to_hide(request.run)
    cards: list[RatingCard] = []
    scales: dict[str, list[RatingScale]] = {}
    counts: dict[str, dict[str, int]] = {}
    for task, episodes in graded.items():
        chosen, counts[task] = _drawn_clusters(task, episodes, request)
        scales[task] = [PAIR_SCALE]
        if not request.pairs:
            names = chosen_dimensions(task, episodes, request.dimensions)
            stated = stated_scales(request.scales)
            scales[task] = rating_scales(request.run, episodes, names, stated)
        if request.pairs:
            cards += _pairs(chosen, hidden)
        elif scales[task]:
            cards += [episode_card(e.record, scales[task], hidden) for e in chosen]
    if not cards:
        raise _nothing_to_rate(request)
    rng = random.Random(f"{request.seed}/cards")
    donors = rng.sample(cards, min(request.checks, len(cards)))
    checks = [attention_check(donor, i, rng) for i, donor in enumerate(donors, start=1)]
    blind = with_blind_ids([*cards, *checks], rng)
    key = _key(request, blind, scales, counts, graded)
    sheets = rater_sheets(blind, request.raters, key["sheet"], request.seed)
    return DrawnSheet(sheets=tuple(sheets), key=key)


def _drawn_clusters(
    task: str, episodes: Sequence[GradedEpisode], request: SheetRequest
) -> tuple[list[GradedEpisode], dict[str, int]]:
    """(episodes of the drawn clusters, counts of all and drawn clusters)."""
    clusters = sorted({episode.cluster for episode in episodes})
    rng = random.Random(f"{request.seed}/{task}")
    drawn = set(rng.sample(clusters, min(request.sample, len(clusters))))
    chosen = [episode for episode in episodes if episode.cluster in drawn]
    return chosen, {"clusters": len(clusters), "drawn": len(drawn)}


def _pairs(episodes: Sequence[GradedEpisode], hidden: Sequence[str]) -> list[RatingCard]:
    """Cards of pairs of different rollouts of the same row."""
    by_row: dict[str, list[GradedEpisode]] = {}
    for episode in episodes:
        by_row.setdefault(episode.record.example_id, []).append(episode)
    couples = (
        pair for same in by_row.values() for pair in zip(same[::2], same[1::2], strict=False)
    )
    cards = [pair_card(one.record, two.record, hidden) for one, two in couples]
    return [card for card in cards if card.sides[0] != card.sides[1]]


def _nothing_to_rate(request: SheetRequest) -> DataError | ConfigError:
    if request.pairs:
        return DataError(
            f"No row of {request.run} has two different judged drafts.",
            "A pair consists of two drafts of the same row.",
            "Evaluate with --repeats 2, or leave out --pairs.",
        )
    return ConfigError(
        f"No judge of {request.run} graded {', '.join(request.dimensions)}.",
        "People rate the same dimensions as the judge.",
        "Choose dimensions that soul judge check prints, or leave out --dimension.",
    )


def _names_to_hide(run: Path) -> list[str]:
    """The model, its last path part and the run's name, longest first."""
    config = read_config(run)
    names = [str(config.get(field) or "") for field in ("model", "adapter")]
    names += [Path(name).name for name in names] + [run.resolve().name]
    return sorted({n for n in names if len(n) >= HIDDEN_FROM}, key=lambda n: (-len(n), n))


def _key(
    request: SheetRequest,
    cards: Sequence[RatingCard],
    scales: Mapping[str, Sequence[RatingScale]],
    counts: Mapping[str, Mapping[str, int]],
    graded: Mapping[str, Sequence[GradedEpisode]],
) -> dict[str, Any]:
    """The key: blind id → episode. `sheet` is a hash of the content."""
    rollouts = {e.record.key: e.record.rollout for some in graded.values() for e in some}
    written_cards = {
        card.blind: {
            "task": card.task, "example_id": card.example_id, "cluster": card.cluster,
            "keys": list(card.keys), "prints": list(card.prints), "pair": len(card.sides) > 1,
            "rollout": rollouts[card.keys[0]] if card.keys else None,
            "expected": dict(card.expected),
        }
        for card in cards
    }  # fmt: skip
    content = {
        "schema": SCHEMA, "run": request.run.resolve().name, "seed": request.seed,
        "sample": request.sample, "raters": request.raters, "clusters": counts,
        "scales": {
            task: {s.dimension: {"labels": list(s.labels), "numeric": s.numeric} for s in some}
            for task, some in scales.items()
        },
        "exchanged": exchanged_pairs(cards, request.seed), "cards": written_cards,
    }  # fmt: skip
    text = json.dumps(content, sort_keys=True)
    return {"sheet": hashlib.sha256(text.encode()).hexdigest()[:8], **content}


def refuse_other_sheet(folder: Path, key: Mapping[str, Any]) -> None:
    """RunError if `folder` contains another sheet, which raters may be filling in."""
    if (folder / KEY).is_file() and read_sheet_key(folder / KEY)["sheet"] != key["sheet"]:
        raise RunError(
            f"'{folder}' contains another sheet of this run.",
            "Overwriting its key would make sheets that raters have filled in unreadable.",
            "Choose another folder with --out, or delete that one.",
        )


def write_tables(drawn: DrawnSheet, folder: Path) -> list[Path]:
    """Write the key and a CSV sheet for each rater; returns the raters' folders."""
    refuse_other_sheet(folder, drawn.key)
    places = []
    for number, sheet in enumerate(drawn.sheets, start=1):
        place = folder / f"rater-{number}"
        stream = io.StringIO(newline="")
        table = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(empty_rows(sheet))
        write_aside(place / "sheet.csv", stream.getvalue().encode())
        places.append(place)
    write_json(folder / KEY, drawn.key)
    return places


# -- import --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ScaleKey:
    labels: Annotated[list[str], Field(min_length=1)]
    numeric: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _CardKey:
    task: str
    example_id: str
    cluster: str
    keys: list[str]
    prints: list[str] = field(default_factory=list)
    pair: bool
    rollout: int | None
    expected: dict[str, str]


@dataclass(frozen=True, slots=True)
class _SheetKey:
    """The form of a key; see `_key`."""

    sheet: str
    scales: dict[str, dict[str, _ScaleKey]]
    cards: dict[str, _CardKey]
    exchanged: list[str]


def read_sheet_key(path: Path) -> dict[str, Any]:
    """The key of a sheet; DataError if the file is not one."""
    try:
        key = stored_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise _no_key(path, str(error)) from error
    if not isinstance(key, dict) or key.get("schema") != SCHEMA:
        raise _no_key(path, "it was not written by soul judge sheet")
    form = read_value(_SheetKey, key, f"The key '{path}'")
    for name, card in form.cards.items():
        if not card.expected and len(card.keys) != 1 + card.pair:
            raise _no_key(path, f"card '{name}' has {counted(len(card.keys), 'episode')}")
    for scale in (scale for scales in form.scales.values() for scale in scales.values()):
        if scale.numeric and not all(map(_is_number, scale.labels)):
            raise _no_key(path, "a scale of numbers has other labels")
    return key


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _no_key(path: Path, detail: str) -> DataError:
    return DataError(
        f"The key '{path}' cannot be read ({detail}).",
        "The key maps each row of a sheet to its episode.",
        "Give the right file with --key, or write a new sheet: soul judge sheet RUN.",
    )


def import_sheets(files: Sequence[Path], key: Mapping[str, Any]) -> FilledSheets:
    """The labels in filled sheets. DataError if a file cannot be read or no file has a label."""
    filled = FilledSheets()
    rows: list[FilledRow] = []
    for file in files:
        for row in _rows_of(file):
            if isinstance(row, BadRow):
                filled.bad.append(row)
            else:
                rows.append(row)
    read = read_filled(rows, key)
    read.bad[:0] = filled.bad
    if not read.labels:
        first = (
            f"; the first bad row is {read.bad[0].source}: {read.bad[0].why}" if read.bad else ""
        )
        raise DataError(
            f"No label could be read from {', '.join(map(str, files))}.",
            f"{read.unrated} rows are empty and {len(read.bad)} are bad{first}.",
            "Fill in the column 'label', or save the sheet's page as a file first.",
        )
    return read


def _rows_of(file: Path) -> Iterator[FilledRow | BadRow]:
    try:
        text = decoded(read_limited(file))
    except (OSError, ParseError) as error:
        raise DataError(
            f"The sheet '{file}' cannot be read.",
            str(error),
            "Save it as UTF-8 text, CSV or JSON.",
        ) from error
    if text.lstrip().startswith("{"):
        yield from _json_rows(file, text)
    else:
        yield from _csv_rows(file, text)


def _csv_rows(file: Path, text: str) -> Iterator[FilledRow | BadRow]:
    first = text.partition("\n")[0]
    separator = max(",;\t", key=first.count)
    csv.field_size_limit(2**31 - 1)
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
    missing = [name for name in COLUMNS if name not in (table.fieldnames or ())]
    if missing:
        raise DataError(
            f"The sheet '{file}' has no column {', '.join(missing)}.",
            f"A sheet has the columns {', '.join(COLUMNS)}.",
            "Fill in the sheet that soul judge sheet wrote, and keep its header line.",
        )
    for row in table:
        source = f"{file}:{table.line_num}"
        if None in row or None in row.values():
            yield BadRow(source, "its number of columns differs from the header line")
        else:
            yield FilledRow(source, row)


def _json_rows(file: Path, text: str) -> Iterator[FilledRow | BadRow]:
    """What the page saves: `{"sheet", "rater", "labels": [{task, example, rollout, …}]}`."""
    try:
        saved = parse_json(text)
        rows = list(saved["labels"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"The sheet '{file}' was not saved from a rating page.",
            f"It is not a JSON object with a list of labels ({error}).",
            "Open the rating page and save the labels again.",
        ) from error
    for number, row in enumerate(rows, start=1):
        source = f"{file}, label {number}"
        if not isinstance(row, dict):
            yield BadRow(source, "it is not a JSON object")
        else:
            shared = {"sheet": saved.get("sheet", ""), "rater": saved.get("rater", "")}
            yield FilledRow(source, {k: str(v) for k, v in {**shared, **row}.items()})


def write_labels(labels: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write one JSON object per line: task, key, cluster, example, rollout, dimension, label and
    rater."""
    lines = [json.dumps(dict(line), ensure_ascii=False) + "\n" for line in labels]
    write_aside(path, "".join(lines).encode())
