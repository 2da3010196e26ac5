"""One prompt, one completion, one right answer: what most benchmarks are."""

from __future__ import annotations

import random
from abc import abstractmethod

from soulkit.judge.verdict import plain
from soulkit.models.base import Cast
from soulkit.tasks.base import READABLE, Rollout, Task, dropped_note
from soulkit.tasks.endings import actor_status
from soulkit.types import (
    Completion,
    Episode,
    Example,
    Feedback,
    Kind,
    Line,
    Score,
    Segment,
    Trace,
    Turn,
    unscored,
)


class ChoiceTask(Task):
    """One prompt, one completion, one right answer.

    A subclass gives `parse`, `grade` and `gold_completion`. The template's `feedback` slot is
    rendered full and empty, so a copy is the same conversation with the slot left empty.
    """

    template = "user"

    def context(self, example: Example, feedback: Feedback | None) -> tuple[Segment, ...]:
        """The prompt, and the same prompt without feedback as its `bare`."""
        return (self.slot(example, self.acted_seat(example), feedback),)

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        view, _ = self.within_budget(example.visible(seat))
        bare = self.prompts.render(self.template, feedback=None, **view)
        full = bare
        if feedback is not None:
            full = self.prompts.render(self.template, feedback=feedback.text, **view)
        return Segment("user", full, bare=bare)

    def preview(self, example: Example) -> tuple[Segment, ...]:
        return self.context(example, None)

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        context = self.context(example, rollout.feedback)
        completion = await cast.actor.complete(context, rollout.call("actor", example))
        return self._episode(example, context, completion, rollout.index, rollout.kind)

    def _episode(
        self,
        example: Example,
        context: tuple[Segment, ...],
        completion: Completion,
        index: int,
        kind: Kind,
    ) -> Episode:
        seat = self.acted_seat(example)
        _, cuts = self.within_budget(example.visible(seat))
        return Episode(
            example_id=example.id,
            task=self.name,
            kind=kind,
            rollout=index,
            traces=(Trace(seat, (Turn(context, completion),)),),
            transcript=(Line(seat, completion.text),),
            stop=completion.stop_reason,
            usage=completion.usage,
            notes={**dropped_note([completion]), **({"cut_words": cuts} if cuts else {})},
        )

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        completion = Completion(text=self.gold_completion(example))
        return self._episode(example, self.context(example, feedback), completion, 0, "gold")

    @abstractmethod
    def gold_completion(self, example: Example) -> str:
        """The text of a perfect answer."""

    def wrong(self, example: Example) -> Episode | None:
        text = self.wrong_completion(example)
        if text is None:
            return None
        context = self.context(example, None)
        return self._episode(example, context, Completion(text=text), 0, "draft")

    def wrong_completion(self, example: Example) -> str | None:
        """The text of a readable answer that is not right, the same at every call.

        By default another option of the leak view, by its letter where it has one. None: there is
        no other option. Override it where an answer is no option.
        """
        view = self.leak_view(example)
        if view is None:
            return None
        gold = plain(view.gold)
        labelled = zip(view.letters or view.options, view.options, strict=False)
        others = [name for name, option in labelled if plain(option) != gold]
        rng = random.Random(example.id)
        return f"<answer>{rng.choice(others)}</answer>" if others else None

    @abstractmethod
    def parse(self, text: str) -> tuple[str, str]:
        """(answer, status): what the completion answers, and how it could be read.

        `ok`; `salvaged` (readable, but not in the form asked for; graded all the same); `no_tag`;
        `malformed`. Whether a reply was empty or cut off is seen without the task.
        """

    def read(self, example: Example, text: str) -> tuple[str, str]:
        """`parse`, for tasks in which what can be read depends on the row (on its scale, say)."""
        return self.parse(text)

    @abstractmethod
    def grade(self, example: Example, answer: str) -> float:
        """The value of an answer in [0, 1]."""

    def measures(self, example: Example, answer: str) -> dict[str, float | None]:
        """Further numbers about an answer, by name; None where one is undefined.

        Asked for every scored reply, so that means are over the same replies as the headline;
        `answer` is empty for a reply that could not be read.
        """
        return {}

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        completion = episode.final
        assert completion is not None
        answer, status = self.read(example, completion.text)
        status = actor_status(completion, status, self.strict_endings)
        readable = status in READABLE
        value = self.grade(example, answer) if readable else self.spec.metric.low
        return Score(
            value=value,
            reward=value,
            metrics=self.measures(example, answer if readable else ""),
            status=status,
            words=answer,
            protocol=self.protocol,
            prompts=self.prompts.hashes(self.template),
        )
