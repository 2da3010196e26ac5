"""Agent chat: the actor is an agent under test, and a simulated person talks to it.

    person ──▶ agent ──▶ person ──▶ …       ends: the person writes END_MARK, max_turns,
                                            or the agent fails (an error, or an empty reply)

The rows are those of the task with the person as the actor. An agent that fails scores the minimum
and no judge is asked; an agent behind a server that does not reply leaves the conversation
unscored. The value depends on the option `verdict`:

    judge            a judge rates `criterion` from 0 to 10, divided by 10
    FILE.py:NAME     NAME(messages, row) returns True, False, a number from 0 to 1, or
                     {"score": …, "reason": …}
    none             1 if the agent answered every message; the metric is then called `answered`

Faults of the person (kit/person/faults.py) are in the notes; `without_faults` is the value of the
conversations that have none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import Field

from soulkit.errors import FunctionError, PartnerError, TaskError
from soulkit.judge import panel
from soulkit.judge.structured import VerdictShape, question
from soulkit.judge.verdict import spoken, transcript
from soulkit.models.base import Cast
from soulkit.models.players.functions import load_function
from soulkit.runs.records import drafts
from soulkit.tasks.kit.base import Rollout, Task
from soulkit.tasks.kit.dialogue import Conversation, DialogueTask, play_out
from soulkit.tasks.kit.person.brief import as_heard, split_end
from soulkit.tasks.kit.person.faults import FAULTS, fault_kinds, fault_notes
from soulkit.tasks.kit.scoring import mean_of
from soulkit.tasks.person_chat.task import AGENT, PERSON, TEXTS, brief_of, read_facts
from soulkit.types import (
    BatchMetric,
    Completion,
    Episode,
    Example,
    Feedback,
    Line,
    Record,
    Role,
    Score,
    Segment,
    Verdict,
    unscored,
)

JUDGE, NONE, TOP = "judge", "none", 10
ENDED, FAILED, SILENT, LIMIT = "person_ended", "agent_error", "agent_silent", "max_turns"
"""Why a conversation ended."""


class Fulfilment(VerdictShape):
    reasoning: str
    score: int = Field(ge=0, le=TOP)


class AgentChat(DialogueTask):
    default_turns = 12
    gold_is_script = True
    slot = Task.slot  # the agent has its own prompt

    def keep_options(self, options: Mapping[str, Any]) -> None:
        """Load the verdict's function; ConfigError if it cannot be used."""
        self.kind, self.function = str(options.get("verdict") or JUDGE), None
        self.templates = ("person", "judge") if self.kind == JUDGE else ("person",)
        if self.kind == NONE:
            metric = self.spec.metric.model_copy(update={"name": "answered"})
            self.spec = self.spec.model_copy(update={"metric": metric})
        elif self.kind != JUDGE:
            self.function, file = load_function(self.kind)
            self.code_files = (file,)

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        return read_facts(fields)

    def calls(self, example: Example) -> dict[Role, int]:
        judge: dict[Role, int] = {"judge": 1} if self.kind == JUDGE else {}
        return {**super().calls(example), **judge}

    # -- playing ------------------------------------------------------------------------------

    def preview(self, example: Example) -> tuple[Segment, ...]:
        return (Segment("user", TEXTS["lines"][0]),)

    def partner_context(self, example: Example, lines: Sequence[Line]) -> tuple[Segment, ...]:
        view, _ = self.within_budget(example.visible(PERSON))
        return (brief_of(view).prompt(), *as_heard(agents_view(lines)))

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        talk, written = Conversation(AGENT, []), list[Line]()
        converse = partial(self._talk, example, cast, rollout, talk, written)
        played = await play_out(talk, example, rollout, converse)
        talk.notes |= fault_notes(written, PERSON, brief_of(example.fields))
        failed = played.failure is not None and played.failure.reason == FunctionError.reason
        return talk.episode(example, rollout, FAILED if failed else played.stop, played.failure)

    async def _talk(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation,
        written: list[Line],
    ) -> str:  # fmt: skip
        """Play the turns; `written` gets all lines, those of the person with their marks."""
        for index in range(self.most_turns):
            line = await self._partner_line(example, cast, rollout, talk, index)
            written.append(line)
            text, ended = split_end(line.text)
            if text.strip():
                talk.hear(Line(PERSON, text.strip()))
            elif not index:
                raise PartnerError("the person ended the conversation before writing anything")
            if ended and index:  # an agent that was never asked could not be judged
                return ENDED
            reply = await talk.speak(cast.actor, rollout.call("actor", example, index))
            talk.record(Line(AGENT, spoken(reply.text, self.protocol)))
            written.append(talk.lines[-1])
            if ended or not talk.lines[-1].text:
                return ENDED if talk.lines[-1].text else SILENT
        return LIMIT

    # -- scoring ------------------------------------------------------------------------------

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        """Raises UnreadableVerdict (the episode is then unscored) if no verdict is readable."""
        failure, faulty = episode.failure, bool(fault_kinds(episode))
        if failure is not None and episode.stop != FAILED:
            return unscored(failure, self.protocol)
        value, words, verdicts = self.spec.metric.high, "", tuple[Verdict, ...]()
        if episode.stop in (FAILED, SILENT):
            value = self.spec.metric.low
            words = failure.detail if failure else "The agent's reply was empty."
        elif self.kind == JUDGE:
            view, _ = self.within_budget(example.visible("judge"))
            prompt = self.prompts.render(
                "judge", scenario=view.get("scenario") or "",
                criterion=self.spec.options["criterion"],
                transcript=transcript(episode.transcript),
            )  # fmt: skip
            opinions = await panel.opinions(cast, question("score", prompt, Fulfilment), episode)
            value = panel.pooled(opinions, lambda said: said.score / TOP, cast.panel.combine)
            words, verdicts = panel.in_words(opinions), panel.verdicts_of(opinions)
        elif self.function is not None:
            messages = [
                {"role": x.role, "content": x.text} for x in agents_view(episode.transcript)
            ]
            value, words = _read_verdict(self.function(messages, dict(example.fields)))
        turns = sum(line.seat == AGENT for line in episode.transcript)
        metrics = {"turns": float(turns), "faulty": float(faulty)}
        metrics |= {} if faulty else {"without_faults": value}
        status = {FAILED: FAILED, SILENT: "empty"}.get(episode.stop, "ok")
        return self.judged_score(value, metrics, verdicts, status=status, words=words)

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """The share of conversations with each end, and with each kind of fault."""
        episodes = [record.episode for record in drafts(records) if record.score.scored]
        shares = {f"ends/{stop}": [float(one.stop == stop) for one in episodes]
                  for stop in (ENDED, LIMIT, FAILED, SILENT)}  # fmt: skip
        kinds = [fault_kinds(one) for one in episodes]
        shares |= {f"faults/{kind}": [float(kind in one) for one in kinds] for kind in FAULTS}
        return {name: mean_of(values) for name, values in shares.items()}

    # -- scripts ------------------------------------------------------------------------------

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        return self._scripted_talk(example, TEXTS["lines"], TEXTS["answers"])

    def wrong(self, example: Example) -> Episode:
        return self._scripted_talk(example, TEXTS["lines"][:1], ["I cannot help you."])

    def canary(self, example: Example, text: str) -> Episode | None:
        if self.kind != JUDGE:
            return None
        return self._scripted_talk(example, TEXTS["lines"][:1], [text])

    def _scripted_talk(
        self, example: Example, lines: Sequence[str], answers: Sequence[str]
    ) -> Episode:
        talk = Conversation(AGENT, [])
        for message, answer in zip(lines, answers, strict=False):
            talk.hear(Line(PERSON, split_end(message)[0]))
            talk.take(Completion(text=answer))
            talk.record(Line(AGENT, answer))
        return talk.episode(example, Rollout(), ENDED)

    def verdict(self, form: str, perfect: bool) -> str | None:
        return json.dumps({"reasoning": "as scripted", "score": TOP if perfect else 0})


def agents_view(lines: Sequence[Line]) -> tuple[Segment, ...]:
    """The lines as the agent sees them: the person is the user."""
    return tuple(Segment("user" if one.seat == PERSON else "assistant", one.text) for one in lines)


def _read_verdict(returned: Any) -> tuple[float, str]:
    """(score, reason) of what a verdict function returned; TaskError if it is neither."""
    parts = returned if isinstance(returned, Mapping) else {"score": returned}
    score, reason = parts.get("score"), str(parts.get("reason") or "")
    if not isinstance(score, bool | int | float) or not 0 <= score <= 1:
        raise TaskError(f"the verdict is {score!r}, not True, False or a number from 0 to 1")
    return float(score), reason
