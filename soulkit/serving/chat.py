"""A chat in which a model plays a person and the user is the agent.

It is recorded as an evaluation of the task with SEATS, with one episode: `soul show` prints it, and
`soul rescore --ask` scores it. The ledger of the run has every reply of judge and coach.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.data.files import write_rows
from soulkit.errors import ContextOverflow, ProviderError
from soulkit.eval.config import EvalConfig, load_work
from soulkit.eval.run.provenance import write_conditions
from soulkit.eval.run.runner import eval_cast, eval_conditions, eval_players, summary_of
from soulkit.judge.verdict import spoken
from soulkit.models.api.protocol import whole_text
from soulkit.models.base import Cast, Player
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.players.players import Players, check_players
from soulkit.people.continuations import models_of
from soulkit.people.simulation import named_player
from soulkit.play.engine import Job, record_of
from soulkit.runs.conditions import with_provenance
from soulkit.runs.folder import Run
from soulkit.runs.records import RecordWriter
from soulkit.serving.backend import ChatBackend, RequestError
from soulkit.serving.engines import WEB, opened_model
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.kit.dialogue import Conversation
from soulkit.tasks.kit.person.brief import PARTIAL_MARK, Brief, split_end
from soulkit.tasks.kit.registry import load_registry
from soulkit.types import (
    Call,
    Completion,
    Episode,
    Failure,
    Feedback,
    Line,
    Sampling,
    Score,
    Segment,
    Usage,
    unscored,
)

if TYPE_CHECKING:
    from soulkit.play.plan import Work

SEATS = {"person": "actor", "agent": "partner"}
"""Seats of the task that a chat is an episode of."""
PERSON, AGENT = SEATS
ROWS, NOT_JUDGED = "rows.jsonl", Failure("not_judged", "no judge was asked")
_PARTIAL = re.compile(rf"(?:{PARTIAL_MARK}|<[^<>]{{0,12}})?\Z")
REPAINT_S = 0.05
"""Minimum seconds between two versions of a message that arrives: each is read as a whole."""
Show = Callable[[str], None]
"""Gets the person's message so far, again and again while it arrives."""


class StreamedModel:
    """The model of a backend as a player; its replies are shown while they arrive."""

    def __init__(self, backend: ChatBackend, show: Show) -> None:
        self.backend, self.show, self.name = backend, show, backend.name

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        """The reply of the backend; ProviderError if it gives none."""
        body = {
            "model": self.name, "max_tokens": sampling.max_tokens, "seed": sampling.seed,
            "temperature": sampling.temperature, "top_p": sampling.top_p,
            "messages": [{"role": part.role, "content": part.text} for part in context],
        }  # fmt: skip
        text, stop, usage, start = "", "stop", dict[str, int](), time.monotonic()
        shown = 0.0
        source: Any = self.backend.chunks(body, "")
        try:
            async with aclosing(source):
                async for chunk in source:
                    usage = chunk.get("usage") or usage
                    for choice in chunk["choices"]:
                        stop = choice.get("finish_reason") or stop
                        text += choice["delta"].get("content") or ""
                        if time.monotonic() - shown > REPAINT_S:
                            self.show(_PARTIAL.sub("", _shown(text)).rstrip())
                            shown = time.monotonic()
        except RequestError as error:
            too_long = error.code == "context_length_exceeded"
            raise (ContextOverflow if too_long else ProviderError)(error.message) from error
        self.show(_shown(text))
        return Completion(text=text, stop_reason=stop, usage=Usage(
            calls=1, prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0), seconds=time.monotonic() - start,
        ))  # fmt: skip

    async def close(self) -> None:
        """Close the backend."""
        await self.backend.close()


def _shown(text: str) -> str:
    return split_end(spoken(text, "paper"))[0]


