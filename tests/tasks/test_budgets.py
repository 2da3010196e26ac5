"""Word budgets of lists, and the fullest lesson that is safe to give."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from soulkit.judge.leaks import LeakView
from soulkit.tasks.budgets import (
    fair_cap,
    first_words,
    keep_latest,
    last_words,
    share_fairly,
    total_words,
)
from soulkit.tasks.lessons import safest

LENGTHS = st.lists(st.integers(0, 60), max_size=12)


@given(LENGTHS, st.integers(0, 400))
def test_a_fair_cap_fits_and_a_larger_one_does_not(lengths: list[int], budget: int) -> None:
    cap = fair_cap(lengths, budget)
    assert sum(min(n, cap) for n in lengths) <= budget or not lengths
    if any(n > cap for n in lengths):
        assert sum(min(n, cap + 1) for n in lengths) > budget


@given(LENGTHS, st.integers(1, 400))
def test_shared_budgets_are_kept_and_cuts_add_up(lengths: list[int], budget: int) -> None:
    items = [{"text": " ".join(["w"] * n)} for n in lengths]
    fitted, cut = share_fairly(items, budget)
    words_left = sum(
        min(n, item["text"].split().count("w")) for n, item in zip(lengths, fitted, strict=True)
    )
    assert words_left <= budget and words_left + cut == sum(lengths) and len(fitted) == len(items)
    assert (cut == 0) == (list(fitted) == items)


@given(LENGTHS, st.integers(1, 400))
def test_the_latest_entries_stay(lengths: list[int], budget: int) -> None:
    entries = [" ".join([f"w{i}"] * n) for i, n in enumerate(lengths)]
    latest, cut = keep_latest(entries, budget)
    assert total_words(latest) - sum(text.endswith(" [...]") for text in latest) <= budget
    if cut and not latest[-1].endswith(" [...]"):
        assert list(latest) == entries[len(entries) - len(latest) :]
        assert total_words(latest) + cut == total_words(entries)


def test_line_breaks_survive_a_cut() -> None:
    assert first_words("a\nb  c", 2) == "a\nb [...]"
    assert first_words("a\nb", 2) == "a\nb"
    assert last_words("a\nb  c", 2) == "[...] b  c"
    assert last_words("a b", 2) == "a b" and last_words("a b", 0) == first_words("a", 0) == "[...]"
    assert keep_latest(["a b c", "d"], None) == (("a b c", "d"), 0)
    assert keep_latest(["a", "b c d"], 2) == (("b c [...]",), 2)


def test_the_fullest_lesson_that_points_at_no_option_is_said() -> None:
    view = LeakView("What to drink?", ("Tea, with honey", "Cold beer"), "Tea, with honey")
    assert safest((("Think of honey.", "Ask."), ("", "Ask.")), view) == "Ask."
    assert safest((("Ask.", "Then wait."),), view) == "Ask. Then wait."
    assert safest((("Take the beer.",), ("",)), view) is None
