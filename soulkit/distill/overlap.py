"""No training row that says what an evaluation row says: looked for before anything is sampled.

The training rows of every expert are compared with the evaluation rows of all their tasks: those
of --held-out, and the pulled evaluation files that are here. An overlap is an error; with
--exclude-overlap the training rows are left out of what the generalist learns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from soulkit.data.contamination import Passage, RowMatch, row_matches
from soulkit.distill.config import DistillConfig
from soulkit.errors import DataError
from soulkit.play.plan import Work
from soulkit.tasks.kit.loading import NoRows, examples_to_play, passage_of

SHOWN = 3
"""Rows that an error names of each task; the others are counted."""

Overlaps = Mapping[str, Mapping[str, RowMatch]]
"""Task → id of a training row → the evaluation row that is most like it."""


def find_overlaps(
    config: DistillConfig, work: Sequence[Work], aside: Sequence[Work] = ()
) -> Overlaps:
    """The training rows in `work` that overlap evaluation rows of its tasks.

    DataError naming them, unless they are to be left out, and where that would leave a task none.
    Rows that overlap those in `aside`, which were set aside without being named by --held-out, are
    always left out: the user did not choose this split.
    """
    named = list(chain.from_iterable(
        _evaluation_rows(config, part.task.name) for part in work
    ))  # fmt: skip
    overlaps = _overlaps(config, work, named)
    _refuse(config, overlaps, work)
    passages = [passage_of(part.task, example) for part in aside for example in part.examples]
    also = _overlaps(config, work, passages) if passages else {}
    overlaps = {name: {**also.get(name, {}), **found} for name, found in overlaps.items()}
    _refuse_nothing_left(overlaps, work)
    return overlaps


def _overlaps(
    config: DistillConfig, work: Sequence[Work], evaluation: Sequence[Passage]
) -> dict[str, dict[str, RowMatch]]:
    overlaps: dict[str, dict[str, RowMatch]] = {}
    for part in work:
        rows = [passage_of(part.task, example) for example in part.examples]
        matches = row_matches(rows, evaluation, config.near)
        overlaps[part.task.name] = {
            part.examples[place].id: max(
                (match for _, match in several), key=lambda m: (m.kind == "exact", m.similarity)
            )
            for place, several in sorted(matches.items())
        }
    return overlaps


def _evaluation_rows(config: DistillConfig, name: str) -> list[Passage]:
    """What the evaluation rows of a task say that are here, each with where it stands."""
    registry = config.registry()
    task, passages = registry.task(name, config.protocol), []
    for source in dict.fromkeys([None, config.held_out_source(name)]):
        try:
            loaded = examples_to_play(task, source, seed=config.seed)
        except NoRows:
            if source is not None:
                raise
            continue
        passages += [passage_of(task, example) for example in loaded.examples]
    return passages


def _refuse(config: DistillConfig, overlaps: Overlaps, work: Sequence[Work]) -> None:
    rows = {part.task.name: len(part.examples) for part in work}
    touched = {name: matches for name, matches in overlaps.items() if matches}
    if touched and not config.exclude_overlap:
        raise DataError(
            f"Training rows overlap evaluation rows: {_listed(touched, rows)}.",
            "A generalist that has learned what it is measured on shows nothing.",
            "Give other rows with --data or --held-out, or leave these out of what is learned: "
            "--exclude-overlap",
        )


def _refuse_nothing_left(overlaps: Overlaps, work: Sequence[Work]) -> None:
    for name, rows in {part.task.name: len(part.examples) for part in work}.items():
        if rows and len(overlaps[name]) == rows:
            raise DataError(
                f"All {rows} training rows of '{name}' overlap evaluation rows.",
                "Without them nothing is left from which the generalist could learn the task.",
                f"Give other rows: --data {name}=WHERE",
            )


def _listed(touched: Overlaps, rows: Mapping[str, int]) -> str:
    parts = []
    for name, matches in touched.items():
        pairs = [
            f"{m.train} = {m.evaluation}" if m.kind == "exact"
            else f"{m.train} ≈ (similarity {m.similarity:.2f}) {m.evaluation}"
            for m in list(matches.values())[:SHOWN]
        ]  # fmt: skip
        more = f" and {len(matches) - SHOWN} more" if len(matches) > SHOWN else ""
        parts.append(f"{len(matches)} of {rows[name]} of '{name}' ({'; '.join(pairs)}{more})")
    return ", ".join(parts)