@dataclass
class LiveChat:
    """One chat. `person` and `answer` take turns; `save` ends it."""

    run: Run
    config: EvalConfig
    work: Work
    players: Players
    cast: Cast
    talk: Conversation = field(init=False)
    stop: str = field(default="", init=False)
    """Why the person ended the chat; empty while it goes on."""

    def __post_init__(self) -> None:
        self.task: Any
        self.task, (self.example, *_) = self.work.task, self.work.examples
        self.talk = self._before = self.task.conversation(self.example, None)

    async def person(self, feedback: Feedback | None = None) -> None:
        """The person's next message; with feedback, its last message again."""
        if feedback is None:
            self._before = self.talk
        talk, task = deepcopy(self._before), self.task
        talk.usage, plain = self.talk.usage, talk.context[0]
        talk.context[0] = task.slot(self.example, PERSON, feedback)
        reply = await talk.speak(
            self.cast.actor, Rollout().call("actor", self.example, len(talk.turns))
        )
        talk.context[0] = plain
        if feedback:
            first = self.talk.lines[-1].text if self.talk.lines else ""
            again = {"feedback": feedback.text, "first": first}
            talk.notes["again"] = [*self.talk.notes.get("again", ()), again]
        self.stop, self.talk = task.take_turn(talk, reply.text), talk

    def answer(self, text: str) -> None:
        """The user's message, as the agent."""
        self.talk.hear(Line(AGENT, whole_text(text)))

    async def feedback(self) -> Any:
        """What the coach says about the person's messages so far: a Feedback, or None."""
        unjudged = unscored(NOT_JUDGED, self.task.protocol)
        return await self.task.critique(
            self.example, self.episode(), unjudged, self.cast, Rollout()
        )

    async def judged(self) -> Any:
        """The judges' Score of the chat so far."""
        return await self.task.judged(self.example, self.episode(), self.cast)

    def episode(self) -> Episode:
        """The chat so far."""
        return self.talk.episode(self.example, Rollout(), self.stop or "left")

    async def save(self) -> Score | None:
        """Score the episode if there is a judge, and write the run. If the person never wrote, the
        folder is removed and there is no score."""
        try:
            if not self.talk.turns:
                shutil.rmtree(self.run.path)
                return None
            self.task.note_faults(self.example, self.talk)
            score = unscored(NOT_JUDGED, self.task.protocol)
            with suppress(asyncio.CancelledError):  # Ctrl-C again: the chat is saved all the same
                score = await self.judged() if self.cast.judges else score
            job = Job(self.task, self.example)
            record = record_of(job, Rollout(), self.episode(), score)
            writer = RecordWriter(self.run.episodes)
            writer.write(record)
            writer.close()
            cost = self.cast.ledger.totals()["cost"] if self.cast.ledger else None
            seconds = record.episode.usage.seconds
            summary = summary_of([self.work], [record], self.config, seconds, cost)
            self.run.write_summary(with_provenance(self.run.path, summary.to_json()))
            return score
        finally:
            await self.cast.actor.model.close()
            await self.players.close()


@contextmanager
def opened_chat(
    model: str, settings: Mapping[str, Any], brief: Brief, folder: Path, show: Show, *,
    adapter: str | None = None, coach: str | None = None, **machine: Any,
) -> Iterator[LiveChat]:  # fmt: skip
    """A chat with this brief in a new run folder.

    `settings` are those of an evaluation without model and rows; `machine` goes to `opened_model`.
    """
    specs, rows = load_registry().specs, folder / ROWS
    asked = named_player(coach, settings["endpoints"], "coach") if coach else None
    task = next(name for name, spec in specs.items() if spec.seats == SEATS)
    with ExitStack() as stack:
        backend = stack.enter_context(opened_model(model, adapter=adapter, running=1, **machine))
        if model.startswith(WEB):
            url = f"{model.rstrip('/').removesuffix('/v1')}/v1"
            who: dict[str, Any] = {"kind": "api", "model": backend.name, "base_url": url}
        else:
            subject = models_of(model, {}, adapter)[-1]
            who = {"kind": "local", "model": subject.player.model, "adapter": subject.adapter}
        config = EvalConfig.load(
            flags={**settings, **who, "tasks": (task,), "data": {task: str(rows)}}
        )
        check_players(config)
        run = Run.open(folder, config.command, config.identity(), sealed=not config.foreign)
        ledger = stack.enter_context(Ledger(run.ledger_path, "record"))
        write_rows(rows, [brief.row() or {"repeat": 0}])
        (work,) = load_work(config)
        actor = StreamedModel(backend, show)
        players = eval_players(config, ledger, actor)
        write_conditions(run, eval_conditions(config, players, [work], {}))
        sampling = replace(config.sampling(work.task.spec), seed=config.seed)
        yield LiveChat(run, config, work, players, replace(
            eval_cast(config, players), actor=Player(actor, sampling),
            coach=players.player("coach", asked, config.seed) if asked else None,
        ))  # fmt: skip
