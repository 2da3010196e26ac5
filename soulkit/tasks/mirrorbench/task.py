"""MirrorBench: write the user's side of a recorded conversation.

    {"task_description": "They want ...", "turns": [{"role": "user", "content": "hi"}, ...],
     "dataset": "clariq", "conversation_id": "clariq-448", "metadata": {"topic_id": "271"}}

The actor sees only the description of the person; judges compare its messages with the person's
(judging.py). `paper`: the assistant repeats its recorded replies (`assistant: replay`), or a model
that sees the recorded conversation plays it (`assistant: live`). A user who never writes anything
gets the minimum without a judge. `reference.py` holds the differences of `reference`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from soulkit.data.chats import ChatMessage, conversation
from soulkit.data.literals import structure
from soulkit.errors import ConfigError, did_you_mean
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import spoken
from soulkit.models.base import Cast
from soulkit.tasks.kit.base import Control, Rollout, Task
from soulkit.tasks.kit.dialogue import Conversation, others_view, partner_reply, play_out
from soulkit.tasks.kit.scoring import macro
from soulkit.tasks.mirrorbench import judging
from soulkit.tasks.mirrorbench.conversations import (
    ASSISTANT,
    USER,
    as_lines,
    lexical_metrics,
    played_messages,
    read_message,
    subset_means,
    subset_of,
    topic_of,
    user_texts,
    with_people,
)
from soulkit.tasks.mirrorbench.judging import CALLS, PARTS, ComparedUsers, Pair, fenced, judge_users
from soulkit.types import (
    BatchMetric,
    Completion,
    ControlRecord,
    Episode,
    Example,
    Failure,
    Feedback,
    Kind,
    Line,
    Record,
    Role,
    Score,
    Segment,
    Turn,
    unscored,
)

START = "(The assistant is waiting for your first message.)"
AGAIN = "(The assistant has not answered yet; you write once more.)"
SILENCE = "(no message)"
"""The assistant sees this in place of an empty message."""
TEMPLATES = ("user", "judge_gteval", "judge_pairwise", "judge_rnr", "judge_critique",
             "judge_revision")  # fmt: skip


class MirrorBench(Task):
    templates: Sequence[str] = TEMPLATES
    start = START
    assistants: Sequence[str] = ("replay", "live")
    """The allowed kinds of assistant, the default first."""
    plain_talk = True
    judges_silence = False
    """Whether judges also rate a user who never said anything."""
    judge_calls = sum(CALLS.values())
    """Calls per judge and episode."""
    pair_calls = CALLS["pairwise"]

    def keep_options(self, options: Mapping[str, Any]) -> None:
        self.live = self.assistant() == "live"

    def assistant(self) -> str:
        """The kind of assistant; ConfigError if the protocol does not support it."""
        assistant = self.spec.options.get("assistant") or self.assistants[0]
        if assistant not in self.assistants:
            raise ConfigError(
                f"The task '{self.name}' has no assistant '{assistant}' under {self.protocol}.",
                "It replays recorded replies (replay, only with `paper`) or is a model (live).",
                did_you_mean(str(assistant), self.assistants),
            )
        return str(assistant)

    # -- rows -------------------------------------------------------------------------------------

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Parse JSON text in columns of type `any`, so that both spellings are the same row."""
        columns = self.spec.columns
        opened = {k: structure(v) if columns[k].type == "any" else v for k, v in fields.items()}
        turns = conversation(opened["turns"], "turns")
        return {
            **opened,
            "turns": turns,
            "conversation": "\n".join(turn["content"] for turn in turns),
            "subset": subset_of(opened),
            "topic": topic_of(opened),
        }

    def with_baselines(self, examples: Sequence[Example]) -> Sequence[Example]:
        return with_people(examples)

    def messages(self, example: Example) -> list[ChatMessage]:
        """The recorded messages that are played and judged."""
        return played_messages(example.fields["turns"])

    def calls(self, example: Example) -> dict[Role, int]:
        """One call per message of the user and per generated message of the assistant; the judges'
        calls with their samples."""
        users = sum(message["role"] == USER for message in self.messages(example))
        calls: dict[Role, int] = {"actor": max(1, users), "judge": self.judge_calls}
        answers = self.answers(example)
        return {**calls, "partner": answers} if answers else calls

    def answers(self, example: Example) -> int:
        """The number of generated assistant messages; an opening is always recorded."""
        later = self.messages(example)[1:]
        return sum(message["role"] == ASSISTANT for message in later) if self.live else 0

    # -- playing ----------------------------------------------------------------------------------

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        view = {"task_description": example.visible(seat)["task_description"]}
        return self.prompts.opening("user", feedback, view)

    def talk(self, example: Example, feedback: Feedback | None) -> Conversation:
        """The user's conversation before the first message."""
        talk = Conversation(USER, [self.slot(example, USER, feedback)])
        messages = self.messages(example)
        if not messages or messages[0]["role"] == USER:
            talk.notify(self.start)
        return talk

    def preview(self, example: Example) -> tuple[Segment, ...]:
        talk = self.talk(example, None)
        if len(talk.context) == 1:
            self.hear(talk, Line(ASSISTANT, self.messages(example)[0]["content"]))
        return tuple(talk.context)

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        if self.answers(example):
            cast.player("partner")
        talk = self.talk(example, rollout.feedback)
        converse = partial(self._converse, example, cast, rollout, talk)
        return await play_out(talk, example, rollout, converse)

    async def _converse(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation
    ) -> str:
        for index, message in enumerate(self.messages(example)):
            if message["role"] == ASSISTANT:
                text = await self.answer(example, cast, rollout, talk, index)
                self.hear(talk, Line(ASSISTANT, text))
            elif message["role"] == USER:
                self.prompt_again(talk)
                if stop := await self.speak(example, cast, rollout, talk):
                    return stop
        return "done"

    async def speak(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation
    ) -> str:
        """The user's message; returns the stop reason, or an empty text to continue."""
        reply = await talk.speak(cast.actor, rollout.call("actor", example, len(talk.turns)))
        self.record(talk, reply)
        return ""

    def prompt_again(self, talk: Conversation) -> None:
        """Add a reminder if the user writes twice in a row, because chat templates need a message
        in between."""
        if talk.context[-1].role == "assistant":
            talk.notify(AGAIN)

    def hear(self, talk: Conversation, line: Line) -> None:
        talk.hear(line)

    def record(self, talk: Conversation, reply: Completion) -> None:
        """Add the user's message. If the reply has token ids, the user remembers it unchanged."""
        text, _ = read_message(reply.text, self.protocol)
        talk.record(Line(USER, text), memory=reply.text if reply.token_ids else text)

    async def answer(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation, index: int
    ) -> str:
        """The assistant's message at this position, recorded or generated."""
        if not self.live or not talk.lines:
            return str(self.messages(example)[index]["content"])
        context = self.assistant_context(example, talk.lines)
        call = rollout.call("partner", example, index)
        player = cast.player("partner")
        text, usage = await partner_reply(
            player, context, call, lambda reply: spoken(reply, "paper") or None, "the assistant"
        )
        talk.usage += usage
        return text

    def assistant_context(self, example: Example, lines: Sequence[Line]) -> tuple[Segment, ...]:
        """The assistant's context: the recorded conversation, and the current one from its side."""
        record = fenced(as_lines(self.messages(example)), "record")
        brief = Segment("system", self.prompts.render("assistant", recorded=record))
        spoken_lines = [line if line.text else Line(line.seat, SILENCE) for line in lines]
        return others_view(ASSISTANT, [brief], spoken_lines)

    # -- scoring ----------------------------------------------------------------------------------

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        """The mean of the four parts; unscored if any of them is missing."""
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        statuses = self.statuses(episode)
        metrics = self.word_metrics(example, episode)
        if not self.judges_silence and all(status == "empty" for status in statuses):
            return self._silent(episode, metrics)
        outcome = await self.judged_users(example, episode, cast)
        if outcome.flips is not None:
            metrics["pairwise/flip"] = outcome.flips
        return self.judged_score(
            outcome.mean, {**outcome.values, **metrics}, outcome.verdicts,
            status="salvaged" if "salvaged" in statuses else "ok",
            words="\n".join(judging.remarks(outcome.verdicts)),
        )  # fmt: skip

    def statuses(self, episode: Episode) -> list[str]:
        """How each of the user's replies was parsed."""
        turns = episode.traces[0].turns if episode.traces else ()
        return [read_message(turn.completion.text, self.protocol)[1] for turn in turns]

    def word_metrics(self, example: Example, episode: Episode) -> dict[str, float | None]:
        texts = [line.text for line in episode.transcript if line.seat == USER]
        return {**lexical_metrics(texts, example.fields), "turns": float(len(texts))}

    def pair(self, example: Example, episode: Episode) -> Pair:
        """The real and the simulated user."""
        real = as_lines(self.messages(example))
        return Pair(real, episode.transcript, str(example.fields["task_description"]))

    async def judged_users(self, example: Example, episode: Episode, cast: Cast) -> ComparedUsers:
        return await judge_users(self.prompts, self.pair(example, episode), episode, cast, PARTS)

    def _silent(self, episode: Episode, metrics: Mapping[str, float | None]) -> Score:
        values = dict.fromkeys(PARTS, self.spec.metric.low)
        words = "The user never wrote anything."
        return self.silent_score(episode, words, {**values, **metrics})

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """`macro_subset` (mean of the subset means), and mean z-scores per subset."""
        by_subset = macro(records, "subset")
        macro_mean = {} if by_subset is None else {"macro_subset": by_subset}
        return {**macro_mean, **subset_means(records)}

    # -- controls ---------------------------------------------------------------------------------

    @property
    def controls(self) -> tuple[Control, ...]:
        return judging.CONTROLS

    async def control(
        self, name: str, example: Example, episode: Episode | None, cast: Cast
    ) -> Score:
        """The parts of a control, for the real user of a row or the simulated user of a draft."""
        about = episode or self.gold(example)
        if all(status == "empty" for status in self.statuses(about)):
            silent = Failure("nothing_to_compare", "the simulated user wrote nothing")
            return unscored(silent, self.protocol)
        pair = Pair(about.transcript, about.transcript, str(example.fields["task_description"]))
        outcome = await judge_users(self.prompts, pair, about, cast, judging.ASKED[name])
        score = self.judged_score(outcome.mean, dict(outcome.values), outcome.verdicts)
        return replace(score, reward=None)

    def calibrate(
        self, records: Sequence[Record], controls: Sequence[ControlRecord]
    ) -> dict[str, BatchMetric]:
        return judging.calibrated_metrics(records, controls)

    def calibration_remarks(self, values: Mapping[str, float | None]) -> Sequence[str]:
        return tuple(judging.undefined_remarks(values))

    # -- feedback ---------------------------------------------------------------------------------

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        view = self.leak_view(example) or LeakView()
        lines = episode.transcript
        return {
            "task_description": example.visible("coach")["task_description"],
            "attempt": fenced(
                judging.shown_attempt(lines, view) if self.live else lines, "attempt"
            ),
            "reward": score.reward,
            "notes": judging.notes(score.verdicts, view),
        }

    def leak_view(self, example: Example) -> LeakView | None:
        """Feedback must not reveal the person's own messages; the assistant's messages are public,
        because the actor reads them anyway."""
        answers = [m["content"] for m in self.messages(example) if m["role"] == ASSISTANT]
        return LeakView(
            question=str(example.fields["task_description"]),
            reference="\n".join(user_texts(example.fields["turns"])),
            public="\n".join(answers),
        )

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        texts = [line.text for line in episode.transcript if line.seat == USER] if episode else None
        return judging.style_lesson(texts, self.leak_view(example) or LeakView())

    # -- scripts ----------------------------------------------------------------------------------

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        return self.scripted(example, user_texts(self.messages(example)), feedback, "gold")

    def wrong(self, example: Example) -> Episode:
        return self.scripted(example, (judging.TEXTS["helpful"],) * self._count(example))

    def canary(self, example: Example, text: str) -> Episode:
        return self.scripted(example, (text,) * self._count(example))

    def verdict(self, form: str, perfect: bool) -> str | None:
        return judging.user_verdict(form, perfect)

    def other_prompts(
        self, example: Example, draft: Episode, score: Score
    ) -> Iterator[tuple[str, str]]:
        yield "assistant", self.assistant_context(example, draft.transcript)[0].text
        words = {"reward": score.reward, "reasons": score.words}
        yield "coach_reference", self.prompts.render("coach_reference", **words)

    def _count(self, example: Example) -> int:
        return len(user_texts(self.messages(example)))

    def scripted(
        self, example: Example, replies: Sequence[str], feedback: Feedback | None = None,
        kind: Kind = "draft",
    ) -> Episode:  # fmt: skip
        talk, waiting = self.talk(example, feedback), iter(replies)
        for message in self.messages(example):
            if message["role"] == ASSISTANT:
                self.hear(talk, Line(ASSISTANT, message["content"]))
                continue
            self.prompt_again(talk)
            reply = Completion(text=next(waiting))
            talk.turns.append(Turn(tuple(talk.context), reply))
            self.record(talk, reply)
        return talk.episode(example, Rollout(kind=kind), "done")

    def gold_text(self, example: Example) -> str:
        return "\n".join(user_texts(self.messages(example)))
