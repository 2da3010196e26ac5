"""`Task`: how to play, score, critique and summarise one benchmark.

The same methods serve evaluation, training and distillation; there is no other code path. A
choice task (`kit/choice.py`) adds `parse` and `grade`, a dialogue (`kit/dialogue.py`) its
prompts and ends.

Controls are anchors that a judge's points are read against: what it gives two real people, say. A
task declares them, asks its judges about them (`control`) and makes numbers of them (`calibrate`).
They never change an episode's own score.
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
    """Which play of an example this is: keys every random stream and every call in it."""

    index: int = 0
    kind: Kind = "draft"
    step: int = 0
    seed: int = 0
    feedback: Feedback | None = None

    def call(
        self, role: Role, example: Example, turn: int = 0, sample: int = 0, *, seat: str = "",
        purpose: str = "",
    ) -> Call:  # fmt: skip
        """A call of this play; `seat` and `purpose` where role and turn do not tell it apart."""
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
        """A stream of its own for choices that a task makes by chance."""
        return random.Random(f"{self.seed}/{example.id}/{self.index}/{self.kind}/{purpose}")


@dataclass(frozen=True, slots=True)
class Control:
    """One kind of control of a task."""

    name: str
    """Unique in the task: `human_human`."""
    per: Literal["row", "episode"]
    """Whether it is asked once a row (what people wrote does not change), or of every draft."""
    calls: Mapping[Role, int]
    """Role → calls of one control at most, with the task's own samples: what a plan counts."""
    pair_calls: int = 0
    """How many of a judge's ask about a pair, both orders together."""


def control_purpose(name: str) -> str:
    """The purpose of the calls of the control `name`."""
    return f"{CONTROL_PURPOSE}{name}"


