"""Playing a person of SimulatorArena: parsing turns, the conversation, and scripted episodes.

The actor plays the person, speaks first and writes at most eight messages; the assistant is the
partner. A turn must be `Query: …`, `Response: …` or `Message: …`, or the phrase `terminate
conversation` on a line of its own. The assistant gets it without the tag and never sees the phrase.

    "Thought: lost\\nMessage: how do i start"         → how do i start
    "Response: thanks!\\nterminate conversation"      → thanks!, and the conversation ends
    "please do not terminate conversation yet"       → unchanged

If the person says nothing, the conversation ends; if the assistant is silent twice, it fails.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, repeat
from typing import Any

from soulkit.data.literals import structure
from soulkit.judge.verdict import spoken
from soulkit.models.base import Cast
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.kit.dialogue import (
    Conversation,
    DialogueTask,
    others_view,
    partner_reply,
    partner_words,
    play_out,
)
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.sim_arena.data import human_lines, human_messages, read_arena_row
from soulkit.types import Call, Completion, Episode, Example, Feedback, Kind, Line, Segment

PHRASE = "terminate conversation"
_AROUND = r"(?:[^\w\n]|_){0,12}"
_END = re.compile(
    rf"^{_AROUND}terminate[ \t]{{1,8}}conversation{_AROUND}$", re.IGNORECASE | re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Utterance:
    """A parsed turn."""

    text: str
    """What others hear; may be empty."""
    ended: bool = False
    """Whether the conversation ends with this turn."""
    status: str = "ok"
    """`ok`, `salvaged` (readable but not in the required form), or `empty`."""


def read_utterance(reply: str, tags: Sequence[str]) -> Utterance:
    """The text of a reply, and whether it ends the conversation; `tags` are the required tags."""
    words = spoken(reply, "paper")
    message, tagged = _after_tag(words, tuple(tags))
    end = _END.search(message)
    text = (message[: end.start()] if end else message).strip()
    if not text:
        return Utterance("", end is not None, "ok" if end else "empty")
    return Utterance(text, end is not None, "ok" if tagged else "salvaged")


def _after_tag(words: str, tags: tuple[str, ...]) -> tuple[str, bool]:
    """(text after the first tag, whether the reply starts with it); the whole text without one."""
    at_line, anywhere = _patterns(tags)
    tag = at_line.search(words) or anywhere.search(words)
    if tag is None:
        return words, False
    return words[tag.end() :].strip(), not words[: tag.start()].strip()


@cache
def _patterns(tags: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns for a tag at the start of a line (any case, or bold), and for an exact tag."""
    either = "|".join(map(re.escape, tags))
    at_line = rf"^[^\w\n]{{0,8}}(?:{either})[*_]{{0,3}}[ \t]?:[*_]{{0,3}}"
    return (
        re.compile(at_line, re.IGNORECASE | re.MULTILINE),
        re.compile(rf"\b(?:{either}):"),
    )


TEXTS = Texts(__file__)
CANARY_TURNS = 2


ENDED = "terminated"


