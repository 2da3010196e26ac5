"""The records of the road: what every layer reads and writes.

Frozen dataclasses, no I/O, no live models, no torch. An Example is played into an Episode, an
Episode is scored, a Score may be critiqued into Feedback, and Feedback conditions a refined
Episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

Role = Literal["actor", "partner", "environment", "judge", "auditor", "coach", "drafter", "filter"]
"""What a live model does; a Cast fills the roles at the table with models. `drafter` and `filter`
sit at none: one writes what a row lacks, the other says whether it may become one."""

Kind = Literal["draft", "refined", "gold"]
"""How an episode came about. (A *copy* is a training sequence, not an episode.)"""

Protocol = Literal["paper", "reference"]

LeakCheck = Literal["off", "log", "drop"]
"""What becomes of feedback that gives the answer away."""


MAX_TOKENS = 8192
"""The longest reply where neither a task nor a setting says less (Ditto paper, §5)."""

LEAST_ROOM = 512
"""A row fits where its reply has room for so many tokens, or for its limit where that is less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row of a task, its fields bound to the seats that may see them."""

    id: str
    """Content hash: equal rows have equal ids, wherever they were read."""
    task: str
    fields: Mapping[str, Any]
    audience: Mapping[str, tuple[str, ...]]
    """Field name → who may see it: seats, or the readers `judge`, `coach` and `gold`."""
    seats: Mapping[str, Role]
    """Seat → the role that plays it in this row."""
    split: str = "test"
    source: str = ""
    """Provenance, `file:line`."""
    cluster: str = ""
    """Rows of one cluster (one story, one conversation) are resampled together."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Values that break-downs group by: order, deception, question type."""
    origin: str = ""
    """The file of somebody's own that the row was made of; empty for any other row."""

    def visible(self, reader: str) -> dict[str, Any]:
        """The fields that `reader` (a seat, `judge`, `coach` or `gold`) may see."""
        return {k: v for k, v in self.fields.items() if reader in self.audience.get(k, ())}


@dataclass(frozen=True, slots=True)
class Segment:
    """One message of a context.

    `bare` is the same message with its feedback slot empty (None: the message has no slot); a copy
    swaps `text` for `bare`. `token_ids` are the ids the actor emitted, so nothing is re-tokenised.
    """

    role: Literal["system", "user", "assistant"]
    text: str
    bare: str | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Form:
    """The shape that a reply is asked to have: a JSON Schema as canonical JSON text, and its name.

    A server that cannot hold a model to it is asked without; whoever reads the reply checks it.
    """

    name: str
    schema: str


ADDED_LATER = MappingProxyType({"added": "later"})
"""Marks a setting that older keys do not hold; its default must be neutral."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one completion. Servers may refuse some of it; what is dropped is recorded."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = MAX_TOKENS
    seed: int | None = None
    stop: tuple[str, ...] = ()
    thinking: bool | None = None
    reasoning_effort: str | None = None
    form: Form | None = field(default=None, metadata=ADDED_LATER)
    top_k: int = field(default=0, metadata=ADDED_LATER)
    """Draw from so many of the likeliest tokens; 0: from all."""
    min_p: float = field(default=0.0, metadata=ADDED_LATER)
    """Draw from tokens at least so many times as likely as the likeliest one; 0: from all."""

    @classmethod
    def first_of(cls, *sources: Mapping[str, Any]) -> Sampling:
        """Each setting from the first source that names it (None is no value), else its default."""
        names = [setting.name for setting in fields(cls)]
        return cls(**{
            name: source[name]
            for source in reversed(sources) for name in names if source.get(name) is not None
        })  # fmt: skip

    @property
    def cuts(self) -> bool:
        """Whether unlikely tokens are left out of the draw."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def identity(self) -> dict[str, Any]:
        """The settings that name a reply in ledgers. Settings that were added later are left out
        where they have their default, so that keys recorded before stay valid."""
        later = {one.name: one.default for one in fields(self) if one.metadata == ADDED_LATER}
        return {k: v for k, v in asdict(self).items() if k not in later or v != later[k]}