class Task(ABC):
    """One benchmark. Instances are stateless; everything about a play comes in as arguments."""

    grades_cut_replies = False
    """Whether a single reply that ran into its limit is graded all the same; else it is truncated,
    and scores the minimum."""
    gold_is_script = False
    """Whether `gold` is for self-checks alone: lines that fit any row, which teach nobody."""
    pair_calls = 0
    """How many of a judge's calls on an episode ask about a pair, both orders together."""
    templates: Sequence[str] = ()
    """Templates whose hashes a score records."""

    def __init__(
        self, name: str, spec: TaskSpec, *, protocol: Protocol = "paper", folder: Path | None = None
    ) -> None:
        self.name = name
        self.spec = spec
        self.protocol: Protocol = protocol
        self.prompts = PromptFolder(name, folder or spec.home.folder, *_class_folders(type(self)))
        self.keep_options(spec.options)

    def keep_options(self, options: Mapping[str, Any]) -> None:
        """What a task keeps of its options. Raises ConfigError on values it cannot work with."""
        return None

    # -- rows ---------------------------------------------------------------------------------

    def example(self, row: Mapping[str, Any], *, source: str = "", split: str = "test") -> Example:
        """Bind a row's columns to the seats that may see them. Raises DataError on a bad row."""
        opened = with_unpacked(row, self.spec.unpack, source)
        fields = self.prepare(bind_columns(opened, self.spec.columns, self.name, source))
        identity = {k: v for k, v in fields.items() if self.spec.columns[k].identity}
        key = content_hash(self.name, identity)
        labels = {k: v for k, v in opened.items() if self._labels(k, v)}
        cluster_fields = self._cluster_fields(fields)
        cluster = content_hash("", cluster_fields)
        return Example(
            id=key,
            task=self.name,
            fields={**fields, **labels},
            audience={**self.audience(fields), **dict.fromkeys(labels, ("gold",))},
            seats=self.seats(fields),
            split=split,
            source=source,
            cluster=cluster if cluster_fields else key,  # a row that names no cluster stands alone
            tags=self.tags(fields),
            origin=self._origin(fields),
        )

    def _cluster_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The columns whose values name the row's cluster: its person, where it names one."""
        person = self.spec.person
        names = [person] if person and fields.get(person) else self.spec.cluster
        return {name: fields[name] for name in names if fields.get(name) is not None}

    def _origin(self, fields: Mapping[str, Any]) -> str:
        """The user's file that the row was made of; a task's own column of that name is none."""
        own = self.spec.columns[ORIGIN] != Column.model_validate(BOOKKEEPING[ORIGIN])
        return "" if own else str(fields.get(ORIGIN) or "")

    def _labels(self, column: str, value: Any) -> bool:
        """Whether a column is a human label that the task itself does not know."""
        declared = column in self.spec.columns
        return column.startswith(HUMAN) and not declared and isinstance(value, str | int | float)

    def examples(
        self, row: Mapping[str, Any], *, source: str = "", split: str = "test"
    ) -> tuple[Example, ...]:
        """What a row is played as: one example, unless the task plays it in several forms.

        Forms of one row share their cluster, and their ids stand next to each other when sorted.
        """
        return (self.example(row, source=source, split=split),)

    def with_baselines(self, examples: Sequence[Example]) -> Sequence[Example]:
        """The examples of a whole data set, each with what it must know of all of them (what people
        score on average, say); same order and number.

        Called once when rows are read, before any are left out.
        """
        return examples

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Normalise a bound row (parse list literals, say); DataError on what cannot be used."""
        return fields

    def seats(self, fields: Mapping[str, Any]) -> Mapping[str, Role]:
        """Seat → role in this row; a task whose rows say who acts overrides it."""
        return self.spec.seats

    def audience(self, fields: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        """Field → who may see it in this row."""
        return {name: column.audience for name, column in self.spec.columns.items()}

    def calls(self, example: Example) -> dict[Role, int]:
        """Calls of one episode at most, by role: what it needs filled, and what a plan counts."""
        turns = int(self.spec.options.get("max_turns", 1))
        return dict.fromkeys(sorted(set(example.seats.values())), turns)

    def shared_calls(self, example: Example) -> int:
        """How many of `calls` exclude each other because roles share turns."""
        return 0

    def usual_calls(self, example: Example) -> dict[Role, int]:
        """Expected calls of one episode by role, for the cost; by default the most (`calls`)."""
        return self.calls(example)

    def usual_lines(self, example: Example) -> dict[Role, int]:
        """Expected lines of one episode by role: what later prompts grow by. By default one for
        every usual call of actor, partner and environment."""
        usual = self.usual_calls(example)
        speakers: tuple[Role, ...] = ("actor", "partner", "environment")
        return {role: usual[role] for role in speakers if role in usual}

    def check_ready(self, examples: Sequence[Example]) -> None:
        """Raise a UserError where these rows need something besides models that is missing, such
        as a service or a file. Called before anything is paid for."""
        return None

    def remarks(self) -> Sequence[str]:
        """Sentences to print before a run starts, such as numbers that it will not have."""
        return ()

    def tags(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """Break-down values of a row."""
        columns = self.spec.tags
        return {tag: str(fields[c]) for tag, c in columns.items() if fields.get(c) is not None}

    def within_budget(self, view: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        """A seat's view with long texts cut to their word budgets; field → words cut."""
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
        """The seats that the actor plays in this row, in the row's order."""
        return tuple(seat for seat, role in example.seats.items() if role == "actor")

    def acted_seat(self, example: Example) -> str:
        """The seat that the actor plays; of several the first."""
        return self.acted_seats(example)[0]

    @property
    def strict_endings(self) -> bool:
        """Whether a cut reply is no answer, whatever can be read of it."""
        return self.protocol == "paper" and not self.grades_cut_replies

    # -- playing, scoring, feedback ------------------------------------------------------------

    @abstractmethod
    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        """Play the example once. A CallError means that something outside the actor broke."""

    @abstractmethod
    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        """Score an episode; the same function for drafts and refined ones."""

    async def judged(self, example: Example, episode: Episode, cast: Cast) -> Score:
        """`score` with as many opinions as declared, or what a broken call makes of it."""
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
        """Unscored; but the minimum, `forged`, where the actor's words posed as the verdict."""
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
        """The minimum for an actor that never said anything; no judge has anything to look at."""
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
        """Feedback on a scored draft: from the cast's coach, else from the task's own rules."""
        if cast.coach is None:
            text = self.explain(example, episode, score)
            return self.symbolic(text) if text else None
        prompt = self.coach_prompt(example, episode, score, cast)
        call = rollout.call("coach", example)
        feedback = await ask_coach(cast.coach, prompt, call, self.spec.feedback.max_words)
        dimensions = judged_dimensions(score) or (self.spec.metric.name,)
        return replace(feedback, kind=self.spec.feedback.kind, dimensions=dimensions)

    def coach_prompt(self, example: Example, episode: Episode, score: Score, cast: Cast) -> str:
        """What a model coach is asked; with the right answer where the cast or
        `feedback.gold_in_reference` says so."""
        prompt = self.prompts.render("coach", **self.coach_view(example, episode, score))
        as_reference = self.protocol == "reference" and self.spec.feedback.gold_in_reference
        gold = self.gold_text(example) if cast.coach_sees_gold or as_reference else ""
        return f"{prompt}\n\n{self.prompts.render('coach_gold', gold=gold)}" if gold else prompt

    def symbolic(self, text: str) -> Feedback:
        """Feedback that the task's own rules wrote, of the kind that the task gives."""
        return Feedback(text=text, author="symbolic", kind=self.spec.feedback.kind)

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        """The symbolic coach: feedback from rules, without a model. None: nothing to say."""
        return None

    def rehearse(self, example: Example, rng: random.Random) -> str | None:
        """Feedback as training will give it, without a draft: for lessons in using feedback."""
        return self.explain(example, None, None)

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        """What the model coach's template may use. The gold answer is not part of it."""
        fields = {k: v for k, v in example.visible("coach").items() if k not in self.gold_fields}
        lines = [(line.seat, line.text) for line in episode.transcript]
        if len(lines) > 1:  # a line break in speech could forge the line of another seat
            lines = [(seat, one_line(text)) for seat, text in lines]
        attempt = "\n".join(f"{seat}: {text}" for seat, text in lines)
        return {**fields, "attempt": attempt, "reward": score.reward}

    @property
    def gold_fields(self) -> tuple[str, ...]:
        return tuple(k for k, c in self.spec.columns.items() if "gold" in c.audience)

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode | None:
        """A scripted perfect episode: for self-checks and supervised warm-up."""
        return None

    def wrong(self, example: Example) -> Episode | None:
        """A scripted episode that is readable and not right: for self-checks."""
        return None

    def verdict(self, form: str, perfect: bool) -> str | None:
        """What a judge that is asked for `form` (its name, "" for a label) would answer on `gold`
        (perfect) or on `wrong`: for self-checks of a task that is scored by models.

        None: the task has no such script, and stays unscored there.
        """
        return None

    def scripted_verdict(self, form: Form | None, perfect: bool) -> str | None:
        """`verdict`, for a task whose verdicts name what stands in a row: the form lists it."""
        return self.verdict(form.name if form is not None else "", perfect)

    def other_prompts(
        self, example: Example, draft: Episode, score: Score
    ) -> Iterator[tuple[str, str]]:
        """(name, text) of prompts that playing, scoring and coaching this row by script does not
        render: for self-checks."""
        yield from ()

    def canary(self, example: Example, text: str) -> Episode | None:
        """An episode in which the actor says nothing but `text`, which no judge should like.

        By default for judged tasks of a single reply; None: there is no canary.
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
        """The gold answer as a reader would like to see it."""
        return ""

    def leak_view(self, example: Example) -> LeakView | None:
        """What a leak check needs to know; None when the task has no answer to give away."""
        return None

    def draft_view(self, example: Example, score: Score) -> LeakView | None:
        """`leak_view`, in which the draft's answer and what its actor has read are known."""
        view = self.leak_view(example)
        if view is None or not (view.options or view.gold):
            return view
        return view.of_draft(score.words, "\n".join(self._read(example)))

    def _read(self, example: Example) -> Iterator[str]:
        """The texts that every acted seat of a row reads, as far as budgets let it; no golds."""
        seats = self.acted_seats(example)
        views = [self.within_budget(example.visible(seat))[0] for seat in seats]
        for name, value in views[0].items():
            shared = all(view.get(name) == value for view in views)
            yield from texts_of(value) if shared and name not in self.gold_fields else ()

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """Metrics that exist only over a batch (joint accuracy, diversity), with what they count.

        Pure, and defined on every subset of the records: intervals leave out one cluster at a time.
        """
        return {}

    def group_rewards(self, records: Sequence[Record]) -> Sequence[Record]:
        """The rollouts of one row in one training step with rewards that depend on each other; the
        same records, in the same order. Called once a row, when all are scored."""
        return records

    # -- controls -----------------------------------------------------------------------------

    @property
    def controls(self) -> tuple[Control, ...]:
        """The controls of the task under its protocol, each name once; none by default."""
        return ()

    async def control(
        self, name: str, example: Example, episode: Episode | None, cast: Cast
    ) -> Score:
        """What the judges of the cast say of the control `name`.

        `episode` is the draft, or `gold(example)` for a control of the row. A CallError leaves the
        control unscored.
        """
        raise ConfigError(
            f"Task '{self.name}' cannot ask about its control '{name}'.",
            "It declares controls, and does not define control().",
            "Define control() in the task's class.",
        )

    async def controlled(
        self, name: str, example: Example, episode: Episode | None, cast: Cast
    ) -> Score:
        """`control`, or what a broken call makes of it; the calls say that they are a control's."""
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
        """Numbers over a batch that take its controls into account.

        Pure, and defined on every subset, like `summarise`; unscored controls are among them.
        """
        return {}

    def calibration_remarks(self, values: Mapping[str, float | None]) -> Sequence[str]:
        """Sentences on the numbers of a run with controls (metric → value): why one has none."""
        return ()

    # -- batches ------------------------------------------------------------------------------

    def batch_metrics(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """`summarise` with the means that the task declares by their parts.

        Where it breaks, the only number is a `task_error` without a value.
        """
        lost = {TaskError.reason: BatchMetric(None, len(drafts(records)), 0)}
        # The published code has no parts: `reference` is the mean of its scores.
        declared = self.spec.metric.parts if self.protocol == "paper" else {}

        def numbers(rows: Sequence[Record]) -> dict[str, BatchMetric]:
            return as_batch_metrics(self.summarise(rows), rows)

        made = partial(with_declared_means, declared, self.headline_metric, numbers, records)
        return or_default(self, "summarise", made, lost)

    @property
    def headline_metric(self) -> str:
        """The batch metric that is the headline; empty: the mean of the scores, as always under
        `reference`."""
        return self.spec.metric.headline if self.protocol == "paper" else ""

    def headline(self, records: Sequence[Record]) -> float | None:
        """The headline of these records, None where it cannot be computed; of a mean with parts
        missing the mean of the others, as training needs one number."""
        if self.headline_metric:
            metric = self.batch_metrics(without_origins(records)).get(self.headline_metric)
            return None if metric is None else metric.value
        return mean_of([record.score.value for record in drafts(records)]).value

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        """The one message of the seat's conversation that holds the feedback slot.

        `text` has the slot filled (empty without feedback), `bare` has it empty.
        """
        raise ConfigError(
            f"Task '{self.name}' cannot fill the feedback slot of a conversation.",
            "A teacher that reads the feedback needs the same conversation with the slot filled.",
            "Define slot() in the task's class.",
        )

    def preview(self, example: Example) -> tuple[Segment, ...]:
        """The context of the actor's first turn without feedback: for plans and length checks."""
        if type(self).previews is not Task.previews:
            return self.previews(example)[self.acted_seat(example)]
        raise ConfigError(
            f"Task '{self.name}' cannot show its first prompt.",
            "It does not define preview().",
            "Define preview() in the task's class.",
        )

    def previews(self, example: Example) -> Mapping[str, tuple[Segment, ...]]:
        """Acted seat → its `preview`; a task in which the actor has several seats overrides it."""
        return {seat: self.preview(example) for seat in self.acted_seats(example)[:1]}

    def public_words(self, line: Line) -> str:
        """What everybody hears of a recorded line; a task whose lines hold more overrides it."""
        return spoken(line.text, self.protocol)


def _class_folders(cls: type[Task]) -> Iterator[Path]:
    for each in cls.__mro__:
        with suppress(TypeError, OSError):  # a class typed in at a prompt or in a notebook
            file = Path(inspect.getfile(each))
            if issubclass(each, Task) and file.is_file():
                yield file.parent


def dropped_note(completions: Iterable[Completion]) -> dict[str, list[str]]:
    """The notes of an episode on sampling parameters that the server refused or ignored, if any."""
    replies = list(completions)
    names = {
        "dropped": sorted({name for reply in replies for name in reply.dropped}),
        "ignored": sorted({name for reply in replies for name in reply.ignored}),
    }
    return {note: of_note for note, of_note in names.items() if of_note}
