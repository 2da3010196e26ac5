"""The records that all layers read and write.

Frozen dataclasses without I/O, live models or torch. An Example becomes an Episode, an Episode
gets a Score, a Score may lead to Feedback, and Feedback conditions a refined Episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

Role = Literal["actor", "partner", "environment", "judge", "auditor", "coach", "drafter", "filter"]
"""What a model does in a run; a Cast assigns models to the roles of an episode. `drafter` and
`filter` have no part in episodes: one drafts rows, the other keeps or rejects them."""

Kind = Literal["draft", "refined", "gold"]
"""The kind of an episode. (A *copy* is a training sequence, not an episode.)"""

Protocol = Literal["paper", "reference"]

LeakCheck = Literal["off", "log", "drop"]
"""What happens to feedback that gives the answer away."""


MAX_TOKENS = 8192
"""Default maximum of tokens per reply (Ditto paper, §5)."""

LEAST_ROOM = 512
"""A row fits if the context leaves this many tokens for the reply, or the reply's limit if lower.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row of a task, with the seats that may see each field."""

    id: str
    """Content hash: equal rows have equal ids in every file."""
    task: str
    fields: Mapping[str, Any]
    audience: Mapping[str, tuple[str, ...]]
    """Field name → its audience: seats, or the readers `judge`, `coach` and `gold`."""
    seats: Mapping[str, Role]
    """Seat → the role that plays it in this row."""
    split: str = "test"
    source: str = ""
    """Provenance, `file:line`."""
    cluster: str = ""
    """Rows of one cluster (one story, one conversation) are resampled together."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Values that breakdowns group by: order, deception, question type."""
    origin: str = ""
    """The user's own file that the row was made from; empty for other rows."""

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
    """The requested format of a reply: a JSON Schema as canonical JSON text, and its name.

    Servers without structured output are asked without it; the caller validates the reply.
    """

    name: str
    schema: str


ADDED_LATER = MappingProxyType({"added": "later"})
"""Marks a setting that older keys do not contain; its default must be neutral."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one completion. Settings that a server refuses are dropped and recorded."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = MAX_TOKENS
    seed: int | None = None
    stop: tuple[str, ...] = ()
    thinking: bool | None = None
    reasoning_effort: str | None = None
    form: Form | None = field(default=None, metadata=ADDED_LATER)
    top_k: int = field(default=0, metadata=ADDED_LATER)
    """Sample from this many of the most likely tokens; 0: from all."""
    min_p: float = field(default=0.0, metadata=ADDED_LATER)
    """Sample from tokens at least this many times as likely as the most likely one; 0: from all."""

    @classmethod
    def first_of(cls, *sources: Mapping[str, Any]) -> Sampling:
        """Each setting from the first source that has it (not None), else its default."""
        names = [setting.name for setting in fields(cls)]
        return cls(**{
            name: source[name]
            for source in reversed(sources) for name in names if source.get(name) is not None
        })  # fmt: skip

    @property
    def cuts(self) -> bool:
        """Whether unlikely tokens are excluded from sampling."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def identity(self) -> dict[str, Any]:
        """The settings that are part of a ledger key. Settings that were added later are omitted
        at their default, so that older keys stay valid."""
        later = {one.name: one.default for one in fields(self) if one.metadata == ADDED_LATER}
        return {k: v for k, v in asdict(self).items() if k not in later or v != later[k]}


