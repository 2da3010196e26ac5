"""What a line of `episodes.jsonl` looks like on disk: a Record in which every text stands once.

    {"key": …, "schema": "soulkit/episodes@1", …, "score": {…},
     "episode": {"messages": [{"role": "system", "text": …}, …],
                 "traces": [{"seat": "agent1", "turns": [{"reply": 2}, {"reply": 4}, …]}],
                 "transcript": [{"seat": "agent1", "text": …}, {"seat": "agent2", "message": 3}]}}

`messages` hold whatever the acted seats saw and said, in that order. A turn names the message that
is its reply, and a line of the transcript with the words of a message names that message. What is
empty, zero or as usual is left out; so is what an episode repeats of its record, and a prompt that
is what the first turns saw. How turns and messages refer to each other stands in `messages.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from soulkit.types import Failure, Feedback, Kind, Score, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageWords:
    """What a reader of scores wants of a message."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLine(MessageWords):
    """A message that a seat saw or said."""

    role: Literal["system", "user", "assistant"]
    slot: tuple[int, int] | None = None
    """The characters of `text` (from, to) that are feedback: without them it is the same message
    with its feedback slot empty. None: it has no slot, or `bare` says what it is without."""
    bare: str | None = None
    """The message with its slot empty, where that is not `text` with characters left out."""
    token_ids: tuple[int, ...] = ()
    """The ids that the actor emitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """What a reader of scores wants of a turn."""

    reply: int
    """The message that the actor emitted."""
    usage: Usage = field(default_factory=Usage)
    stop_reason: str = "stop"
    reasoning: str = ""
    dropped: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    policy: str = ""
    server: str = ""
    """Address of the vLLM server that sampled the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLine(TurnFacts):
    """A turn of a seat.

    It saw what the turn before it saw and said, and then the messages up to its own reply that no
    turn before it has; unless `shared` and `adds` say otherwise.
    """

    shared: int | None = None
    """It saw so many of the messages that the turn before it saw and said, from the first …"""
    adds: tuple[int, ...] | None = None
    """… and then these."""
    shared_ids: int = 0
    """So many prompt ids come first that the turn before it had as prompt and reply."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt ids that follow."""
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    seat: str
    turns: tuple[TurnFacts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLine:
    """The turns of one acted seat."""

    seat: str
    turns: tuple[TurnLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptLine:
    """A line of the transcript, in words of its own or in those of a message."""

    seat: str
    text: str | None = None
    message: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeHead:
    """An episode without its messages and turns."""

    example_id: str | None = None
    """This and what follows up to `step`: the record's where it is not there."""
    task: str | None = None
    kind: Kind | None = None
    rollout: int | None = None
    step: int | None = None
    stop: str = "done"
    failure: Failure | None = None
    usage: Usage = field(default_factory=Usage)
    notes: Mapping[str, Any] = field(default_factory=dict)
    transcript: tuple[TranscriptLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFacts(EpisodeHead):
    """An episode for readers of scores."""

    messages: tuple[MessageWords, ...] = ()
    traces: tuple[TraceFacts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLine(EpisodeHead):
    """What happened in one play of one example."""

    messages: tuple[MessageLine, ...] = ()
    """All that the acted seats saw and said, each message once."""
    traces: tuple[TraceLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHead:
    """A record without its episode."""

    key: str
    """`step/example_id/rollout/kind`, unique in a run; a later line replaces an earlier one."""
    schema: Literal["soulkit/episodes@1"]
    task: str
    example_id: str
    rollout: int
    kind: Kind
    step: int = 0
    cluster: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
    """The file of somebody's own that the row was made of; empty for any other row."""
    score: Score
    given: Feedback | None = None
    """The feedback this (refined) episode was conditioned on."""
    received: Feedback | None = None
    """The feedback this (draft) episode earned."""
    gold: str = ""
    prompt: str | None = None
    """What the actor first saw; not there where that is what its first turns saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFacts(RecordHead):
    episode: EpisodeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLine(RecordHead):
    """One line of `episodes.jsonl` or `dev.jsonl`."""

    episode: EpisodeLine


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreFacts:
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFacts:
    """What a resumed run wants of a line."""

    key: str
    score: ScoreFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLine:
    """One line of `controls.jsonl`."""

    schema: Literal["soulkit/controls@1"]
    task: str
    example_id: str
    rollout: int
    name: str
    score: Score
    cluster: str = ""
