"""How a person of SimulatorArena is played: reading turns, the conversation, and scripts of it.

The actor is the person and speaks first, eight times at most; the assistant is the partner. A turn
is asked for as `Query: …`, `Response: …` or `Message: …`, or as the phrase `terminate conversation`
on a line of its own. The assistant hears it without its tag, and never the phrase.

    "Thought: lost\\nMessage: how do i start"         → how do i start
    "Response: thanks!\\nterminate conversation"      → thanks!, and the conversation is over
    "please do not terminate conversation yet"       → said as it stands

A person that says nothing ends the conversation; an assistant silent twice breaks it.
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
    cut_note,
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
    """A turn as it was read."""

    text: str
    """What everybody hears; empty for nothing."""
    ended: bool = False
    """Whether the conversation ends with it."""
    status: str = "ok"
    """`ok`, `salvaged` (readable, and not in the form asked for), `empty`."""


def read_utterance(reply: str, tags: Sequence[str]) -> Utterance:
    """What a reply says and whether it ends the conversation; `tags` are those asked for."""
    words = spoken(reply, "paper")
    message, tagged = _after_tag(words, tuple(tags))
    end = _END.search(message)
    text = (message[: end.start()] if end else message).strip()
    if not text:
        return Utterance("", end is not None, "ok" if end else "empty")
    return Utterance(text, end is not None, "ok" if tagged else "salvaged")


def _after_tag(words: str, tags: tuple[str, ...]) -> tuple[str, bool]:
    """(what comes after the first tag, whether nothing stood before it); all without a tag."""
    at_line, anywhere = _patterns(tags)
    tag = at_line.search(words) or anywhere.search(words)
    if tag is None:
        return words, False
    return words[tag.end() :].strip(), not words[: tag.start()].strip()


@cache
def _patterns(tags: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """A tag where a line begins, in any case and in bold type; and one anywhere, as asked for."""
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
    """The tags of a message; the first is that of the first message."""
    default_turns = 8

    # -- rows ---------------------------------------------------------------------------------

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A column of type `any` holds a structure or its JSON text, and both are the same row."""
        kinds = self.spec.columns
        opened = {k: structure(v) if kinds[k].type == "any" else v for k, v in fields.items()}
        return read_arena_row(opened)

    # -- prompts ------------------------------------------------------------------------------

    def view(self, example: Example, reader: str) -> dict[str, Any]:
        """What a reader may see, within its word budgets."""
        view, _ = self.within_budget(example.visible(reader))
        return view

    def preview(self, example: Example) -> tuple[Segment, ...]:
        return tuple(self.conversation(example, None).context)

    def conversation(self, example: Example, feedback: Feedback | None) -> Conversation:
        """The actor's side before the first turn."""
        seat = self.acted_seat(example)
        _, cuts = self.within_budget(example.visible(seat))
        talk = Conversation(seat, [self.slot(example, seat, feedback)], notes=cut_note(cuts))
        talk.notify(self.prompts.render(f"{seat}_opening", **self.view(example, seat)))
        return talk

    def partner_context(self, example: Example, lines: Sequence[Line]) -> tuple[Segment, ...]:
        seat = self.partner_seat(example)
        view = self.view(example, seat)
        words = lines[0].text if lines else ""
        first = self.prompts.render(f"{seat}_opening", message=words, **view)
        brief = Segment("system", self.prompts.render(seat, **view))
        actor = self.acted_seat(example)
        return others_view(seat, [brief], [Line(actor, first), *lines[1:]])

    # -- the road -----------------------------------------------------------------------------

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
        """The actor's turn; why it ends the conversation, empty where it does not."""
        reply = await talk.speak(cast.actor, rollout.call("actor", example, index))
        return self.take_turn(talk, reply.text)

    def take_turn(self, talk: Conversation, reply: str) -> str:
        """The actor's reply as a line; why it ends the conversation, empty where it does not."""
        turn = self.read(reply)
        if turn.text:
            talk.record(Line(talk.seat, turn.text), memory=self.memory(reply))
        if turn.ended:
            return ENDED
        return "" if turn.text else "empty"

    def memory(self, reply: str) -> str:
        """What the actor sees of its own reply later."""
        return partner_words(reply) or reply

    async def ask_partner(
        self, cast: Cast, context: Sequence[Segment], call: Call, talk: Conversation
    ) -> str | None:
        """What the assistant says; PartnerError when that is nothing, twice. None: it is silent,
        and that ends the conversation."""
        player = cast.player("partner")
        text, usage = await partner_reply(player, context, call, partner_words, "the assistant")
        talk.usage += usage
        return text

    async def close(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation
    ) -> None:
        """What is asked for when the conversation is over."""

    def turns(self, episode: Episode) -> list[Utterance]:
        """The actor's turns, read again from what it emitted."""
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
        """A message in the form that is asked for."""
        return f"{self.tags_asked[min(index, len(self.tags_asked) - 1)]}: {text}"

    def scripted_talk(
        self, example: Example, replies: Sequence[str], answers: Sequence[str] = (),
        feedback: Feedback | None = None, kind: Kind = "draft",
    ) -> Episode:  # fmt: skip
        """The episode in which the actor says `replies` and the assistant `answers`, then nothing
        in particular."""
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
        """What is there at the end of a scripted conversation."""

    def gold_text(self, example: Example) -> str:
        return "\n".join(human_messages(example.fields))
