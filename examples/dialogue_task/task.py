"""Two people on the phone agree on a day; rules check whether it suits both.

The actor is the caller. The friend is the partner: a model, or the script in partner.py. The call
ends when the caller says `Agreed: <day>`, or after `max_turns` turns of the caller.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from soulkit.errors import DataError, PartnerError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import spoken
from soulkit.models.base import Cast
from soulkit.tasks import Conversation, Rollout, Task, others_view, play_out
from soulkit.types import (
    Completion,
    Episode,
    Example,
    Feedback,
    Line,
    Score,
    Segment,
    Trace,
    Turn,
    unscored,
)

CALLER, FRIEND = "caller", "friend"
START = "(The call is picked up.)"
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_AGREED = re.compile(rf"\bagreed\s*:\W*({'|'.join(DAYS)})\b", re.IGNORECASE)


class MyDialogue(Task):
    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        both = set(fields["free"]) & set(fields["friend_free"])
        if both != {fields["day"]} or not both <= set(DAYS):
            raise DataError(
                "The row's 'day' is not the one day on which both are free.",
                f"Both are free on {', '.join(sorted(both)) or 'no day'}.",
                "Correct the row, or remove it.",
            )
        return fields

    # -- contexts -----------------------------------------------------------------------------

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        """The caller's brief with feedback; `bare` is the same brief without it."""
        bare = self.prompts.render(CALLER, feedback=None, **example.visible(CALLER))
        if feedback is None:
            return Segment("system", bare, bare=bare)
        full = self.prompts.render(CALLER, feedback=feedback.text, **example.visible(CALLER))
        return Segment("system", full, bare=bare)

    def preview(self, example: Example) -> tuple[Segment, ...]:
        return (self.slot(example, CALLER, None), Segment("user", START))

    def _friend_context(self, example: Example, lines: Sequence[Line]) -> tuple[Segment, ...]:
        brief = self.prompts.render(FRIEND, **example.visible(FRIEND))
        return others_view(FRIEND, [Segment("system", brief)], lines)

    # -- play ---------------------------------------------------------------------------------

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        talk = Conversation(CALLER, [self.slot(example, CALLER, rollout.feedback)])
        talk.notify(START)
        return await play_out(
            talk, example, rollout, lambda: self._converse(example, cast, rollout, talk)
        )

    async def _converse(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation
    ) -> str:
        partner = cast.player("partner")
        for index in range(int(self.spec.options["max_turns"])):
            reply = await talk.speak(cast.actor, rollout.call("actor", example, index))
            talk.record(Line(CALLER, spoken(reply.text, self.protocol)), memory=reply.text)
            if agreed_day(talk.lines):
                return "agreed"
            brief, call = (
                self._friend_context(example, talk.lines),
                rollout.call("partner", example, index),
            )
            answer = await partner.complete(brief, call)
            talk.usage += answer.usage
            line = spoken(answer.text, "paper")
            if not line:  # not the actor's fault: the episode stays unscored
                partner.set_aside(brief, call)
                raise PartnerError(f"the friend said nothing ({answer.stop_reason})")
            talk.hear(Line(FRIEND, line))
        return "max_turns"

    # -- score --------------------------------------------------------------------------------

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        words = [line.text for line in episode.transcript if line.seat == CALLER]
        day = agreed_day(episode.transcript)
        value = float(day == example.fields["day"])
        return Score(
            value=value,
            reward=value,
            metrics={"turns": float(len(words)), "agreed": float(bool(day))},
            status="ok" if any(text.strip() for text in words) else "empty",
            words=day,
            protocol=self.protocol,
            prompts=self.prompts.hashes(CALLER, FRIEND),
        )

    # -- feedback -----------------------------------------------------------------------------

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str:
        """Advice on how to proceed; it never names a day."""
        friend = example.fields["friend"]
        if score is not None and score.value == 1:
            return f"That worked: you settled only what {friend} had said yes to."
        if score is not None and score.words:
            return f"You settled a day that does not suit {friend}; wait for a yes first."
        return f"Offer {friend} your free days one by one, and close the call once one suits."

    def leak_view(self, example: Example) -> LeakView:
        free = tuple(example.fields["free"])
        return LeakView("On which day do they meet?", free, example.fields["day"])

    def gold_text(self, example: Example) -> str:
        return str(example.fields["day"])

    # -- self-checks --------------------------------------------------------------------------

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        day = example.fields["day"]
        return self._scripted(example, day, f"Yes, {day} suits me.", feedback)

    def wrong(self, example: Example) -> Episode:
        """The caller settles on a day that the friend has just declined."""
        day = next(day for day in example.fields["free"] if day != example.fields["day"])
        return self._scripted(example, day, f"Sorry, I cannot on {day}.", None)

    def _scripted(
        self, example: Example, day: str, answer: str, feedback: Feedback | None
    ) -> Episode:
        opening = (self.slot(example, CALLER, feedback), Segment("user", START))
        ask, close = f"How about {day}?", f"Agreed: {day}"
        later = (*opening, Segment("assistant", ask), Segment("user", answer))
        turns = (Turn(opening, Completion(text=ask)), Turn(later, Completion(text=close)))
        lines = (Line(CALLER, ask), Line(FRIEND, answer), Line(CALLER, close))
        return Episode(
            example_id=example.id, task=self.name, kind="gold", traces=(Trace(CALLER, turns),),
            transcript=lines, stop="agreed",
        )  # fmt: skip


def agreed_day(lines: Sequence[Line]) -> str:
    """The day on which the caller ended the call; empty if the call has not ended."""
    last = next((line.text for line in reversed(lines) if line.seat == CALLER), "")
    match = _AGREED.search(last)
    return match.group(1).capitalize() if match else ""
