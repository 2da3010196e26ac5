"""Every task on rows of its own: gold is best, wrong is not, and nothing is shown to whom it isn't.

The checks run over the whole of tasks.yaml, so a task that is added there is checked as well.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from soulkit.judge.leaks import check_leak
from soulkit.tasks.spec import READERS
from soulkit.types import Completion, Example, Feedback, Line, Score
from tests.support.road import (
    CHOICES,
    EVERY,
    NO_ONE,
    ROLLOUT,
    TASKS,
    score_text,
    synth_examples,
    task_of,
)

PROTOCOLS = ("paper", "reference")
ADVICE = Feedback(text="Look again at who was there.", author="symbolic")


def wrong_text(task: Any, example: Example, rng: random.Random) -> str:
    view = task.leak_view(example)
    wrong = rng.choice([i for i, option in enumerate(view.options) if option != view.gold])
    return f"<answer>{(view.letters or view.options)[wrong]}</answer>"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", TASKS)
def test_gold_scores_the_maximum(name: str, protocol: str) -> None:
    task = task_of(name, protocol)
    for example in synth_examples(name, protocol=protocol):
        if "judge" in task.calls(example):
            continue  # what only a judge can tell is played in the task's own tests
        score = asyncio.run(task.score(example, task.gold(example), NO_ONE))
        assert (score.value, score.reward, score.status) == (task.spec.metric.high,) * 2 + ("ok",)
        assert score.protocol == protocol and score.prompts


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", CHOICES)
def test_a_wrong_answer_scores_the_minimum(name: str, protocol: str) -> None:
    task = task_of(name, protocol)
    for example in synth_examples(name, protocol=protocol):
        wrong = wrong_text(task, example, random.Random(example.id))
        score = score_text(task, example, wrong)
        assert score.value == task.spec.metric.low and score.status == "ok"


def test_a_gold_dialogue_with_the_secret_in_it_scores_nothing() -> None:
    task = task_of("secret_keeper")
    for example in synth_examples("secret_keeper"):
        gold = task.gold(example)
        slip = Line("keeper", f"And the {example.fields['secret']['value']}.")
        episode = replace(gold, transcript=(*gold.transcript[:-1], slip))
        assert asyncio.run(task.score(example, episode, NO_ONE)).value == 0


@pytest.mark.parametrize("name", CHOICES)
def test_feedback_from_rules_never_leaks(name: str) -> None:
    task = task_of(name)
    for example in synth_examples(name):
        rng = random.Random(example.id)
        drafts = (task.gold_completion(example), wrong_text(task, example, rng), "")
        scores: list[Score | None] = [score_text(task, example, draft) for draft in drafts]
        texts = [task.explain(example, None, score) for score in (*scores, None)]
        for text in [*texts, task.rehearse(example, rng)]:
            assert text
            feedback = check_leak(Feedback(text=text, author="symbolic"), task.leak_view(example))
            assert feedback.leak == "" and feedback.blind <= feedback.chance, text


def test_feedback_on_a_dialogue_names_topics_and_no_values() -> None:
    task = task_of("secret_keeper")
    for example in synth_examples("secret_keeper"):
        values = [f["value"] for f in (*example.fields["facts"], example.fields["secret"])]
        for episode in (task.gold(example), None):
            text = task.explain(example, episode, None)
            assert text and not any(value.lower() in text.lower() for value in values)


def first_contexts(task: Any, example: Example) -> tuple[Any, Any]:
    return tuple(
        task.gold(example, feedback).traces[0].turns[0].context for feedback in (None, ADVICE)
    )


@pytest.mark.parametrize("name", TASKS)
def test_a_copy_is_the_draft_with_nothing_in_the_slot(name: str) -> None:
    task = task_of(name)
    for example in synth_examples(name, 12):
        draft, refined = first_contexts(task, example)
        assert len(draft) == len(refined)
        assert sum(a.text != b.text for a, b in zip(draft, refined, strict=True)) == 1
        bare = [segment.text if segment.bare is None else segment.bare for segment in refined]
        assert bare == [segment.text for segment in draft]
        assert ADVICE.text in "".join(segment.text for segment in refined)


def marked(value: Any, mark: str) -> Any:
    """The value with every text in it replaced by `mark`."""
    if isinstance(value, str):
        return mark
    if isinstance(value, dict):
        return {key: marked(inner, mark) for key, inner in value.items()}
    return [marked(inner, mark) for inner in value] if isinstance(value, list | tuple) else value


def with_private_strings(example: Example) -> tuple[Example, dict[str, str]]:
    """The example with a string of its own in every field, and field → string."""
    marks = {name: f"zq{i}zq" for i, name in enumerate(example.fields) if example.fields[name]}
    fields = {name: marked(v, marks.get(name, "")) for name, v in example.fields.items()}
    return replace(example, fields=fields), marks


def contexts_of(task: Any, example: Example) -> dict[str, str]:
    """Seat → all it reads."""
    seats = {s: "".join(m.text for m in c) for s, c in task.previews(example).items()}
    if hasattr(task, "partner_context"):
        brief = task.partner_context(example, [])
        seats[task.partner_seat(example)] = "".join(s.text for s in brief)
    for seat in seats_called(task, example) - set(seats):
        seats[seat] = task.slot(example, seat, None).text
    return seats


def seats_called(task: Any, example: Example) -> set[str]:
    """The seats whose players an episode may call: a recorded partner is nobody."""
    calls = task.calls(example)
    return {seat for seat, role in example.seats.items() if calls.get(role)}


@pytest.mark.parametrize("name", TASKS)
def test_no_seat_reads_a_field_that_is_not_for_it(name: str) -> None:
    task = task_of(name)
    for original in synth_examples(name, 12):
        example, marks = with_private_strings(original)
        contexts = contexts_of(task, example)
        assert set(contexts) == seats_called(task, example)
        for seat, text in contexts.items():
            shown = {field for field, mark in marks.items() if mark in text}
            allowed = {f for f in marks if seat in example.audience[f]}
            assert shown <= allowed, f"{seat} reads {shown - allowed}"
            assert shown or not allowed


TAUGHT = [name for name in TASKS if task_of(name).spec.feedback.coaches]


@pytest.mark.parametrize("name", TAUGHT)
def test_the_coach_does_not_read_the_gold(name: str) -> None:
    task = task_of(name)
    for original in synth_examples(name, 12):
        example, marks = with_private_strings(original)
        episode = replace(task.gold(original), transcript=(Line("actor", "I wonder."),))
        score = Score(value=0.0, reward=0.0)
        text = task.prompts.render("coach", **task.coach_view(example, episode, score))
        hidden = {f for f in marks if "coach" not in example.audience[f] or f in task.gold_fields}
        shown = {f for f in hidden if marks[f] in text}
        # Of what is not told yet the coach learns the topic; here topic and value are one string.
        assert shown <= ({"facts"} if name == "secret_keeper" else set())


def test_the_dialogue_coach_reads_topics_and_no_values() -> None:
    task = task_of("secret_keeper")
    for example in synth_examples("secret_keeper", 12):
        episode = replace(task.gold(example), transcript=(Line("keeper", "I wonder."),))
        score = asyncio.run(task.score(example, episode, NO_ONE))
        text = task.prompts.render("coach", **task.coach_view(example, episode, score))
        for fact in (*example.fields["facts"], example.fields["secret"]):
            assert fact["value"].lower() not in text.lower()
        assert all(fact["topic"] in text for fact in example.fields["facts"])


@pytest.mark.parametrize("name", EVERY)
def test_rows_have_no_undeclared_columns_and_stable_ids(name: str) -> None:
    from tests.support.road import synth

    rows = synth(name, 12, 5)
    spec = task_of(name).spec
    assert all(set(row) <= {*spec.columns, *spec.unpack} for row in rows)
    examples = synth_examples(name, 12)
    assert [e.id for e in examples] == [e.id for e in synth_examples(name, 12)]
    unnamed = [f for f, column in spec.columns.items() if not column.identity]
    for row, example in zip(rows, examples, strict=True):
        assert task_of(name).example({**row, **dict.fromkeys(unnamed)}).id == example.id
        assert set(example.audience) >= set(spec.columns)
        seats = {*spec.seats, *example.seats}  # a row may have seats of its own
        assert {r for a in example.audience.values() for r in a} <= {*seats, *READERS}


def test_texts_over_their_word_budget_are_cut_for_every_model_and_noted() -> None:
    task = task_of("tomi")
    example = synth_examples("tomi", 1)[0]
    words = " \n".join(f"w{i}" for i in range(3005))
    long = replace(example, fields={**example.fields, "story": words})
    (segment,) = task.context(long, None)
    assert "w2999 [...]" in segment.text and "w3000" not in segment.text
    assert "w0 \nw1" in segment.text, "line breaks survive the cut"
    episode = task._episode(long, (segment,), Completion(text=""), 0, "draft")
    assert episode.notes["cut_words"] == {"story": 5}


def test_every_random_choice_has_a_stream_of_its_own() -> None:
    one, two = synth_examples("tomi", 2)
    assert ROLLOUT.rng(one, "x").random() == ROLLOUT.rng(one, "x").random()
    streams = {ROLLOUT.rng(e, p).random() for e in (one, two) for p in ("x", "y")}
    assert len(streams | {replace(ROLLOUT, index=1).rng(one, "x").random()}) == 5
