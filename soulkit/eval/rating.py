"""`soul judge sheet` and `soul judge import`: people rate a part of what a judge has rated.

    RUN ──clusters drawn by a seed──▶ RUN-sheet/rater-1/sheet.html, sheet.csv   (for the raters)
                                      RUN-sheet/key.json                        (for nobody else)
    filled sheets + key.json ───────▶ RUN-sheet/labels.jsonl

The sample is one of *clusters* (stories, conversations, rows with their rollouts), without
replacement, from a random stream of the seed and the task: of a drawn cluster every judged episode
is on the sheet. That is what makes the corrected mean of `soul judge correct` valid.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow
from soulkit.errors import ConfigError, DataError, RunError
from soulkit.eval.graded import (
    GradedEpisode,
    chosen_dimensions,
    graded_episodes,
    rating_scales,
    stated_scales,
)
from soulkit.judge.sheets import (
    COLUMNS,
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
from soulkit.runs.folder import read_config
from soulkit.runs.jsonl import write_aside, write_json

KEY, LABELS = "key.json", "labels.jsonl"
SCHEMA = "soulkit/rating-key/1"
HIDDEN_FROM = 4
"""Names of models that are shorter may be ordinary words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetRequest:
    """What a sheet is made of."""

    run: Path
    sample: int = 50
    """Clusters of each task."""
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
    """Beside the run: a run's folder is what others get to see."""
    whole = run.resolve()
    return whole.with_name(f"{whole.name}-sheet")


def draw_sheet(request: SheetRequest) -> DrawnSheet:
    """Draw clusters and lay out a sheet for each rater. UserError: nothing to rate."""
    graded = graded_episodes(request.run)
    hidden = _names_to_hide(request.run)
    cards: list[RatingCard] = []
    scales: dict[str, list[RatingScale]] = {}
    counts: dict[str, dict[str, int]] = {}
    for task, episodes in graded.items():
        chosen, counts[task] = _drawn_clusters(task, episodes, request)
        scales[task] = _scales(task, episodes, request)
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
    """The episodes of the clusters that the seed draws, and how many clusters those are."""
    clusters = sorted({episode.cluster for episode in episodes})
    rng = random.Random(f"{request.seed}/{task}")
    drawn = set(rng.sample(clusters, min(request.sample, len(clusters))))
    chosen = [episode for episode in episodes if episode.cluster in drawn]
    return chosen, {"clusters": len(clusters), "drawn": len(drawn)}


def _scales(
    task: str, episodes: Sequence[GradedEpisode], request: SheetRequest
) -> list[RatingScale]:
    if request.pairs:
        return [PAIR_SCALE]
    names = chosen_dimensions(task, episodes, request.dimensions)
    return rating_scales(request.run, episodes, names, stated_scales(request.scales))


def _pairs(episodes: Sequence[GradedEpisode], hidden: Sequence[str]) -> list[RatingCard]:
    """Two by two, the different rollouts of a row."""
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
            f"No row of {request.run} has two different judged answers.",
            "Pairs are drafts of the same row.",
            "Evaluate with --repeats 2, or leave out --pairs.",
        )
    return ConfigError(
        f"No judge of {request.run} has graded {', '.join(request.dimensions)}.",
        "People are asked what the judge was asked.",
        "Name dimensions that soul judge check prints, or leave out --dimension.",
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
    """What each blind id stands for; `sheet` names the whole by its content."""
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
    """RunError when `folder` holds another sheet: raters may be at work on it."""
    if (folder / KEY).is_file() and read_sheet_key(folder / KEY)["sheet"] != key["sheet"]:
        raise RunError(
            f"'{folder}' holds another sheet of this run.",
            "What raters fill in could no longer be read without its key.",
            "Name another folder with --out, or delete that one.",
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


# -- what comes back -----------------------------------------------------------------------------


def read_sheet_key(path: Path) -> dict[str, Any]:
    """The key of a sheet; DataError when the file is none."""
    try:
        key = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _no_key(path, str(error)) from error
    if not isinstance(key, dict) or key.get("schema") != SCHEMA:
        raise _no_key(path, "it is not what soul judge sheet writes")
    return key


def _no_key(path: Path, detail: str) -> DataError:
    return DataError(
        f"The key '{path}' cannot be read ({detail}).",
        "Without it nobody knows which episode a row of a sheet stands for.",
        "Name the right one with --key, or write the sheet anew: soul judge sheet RUN.",
    )


def import_sheets(files: Sequence[Path], key: Mapping[str, Any]) -> FilledSheets:
    """The labels in filled sheets. DataError when a file cannot be read, or none holds a label."""
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
            "Fill in the column label, or save the page of the sheet as a file first.",
        )
    return read


def _rows_of(file: Path) -> Iterator[FilledRow | BadRow]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
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
    """Rows of a table with the columns of COLUMNS, in any order, by comma, semicolon or tab."""
    first = text.partition("\n")[0]
    separator = max(",;\t", key=first.count)
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
    missing = [name for name in COLUMNS if name not in (table.fieldnames or ())]
    if missing:
        raise DataError(
            f"The sheet '{file}' has no column {', '.join(missing)}.",
            f"A sheet has the columns {', '.join(COLUMNS)}.",
            "Fill in the sheet that soul judge sheet wrote, and keep its first line.",
        )
    for row in table:
        source = f"{file}:{table.line_num}"
        if None in row or None in row.values():
            yield BadRow(source, "it has more or fewer columns than the first line")
        else:
            yield FilledRow(source, row)


def _json_rows(file: Path, text: str) -> Iterator[FilledRow | BadRow]:
    """What the page saves: `{"sheet", "rater", "labels": [{task, example, rollout, …}]}`."""
    try:
        saved = json.loads(text)
        rows = list(saved["labels"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"The sheet '{file}' is no file that a sheet's page saves.",
            f"It is no JSON object with a list of labels ({error}).",
            "Save the page again.",
        ) from error
    for number, row in enumerate(rows, start=1):
        source = f"{file}, label {number}"
        if not isinstance(row, dict):
            yield BadRow(source, "it is no JSON object")
        else:
            shared = {"sheet": saved.get("sheet", ""), "rater": saved.get("rater", "")}
            yield FilledRow(source, {k: str(v) for k, v in {**shared, **row}.items()})


def write_labels(labels: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One JSON object a line: task, key, cluster, example, rollout, dimension, label, rater."""
    lines = [json.dumps(dict(line), ensure_ascii=False) + "\n" for line in labels]
    write_aside(path, "".join(lines).encode())
