"""Variety and likeness of texts: worked values, properties, the packages they stand on."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.metrics.text import (
    bleu,
    common_length,
    hdd,
    mattr,
    rouge_l,
    subword_tokens,
    yules_k,
    z_score,
)

SHORT = [1, 2, 3, 1, 2, 1]
LONG = [*range(40), *[0] * 20]
TOKENS = st.lists(st.integers(0, 12), min_size=1, max_size=120)
WORDS = st.lists(st.sampled_from(("a", "bb", "cat", "7", "ü", "x9")), max_size=40).map(" ".join)


# -- variety -------------------------------------------------------------------------------------


def test_worked_values():
    assert mattr(SHORT) == 0.5 and mattr(SHORT, 3) == pytest.approx(0.916667, abs=1e-6)
    assert hdd(SHORT) == 0.5 and hdd(SHORT, 3) == pytest.approx(0.75)
    assert yules_k(SHORT) == pytest.approx(2222.2222, abs=1e-4)
    values = [mattr(LONG), hdd(LONG), yules_k(LONG)]
    assert values == pytest.approx([0.718182, 0.673810, 1166.6667], rel=1e-6)


def test_no_tokens_have_no_variety():
    assert mattr([]) == hdd([]) == yules_k([]) == 0.0


@pytest.mark.parametrize("measure", [mattr, hdd])
def test_a_window_or_sample_holds_something(measure):
    with pytest.raises(ValueError, match="must be at least 1 token"):
        measure(SHORT, 0)


@given(TOKENS, st.integers(1, 130))
def test_mattr_is_the_mean_over_windows(tokens, window):
    size = min(window, len(tokens))
    windows = [tokens[i : i + size] for i in range(len(tokens) - size + 1)]
    shares = [Fraction(len(set(part)), size) for part in windows]
    assert mattr(tokens, window) == pytest.approx(float(sum(shares) / len(shares)))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 9))
def test_hdd_is_the_mean_over_all_samples(tokens, sample):
    samples = list(combinations(tokens, min(sample, len(tokens))))
    shares = [Fraction(len(set(part)), len(part)) for part in samples]
    assert hdd(tokens, sample) == pytest.approx(float(sum(shares) / len(shares)))


@given(TOKENS, st.randoms(use_true_random=False))
def test_only_the_counts_matter_to_hdd_and_k(tokens, rng):
    names = {token: f"w{token}" for token in tokens}
    renamed = [names[token] for token in rng.sample(tokens, len(tokens))]
    assert hdd(renamed) == pytest.approx(hdd(tokens)) and yules_k(renamed) == yules_k(tokens)


@given(TOKENS)
def test_the_scales(tokens):
    n, types = len(tokens), len(set(tokens))
    assert 0 < mattr(tokens) <= 1 and 0 < hdd(tokens) <= 1 + 1e-12
    assert 0 <= yules_k(tokens) < 10_000 and (yules_k(tokens) == 0) == (types == n)
    pairs = sum(count * (count - 1) for count in Counter(tokens).values())
    assert yules_k(tokens) == pytest.approx(10_000 * pairs / n**2)


def test_a_book_is_measured_at_once():
    rng = random.Random(0)
    book = [rng.randrange(5000) for _ in range(200_000)]
    assert 0.99 < mattr(book) < 1 and 0.99 < hdd(book) < 1 and 1.9 < yules_k(book) < 2.1


def test_a_z_score_without_spread_is_undefined():
    assert z_score(3, 1, 4) == 0.5 and z_score(1, 3, 4) == -0.5
    assert z_score(3, 1, 0) is None


# -- likeness ------------------------------------------------------------------------------------


def test_the_same_text_is_fully_alike_and_another_is_not():
    text = "The cat sat on the mat, and stayed."
    assert bleu(text, text.upper()) == 1.0 and rouge_l(text, text.upper()) == 1.0
    assert bleu(text, "xyz") == rouge_l(text, "xyz") == 0.0
    assert bleu(text, "") == rouge_l(text, "") == 0.0


def test_short_texts_use_the_orders_that_they_have():
    assert bleu("a b c", "a b c") == 1.0
    # Precisions of the three orders 2/3, 1/2 and, smoothed, 1/2 of 1/1.
    assert bleu("a b c", "a b d") == pytest.approx((2 / 3 * 1 / 2 * 1 / 2) ** (1 / 3))


def test_the_order_of_words_counts_across_lines():
    assert rouge_l("a b\nc d", "c d\na b") == 0.5


@pytest.mark.parametrize(("measure", "blank"), [(bleu, " \n"), (rouge_l, ""), (rouge_l, "今日は")])
def test_likeness_to_nothing_is_undefined(measure, blank):
    assert measure(blank, "a") is None and measure(blank, blank) is None


@given(WORDS, WORDS)
def test_rouge_l_is_the_published_packages(reference, hypothesis):
    from rouge_score.rouge_scorer import RougeScorer

    score = rouge_l(reference, hypothesis)
    if score is not None:
        published = RougeScorer(["rougeL"]).score(reference, hypothesis)["rougeL"]
        assert score == pytest.approx(published.fmeasure)


@given(st.lists(st.integers(0, 3), max_size=90), st.lists(st.integers(0, 3), max_size=90))
def test_a_common_subsequence_is_as_long_as_a_table_says(one, other):
    row = [0] * (len(other) + 1)
    for a in one:
        above = row
        row = [0]
        for j, b in enumerate(other):
            row.append(above[j] + 1 if a == b else max(row[j], above[j + 1]))
    assert common_length(one, other) == common_length(other, one) == row[-1]


def test_bleu_keeps_no_dialogue_in_memory():
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a, TokenizerRegexp

    bleu("a long dialogue", "another long dialogue")
    memories = [each.__call__.cache_info() for each in (Tokenizer13a, TokenizerRegexp)]
    assert [memory.currsize for memory in memories] == [0, 0]


# -- tokens --------------------------------------------------------------------------------------

# Ids that were printed by others with the vocabulary's own library.
PUBLISHED = {
    "Hi my name is Betül and I like purple!":
        [12194, 922, 1308, 382, 10559, 13595, 326, 357, 1299, 37896, 0],
    "this is a test example, tutorialexample.com":
        [851, 382, 261, 1746, 4994, 11, 24000, 18582, 1136],
    "Now is the time for all good men to come to the aid of their country.":
        [10620, 382, 290, 1058, 395, 722, 1899, 1966, 316, 3063, 316, 290, 13765, 328, 1043, 4931,
         13],
    "お誕生日おめでとう": [8930, 9697, 243, 128225, 8930, 17693, 4344, 48669],
    "antidisestablishmentarianism": [493, 129901, 376, 160388, 21203, 2367],
}  # fmt: skip


@pytest.mark.parametrize("text", PUBLISHED)
def test_ids_are_those_of_the_vocabulary(text):
    assert subword_tokens(text) == PUBLISHED[text]


def test_marks_and_broken_signs_are_text():
    assert len(subword_tokens("<|endoftext|>") or ()) > 1
    assert subword_tokens("") == [] and subword_tokens("\ud800x")


def test_a_long_text_has_the_ids_that_it_has_at_once():
    import bpe_openai

    text = " ".join(f"word{i}  is, so to speak,\n no. {i * i};" for i in range(6000))
    assert len(text) > 3 * 40_000
    assert subword_tokens(text) == bpe_openai.get_encoding("o200k_base").encode_ordinary(text)


def test_a_text_without_blanks_has_ids_however_long():
    assert len(subword_tokens("!?" * 150_000) or ()) > 10_000


# -- packages ------------------------------------------------------------------------------------

WITHOUT = """
import json, logging, sys
for name in ("sacrebleu", "rouge_score", "bpe_openai"):
    sys.modules[name] = None
logging.basicConfig(format="%(message)s")
from soulkit.metrics.text import bleu, mattr, rouge_l, subword_tokens
twice = [[bleu("a", "a"), rouge_l("a", "a"), subword_tokens("a")] for _ in range(2)]
print(json.dumps([twice, mattr([1, 1])]))
"""


def test_what_a_missing_package_measures_is_undefined_and_said_once():
    process = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == [[[None] * 3] * 2, 0.5]
    remarks = process.stderr.splitlines()
    assert len(remarks) == 3
    for package, remark in zip(("sacrebleu", "rouge_score", "bpe_openai"), remarks, strict=True):
        assert f"'{package}'" in remark and "undefined" in remark and "[metrics]" in remark