CONTROL_PURPOSE = "control/"
"""What the purpose of every call about a control begins with; the control's name follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Who asks for a completion: keys its random stream and its ledger entry."""

    role: Role
    example_id: str
    rollout: int = 0
    kind: Kind = "draft"
    turn: int = 0
    sample: int = 0
    """Repetition of one question: the judge samples of an episode, the reads of a blind reader."""
    step: int = 0
    """The training step (0 in evaluation): the same example drafted at two steps is two calls."""
    seat: str = ""
    """Which seat speaks, where several of one role have a turn."""
    purpose: str = ""
    """What the call is for, where one role has several things to do in a turn."""

    def identity(self) -> dict[str, Any]:
        """The fields that name the call; seat and purpose are left out where they are empty, so
        that whoever needs neither keeps the keys and random streams from before there were any."""
        fields = asdict(self)
        return {k: v for k, v in fields.items() if v != "" or k not in ("seat", "purpose")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What completions cost. `cost` is in US dollars, None when no price is known."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """With the reasoning, as it is billed."""
    seconds: float = 0.0
    cost: float | None = None
    reasoning_tokens: int = 0
    """Of the completion tokens those of the reasoning, as far as servers tell."""

    def __add__(self, other: Usage) -> Usage:
        costs = [c for c in (self.cost, other.cost) if c is not None]
        return Usage(
            calls=self.calls + other.calls,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            seconds=self.seconds + other.seconds,
            cost=sum(costs) if costs else None,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One reply. API models leave `prompt_ids`, `token_ids` and `logprobs` empty."""

    text: str
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    """Emitted ids, the end-of-turn token included when it was emitted."""
    logprobs: tuple[float, ...] = ()
    """One per emitted id, of logits / temperature, from the sampler."""
    stop_reason: str = "stop"
    """`stop` | `length` | `content_filter` | `refusal` (the reply says why) | whatever else the
    server says."""
    reasoning: str = ""
    usage: Usage = Usage()
    dropped: tuple[str, ...] = ()
    """Sampling parameters that the server refused."""
    ignored: tuple[str, ...] = ()
    """Sampling parameters that the server took, and that its reply shows it did not follow."""
    policy: str = ""
    """Hash of the adapter that sampled, empty without one."""
    server: str = ""
    """Address of the vLLM server that sampled the reply; empty for any other model."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a seat saw and what it then emitted."""

    context: tuple[Segment, ...]
    completion: Completion


@dataclass(frozen=True, slots=True)
class Trace:
    """The turns of one acted seat, in order."""

    seat: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One readable line of a transcript."""

    seat: str
    text: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an episode is unscored: something outside the actor broke.

    `reason` is a slug: `provider_error`, `partner_error`, `judge_error`, `context_overflow`,
    `task_error` (the task's own code broke: `detail` names file and line).
    """

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What happened in one play of one example."""

    example_id: str
    task: str
    kind: Kind = "draft"
    rollout: int = 0
    step: int = 0
    """The training step, 0 in evaluation: whoever judges the episode keys its calls with it."""
    traces: tuple[Trace, ...] = ()
    """One trace per acted seat (the seats of role `actor`), none for the others."""
    transcript: tuple[Line, ...] = ()
    stop: str = "done"
    failure: Failure | None = None
    usage: Usage = Usage()
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Recorded facts that are no score: word-budget cuts, dropped parameters."""

    @property
    def final(self) -> Completion | None:
        """The last completion of the episode: of the acted seat that spoke last."""
        turns = {trace.seat: trace.turns for trace in self.traces if trace.turns}
        spoke = (line.seat for line in reversed(self.transcript) if line.seat in turns)
        seat = next(spoke, next(iter(turns), None))
        return None if seat is None else turns[seat][-1].completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one judge said, once: its reply as it was read, never a number in its place."""

    judge: str
    """The judge's name, with a digit where two judges are called alike."""
    purpose: str
    """Which question it answered: `score`, `audit`, `detector` …"""
    sample: int = 0
    said: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the verdict; empty when it could not be read."""
    problem: str = ""
    """Why it could not be read, empty when it could."""
    replies: int = 0
    """So many replies it took; 0 where none was read, or nobody counted."""
    quoting: int = 0
    """So many of them repeated a verdict that an actor or partner had written for the judge."""
    ignored: tuple[str, ...] = ()
    """What its server took of the sampling and did not follow: `form`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """`value` is the headline, `reward` what training maximises; both None when unscored. A value
    without a reward is scored in evaluation and unscored in training; `reason` says why.

    `status` is `ok`, `salvaged` (readable, but not in the form asked for; scored like `ok`), the
    actor's own failure (`no_tag`, `malformed`, `empty`, `truncated`, `refusal`, `forged`: a verdict
    of its own making left none of the judge's; scored at the task's minimum), or `unscored` with a
    `reason`. A dialogue in which turns were cut is `truncated`, one with a turn in which the actor
    said nothing `empty`; both are scored as they stand.
    """

    value: float | None
    reward: float | None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    status: str = "ok"
    reason: str = ""
    words: str = ""
    """The judge's words; for rule-scored tasks what was read from the answer."""
    protocol: Protocol = "paper"
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Template name → hash, for every template used."""
    verdicts: tuple[Verdict, ...] = ()
    """What every judge said, the unreadable ones included; the raw replies are in the ledger."""

    @property
    def scored(self) -> bool:
        return self.value is not None


def unscored(failure: Failure, protocol: Protocol = "paper") -> Score:
    """The Score of an episode that something outside the actor broke."""
    return Score(
        value=None,
        reward=None,
        status="unscored",
        reason=failure.reason,
        words=failure.detail,
        protocol=protocol,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Text for the actor about its draft."""

    text: str
    author: str
    """`symbolic`, or the name of the model that wrote it."""
    kind: Literal["coach", "worked_example"] = "coach"
    dimensions: tuple[str, ...] = ()
    leak: str = ""
    """Empty, or how it gives something away: `gold_text`, `gold_letter`, `gold_place`,
    `answerable`, `private_text`, `rubric_words`, `gold_reference`, `too_long`."""
    blind: float | None = None
    """How often a reader who sees question, options and this text, but not the story, picks the
    gold."""
    chance: float | None = None
    """What guessing would give that reader: 1 / number of options."""
    kept: bool = False
    """Whether it is used although it leaks: its run drops none (`--leak-check log` or `off`)."""

    @property
    def usable(self) -> bool:
        """Whether an actor may see it: what leaks may only where leaking is the point, or where the
        run drops nothing."""
        return not self.leak or self.kept or self.kind == "worked_example"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of `episodes.jsonl`: a scored episode with the feedback on both sides of it."""

    key: str
    """`step/example_id/rollout/kind`, unique in a run; a later line replaces an earlier one."""
    task: str
    example_id: str
    rollout: int
    kind: Kind
    episode: Episode
    score: Score
    cluster: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
    """The file of somebody's own that the row was made of; empty for any other row."""
    step: int = 0
    given: Feedback | None = None
    """The feedback this (refined) episode was conditioned on."""
    received: Feedback | None = None
    """The feedback this (draft) episode earned, leaking ones included (their `leak` says how)."""
    prompt: str = ""
    """What the actor first saw, for readers."""
    gold: str = ""
    """The gold answer, for readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRecord:
    """One line of `controls.jsonl`: what the judges made of a control."""

    task: str
    example_id: str
    rollout: int
    """Of the draft that it is about; 0 for a control of the row."""
    name: str
    score: Score
    cluster: str = ""

    @property
    def key(self) -> str:
        """Unique in a run; a later line with the same key replaces an earlier one."""
        return f"{self.name}/{self.example_id}/{self.rollout}"


@dataclass(frozen=True, slots=True)
class BatchMetric:
    """A number over a batch, which is no mean over its episodes: joint accuracy, diversity."""

    value: float | None
    """None when nothing that it needs was scored."""
    n: int
    """So many units it is about, and of so many it was made."""
    n_scored: int
    unit: str = "episodes"
    """What is counted, in the plural: `rows`, `stories`, `conversations`."""
    low: float | None = None
    high: float | None = None
    """The ends of its scale, where it has any."""
    is_mean: bool = False
    """Whether it is the plain mean over its units, each counting alike."""
    beside: bool = False
    """Whether it is shown beside the headline, as what controls make of a batch always is."""
    parts: tuple[tuple[str, str], ...] = ()
    """(label, name of the number) of what it is the mean of, where it is one (tasks/parts.py)."""
    over: str = ""
    """The tag whose values are the labels of `parts`. A part has no other name then: it is this
    number over the rows with the value."""
    missing: tuple[tuple[str, str], ...] = ()
    """(label, why) of the parts without a number: `value` is then the mean of the others."""
    origin: str = ""
    """The person's own file that all its rows come from."""
    not_applicable: str = ""
    """Why `n` is 0 although there are records, for readers: `none of these rows has a choice
    question`. A headline without it gets a general sentence."""


def row_id(example_id: str) -> str:
    """What the ids of all forms of a row begin with; of a row in one form, its id."""
    return example_id.partition("-")[0]


def record_key(step: int, example_id: str, rollout: int, kind: Kind) -> str:
    return f"{step}/{example_id}/{rollout}/{kind}"
