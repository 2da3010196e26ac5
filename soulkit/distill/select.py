"""SampleSelection as files: samples are read, what is learned of them is written.

    OUT/samples/TASK/episodes.jsonl ──▶ OUT/selected.jsonl    rows as `soul train sft --data` reads
                                        OUT/selection.json    what became of the samples, by task

Samples are read twice and never held: first what is known of each, then the turns of those that are
taken. Both files are written aside and renamed, selection.json last, with the hash of the other; so
whatever dies, the same samples give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from soulkit.distill.config import SELECTED, SELECTION, STAGES, DistillConfig, stages_after
from soulkit.distill.experts import Expert
from soulkit.distill.lessons import lesson_lines
from soulkit.distill.near import row_matches
from soulkit.distill.overlap import find_overlaps
from soulkit.distill.rejection import Choice, Rules, Sampled, choose_samples, sampled
from soulkit.distill.sample import refuse_other_samples, samples_folder, training_work, work_aside
from soulkit.errors import DataError, RunError
from soulkit.eval.standing import draft_keys
from soulkit.play.plan import Work
from soulkit.runs.jsonl import write_aside, write_json
from soulkit.runs.packing import has_lines
from soulkit.runs.records import stream_records
from soulkit.tasks.passages import passage_of

SCHEMA = "soulkit/selection@1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSelection:
    """What became of the samples of one task. Counts are of episodes unless they say otherwise."""

    prompts: int
    """Rows that were played."""
    sampled: int
    scored: int
    """Of these with a score, whatever it is; those of overlapping rows are not looked at."""
    passed: int
    """Of these with reward enough."""
    overlaps: int
    """Samples of rows that overlap evaluation rows."""
    duplicates: int
    """Samples set aside because one that is taken says the same, or nearly."""
    taken: int
    prompts_taken: int
    """Rows of which some sample is taken."""
    lines: int
    """Rows in selected.jsonl: one for each acted seat and sequence."""
    tokens: int
    """Trained tokens of these, as sampled."""
    acceptance: float
    """passed / (sampled - overlaps): the share of samples that are good enough to be learned."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Why samples were never learned from → how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSelection:
    """The contents of selection.json."""

    tasks: Mapping[str, TaskSelection]
    sha256: str
    """Of selected.jsonl."""
    reused: bool = False
    """Whether it stood there already."""

    @property
    def lines(self) -> int:
        return sum(part.lines for part in self.tasks.values())


def select_samples(
    config: DistillConfig, experts: Sequence[Expert], out: Path, *,
    say: Callable[[str], None] | None = None,
) -> SampleSelection:  # fmt: skip
    """Write selected.jsonl and selection.json of the samples in `out`, or find them written.

    RunError while samples are missing, DataError where rows overlap evaluation rows or nothing of a
    task passes.
    """
    say = say or (lambda remark: None)
    refuse_other_samples(out, experts)
    settings = _settings(config, experts)
    if (selection := _written(out, settings)) is not None:
        say(f"selection: all there, {selection.lines} rows in {out / SELECTED}")
        return selection
    work = training_work(config, experts)
    overlaps = find_overlaps(config, work, work_aside(config, experts))
    parts, lines = {}, list[bytes]()
    for expert, part in zip(experts, work, strict=True):
        samples = _samples(out, part, config)
        choice = choose_samples(
            samples, _rules(config, part), overlapping=overlaps[expert.task],
            alike=_alike(part, config.near),
        )  # fmt: skip
        if not choice.taken:
            raise _nothing(expert, samples, choice, config)
        fresh = _lines_of(samples_folder(out, expert.task), choice, expert)
        parts[expert.task] = _counted(part, samples, choice, fresh)
        lines += fresh
        say(_words(expert.task, parts[expert.task]))
    content = b"".join(lines)
    digest = hashlib.sha256(content).hexdigest()
    write_aside(out / SELECTED, content)
    selection = SampleSelection(tasks=parts, sha256=digest)
    write_json(out / SELECTION, {
        "schema": SCHEMA, "settings": settings, "sha256": digest,
        "tasks": {name: asdict(part) for name, part in parts.items()},
    })  # fmt: skip
    return selection


def read_selection(out: Path) -> SampleSelection:
    """What `select` wrote; RunError where it did not."""
    line = _read(out)
    if line is None:
        raise RunError(
            f"Nothing has been selected in {out}.",
            f"There is no {SELECTION} that goes with a {SELECTED}.",
            "Select first: soul distill select, with the same settings.",
        )
    tasks = {name: TaskSelection(**part) for name, part in line["tasks"].items()}
    return SampleSelection(tasks=tasks, sha256=line["sha256"], reused=True)