class PlayedPerson(DialogueTask):
    """A task in which the actor plays a person who talks to an assistant."""

    tags_asked: tuple[str, ...]
    """The tags of messages; the first one is for the first message."""
    default_turns = 8
    plain_talk = False

    # -- rows ---------------------------------------------------------------------------------

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Parse JSON text in columns of type `any`, so that both spellings are the same row."""
        kinds = self.spec.columns
        opened = {k: structure(v) if kinds[k].type == "any" else v for k, v in fields.items()}
        return read_arena_row(opened)

    # -- prompts ------------------------------------------------------------------------------

    def view(self, example: Example, reader: str) -> dict[str, Any]:
        """The fields that a reader may see, within its word budgets."""
        view, _ = self.within_budget(example.visible(reader))
        return view

    def preview(self, example: Example) -> tuple[Segment, ...]:
        return tuple(self.conversation(example, None).context)

    def conversation(self, example: Example, feedback: Feedback | None) -> Conversation:
        talk = super().conversation(example, feedback)
        opening = f"{talk.seat}_opening"
        talk.notify(self.prompts.render(opening, **self.view(example, talk.seat)))
        return talk

    def partner_context(self, example: Example, lines: Sequence[Line]) -> tuple[Segment, ...]:
        seat = self.partner_seat(example)
        view = self.view(example, seat)
        words = lines[0].text if lines else ""
        first = self.prompts.render(f"{seat}_opening", message=words, **view)
        brief = Segment("system", self.prompts.render(seat, **view))
        actor = self.acted_seat(example)
        return others_view(seat, [brief], [Line(actor, first), *lines[1:]])

    # -- playing ------------------------------------------------------------------------------

    def read(self, reply: str) -> Utterance:
        return read_utterance(reply, self.tags_asked)

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        cast.player("partner")
        talk = self.conversation(example, rollout.feedback)

        async def converse() -> str:
            stop = await self._converse(example, cast, rollout, talk)
            await self.close(example, cast, rollout, talk)
            return stop

        return await play_out(talk, example, rollout, converse)

    async def _converse(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation
    ) -> str:
        for index in range(self.most_turns):
            if stop := await self.speak(example, cast, rollout, talk, index):
                return stop
            call = rollout.call("partner", example, index)
            context = self.partner_context(example, talk.lines)
            text = await self.ask_partner(cast, context, call, talk)
            if text is None:
                return "partner_silent"
            talk.hear(Line(self.partner_seat(example), text))
        return "max_turns"

    async def speak(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation, index: int
    ) -> str:
        """The actor's turn; returns the stop reason, or an empty text to continue."""
        reply = await talk.speak(cast.actor, rollout.call("actor", example, index))
        return self.take_turn(talk, reply.text)

    def take_turn(self, talk: Conversation, reply: str) -> str:
        """Add the actor's reply as a line; returns the stop reason, or an empty text."""
        turn = self.read(reply)
        if turn.text:
            talk.record(Line(talk.seat, turn.text), memory=self.memory(reply))
        if turn.ended:
            return ENDED
        return "" if turn.text else "empty"

    def memory(self, reply: str) -> str:
        """The actor's reply, as the actor sees it in later turns."""
        return partner_words(reply) or reply

    async def ask_partner(
        self, cast: Cast, context: Sequence[Segment], call: Call, talk: Conversation
    ) -> str | None:
        """The assistant's reply; PartnerError if two attempts give nothing. None means that the
        assistant is silent, which ends the conversation."""
        player = cast.player("partner")
        text, usage = await partner_reply(player, context, call, partner_words, "the assistant")
        talk.usage += usage
        return text

    async def close(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation
    ) -> None:
        """Make the calls that follow the conversation; none by default."""

    def turns(self, episode: Episode) -> list[Utterance]:
        """The actor's turns, parsed again from its completions."""
        turns = episode.traces[0].turns if episode.traces else ()
        return [self.read(turn.completion.text) for turn in turns]

    # -- scripts ------------------------------------------------------------------------------

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode | None:
        seat = self.partner_seat(example)
        lines = human_lines(example.fields, self.acted_seat(example), seat)
        answers = [line.text for line in lines if line.seat == seat and line.text.strip()]
        messages = [self.tagged(t, i) for i, t in enumerate(human_messages(example.fields))]
        replies = [*messages, PHRASE][: self.most_turns]
        return self.scripted_talk(example, replies, answers, feedback, "gold")

    def wrong(self, example: Example) -> Episode:
        messages = [self.tagged(text, i) for i, text in enumerate(TEXTS["unlike"])]
        return self.scripted_talk(example, [*messages, PHRASE])

    def canary(self, example: Example, text: str) -> Episode:
        return self.scripted_talk(example, [self.tagged(text, i) for i in range(CANARY_TURNS)])

    def tagged(self, text: str, index: int) -> str:
        """A message in the required form."""
        return f"{self.tags_asked[min(index, len(self.tags_asked) - 1)]}: {text}"

    def scripted_talk(
        self, example: Example, replies: Sequence[str], answers: Sequence[str] = (),
        feedback: Feedback | None = None, kind: Kind = "draft",
    ) -> Episode:  # fmt: skip
        """The episode in which the actor says `replies` and the assistant `answers`, then neutral
        texts."""
        talk, stop = self.conversation(example, feedback), "max_turns"
        neutral = TEXTS["neutral"]
        partner_lines = chain(answers, neutral, repeat(neutral[-1]))
        for reply, answer in zip(replies[: self.most_turns], partner_lines, strict=False):
            talk.take(Completion(text=reply))
            if end := self.take_turn(talk, reply):
                stop = end
                break
            talk.hear(Line(self.partner_seat(example), answer))
        self.script_close(talk)
        return talk.episode(example, Rollout(kind=kind), stop)

    def script_close(self, talk: Conversation) -> None:
        """The scripted version of `close`; nothing by default."""

    def gold_text(self, example: Example) -> str:
        return "\n".join(human_messages(example.fields))
