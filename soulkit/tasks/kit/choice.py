"""Tasks with one prompt, one reply and one right answer: free text, letters, or worked examples.

`ChoiceTask`: a template, a parser and a scorer. `LetteredTask`: one of the letters A to D; rows may
give options as a mapping, a list, or JSON text of either (`read_options`). `OrderedTask`: the
options of a row are presented in several orders. `WorkedTask`: feedback may show the full solution
with its answer (`feedback: {kind: worked_example}`).
"""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from soulkit.data.literals import item_text, structure
from soulkit.errors import RowError
from soulkit.judge.coach import ask_coach
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import plain, spoken, tagged_letter, tagged_text
from soulkit.models.base import Cast
from soulkit.tasks.kit.base import READABLE, Rollout, Task, dropped_note
from soulkit.tasks.kit.coaching import first_safe_lesson
from soulkit.tasks.kit.scoring import ROWS, actor_status, mean_of, row_plays
from soulkit.types import (
    BatchMetric,
    Completion,
    Episode,
    Example,
    Feedback,
    Kind,
    Line,
    Record,
    Score,
    Segment,
    Trace,
    Turn,
    unscored,
)


class ChoiceTask(Task):
    """One prompt, one completion, one right answer.

    A subclass defines `grade` and `gold_text`. The template is rendered with its
    `feedback` slot filled and empty, so a copy is the same conversation with an empty slot.
    """

    template = "user"

    def context(self, example: Example, feedback: Feedback | None) -> tuple[Segment, ...]:
        """The prompt as a message; its `bare` text is the same prompt without feedback."""
        return (self.slot(example, self.acted_seat(example), feedback),)

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        view, _ = self.within_budget(example.visible(seat))
        return self.prompts.opening(self.template, feedback, view, "user")

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

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode | None:
        completion = Completion(text=self.gold_completion(example))
        if not completion.text:
            return None
        return self._episode(example, self.context(example, feedback), completion, 0, "gold")

    def gold_completion(self, example: Example) -> str:
        """The text of a perfect answer, by default the gold in the answer tag; empty if there is no
        script."""
        return f"<answer>{self.gold_text(example)}</answer>"

    def wrong(self, example: Example) -> Episode | None:
        text = self.wrong_completion(example)
        if text is None:
            return None
        context = self.context(example, None)
        return self._episode(example, context, Completion(text=text), 0, "draft")

    def wrong_completion(self, example: Example) -> str | None:
        """The text of a readable wrong answer, the same at every call.

        By default another option of the leak view, as its letter if it has one; None if there is no
        other option. Override it if an answer is not one of the options.
        """
        view = self.leak_view(example)
        if view is None:
            return None
        gold = plain(view.gold)
        labelled = zip(view.letters or view.options, view.options, strict=False)
        others = [name for name, option in labelled if plain(option) != gold]
        rng = random.Random(example.id)
        return f"<answer>{rng.choice(others)}</answer>" if others else None

    def parse(self, text: str) -> tuple[str, str]:
        """(answer, status): the answer in a completion (by default the text of its answer tag), and
        how it was read.

        `ok`; `salvaged` (readable although not in the required form, and graded); `no_tag`;
        `malformed`. Empty and truncated replies are detected elsewhere.
        """
        return with_status(tagged_text(text, self.protocol))

    def read(self, example: Example, text: str) -> tuple[str, str]:
        """`parse`, for tasks in which parsing depends on the row (for example, on its scale)."""
        return self.parse(text)

    @abstractmethod
    def grade(self, example: Example, answer: str) -> float:
        """The score of an answer, in [0, 1]."""

    def measures(self, example: Example, answer: str) -> dict[str, float | None]:
        """Additional metrics of an answer, by name; None if one is undefined.

        Called for every scored reply, so that their means cover the same replies as the headline;
        `answer` is empty for an unreadable reply.
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
        return self.judged_score(
            value, self.measures(example, answer if readable else ""), status=status,
            words=answer, templates=self.templates or (self.template,),
        )  # fmt: skip


def with_status(answer: str | None) -> tuple[str, str]:
    """An answer, which is None if there is no answer tag, with its status."""
    return answer or "", "no_tag" if answer is None else "ok" if answer else "malformed"


LETTERS = ("A", "B", "C", "D")
ANY_LETTER = re.compile(r"<answer>\s*([A-Z])\s*</answer>", re.IGNORECASE)
_ABSENT = ("", "nan", "NaN")  # `Nan` can be a name


class LetteredTask(ChoiceTask):
    """The answer is one of `letters`, in the answer tag."""

    letters = "ABCD"
    published = re.compile(r"<answer>\s*([A-D])\s*</answer>", re.IGNORECASE)
    """How replies are parsed under `reference`."""
    options_column, letter_column = "options", "correct_letter"
    """The columns with the mapping of letters to options, and with the gold's letter."""
    question_column = "question"
    """The column with the question that the options answer, for the leak check."""
    gold_column = ""
    """The column with the gold text, for rows whose options do not include it."""
    hears_thinking = False
    """Whether `reference` also counts an answer inside the thinking."""

    def options(self, example: Example) -> Mapping[str, str]:
        """Letter → option text."""
        options: Mapping[str, str] = example.fields[self.options_column]
        return options

    def gold_letter(self, example: Example) -> str:
        """The right letter; empty if the row has none."""
        return str(example.fields.get(self.letter_column) or "")

    def parse(self, text: str) -> tuple[str, str]:
        if self.protocol == "reference":
            match = self.published.search(
                text if self.hears_thinking else spoken(text, "reference")
            )
            return (match.group(1).upper(), "ok") if match else ("", "no_tag")
        letter, status = tagged_letter(text, "paper")
        return (letter, status) if not letter or letter in self.letters else ("", "malformed")

    def grade(self, example: Example, answer: str) -> float:
        return float(bool(answer) and answer == self.gold_letter(example))

    def gold_text(self, example: Example) -> str:
        letter = self.gold_letter(example)
        text = str(example.fields.get(self.gold_column) or letter) if self.gold_column else ""
        return self.options(example).get(letter, text)

    def gold_completion(self, example: Example) -> str:
        return f"<answer>{self.gold_letter(example)}</answer>"

    def leak_view(self, example: Example) -> LeakView:
        options, gold = self.options(example), self.gold_text(example)
        return LeakView(self.question(example), tuple(options.values()), gold, tuple(options))

    def question(self, example: Example) -> str:
        """The question that the options answer."""
        return str(example.fields.get(self.question_column) or "")

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        """The coach's view, with long fields cut as they are for the actor."""
        view, _ = self.within_budget(super().coach_view(example, episode, score))
        return view

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        """The first lesson that does not give the answer away; None if all of them do."""
        lessons = ((text,) for text in self.lessons(example, score))
        return first_safe_lesson(lessons, self.leak_view(example))

    def lessons(self, example: Example, score: Score | None) -> Iterable[str]:
        """Possible feedback texts, best first. If `score` is None, there is no draft yet."""
        return ()


