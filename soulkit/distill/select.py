"""Selection of the samples that the generalist is trained on.

    OUT/samples/TASK/episodes.jsonl ──▶ OUT/selected.jsonl    rows for `soul train sft --data`
                                        OUT/selection.json    counts by task

    scored, not cut off, refused, forged or hacked ──▶ high reward ──▶ distinct ──▶ best per prompt

* Without --min-reward, a 0/1 score must be 1. A graded score must be above the mean of its prompt,
  or reach the mean of the task if all samples of the prompt have the same score.
* Ranking: highest reward, then well-formed reply, score, fewer tokens, key.
* Duplicates are (nearly) equal replies to (nearly) equal prompts. A quota is spread over prompts.

Replies keep the token ids that the expert sampled. The result does not depend on sample order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from soulkit.data.contamination import Words, folded_words, row_matches, same_words
from soulkit.data.corpora.lessons import message_json
from soulkit.data.rows import share_of
from soulkit.distill.config import SELECTED, SELECTION, STAGES, DistillConfig, stages_after
from soulkit.distill.experts import Expert
from soulkit.distill.sample import (
    find_overlaps,
    refuse_other_samples,
    samples_folder,
    training_work,
    work_aside,
)
from soulkit.errors import DataError, RunError
from soulkit.eval.run.resume import draft_keys
from soulkit.play.plan import Work
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.jsonl import has_lines, stored_json, write_aside, write_json
from soulkit.runs.records import stream_records
from soulkit.tasks.kit.loading import passage_of
from soulkit.types import Record, Segment, Trace

CUT = frozenset({"length", "content_filter", "refusal"})
"""Stop reasons of incomplete replies."""
READABLE = ("ok", "salvaged")


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """The facts about one sample that the selection uses."""

    key: str
    example_id: str
    reward: float | None
    """None for an unusable sample."""
    value: float = 0.0
    salvaged: bool = False
    tokens: int = 0
    replies: Words = ()
    fault: str = ""
    """Why it is unusable: `unscored`, `hacked`, `truncated` or another status."""

    @property
    def rank(self) -> tuple[float, bool, float, int, str]:
        """Sort key; smaller is better."""
        return -(self.reward or 0.0), self.salvaged, -self.value, self.tokens, self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRules:
    """The rules of a selection."""

    high: float
    """The highest possible reward."""
    low: float
    """The lowest possible reward."""
    binary: bool
    min_reward: float | None = None
    keep_top: int = 1
    quota: int | None = None
    near: float = 0.8
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleChoice:
    """The selected samples of a task, with counts."""

    taken: tuple[SampleFacts, ...]
    passed: int
    duplicates: int
    overlaps: int
    faults: Mapping[str, int]
    below: int
    """Samples whose reward was too low."""


def sample_facts(record: Record) -> SampleFacts:
    """The facts about the sample in one record."""
    score = record.score
    turns = [turn.completion for trace in record.episode.traces for turn in trace.turns]
    texts = [turn.text for turn in turns]
    # Texts without words are compared as written.
    replies = tuple(w for text in texts for w in folded_words(text) or (text.strip(),))
    fault = _fault(record, [turn.stop_reason for turn in turns])
    return SampleFacts(
        key=record.key, example_id=record.example_id, reward=None if fault else score.reward,
        value=score.value or 0.0, salvaged=score.status == READABLE[1],
        tokens=sum(len(turn.token_ids) or turn.usage.completion_tokens for turn in turns),
        replies=replies, fault=fault,
    )  # fmt: skip


def _fault(record: Record, ends: Collection[str]) -> str:
    score = record.score
    if not score.scored or score.reward is None or not math.isfinite(score.reward):
        return "unscored"
    if score.status not in READABLE:
        return score.status
    if score.metrics.get("hacked"):
        return "hacked"
    if record.given is not None or record.kind != "draft":
        return "conditioned"  # on feedback, which is not in the trained prompt
    if not ends:
        return "empty"
    return "truncated" if CUT & set(ends) else ""


# -- choosing ------------------------------------------------------------------------------------


def choose_samples(
    samples: Iterable[SampleFacts], rules: SelectionRules, *, overlapping: Collection[str] = (),
    alike: Mapping[str, Collection[str]] | None = None,
) -> SampleChoice:  # fmt: skip
    """Select samples of one task, in a fixed order. `overlapping` rows are left out; `alike`: row →
    other rows with nearly the same text."""
    every = sorted({one.key: one for one in samples}.values(), key=lambda one: one.key)
    clean = [one for one in every if one.example_id not in overlapping]
    usable = [one for one in clean if one.reward is not None]
    passed = passing_samples(usable, rules)
    taken, duplicates = _distinct(passed, rules, alike or {})
    return SampleChoice(
        taken=tuple(taken), passed=len(passed), duplicates=duplicates,
        overlaps=len(every) - len(clean), below=len(usable) - len(passed),
        faults=dict(sorted(Counter(one.fault for one in clean if one.fault).items())),
    )  # fmt: skip


def passing_samples(samples: Sequence[SampleFacts], rules: SelectionRules) -> list[SampleFacts]:
    """The samples whose reward is high enough."""
    rewards: dict[str, list[float]] = {}
    for one in samples:
        rewards.setdefault(one.example_id, []).append(one.reward or 0.0)
    task_mean = fmean([one.reward or 0.0 for one in samples]) if samples else 0.0
    return [
        one
        for one in samples
        if _enough(one.reward or 0.0, rewards[one.example_id], task_mean, rules)
    ]


def _enough(reward: float, row: Sequence[float], task_mean: float, rules: SelectionRules) -> bool:
    if rules.min_reward is not None:
        return reward >= rules.min_reward
    if reward >= rules.high or rules.binary:
        return reward >= rules.high
    if reward <= rules.low:
        return False
    return reward > fmean(row) if max(row) > min(row) else reward >= task_mean


def _distinct(
    passed: Sequence[SampleFacts], rules: SelectionRules, alike: Mapping[str, Collection[str]]
) -> tuple[list[SampleFacts], int]:
    """The best distinct samples of each prompt, and the number of duplicates left out."""
    waiting: dict[str, list[SampleFacts]] = {}
    for one in sorted(passed, key=lambda one: one.rank, reverse=True):
        waiting.setdefault(one.example_id, []).append(one)
    order = sorted(waiting, key=lambda row: (share_of(f"quota/{rules.seed}", row), row))
    taken: dict[str, list[SampleFacts]] = {}
    count = duplicates = 0
    for _ in range(rules.keep_top):
        for row in order:
            if count == rules.quota:
                break
            others = [o for near in (row, *alike.get(row, ())) for o in taken.get(near, ())]
            while waiting[row]:
                one = waiting[row].pop()
                if not any(same_words(one.replies, o.replies, rules.near) for o in others):
                    taken.setdefault(row, []).append(one)
                    count += 1
                    break
                duplicates += 1
    return [one for row in sorted(taken) for one in taken[row]], duplicates


Message = tuple[Segment, bool]
"""One message of a conversation, and whether it is trained."""


def lesson_lines(record: Record, expert: Expert) -> Iterator[dict[str, Any]]:
    """The rows of selected.jsonl for one episode."""
    for trace in record.episode.traces:
        for messages in lesson_conversations(trace):
            exact = any(segment.token_ids for segment, _ in messages)
            tokenizer = {"tokenizer": expert.tokenizer_print} if exact else {}
            yield {
                "messages": [message_json(one, trained=trained) for one, trained in messages],
                "data_source": record.task, **tokenizer, "task": record.task,
                "example_id": record.example_id, "rollout": record.rollout, "seat": trace.seat,
                "value": record.score.value, "reward": record.score.reward,
                "expert": expert.weights or expert.model,
            }  # fmt: skip


def lesson_conversations(trace: Trace) -> list[list[Message]]:
    """The turns of one seat as conversations; each reply is trained in exactly one of them."""
    done: list[list[Message]] = []
    for turn in trace.turns:
        context = [  # without feedback
            Segment(one.role, one.text if one.bare is None else one.bare, token_ids=one.token_ids)
            for one in turn.context
        ]
        head = done[-1] if done and _goes_on(done[-1], context) else None
        if head is None:
            head = []
            done.append(head)
        head += [(segment, False) for segment in context[len(head) :]]
        reply = Segment("assistant", turn.completion.text, token_ids=turn.completion.token_ids)
        head.append((reply, True))
    return done


def _goes_on(head: Sequence[Message], context: Sequence[Segment]) -> bool:
    pairs = zip(head, context, strict=False)
    return len(context) >= len(head) and all(_same(m, segment) for (m, _), segment in pairs)


def _same(one: Segment, other: Segment) -> bool:
    exact = bool(one.token_ids and other.token_ids)
    same = one.token_ids == other.token_ids if exact else one.text == other.text
    return one.role == other.role and same


SCHEMA = "soulkit/selection@1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSelection:
    """Counts of the samples of one task: episodes, unless stated otherwise."""

    prompts: int
    """Played rows."""
    sampled: int
    scored: int
    """Samples with a score, without those of overlapping rows."""
    passed: int
    """Samples whose reward was high enough."""
    overlaps: int
    """Samples of rows that overlap evaluation rows."""
    duplicates: int
    """Samples left out because a selected one is (nearly) equal."""
    taken: int
    prompts_taken: int
    """Rows with a selected sample."""
    lines: int
    """Rows in selected.jsonl: one per acted seat and sequence."""
    tokens: int
    """Trained tokens in these rows, as sampled."""
    acceptance: float
    """passed / (sampled - overlaps): share of samples with a high enough reward."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Reason → number of unusable samples."""


