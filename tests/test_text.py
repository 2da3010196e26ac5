"""Addresses from users are parsed or rejected; numbers and lists are written in words."""

from __future__ import annotations

import pytest

from soulkit.text import (
    byte_size,
    dollars,
    duration,
    join_and,
    listed,
    web_address,
    word_count,
)


@pytest.mark.parametrize(
    "text", ["http://localhost:8000/v1", "https://api.example.org", "http://[::1]:80", "HTTP://x"]
)
def test_addresses(text: str) -> None:
    parts = web_address(text)
    assert parts is not None and parts.hostname


@pytest.mark.parametrize(
    "text", ["", "localhost:8000", "ftp://x", "http://", "http://x:0", "http://x:99999", "http://["]
)
def test_what_no_request_could_be_sent_to(text: str) -> None:
    assert web_address(text) is None


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (duration(0.4), "0 s"), (duration(59.6), "1 min 00 s"), (duration(185), "3 min 05 s"),
        (duration(7620), "2 h 07 min"), (duration(4.23, 1), "4.2 s"), (duration(-1), "0 s"),
        (dollars(None), "unknown"), (dollars(0), "$0.00"), (dollars(0.042), "$0.0420"),
        (dollars(1234.5), "$1,234.50"), (byte_size(512), "512 B"), (byte_size(3.4e6), "3.4 MB"),
        (byte_size(1.23e12), "1230.0 GB"), (join_and(()), ""), (join_and("a"), "a"),
        (join_and(("a", "b")), "a and b"), (join_and("abc"), "a, b and c"),
    ],
)  # fmt: skip
def test_numbers_and_lists_in_words(shown: str, words: str) -> None:
    assert shown == words


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [("", 0, 0), ("two words", 2, 2), ("déjà vu", 2, 2), ("\ud800", 1, 1),
     ("我不知道他昨天为什么没有来", 6, 13), ("彼は昨日なぜ来なかったのだろう", 7, 15),
     ("Я не знаю, почему он не пришёл вчера", 8, 20)],
)  # fmt: skip
def test_words_are_counted_without_spaces_too(text: str, least: int, most: int) -> None:
    assert least <= word_count(text) <= most


def test_counts_are_listed_in_the_singular_and_the_plural() -> None:
    counts = {"failed requests": 1, "memories": 1, "reasoning": 1, "answers of batches": 2000}
    assert listed(counts) == "1 failed request, 1 memory, 1 reasoning, 2,000 answers of batches"