class OrderedTask(LetteredTask):
    """A lettered task that may present a row in several orders of its options."""

    order_column = "order"

    def in_orders(self, example: Example, orders: Iterable[str]) -> tuple[Example, ...]:
        """The forms of a row. The order BCA shows the row's B as A, its C as B and its A as C."""
        options, gold = self.options(example), self.gold_letter(example)
        forms = []
        for number, order in enumerate(orders):
            shown = dict(zip(options, order, strict=True))
            fields = {
                **example.fields,
                self.options_column: {new: options[old] for new, old in shown.items()},
                self.letter_column: next((new for new, old in shown.items() if old == gold), gold),
                self.order_column: order,
            }
            forms.append(replace(example, id=f"{example.id}-{number}", fields=fields))
        return tuple(forms)

    def _episode(
        self, example: Example, context: tuple[Segment, ...], completion: Completion,
        index: int, kind: Kind,
    ) -> Episode:  # fmt: skip
        episode = super()._episode(example, context, completion, index, kind)
        order = example.fields.get(self.order_column)
        return replace(episode, notes={**episode.notes, "order": order}) if order else episode


def chosen_letter(record: Record) -> str:
    """The letter, in the row's own order, of the option that a reply chose; "" if unreadable."""
    order = str(record.episode.notes["order"])
    letters = dict(zip(sorted(order), order, strict=True))
    return letters.get(record.score.words, "") if record.score.status in READABLE else ""


def over_orders(
    records: Sequence[Record], orders: int, measure: Callable[[Sequence[Record]], bool]
) -> BatchMetric:
    """The mean of `measure` over rows, among those that were scored in every order; a row that was
    played several times counts with its mean. `measure` gets the forms in order."""
    values: list[float | None] = []
    for plays in row_plays(records).values():
        scored = [
            float(measure(sorted(play, key=lambda r: int(r.example_id.rpartition("-")[2]))))
            for play in plays
            if len(play) == orders and all(r.score.scored for r in play)
        ]
        values.append(sum(scored) / len(scored) if scored else None)
    return mean_of(values, ROWS)


def read_options(mapping: Any, listed: Any) -> dict[str, str]:
    """Letter → text, from a mapping of letters or else from a list in order; {} if both are empty.

    Either may be JSON text. None, NaN and blanks are not options. RowError for anything else.
    """
    by_letter, in_order = _structure_of(mapping, Mapping), _structure_of(listed, list, tuple)
    pairs = (
        [(str(letter).strip().upper(), text) for letter, text in by_letter.items()]
        if by_letter
        else list(zip(LETTERS, in_order or (), strict=False))
    )
    texts = {k: item_text(v, "options") for k, v in pairs if v is not None and k in LETTERS}
    return {letter: texts[letter] for letter in sorted(texts) if texts[letter] not in _ABSENT}


def _structure_of(value: Any, *kind: type[Any]) -> Any:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    options = structure(value)
    if not isinstance(options, kind):
        raise unreadable_options(value)
    return options