@dataclass(frozen=True, slots=True)
class SampleSelection:
    """The contents of selection.json."""

    tasks: Mapping[str, TaskSelection]
    sha256: str
    """Hash of selected.jsonl."""
    settings: Mapping[str, Any]
    """Settings that the selection depends on."""
    reused: bool = False
    """Whether it was already on disk."""

    @property
    def lines(self) -> int:
        return sum(part.lines for part in self.tasks.values())


def select_samples(
    config: DistillConfig, experts: Sequence[Expert], out: Path, *, reporter: Reporter = SILENT
) -> SampleSelection:
    """Write selected.jsonl and selection.json unless they are up to date. RunError if samples are
    missing, DataError if rows overlap evaluation rows or no sample of a task passes."""
    refuse_other_samples(out, experts)
    settings = _settings(config, experts)
    selection = written_selection(out)
    if selection is not None and selection.settings == settings:
        reporter.note(f"selection: complete, {selection.lines} rows in {out / SELECTED}")
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
        reporter.note(_words(expert.task, parts[expert.task]))
    content = b"".join(lines)
    digest = hashlib.sha256(content).hexdigest()
    write_aside(out / SELECTED, content)
    selection = SampleSelection(parts, digest, settings)
    write_json(out / SELECTION, {
        "schema": SCHEMA, "settings": settings, "sha256": digest,
        "tasks": {name: asdict(part) for name, part in parts.items()},
    })  # fmt: skip
    return selection


