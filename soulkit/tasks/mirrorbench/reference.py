"""MirrorBench under `--protocol reference`: one question, a live assistant, ten messages.

The score is GTEval alone, asked once and clipped to [0, 1]. The first ten messages of a
conversation are played and judged, without an assistant's last one; an assistant's opening is
generated as well. The assistant sees the whole real conversation; the user gets its replies after
`AI:`, with the instruction to continue, and an empty reply is skipped. An empty message from the
user ends the conversation, which is judged even if it is very short.

Feedback is one sentence from the judge's reasons, followed by the real user's messages; there is no
leak check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from soulkit.data.chats import ChatMessage
from soulkit.errors import ConfigError
from soulkit.judge.leaks import LeakView
from soulkit.judge.panel import opinions, pooled
from soulkit.judge.structured import VerdictShape, question
from soulkit.judge.verdict import fence
from soulkit.models.base import Cast
from soulkit.tasks.kit.base import Control, Rollout
from soulkit.tasks.kit.dialogue import (
    Conversation,
    others_view,
    within_episode,
)
from soulkit.tasks.kit.prompting import first_words
from soulkit.tasks.mirrorbench import judging
from soulkit.tasks.mirrorbench.conversations import (
    ASSISTANT,
    MEASURES,
    USER,
    conversation_text,
    first_messages,
    read_message,
    user_texts,
    word_measures,
)
from soulkit.tasks.mirrorbench.judging import ComparedUsers
from soulkit.tasks.mirrorbench.task import MirrorBench
from soulkit.types import (
    Completion,
    Episode,
    Example,
    Feedback,
    Line,
    Score,
    Segment,
)

NEXT = "Write the user's next message."
TURN_WORDS, ALL_WORDS = 500, 2000
"""Word limits of the real messages in feedback: per message, and in total."""


class LooseSimilarity(VerdictShape):
    """Any number: what is off the scale counts as its end."""

    reasoning: str
    score: float


class MirrorBenchReference(MirrorBench):
    templates = ("user", "judge_gteval", "assistant")
    start = NEXT
    assistants = ("live",)
    judges_silence = True
    judge_calls = 1
    pair_calls = 0

    def keep_options(self, options: Mapping[str, Any]) -> None:
        super().keep_options(options)
        self.most = int(options["reference_messages"])
        if self.most < 1:
            raise ConfigError(
                f"The task '{self.name}' cannot play {self.most} messages of a conversation.",
                "The option reference_messages is the number of messages to play.",
                "Use a number of at least 1; the published code uses 10.",
            )

    def messages(self, example: Example) -> list[ChatMessage]:
        return first_messages(example.fields["turns"], self.most)

    # -- playing ----------------------------------------------------------------------------------

    def talk(self, example: Example, feedback: Feedback | None) -> Conversation:
        """Every conversation starts with the same instruction; messages are not merged."""
        talk = Conversation(USER, [self.slot(example, USER, feedback)], merge=False)
        talk.notify(NEXT)
        return talk

    async def speak(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation
    ) -> str:
        actor = within_episode(talk, cast.actor)
        if actor is None:
            return "length"
        reply = await talk.speak(actor, rollout.call("actor", example, len(talk.turns)))
        if not reply.text.strip():
            return "empty"
        self.record(talk, reply)
        return ""

    def prompt_again(self, talk: Conversation) -> None:
        """Add nothing between two messages of the user."""

    def hear(self, talk: Conversation, line: Line) -> None:
        """Skip an empty reply, but still ask the user to continue."""
        shown = f"AI: {line.text}\n\n{NEXT}"
        if line.text:
            talk.hear(line, shown)
        else:
            talk.notify(shown)

    def record(self, talk: Conversation, reply: Completion) -> None:
        text, _ = read_message(reply.text, self.protocol)
        talk.record(Line(USER, text), memory=reply.text)

    async def answer(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation, index: int
    ) -> str:
        """Generate a reply at every position; an empty reply is not requested again."""
        context = self.assistant_context(example, talk.lines)
        call = rollout.call("partner", example, index)
        reply = await cast.player("partner").complete(context, call)
        talk.usage += reply.usage
        return reply.text.strip()

    def answers(self, example: Example) -> int:
        return sum(message["role"] == ASSISTANT for message in self.messages(example))

    def assistant_context(self, example: Example, lines: Sequence[Line]) -> tuple[Segment, ...]:
        record = fence(conversation_text(example.visible(ASSISTANT)["turns"]), "record")
        brief = Segment("system", self.prompts.render("assistant", recorded=record))
        return others_view(ASSISTANT, [brief], lines)

    # -- scoring ----------------------------------------------------------------------------------

    def statuses(self, episode: Episode) -> list[str]:
        """Every reply is accepted as it is."""
        return ["ok"]

    async def judged_users(self, example: Example, episode: Episode, cast: Cast) -> ComparedUsers:
        lines = [{"role": line.seat, "content": line.text} for line in episode.transcript]
        prompt = self.prompts.render(
            "judge_gteval", real=fence(conversation_text(self.messages(example)), "real"),
            simulated=fence(conversation_text(lines), "simulated"),
        )  # fmt: skip
        replies = await opinions(cast, question("gteval", prompt, LooseSimilarity), episode)
        value = pooled(replies, lambda one: clipped_score(one.score), cast.panel.combine)
        return ComparedUsers({"gteval": value}, None, tuple(one.verdict() for one in replies))

    def word_metrics(self, example: Example, episode: Episode) -> dict[str, float | None]:
        """The word metrics, plus the distances to the real user, computed from all of their
        messages."""
        texts = [line.text for line in episode.transcript if line.seat == USER]
        turns = episode.traces[0].turns if episode.traces else ()
        messages = len(turns[-1].context) + 1 if turns else 0
        distances = gaps(word_measures(user_texts(example.fields["turns"])), word_measures(texts))
        return {
            **super().word_metrics(example, episode), **distances, "num_turn": float(messages)
        }  # fmt: skip

    @property
    def controls(self) -> tuple[Control, ...]:
        return ()

    # -- feedback ---------------------------------------------------------------------------------

    def coach_prompt(self, example: Example, episode: Episode, score: Score, cast: Cast) -> str:
        """The judge's score and reasons, without the conversation."""
        reasons = fence("\n".join(judging.remarks(score.verdicts)), "reasons")
        return self.prompts.render("coach_reference", reward=score.reward, reasons=reasons)

    async def critique(
        self, example: Example, episode: Episode, score: Score, cast: Cast, rollout: Rollout
    ) -> Feedback | None:
        feedback = await super().critique(example, episode, score, cast, rollout)
        if feedback is None:
            return None
        return replace(feedback, text=f"{feedback.text}\n\n{self.real_messages(example)}")

    def real_messages(self, example: Example) -> str:
        texts = [first_words(t, TURN_WORDS) for t in user_texts(example.fields["turns"])]
        listed = first_words("\n".join(f"- {text}" for text in texts), ALL_WORDS)
        return f"For comparison, this is what the real user wrote:\n{listed}"

    def leak_view(self, example: Example) -> LeakView | None:
        return None


def clipped_score(score: float) -> float:
    """A score clipped to [0, 1]."""
    return max(0.0, min(1.0, float(score)))


def gaps(
    real: Mapping[str, float | None], simulated: Mapping[str, float | None]
) -> dict[str, float | None]:
    """`mattr_gap` etc.: the distance between two users; None if one of them has no number."""
    pairs: dict[str, Any] = {name: (real.get(name), simulated.get(name)) for name in MEASURES}
    return {
        f"{name}_gap": None if None in pair else abs(pair[1] - pair[0])
        for name, pair in pairs.items()
    }