def _read(out: Path) -> dict[str, Any] | None:
    """selection.json, where it is whole and goes with selected.jsonl."""
    try:
        line: dict[str, Any] = json.loads((out / SELECTION).read_text(encoding="utf-8"))
        with (out / SELECTED).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return line if line["schema"] == SCHEMA and line["sha256"] == digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _written(out: Path, settings: Mapping[str, Any]) -> SampleSelection | None:
    line = _read(out)
    return read_selection(out) if line is not None and line["settings"] == settings else None


def _settings(config: DistillConfig, experts: Sequence[Expert]) -> dict[str, Any]:
    """What a selection depends on: settings of the first two stages, and the experts' weights."""
    early = {k: v for k, v in config.identity().items() if set(stages_after({k})) & set(STAGES[:2])}
    weights = {one.task: one.weights or one.name for one in experts}
    plain: dict[str, Any] = json.loads(json.dumps({**early, "experts": weights}, default=str))
    return plain


# -- reading samples -----------------------------------------------------------------------------


def _samples(out: Path, part: Work, config: DistillConfig) -> list[Sampled]:
    """What is known of every sample of a task, each once; RunError where some are missing."""
    path = samples_folder(out, part.task.name) / "episodes.jsonl"
    by_key: dict[str, Sampled] = {}
    for record in stream_records(path) if has_lines(path) else ():
        by_key[record.key] = sampled(record)
    every = draft_keys([part], config.samples)
    missing, strange = set(every) - by_key.keys(), by_key.keys() - set(every)
    if missing or strange:
        raise RunError(
            f"{path.parent} lacks {len(missing)} of {len(every)} samples, and holds "
            f"{len(strange)} of other rows.",
            "A selection of a part of the samples would change when the others come.",
            "Sample first, with the same settings and data files: soul distill sample",
        )
    return [by_key[key] for key in every]


def _alike(part: Work, near: float) -> Mapping[str, Collection[str]]:
    """Row → other rows of the task that say the same, or nearly. Rows of one cluster share a story
    and ask something else about it: of these only equal ones count."""
    rows = [passage_of(part.task, example) for example in part.examples]
    examples = part.examples
    return {
        examples[place].id: sorted({
            examples[other].id for other, match in several
            if other != place
            and (match.kind == "exact" or examples[other].cluster != examples[place].cluster)
        })
        for place, several in row_matches(rows, rows, near).items()
    }  # fmt: skip


def _rules(config: DistillConfig, part: Work) -> Rules:
    metric = part.task.spec.metric
    return Rules(
        high=metric.high, low=metric.low, binary=metric.binary, min_reward=config.min_reward,
        keep_top=config.keep_top, quota=config.quota, near=config.near, seed=config.seed,
    )  # fmt: skip


def _lines_of(folder: Path, choice: Choice, expert: Expert) -> list[bytes]:
    """The rows of the samples that are taken, in their order."""
    keys = {one.key for one in choice.taken}
    by_key: dict[str, list[bytes]] = {}
    for record in stream_records(folder / "episodes.jsonl", keys=keys):
        by_key[record.key] = [
            (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode()
            for line in lesson_lines(record, expert)
        ]
    return [line for one in choice.taken for line in by_key[one.key]]


# -- what became of them -------------------------------------------------------------------------


def _counted(
    part: Work, samples: Sequence[Sampled], choice: Choice, lines: Sequence[bytes]
) -> TaskSelection:
    eligible = len(samples) - choice.overlaps
    return TaskSelection(
        prompts=len(part.examples), sampled=len(samples),
        scored=eligible - choice.faults.get("unscored", 0),
        passed=choice.passed, overlaps=choice.overlaps, duplicates=choice.duplicates,
        taken=len(choice.taken), prompts_taken=len({one.example_id for one in choice.taken}),
        lines=len(lines), tokens=sum(one.tokens for one in choice.taken),
        acceptance=choice.passed / eligible if eligible else 0.0, faults=choice.faults,
    )  # fmt: skip


def _words(task: str, part: TaskSelection) -> str:
    return (
        f"selected of {task}: {part.taken} samples of {part.prompts_taken} prompts; "
        f"{part.passed} of {part.sampled} passed, duplicates {part.duplicates}, "
        f"overlapping evaluation rows {part.overlaps}"
    )


def _nothing(
    expert: Expert, samples: Sequence[Sampled], choice: Choice, config: DistillConfig
) -> DataError:
    rewards = [one.reward for one in samples if one.reward is not None]
    best = f"the best reward is {max(rewards):g}" if rewards else "none has a reward"
    faults = [f"{name} {count}" for name, count in choice.faults.items()]
    reasons = [f"below the reward asked for {choice.below}", *faults,
               f"overlapping evaluation rows {choice.overlaps}"]  # fmt: skip
    return DataError(
        f"None of {len(samples)} samples of '{expert.task}' by {expert.name} can be learned from.",
        f"They are: {', '.join(reasons)}; {best}. The generalist would not learn the task at all.",
        f"Ask for less with --min-reward, for more --samples than {config.samples}, for other "
        "rows, or train the expert further.",
    )
