"""`Task`: how to play, score, critique and summarise one benchmark.

Evaluation, training and distillation all use these methods. A choice task (`kit/choice.py`) adds
`parse` and `grade`, a dialogue (`kit/dialogue.py`) its prompts and endings.

Controls calibrate a judge, for example with its score for two real people. A task declares them,
asks its judges about them (`control`) and computes metrics from them (`calibrate`). They never
change an episode's own score.
"""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from soulkit.data.literals import texts_of
from soulkit.data.rows import HUMAN, Column, bind_columns, content_hash, with_unpacked
from soulkit.errors import CallError, ConfigError, TaskError, UnreadableVerdict
from soulkit.judge.coach import ask_coach
from soulkit.judge.leaks import LeakView
from soulkit.judge.panel import reading_metrics
from soulkit.judge.verdict import spoken
from soulkit.judge.verdict import utterances as utterances
from soulkit.models.base import Cast
from soulkit.runs.records import drafts
from soulkit.tasks.kit.coaching import judged_dimensions
from soulkit.tasks.kit.prompting import PromptFolder, first_words, last_words
from soulkit.tasks.kit.scoring import READABLE as READABLE
from soulkit.tasks.kit.scoring import (
    actor_status,
    as_batch_metrics,
    mean_of,
    with_declared_means,
    with_endings,
    without_origins,
)
from soulkit.tasks.kit.spec import BOOKKEEPING, ORIGIN, TaskSpec
from soulkit.tasks.kit.user_code import checked_score, or_default, task_code
from soulkit.text import one_line
from soulkit.types import (
    CONTROL_PURPOSE,
    BatchMetric,
    Call,
    Completion,
    ControlRecord,
    Episode,
    Example,
    Failure,
    Feedback,
    Form,
    Kind,
    Line,
    Protocol,
    Record,
    Role,
    Score,
    Segment,
    Trace,
    Turn,
    Verdict,
    unscored,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Identifies one play of an example; seeds every random stream and call in it."""

    index: int = 0
    kind: Kind = "draft"
    step: int = 0
    seed: int = 0
    feedback: Feedback | None = None

    def call(
        self, role: Role, example: Example, turn: int = 0, sample: int = 0, *, seat: str = "",
        purpose: str = "",
    ) -> Call:  # fmt: skip
        """Identify a model call in this play; give `seat` or `purpose` if role and turn are not
        unique."""
        return Call(
            role=role,
            example_id=example.id,
            rollout=self.index,
            kind=self.kind,
            turn=turn,
            sample=sample,
            step=self.step,
            seat=seat,
            purpose=purpose,
        )

    def rng(self, example: Example, purpose: str) -> random.Random:
        """A separate random stream for a task's random choices."""
        return random.Random(f"{self.seed}/{example.id}/{self.index}/{self.kind}/{purpose}")


@dataclass(frozen=True, slots=True)
class Control:
    """A kind of control that a task declares."""

    name: str
    """Unique in the task: `human_human`."""
    per: Literal["row", "episode"]
    """Asked once per row (its human texts never change), or once per draft."""
    calls: Mapping[Role, int]
    """Role → maximum number of calls per control, with the task's own samples; used in plans."""
    pair_calls: int = 0
    """How many of the judge's calls compare a pair, counting both orders."""


def control_purpose(name: str) -> str:
    """The purpose of the calls of the control `name`."""
    return f"{CONTROL_PURPOSE}{name}"


class Task(ABC):
    """One benchmark. Instances are stateless: every play gets its data as arguments."""

    grades_cut_replies = False
    """Whether a single reply that hit its length limit is still graded; otherwise it is truncated
    and scores the minimum."""
    gold_is_script = False
    """Whether `gold` is only for self-checks: generic lines that are useless for training."""
    plain_talk = False
    """Whether the actor's replies are the messages that others read, so that a server can play the
    actor of a row, and `--prompt-mode replace` may replace its system prompt."""
    pair_calls = 0
    """How many of a judge's calls per episode compare a pair, counting both orders."""
    code_files: Sequence[Path] = ()
    """Files with the user's code that an option names; their hashes are recorded."""
    templates: Sequence[str] = ()
    """Templates whose hashes are recorded in scores."""

    def __init__(
        self, name: str, spec: TaskSpec, *, protocol: Protocol = "paper", folder: Path | None = None
    ) -> None:
        self.name = name
        self.spec = spec
        self.protocol: Protocol = protocol
        self.prompts = PromptFolder(name, folder or spec.home.folder, *_class_folders(type(self)))
        self._audience = {name: column.audience for name, column in spec.columns.items()}
        self.keep_options(spec.options)

    def keep_options(self, options: Mapping[str, Any]) -> None:
        """Store the task's options. Raises ConfigError on invalid values."""
        return None

    # -- rows ---------------------------------------------------------------------------------

    def example(self, row: Mapping[str, Any], *, source: str = "", split: str = "test") -> Example:
        """Bind a row's columns to the seats that may see them. Raises DataError on a bad row."""
        opened = with_unpacked(row, self.spec.unpack, source)
        fields = self.prepare(bind_columns(opened, self.spec.columns, self.name, source))
        identity = {k: v for k, v in fields.items() if self.spec.columns[k].identity}
        key = content_hash(self.name, identity)
        others = self.other_columns(opened)
        cluster_fields = self._cluster_fields(fields)
        cluster = content_hash("", cluster_fields)
        return Example(
            id=key,
            task=self.name,
            fields={**fields, **{name: opened[name] for name in others}},
            audience={**self.audience(fields), **others} if others else self.audience(fields),
            seats=self.seats(fields),
            split=split,
            source=source,
            cluster=cluster if cluster_fields else key,  # a row without a cluster is its own
            tags=self.tags(fields),
            origin=self._origin(fields),
        )

    def _cluster_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What names the row's cluster: its person, if it has one, the same in every task."""
        if self.spec.person and (person := fields.get(self.spec.person)):
            return {"person": str(person)}
        return {name: fields[name] for name in self.spec.cluster if fields.get(name) is not None}

    def _origin(self, fields: Mapping[str, Any]) -> str:
        """The user's file that the row comes from; empty if the task redefines that column."""
        own = self.spec.columns[ORIGIN] != Column.model_validate(BOOKKEEPING[ORIGIN])
        return "" if own else str(fields.get(ORIGIN) or "")

    def other_columns(self, row: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """Columns of a row that the task does not declare but keeps, with their audience: human
        labels. They are no part of the row's id."""
        labels = {
            k for k, v in row.items() if k.startswith(HUMAN) and isinstance(v, str | int | float)
        }
        return {name: ("gold",) for name in row if name in labels - set(self.spec.columns)}

    def examples(
        self, row: Mapping[str, Any], *, source: str = "", split: str = "test"
    ) -> tuple[Example, ...]:
        """The examples of a row: one, unless the task plays the row in several forms.

        Forms of a row share their cluster, and sorting by id keeps them together.
        """
        return (self.example(row, source=source, split=split),)

    def with_baselines(self, examples: Sequence[Example]) -> Sequence[Example]:
        """The same examples in the same order, with statistics over the whole data set added if the
        task needs them (such as people's average score).

        Called once when rows are read, before any are filtered out.
        """
        return examples

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Normalise a bound row (for example, parse list literals); DataError if it is unusable."""
        return fields

    def seats(self, fields: Mapping[str, Any]) -> Mapping[str, Role]:
        """Seat → role in this row; overridden by tasks whose rows name the actor."""
        return self.spec.seats

    def audience(self, fields: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        """Field → who may see it in this row."""
        return self._audience  # one object for all rows

    def calls(self, example: Example) -> dict[Role, int]:
        """Role → maximum number of calls per episode. Its keys are the roles that need a player."""
        turns = int(self.spec.options.get("max_turns", 1))
        return dict.fromkeys(sorted(set(example.seats.values())), turns)

    def shared_calls(self, example: Example) -> int:
        """The number of calls that `calls` counts too many because some roles share turns."""
        return 0

    def usual_calls(self, example: Example) -> dict[Role, int]:
        """Role → expected calls per episode, for the cost estimate; by default the maximum."""
        return self.calls(example)

    def usual_lines(self, example: Example) -> dict[Role, int]:
        """Role → expected number of lines per episode (lines lengthen later prompts). By default
        one per expected call of actor, partner and environment."""
        usual = self.usual_calls(example)
        speakers: tuple[Role, ...] = ("actor", "partner", "environment")
        return {role: usual[role] for role in speakers if role in usual}

    def check_ready(self, examples: Sequence[Example]) -> None:
        """Raise a UserError if these rows need something missing besides models, such as a service
        or a file. Called before any paid call."""
        return None

    def remarks(self) -> Sequence[str]:
        """Sentences to print before a run, such as which metrics will be missing."""
        return ()

    def tags(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """Breakdown values of a row."""
        columns = self.spec.tags
        return {tag: str(fields[c]) for tag, c in columns.items() if fields.get(c) is not None}

    def within_budget(self, view: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        """A seat's view with long texts cut to their word budgets, and the words cut per field."""
        fitted, cuts = dict(view), {}
        for name, value in view.items():
            column = self.spec.columns.get(name)
            budget = column.max_words if column is not None else None
            total = len(value.split()) if isinstance(value, str) else 0
            if column is not None and budget and total > budget:
                shorten = last_words if column.keep == "last" else first_words
                fitted[name] = shorten(value, budget)
                cuts[name] = total - budget
        return fitted, cuts

    def acted_seats(self, example: Example) -> tuple[str, ...]:
        """The seats that the actor plays in this row, in row order."""
        return tuple(seat for seat, role in example.seats.items() if role == "actor")

    def acted_seat(self, example: Example) -> str:
        """The first seat that the actor plays."""
        return self.acted_seats(example)[0]

    @property
    def strict_endings(self) -> bool:
        """Whether a truncated reply counts as no answer even if it is readable."""
        return self.protocol == "paper" and not self.grades_cut_replies

    # -- playing, scoring, feedback ------------------------------------------------------------

    @abstractmethod
    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        """Play the example once. A CallError means that a model other than the actor failed."""

    @abstractmethod
    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        """Score an episode; drafts and refined rollouts are scored the same way."""

    async def judged(self, example: Example, episode: Episode, cast: Cast) -> Score:
        """`score` with the declared number of samples; after a CallError the episode is
        unscored."""
        try:
            with task_code(self, "score"):
                score = await self.score(example, episode, self._asking(cast))
                dialogue = self.calls(example).get("actor", 1) > 1
            score = checked_score(self, score)
        except CallError as error:
            return self._without_score(episode, error)
        low = self.spec.metric.low
        score = with_endings(score, episode, low, strict=self.strict_endings, dialogue=dialogue)
        return replace(score, metrics={**score.metrics, **reading_metrics(score.verdicts)})

    def _asking(self, cast: Cast) -> Cast:
        return replace(cast, panel=replace(cast.panel, questions=self.spec.samples))

    def _without_score(self, episode: Episode, error: CallError) -> Score:
        """Unscored; but `forged` with the minimum if the actor imitated the judge's verdict."""
        forgery = error.forgery if isinstance(error, UnreadableVerdict) else None
        if forgery is None or not any(map(forgery, utterances(episode))):
            return unscored(Failure(error.reason, error.detail), self.protocol)
        low = self.spec.metric.low
        return Score(
            value=low, reward=low, status="forged", words=error.detail, protocol=self.protocol
        )

    def judged_score(
        self, value: float | None, metrics: Mapping[str, float | None],
        verdicts: Iterable[Verdict] = (), *, status: str = "ok", words: str = "",
        templates: Sequence[str] = (),
    ) -> Score:  # fmt: skip
        """A score of this task, with the hashes of `templates` (by default the class's)."""
        return Score(
            value=value, reward=value, metrics=metrics, status=status, words=words,
            protocol=self.protocol, prompts=self.prompts.hashes(*(templates or self.templates)),
            verdicts=tuple(verdicts),
        )  # fmt: skip

    def silent_score(
        self, episode: Episode, words: str, metrics: Mapping[str, float | None],
        parsed: str = "empty", *, templates: Sequence[str] = (),
    ) -> Score:  # fmt: skip
        """The minimum score for an actor that never said anything; the judge is not asked."""
        final = episode.final
        status = "empty" if final is None else actor_status(final, parsed, self.strict_endings)
        low = self.spec.metric.low
        return self.judged_score(low, metrics, status=status, words=words, templates=templates)

    def gate(self, score: Score, step: int) -> bool:
        """Whether a draft with this score gets feedback under `--feedback-for task`."""
        limits = self.spec.feedback
        below = score.reward is not None and score.reward < limits.below
        return below and (limits.until_step is None or step < limits.until_step)

    async def critique(
        self, example: Example, episode: Episode, score: Score, cast: Cast, rollout: Rollout
    ) -> Feedback | None:
        """Feedback on a scored draft, from the cast's coach or else from the task's rules."""
        if cast.coach is None:
            text = self.explain(example, episode, score)
            return self.symbolic(text) if text else None
        prompt = self.coach_prompt(example, episode, score, cast)
        call = rollout.call("coach", example)
        feedback = await ask_coach(cast.coach, prompt, call, self.spec.feedback.max_words)
        dimensions = judged_dimensions(score) or (self.spec.metric.name,)
        return replace(feedback, kind=self.spec.feedback.kind, dimensions=dimensions)

    def coach_prompt(self, example: Example, episode: Episode, score: Score, cast: Cast) -> str:
        """The prompt of a model coach; includes the gold answer if the cast or
        `feedback.gold_in_reference` says so."""
        prompt = self.prompts.render("coach", **self.coach_view(example, episode, score))
        as_reference = self.protocol == "reference" and self.spec.feedback.gold_in_reference
        gold = self.gold_text(example) if cast.coach_sees_gold or as_reference else ""
        return f"{prompt}\n\n{self.prompts.render('coach_gold', gold=gold)}" if gold else prompt

    def symbolic(self, text: str) -> Feedback:
        """Feedback by the task's own rules, of the task's kind."""
        return Feedback(text=text, author="symbolic", kind=self.spec.feedback.kind)

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        """Rule-based feedback, without a model; None if there is none for this draft."""
        return None

    def rehearse(self, example: Example, rng: random.Random) -> str | None:
        """Feedback that needs no draft, for training the model to use feedback."""
        return self.explain(example, None, None)

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        """The values for the coach's template, without the gold answer."""
        fields = {k: v for k, v in example.visible("coach").items() if k not in self.gold_fields}
        lines = [(line.seat, line.text) for line in episode.transcript]
        if len(lines) > 1:  # a line break in a turn could forge another seat's line
            lines = [(seat, one_line(text)) for seat, text in lines]
        attempt = "\n".join(f"{seat}: {text}" for seat, text in lines)
        return {**fields, "attempt": attempt, "reward": score.reward}

    @property
    def gold_fields(self) -> tuple[str, ...]:
        return tuple(k for k, c in self.spec.columns.items() if "gold" in c.audience)

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode | None:
        """A scripted perfect episode, for self-checks and supervised warm-up."""
        return None

    def wrong(self, example: Example) -> Episode | None:
        """A scripted episode, readable but wrong, for self-checks."""
        return None

    def verdict(self, form: str, perfect: bool) -> str | None:
        """The judge's scripted answer on `gold` (`perfect`) or on `wrong`, for self-checks of
        judged tasks; `form` is the name of the verdict's schema ("" for a label).

        None: no script, so the row stays unscored in the check.
        """
        return None

    def scripted_verdict(self, form: Form | None, perfect: bool) -> str | None:
        """The scripted verdict for `form`; overridden by tasks whose valid verdicts depend on the
        row."""
        return self.verdict(form.name if form is not None else "", perfect)

    def other_prompts(
        self, example: Example, draft: Episode, score: Score
    ) -> Iterator[tuple[str, str]]:
        """Prompts, as (name, text), that playing, scoring and critiquing this row from a script do
        not render. Self-checks use them."""
        yield from ()

    def canary(self, example: Example, text: str) -> Episode | None:
        """An episode in which the actor says only `text`, which no judge should score well.

        By default only judged tasks with a single reply have canaries; None for other tasks.
        """
        calls = self.calls(example)
        if not calls.get("judge") or calls.get("actor") != 1:
            return None
        seat, turn = self.acted_seat(example), Turn(self.preview(example), Completion(text=text))
        return Episode(
            example_id=example.id, task=self.name, traces=(Trace(seat, (turn,)),),
            transcript=(Line(seat, text),),
        )  # fmt: skip

    def gold_text(self, example: Example) -> str:
        """The gold answer in readable form."""
        return ""

    def leak_view(self, example: Example) -> LeakView | None:
        """The data of a leak check; None if the task has no answer that could leak."""
        return None

    def draft_view(self, example: Example, score: Score) -> LeakView | None:
        """`leak_view`, extended by the draft's answer and the texts that the actor has read."""
        view = self.leak_view(example)
        if view is None or not (view.options or view.gold):
            return view
        return view.of_draft(score.words, "\n".join(self._read(example)))

    def _read(self, example: Example) -> Iterator[str]:
        """The texts that every acted seat of a row reads, after budgets; without golds."""
        seats = self.acted_seats(example)
        views = [self.within_budget(example.visible(seat))[0] for seat in seats]
        for name, value in views[0].items():
            shared = all(view.get(name) == value for view in views)
            yield from texts_of(value) if shared and name not in self.gold_fields else ()

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """Metrics that exist only over a batch (joint accuracy, diversity), with their counts.

        Must be pure and accept every subset of the records, because intervals leave out one cluster
        at a time.
        """
        return {}

    @property
    def batch_reads_texts(self) -> bool:
        """Whether `summarise` or `calibrate` may read long texts, as code of users may."""
        hooks = (self.summarise, self.calibrate)
        return not all(hook.__module__.startswith("soulkit.") for hook in hooks)

    def group_rewards(self, records: Sequence[Record]) -> Sequence[Record]:
        """The rollouts of one row in one training step, with rewards that depend on the whole
        group. Returns the same records in the same order. Called once per row, after all are
        scored."""
        return records

    # -- controls -----------------------------------------------------------------------------

    @property
    def controls(self) -> tuple[Control, ...]:
        """The task's controls under its protocol, with unique names; none by default."""
        return ()

    async def control(
        self, name: str, example: Example, episode: Episode | None, cast: Cast
    ) -> Score:
        """The judges' score for the control `name`.

        `episode` is the draft, or `gold(example)` for a control per row. A CallError leaves the
        control unscored.
        """
        raise ConfigError(
            f"Task '{self.name}' cannot score its control '{name}'.",
            "It declares controls but does not define control().",
            "Define control() in the task's class.",
        )

    async def controlled(
        self, name: str, example: Example, episode: Episode | None, cast: Cast
    ) -> Score:
        """`control`, or unscored if a call fails; its calls are marked as a control's."""
        try:
            cast = replace(self._asking(cast), purpose=control_purpose(name))
            with task_code(self, "control"):
                score = await self.control(name, example, episode, cast)
            score = checked_score(self, score, "control")
        except CallError as error:
            return unscored(Failure(error.reason, error.detail), self.protocol)
        return replace(score, metrics={**score.metrics, **reading_metrics(score.verdicts)})

    def calibrate(
        self, records: Sequence[Record], controls: Sequence[ControlRecord]
    ) -> dict[str, BatchMetric]:
        """Batch metrics that use the controls, including unscored ones. Must be pure and accept
        every subset, like `summarise`.
        """
        return {}

    def calibration_remarks(self, values: Mapping[str, float | None]) -> Sequence[str]:
        """Notes on the metrics of a run with controls (metric → value), such as why one is None."""
        return ()

    # -- batches ------------------------------------------------------------------------------

    def batch_metrics(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """The metrics of `summarise`, plus the means that the task declares.

        If the task's code raises, the only metric is a `task_error` without a value.
        """
        lost = {TaskError.reason: BatchMetric(None, len(drafts(records)), 0)}
        # The published code has no parts: `reference` averages the scores.
        declared = self.spec.metric.parts if self.protocol == "paper" else {}

        def numbers(rows: Sequence[Record]) -> dict[str, BatchMetric]:
            return as_batch_metrics(self.summarise(rows), rows)

        made = partial(with_declared_means, declared, self.headline_metric, numbers, records)
        return or_default(self, "summarise", made, lost)

    @property
    def headline_metric(self) -> str:
        """Name of the headline's batch metric. Empty: the headline is the mean of the scores, as it
        always is under `reference`."""
        return self.spec.metric.headline if self.protocol == "paper" else ""

    def headline(self, records: Sequence[Record]) -> float | None:
        """The headline of these records, or None; missing parts are left out of the mean, because
        training needs a number."""
        if self.headline_metric:
            metric = self.batch_metrics(without_origins(records)).get(self.headline_metric)
            return None if metric is None else metric.value
        return mean_of([record.score.value for record in drafts(records)]).value

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        """The message in the seat's conversation that holds the feedback slot.

        In `text` the slot is filled (empty without feedback), in `bare` it is empty.
        """
        raise ConfigError(
            f"Task '{self.name}' cannot put feedback into a conversation.",
            "A teacher with feedback needs the same conversation with the slot filled.",
            "Define slot() in the task's class.",
        )

    def preview(self, example: Example) -> tuple[Segment, ...]:
        """The context of the actor's first turn without feedback, for plans and length checks."""
        if type(self).previews is not Task.previews:
            return self.previews(example)[self.acted_seat(example)]
        raise ConfigError(
            f"Task '{self.name}' cannot show its first prompt.",
            "It does not define preview().",
            "Define preview() in the task's class.",
        )

    def previews(self, example: Example) -> Mapping[str, tuple[Segment, ...]]:
        """Acted seat → its `preview`; overridden by tasks in which the actor plays several
        seats."""
        return {seat: self.preview(example) for seat in self.acted_seats(example)[:1]}

    def public_words(self, line: Line) -> str:
        """The part of a recorded line that all seats hear; overridden if lines also hold private
        text."""
        return spoken(line.text, self.protocol)


def _class_folders(cls: type[Task]) -> Iterator[Path]:
    for each in cls.__mro__:
        with suppress(TypeError, OSError):  # a class defined in a shell or notebook
            file = Path(inspect.getfile(each))
            if issubclass(each, Task) and file.is_file():
                yield file.parent


def dropped_note(completions: Iterable[Completion]) -> dict[str, list[str]]:
    """Episode notes on sampling parameters that the server refused or ignored, if any."""
    replies = list(completions)
    names = {
        "dropped": sorted({name for reply in replies for name in reply.dropped}),
        "ignored": sorted({name for reply in replies for name in reply.ignored}),
    }
    return {note: of_note for note, of_note in names.items() if of_note}
