"""Ordinary criticism of a wrong draft is no leak, and answers in it are: on made rows of every task
with options, and on real rows of stories.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from soulkit.judge.leaks import LeakView, check_leak
from soulkit.judge.verdict import plain
from soulkit.tasks.kit.loading import examples_to_inspect
from soulkit.types import Example, Feedback, Score
from tests.support.road import EVERY, original, synth_examples, task_of

WITH_OPTIONS = ("hitom", "paratomi", "tomi", "twinvoice", "behaviorchain", "tombench",
                "lifechoices", "mistakes", "socsci210", "mmtom", "alignx_demo",
                "humanllm")  # fmt: skip
REAL = {"paratomi": "paratomi/test.txt", "hitom": "hitom/Hi-ToM_data.json"}
ROWS = 300


def wrong_option(view: LeakView, rng: random.Random) -> tuple[str, str]:
    """(what the draft answers, the option that this is) of a wrong one."""
    named = zip(view.letters or view.options, view.options, strict=False)
    return rng.choice([one for one in named if plain(one[1]) != plain(view.gold)])


def leak(text: str, view: LeakView | None) -> str:
    return check_leak(Feedback(text=text, author="coach"), view).leak


def drafted(name: str, example: Example) -> tuple[LeakView, str]:
    """The view for feedback on a wrong draft, and the option that it answered."""
    task, rng = task_of(name), random.Random(example.id)
    answer, option = wrong_option(task.leak_view(example), rng)
    view = task.draft_view(example, Score(value=0, reward=0, words=answer))
    return view, option


def test_every_task_with_options_is_looked_at() -> None:
    assert set(WITH_OPTIONS) <= set(EVERY)


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_the_drafts_answer_may_be_said_and_the_gold_may_not(name: str) -> None:
    for example in synth_examples(name, 25):
        view, option = drafted(name, example)
        criticism = f"You said “{option}”, but ask who was there."
        alone = len(view.names()) == 2
        assert leak(criticism, view) == ("answerable" if alone else ""), criticism
        assert leak(f"{criticism} It is “{view.gold}”.", view) == "gold_text"
        others = [one for one in view.options if plain(one) != plain(view.gold)]
        assert leak(f"It is none of: {'; '.join(others)}.", view) == "answerable"
        if view.letter:
            assert leak(f"{criticism} Take option {view.letter}.", view) == "gold_letter"


def sentences(text: str) -> list[str]:
    return [s for s in re.split(r"(?<=[.!?])\s+|\n+", text) if len(s.split()) > 3]


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_what_the_actor_reads_may_be_quoted_but_for_its_options(name: str) -> None:
    task = task_of(name)
    for example in synth_examples(name, 15):
        view, _ = drafted(name, example)
        options = [plain(option) for option in view.options]
        for sentence in sentences(view.story):
            if any(plain(sentence) in one or one in plain(sentence) for one in options):
                continue
            assert leak(f"You passed over this: {sentence}", view) == "", sentence
        assert view.story and task.gold_text(example)
        assert leak(f"You passed over this: {view.gold}", view) == "gold_text"


def real_rows(name: str) -> Sequence[Example]:
    return examples_to_inspect(task_of(name), str(original(REAL[name]))).examples[:ROWS]


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_criticism_of_drafts_on_real_stories(name: str) -> None:
    """Sentences of the story as a remark, the draft's own answer, and that with the gold."""
    kinds: dict[str, Counter[str]] = {form: Counter() for form in ("quoted", "said", "told")}
    for example in real_rows(name):
        view, option = drafted(name, example)
        story = sentences(example.fields["story"])
        quotes = random.Random(example.id).sample(story, min(3, len(story)))
        remarks: dict[str, Any] = {
            "quoted": [f"You passed over this: {s}" for s in quotes],
            "said": [f"You said {option}, but ask whether she was there."],
            "told": [f"You said {option}, but it is the {view.gold}."],
        }
        for form, texts in remarks.items():
            kinds[form].update(leak(text, view) for text in texts)
    assert set(kinds["quoted"]) == set(kinds["said"]) == {""}
    assert kinds["quoted"].total() == 3 * ROWS and kinds["told"] == {"gold_text": ROWS}
