"""What counts as private in a text, and what does not."""

from __future__ import annotations

import re
import time

import pytest

from soulkit.data.privacy.finders import (
    counts_line,
    find_private,
    private_counts,
    refuse_private,
    strings_in,
)
from soulkit.errors import ConfigError

KEY = "s" + "k-proj-Ab12Cd34Ef56Gh78Ij90"

PRIVATE = [
    ("email", "write to ana.lópez+x@mail.example-firma.es.", "ana.lópez+x@mail.example-firma.es"),
    ("phone", "+34 612 345 678", None),
    ("phone", "llámame al 612345678, gracias", "612345678"),
    ("phone", "mi fijo: 91 234 56 78", "91 234 56 78"),
    ("phone", "06 12 34 56 78", None),
    ("phone", "ruf 030 1234567 an", "030 1234567"),
    ("phone", "Tel.0151 23456789", "0151 23456789"),
    ("phone", "(212) 555-7890", None),
    ("phone", "call 212-555-7890 2nd floor", "212-555-7890"),
    ("phone", "020 7946 0958", None),
    ("phone", "+44 (0)20 7946 0958", None),
    ("phone", "(11) 91234-5678", None),
    ("card", "4111 1111 1111 1111", None),
    ("iban", "es91 2100 0418 4502 0005 1332 por favor", "es91 2100 0418 4502 0005 1332"),
    ("iban", "AB12 DE89370400440532013000", "DE89370400440532013000"),
    ("ip", "ping 192.168.1.10", "192.168.1.10"),
    ("ip", "fe80::1ff:fe23:4567:890a", None),
    ("mac", "00:1A:2B:3C:4D:5E", None),
    ("url", "see https://a.b/c?token=1).", "https://a.b/c?token=1"),
    ("url", "postgres://me:pw@db/x", None),
    ("key", KEY, None),
    ("key", "the password is hunter2x", "hunter2x"),
    ("id", "DNI 12345678Z", "12345678Z"),
    ("id", "RSSMRA85T10A562S", None),
    ("id", "111.444.777-35", None),
    ("id", "SSN 523-45-6789", "523-45-6789"),
]
CALM = [
    "chrome 120.0.6099.109, v1.2.3.4, version 10.0.0.1, Python 3.11.7",
    "order 612345678, pedido nº 612345678, Bestellnummer: 0301234567, #4539148803436467",
    "$1,234,567.89 or 612 345 678 €, 212.555.789 euros",
    "ISBN 978-3-16-148410-0 and 0-306-40615-2",
    "2024-05-12 12:30, 12.05.2024 14:30, 05 12 2023, 1939-1945",
    "4111 1111 1111 1112 and ES91 2100 0418 4502 0005 1333 and 12345678A",
    "https://soul.org/a/612345678 and 127.0.0.1 and std::vector and 10:20:30",
    "3 4 5 6 7 8 9 10 11 12, 31.6069612586, n=360/(180-162), 3.14159265",
    "37b71bb4-7e9e-4d7a-a83f-4a38b56a568c",
    "me@example.org, https://www.example.org/?q=1, 203.0.113.7, AKIAIOSFODNN7EXAMPLE",
]


@pytest.mark.parametrize(("kind", "text", "item"), PRIVATE)
def test_private_items_are_found_whole(kind: str, text: str, item: str | None) -> None:
    items = [(one.kind, text[one.start : one.end]) for one in find_private(text)]
    assert items == [(kind, item or text)]


@pytest.mark.parametrize("text", CALM)
def test_what_only_looks_private_is_left(text: str) -> None:
    assert find_private(text) == []


def test_own_patterns_go_first_and_regions_decide_about_national_numbers() -> None:
    text = "member KD-4411 calls 612 345 678"
    items = find_private(text, {"member": re.compile(r"KD-\d+")}, ["ES"])
    assert [one.kind for one in items] == ["member", "phone"]
    assert find_private("612 345 678", regions=["DE"]) == []


@pytest.mark.parametrize(
    "unit", ["1 ", "1/", "12 ", "123 ", "1'", "+1 ", "a@", "1.", "order ", "f1:"]
)
def test_hostile_texts_take_linear_time(unit: str) -> None:
    """Ten times the text takes ten times as long; quadratic patterns would take a hundred times."""

    def seconds(length: int) -> float:
        start = time.process_time()
        find_private(unit * (length // len(unit)))
        return time.process_time() - start

    least = max(min(seconds(5_000) for _ in range(3)), 0.01)
    assert min(seconds(50_000) for _ in range(3)) < 40 * least


def test_after_many_candidates_numbers_are_replaced_without_a_check() -> None:
    text = "12 12 12 99, " * 2000 + "call 612 345 678"
    last = find_private(text)[-1]
    assert (last.kind, text[last.start : last.end]) == ("phone", "612 345 678")


def test_canaries_are_not_counted_and_a_remote_model_is_refused() -> None:
    rows = [{"messages": [{"content": "612345678 a@b.es"}, {"content": "c@d.es", "canary": True}]}]
    assert private_counts(strings_in(rows)) == {"phone": 1, "email": 1}
    assert counts_line({"email": 1, "phone": 2}) == "2 phone numbers and 1 e-mail"
    with pytest.raises(ConfigError, match="1 phone number") as error:
        refuse_private(strings_in(rows), "the drafter gpt-5", False)
    assert "--allow-private" in error.value.way_out
    refuse_private(strings_in(rows), "the drafter gpt-5", True)