def unreadable_options(value: Any) -> RowError:
    what = "The row's options are unreadable."
    return RowError(what, f"They are {value!r:.60}, neither a mapping of letters nor a list.")


def check_gold(letter: str, options: Mapping[str, str]) -> None:
    """RowError if a row has fewer than two options, or if the gold is not among them."""
    if len(options) < 2:
        raise RowError("The row has fewer than two options.", "A choice needs at least two.")
    if letter not in options:
        what = f"The gold answer '{letter}' is not one of the row's options."
        raise RowError(what, f"The options are {', '.join(options)}.")


def read_state(score: Score | None) -> str:
    """The state of a draft: `none` (no draft), `right`, `wrong`, or why it is unreadable."""
    if score is None:
        return "none"
    if score.status not in READABLE:
        return score.status
    return "right" if score.value == 1 else "wrong"


UNREAD_OPENINGS = {
    "no_tag": "The draft reasoned but never put its choice between the answer tags.",
    "malformed": "The draft put something other than one letter between the answer tags.",
    "empty": "The draft said nothing.",
    "truncated": "The draft ran out of room before it answered; reason in fewer words.",
    "refusal": "The draft declined; picking among given options is all that is asked.",
}


def opening(state: str, right: str, wrong: str, unread: Mapping[str, str] = UNREAD_OPENINGS) -> str:
    """The first sentence of a lesson for the state of the draft; empty without a draft."""
    return {"none": "", "right": right, "wrong": wrong, **unread}.get(state, wrong)


_LED = re.compile(r"\s*[(\[*]*([A-Za-z])(?:[)\]*.:]+(?:\s+(.*))?)?\s*", re.DOTALL)

CLOSE = "Close with one option's letter between <answer> and </answer>, nothing else inside."


class WorkedTask(LetteredTask):
    """A lettered task with two kinds of feedback: advice, or a worked example."""

    @abstractmethod
    def worked_example(self, example: Example) -> str:
        """The full solution of a row, with its answer, written without a model."""

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        if self.spec.feedback.kind == "worked_example":
            return self.worked_example(example)
        return super().explain(example, episode, score)

    async def critique(
        self, example: Example, episode: Episode, score: Score, cast: Cast, rollout: Rollout
    ) -> Feedback | None:
        if cast.coach is None or self.spec.feedback.kind != "worked_example":
            return await super().critique(example, episode, score, cast, rollout)
        prompt = self.prompts.render("worked_example", **self.worked_view(example))
        feedback = await ask_coach(cast.coach, prompt, rollout.call("coach", example))
        return replace(feedback, kind="worked_example")

    def other_prompts(
        self, example: Example, draft: Episode, score: Score
    ) -> Iterator[tuple[str, str]]:
        """The prompts for both kinds of feedback."""
        view = self.worked_view(example)
        yield "worked_example", self.prompts.render("worked_example", **view)
        view = self.coach_view(example, draft, score)
        yield "coach", self.prompts.render("coach", **view)

    def wrong_completion(self, example: Example) -> str | None:
        # By letter, because two option texts may differ only in signs (`<` and `>`).
        others = [key for key in self.options(example) if key != self.gold_letter(example)]
        rng = random.Random(example.id)
        return f"<answer>{rng.choice(others)}</answer>" if others else None

    def worked_view(self, example: Example) -> dict[str, Any]:
        """The fields that the author of a worked example sees: the actor's view plus the gold."""
        view, _ = self.within_budget(example.visible(self.acted_seat(example)))
        letter, text = self.gold_letter(example), self.gold_text(example)
        return {**view, "gold_letter": letter, "gold_text": text}


# -- gold answers in rows ------------------------------------------------------------------------


def led_letter(text: str, letters: str) -> str:
    """The letter of a gold such as `B`, `b)`, `(B)` or `B. some text`; "" for `Burn the will`."""
    match = _LED.fullmatch(text)
    letter = match.group(1).upper() if match else ""
    return letter if letter in letters else ""


def led_text(text: str) -> str:
    """`B. some text` without its letter; other texts unchanged."""
    match = _LED.fullmatch(text)
    return match.group(2).strip() if match and match.group(2) else text.strip()


def letter_of(gold: str, options: Mapping[str, str], letters: str) -> str:
    """The option that `gold` names by letter, full text or both; "" if it names none.

    The full text takes precedence, because an option may start like a letter (`A. Smith`).
    """
    letter, gold_words = led_letter(gold, letters), plain(gold)
    text_matches = [
        key for key, text in options.items() if gold_words and plain(text) == gold_words
    ]
    if len(text_matches) == 1 and len(gold_words) > 1:
        return text_matches[0]
    rest = plain(led_text(gold)) if len(gold_words) > 1 else ""
    rest_matches = {key for key, text in options.items() if rest and plain(text) == rest}
    contradicts = bool(rest_matches) and letter not in rest_matches
    return "" if contradicts or (options and letter not in options) else letter


def bad_gold(gold: str, expected: str) -> RowError:
    what = f"The gold answer '{gold:.60}' matches none of the row's options."
    return RowError(what, f"It should be {expected}.")