CONTROL_PURPOSE = "control/"
"""Prefix of the purpose of all calls about a control; the control's name follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The origin of a completion: the key of its random stream and ledger entry."""

    role: Role
    example_id: str
    rollout: int = 0
    kind: Kind = "draft"
    turn: int = 0
    sample: int = 0
    """Number of the repetition: judge samples of an episode, attempts of a blind reader."""
    step: int = 0
    """The training step, 0 in evaluation: drafts of one example at two steps are two calls."""
    seat: str = ""
    """The seat that speaks, if a role has several seats."""
    purpose: str = ""
    """The purpose of the call, if a role makes several calls per turn."""

    def identity(self) -> dict[str, Any]:
        """The fields that identify the call. Empty seat and purpose are omitted, so that older
        keys and random streams stay valid."""
        fields = asdict(self)
        return {k: v for k, v in fields.items() if v != "" or k not in ("seat", "purpose")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Calls, tokens, time and cost of completions. `cost` is in US dollars, None without a known
    price."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Includes the reasoning tokens, as billed."""
    seconds: float = 0.0
    cost: float | None = None
    reasoning_tokens: int = 0
    """The reasoning tokens among them, if the server reports them."""

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
    """`stop` | `length` | `content_filter` | `refusal` (the reply says why) | another word of the
    server."""
    reasoning: str = ""
    usage: Usage = Usage()
    dropped: tuple[str, ...] = ()
    """Sampling parameters that the server refused."""
    ignored: tuple[str, ...] = ()
    """Sampling parameters that the server accepted but, judging by the reply, did not follow."""
    policy: str = ""
    """Hash of the sampling adapter; empty without one."""
    server: str = ""
    """Address of the vLLM server that sampled the reply; empty for other models."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The context a seat saw, and its completion."""

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
    """Why an episode is unscored: something other than the actor failed.

    `reason` is a slug: `provider_error`, `partner_error`, `judge_error`, `context_overflow`,
    `task_error` (an error in the task's code; `detail` names file and line).
    """

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The record of one episode of an example."""

    example_id: str
    task: str
    kind: Kind = "draft"
    rollout: int = 0
    step: int = 0
    """The training step, 0 in evaluation; part of the keys of judge calls."""
    traces: tuple[Trace, ...] = ()
    """One trace per acted seat (role `actor`)."""
    transcript: tuple[Line, ...] = ()
    stop: str = "done"
    failure: Failure | None = None
    usage: Usage = Usage()
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Recorded facts other than scores: word-budget cuts, dropped parameters."""

    @property
    def final(self) -> Completion | None:
        """The last completion of the acted seat that spoke last."""
        turns = {trace.seat: trace.turns for trace in self.traces if trace.turns}
        spoke = (line.seat for line in reversed(self.transcript) if line.seat in turns)
        seat = next(spoke, next(iter(turns), None))
        return None if seat is None else turns[seat][-1].completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One reply of one judge, as parsed; never replaced by a default score."""

    judge: str
    """The judge's name, with a digit if two judges have the same name."""
    purpose: str
    """Which question it answered: `score`, `audit`, `detector` …"""
    sample: int = 0
    said: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the verdict; empty if the reply was unreadable."""
    problem: str = ""
    """Why the reply was unreadable; empty if it was readable."""
    replies: int = 0
    """Number of replies it took; 0 if none was read or counted."""
    quoting: int = 0
    """How many of them repeated a verdict that the actor or partner had written for the judge."""
    ignored: tuple[str, ...] = ()
    """Sampling settings that the server accepted but did not follow: `form`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of an episode: `value` for evaluation, `reward` for training; both None if
    unscored.

    A score with a value but no reward counts in evaluation and is unscored in training; `reason`
    says why.

    `status` is `ok`, `salvaged` (readable, but not in the requested format; scored like `ok`), a
    failure of the actor (`no_tag`, `malformed`, `empty`, `truncated`, `refusal`, `agent_error`,
    `forged`: only verdicts written by the actor itself were found; scored at the task's minimum),
    or `unscored` with a `reason`. A dialogue with truncated turns is `truncated`, one with an empty
    turn of the actor `empty`; both keep their score.
    """

    value: float | None
    reward: float | None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    status: str = "ok"
    reason: str = ""
    words: str = ""
    """The judge's words; for rule-scored tasks, the answer as parsed."""
    protocol: Protocol = "paper"
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Template name → hash, for all templates used."""
    verdicts: tuple[Verdict, ...] = ()
    """The verdicts of all judges, including unreadable ones; the raw replies are in the ledger."""

    @property
    def scored(self) -> bool:
        return self.value is not None


def unscored(failure: Failure, protocol: Protocol = "paper") -> Score:
    """The Score of an episode that failed for a reason other than the actor."""
    return Score(
        value=None,
        reward=None,
        status="unscored",
        reason=failure.reason,
        words=failure.detail,
        protocol=protocol,
    )


COACH_FAILURE = "coach_failure"
"""Note of an episode whose coach failed: why there is no feedback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Text for the actor about its draft."""

    text: str
    author: str
    """`symbolic`, or the name of the model that wrote it."""
    kind: Literal["coach", "worked_example"] = "coach"
    dimensions: tuple[str, ...] = ()
    leak: str = ""
    """Empty, or the kind of leak: `gold_text`, `gold_letter`, `gold_place`, `answerable`,
    `private_text`, `rubric_words`, `gold_reference`, `too_long`."""
    blind: float | None = None
    """How often a reader picks the gold answer from question, options and this text, without the
    story."""
    chance: float | None = None
    """The reader's score by guessing: 1 / number of options."""
    kept: bool = False
    """Whether it is used although it leaks (`--leak-check log` or `off`)."""

    @property
    def usable(self) -> bool:
        """Whether the actor may see it: it does not leak, it is a worked example, or the run
        keeps leaks."""
        return not self.leak or self.kept or self.kind == "worked_example"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of `episodes.jsonl`: a scored episode with the feedback before and after it."""

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
    """The user's own file that the row was made from; empty for other rows."""
    step: int = 0
    given: Feedback | None = None
    """The feedback that this refined episode was conditioned on."""
    received: Feedback | None = None
    """The feedback on this draft, including leaking feedback (see its `leak`)."""
    prompt: str = ""
    """The actor's first prompt, for readers."""
    gold: str = ""
    """The gold answer, for readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRecord:
    """One line of `controls.jsonl`: the judges' score of a control."""

    task: str
    example_id: str
    rollout: int
    """The rollout of the draft; 0 for a control of the row."""
    name: str
    score: Score
    cluster: str = ""

    @property
    def key(self) -> str:
        """Unique in a run; a later line with the same key replaces an earlier one."""
        return f"{self.name}/{self.example_id}/{self.rollout}"


@dataclass(frozen=True, slots=True)
class BatchMetric:
    """A number over a batch that is not the mean over episodes: joint accuracy, diversity."""

    value: float | None
    """None if nothing that it needs was scored."""
    n: int
    """Number of units in the batch; `n_scored` of them have a score."""
    n_scored: int
    unit: str = "episodes"
    """What is counted, in the plural: `rows`, `stories`, `conversations`."""
    low: float | None = None
    high: float | None = None
    """The bounds of its scale, if any."""
    is_mean: bool = False
    """Whether it is the unweighted mean over its units."""
    beside: bool = False
    """Whether it is shown next to the headline, like all numbers from controls."""
    parts: tuple[tuple[str, str], ...] = ()
    """(label, metric name) of the parts that it is the mean of, if any (tasks/parts.py)."""
    over: str = ""
    """The tag whose values are the labels of `parts`. A part is then this number over the rows
    with that value."""
    missing: tuple[tuple[str, str], ...] = ()
    """(label, reason) of parts without a number; `value` is then the mean of the others."""
    origin: str = ""
    """The user's own file that all its rows come from."""
    not_applicable: str = ""
    """Why `n` is 0 although there are records, for readers: `none of these rows has a choice
    question`. A headline without it gets a general sentence."""


def row_id(example_id: str) -> str:
    """The common prefix of the ids of all forms of a row; the id itself for a row with only one
    form."""
    return example_id.partition("-")[0]


def record_key(step: int, example_id: str, rollout: int, kind: Kind) -> str:
    return f"{step}/{example_id}/{rollout}/{kind}"