def read_selection(out: Path) -> SampleSelection:
    """The selection on disk; RunError if there is none."""
    selection = written_selection(out)
    if selection is None:
        raise RunError(
            f"No samples have been selected in {out} yet.",
            f"There is no {SELECTION} that matches {SELECTED}.",
            "Run soul distill select first, with the same settings.",
        )
    return selection


def written_selection(out: Path) -> SampleSelection | None:
    """The content of selection.json if it is intact and matches selected.jsonl; else None."""
    try:
        line: dict[str, Any] = stored_json(out / SELECTION)
        with (out / SELECTED).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if line["schema"] != SCHEMA or line["sha256"] != digest:
            return None
        tasks = {name: TaskSelection(**part) for name, part in line["tasks"].items()}
        return SampleSelection(tasks, digest, line["settings"], reused=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _settings(config: DistillConfig, experts: Sequence[Expert]) -> dict[str, Any]:
    """What a selection depends on: settings of sample and select, and the experts' weights."""
    early = {k: v for k, v in config.identity().items() if set(stages_after({k})) & set(STAGES[:2])}
    weights = {one.task: one.weights or one.name for one in experts}
    plain: dict[str, Any] = json.loads(json.dumps({**early, "experts": weights}, default=str))
    return plain


# -- reading samples -----------------------------------------------------------------------------


def _samples(out: Path, part: Work, config: DistillConfig) -> list[SampleFacts]:
    """The facts about all samples of a task; RunError if some are missing."""
    path = samples_folder(out, part.task.name) / "episodes.jsonl"
    by_key: dict[str, SampleFacts] = {}
    for record in stream_records(path) if has_lines(path) else ():
        by_key[record.key] = sample_facts(record)
    every = draft_keys([part], config.samples)
    missing, strange = set(every) - by_key.keys(), by_key.keys() - set(every)
    if missing or strange:
        raise RunError(
            f"{path.parent} lacks {len(missing)} of {len(every)} samples, and has "
            f"{len(strange)} samples of other rows.",
            "The selection needs all samples.",
            "Run soul distill sample first, with the same settings and data files.",
        )
    return [by_key[key] for key in every]


def _alike(part: Work, near: float) -> Mapping[str, Collection[str]]:
    """Row → other rows with (nearly) the same text; within a cluster only equal ones count."""
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


def _rules(config: DistillConfig, part: Work) -> SelectionRules:
    metric = part.task.spec.metric
    return SelectionRules(
        high=metric.high, low=metric.low, binary=metric.binary, min_reward=config.min_reward,
        keep_top=config.keep_top, quota=config.quota, near=config.near, seed=config.seed,
    )  # fmt: skip


def _lines_of(folder: Path, choice: SampleChoice, expert: Expert) -> list[bytes]:
    keys = {one.key for one in choice.taken}
    by_key: dict[str, list[bytes]] = {}
    for record in stream_records(folder / "episodes.jsonl", keys=keys):
        by_key[record.key] = [
            (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode()
            for line in lesson_lines(record, expert)
        ]
    return [line for one in choice.taken for line in by_key[one.key]]


# -- counts --------------------------------------------------------------------------------------


def _counted(
    part: Work, samples: Sequence[SampleFacts], choice: SampleChoice, lines: Sequence[bytes]
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
        f"selected for {task}: {part.taken} samples of {part.prompts_taken} prompts "
        f"({part.passed} of {part.sampled} passed; left out: {part.duplicates} duplicates, "
        f"{part.overlaps} that overlap evaluation rows)"
    )


def _nothing(
    expert: Expert, samples: Sequence[SampleFacts], choice: SampleChoice, config: DistillConfig
) -> DataError:
    rewards = [one.reward for one in samples if one.reward is not None]
    best = f"the best reward is {max(rewards):g}" if rewards else "no sample has a reward"
    faults = [f"{name}: {count}" for name, count in choice.faults.items()]
    reasons = [f"reward too low: {choice.below}", *faults,
               f"overlapping evaluation rows: {choice.overlaps}"]  # fmt: skip
    return DataError(
        f"None of {len(samples)} samples of '{expert.task}' by {expert.name} can be used.",
        f"Reasons: {', '.join(reasons)}; {best}. The generalist would not learn this task.",
        f"Lower --min-reward, use more --samples than {config.samples} or other rows, or train the "
        "expert further.",
    )
