"""How much private data does `soul data redact` find in chats, and what does it find wrongly?

    .venv/bin/python benchmarks/redaction.py                          # made messages, ten seconds
    .venv/bin/python benchmarks/redaction.py --real CHATS.json ...    # and hits in real messages

The messages are made: each has three private items in the forms of six countries, and two lures
(versions, prices, dates, ISBNs, order numbers). Telephone numbers come from the numbering plans and
are written as people do; cards and IBANs have right check digits. An item is found if a finding
covers it, and left if it still stands in the redacted file. Exit code 1 if less than 98 % of a kind
is found, if an item is left, or if a lure is found.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import phonenumbers

from soulkit.data.privacy.finders import find_private, strings_in
from soulkit.data.privacy.redaction import Redaction, redact_chats

LEAST = 0.98
COUNTRIES = {
    "US": (
        "emily|jacob|madison",
        "Carter|Nguyen|O'Neill",
        "my {} is {}|call or write: {1}|{1}, ok?",
    ),
    "GB": ("oliver|amelia", "Whitfield|Hughes", "here's my {}: {}|it is {1} mate|{1}"),
    "ES": ("lucía|mateo", "Ibáñez|Serrano", "mi {} es {}|apunta: {1}|es el {1}, gracias"),
    "FR": ("chloé|hugo", "Lefèvre|Moreau", "voici mon {} : {}|c'est {1}|{1} merci"),
    "DE": ("jürgen|lena", "Müller|Großmann", "meine {} ist {}|schreib an {1}|{1} danke"),
    "IT": ("giulia|matteo", "Ricci|D'Angelo", "il mio {} è {}|ecco: {1}.|({1})"),
}
"""Country → given names, family names, frames for (kind, item)."""
IBANS = {"GB": "AAAA" + "0" * 14, "ES": "0" * 20, "FR": "0" * 10 + "A" * 11 + "00", "DE": "0" * 18,
         "IT": "A" + "0" * 10 + "A" * 12, "US": "0" * 18}  # fmt: skip
LURES = (
    "version {v}", "v{v}", "it costs ${p}", "{p} €", "on {d}", "{d2} at 14:30", "ISBN {i}", "({i})",
    "order {o}", "order number: {o}", "pedido nº {o}", "Bestellnummer {o}", "#{o}", "commande {o}",
    "pi is 3.{o}", "{y}-{y2}", "python 3.11.{s}", "Chrome {c}", "room {s}, page {s}", "{s}/{s}",
)  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One thing in a message, private or (kind `lure`) not."""

    kind: str
    text: str


def digits(rng: random.Random, form: str) -> str:
    """`form` with random digits for 0 and capital letters for A."""
    letters = "ABCDEFGHJKLMNPRSTUVWXYZ"
    return "".join(
        rng.choice("0123456789") if c == "0" else rng.choice(letters) if c == "A" else c
        for c in form
    )


def phone(rng: random.Random, country: str) -> str:
    kind = rng.choice(
        (phonenumbers.PhoneNumberType.MOBILE, phonenumbers.PhoneNumberType.FIXED_LINE)
    )
    example = phonenumbers.example_number_for_type(country, kind)
    while True:
        text = str(example.national_number)
        text = text[:3] + digits(rng, "0" * len(text[3:]))
        zeros = "0" if example.italian_leading_zero else ""
        number = phonenumbers.parse(f"+{example.country_code}{zeros}{text}", None)
        if phonenumbers.is_valid_number_for_region(number, country):
            break
    forms = phonenumbers.PhoneNumberFormat
    national = phonenumbers.format_number(number, forms.NATIONAL)
    foreign = phonenumbers.format_number(number, forms.INTERNATIONAL)
    return rng.choice((
        national, foreign, phonenumbers.format_number(number, forms.E164), national,
        re.sub(r"\D", "", national), foreign.replace("+", "00"), national.replace(" ", "-"),
        foreign.replace(" ", "."), foreign.replace(" ", "-"),
    ))  # fmt: skip


def card(rng: random.Random) -> str:
    body = rng.choice(("4", "51", "55", "37"))
    body += digits(rng, "0" * ((14 if body == "37" else 15) - len(body)))
    values = [int(c) for c in body[::-1]]
    total = sum(v * 2 - 9 * (v > 4) for v in values[::2]) + sum(values[1::2])
    body += str(-total % 10)
    groups = [body[:4], body[4:10], body[10:]] if len(body) == 15 else re.findall("....", body)
    return rng.choice(("", " ", "-")).join(groups)


def iban(rng: random.Random, country: str) -> str:
    code = country if country != "US" else "DE"
    body = digits(rng, IBANS[country])
    number = int("".join(str(int(c, 36)) for c in body + code + "00"))
    text = f"{code}{98 - number % 97:02d}{body}"
    spaced = re.sub("(.{4})", r"\1 ", text).strip()
    return rng.choice((text, spaced, spaced, spaced.lower()))


def national_id(rng: random.Random, country: str) -> str:
    forms = {"US": "100-20-3000", "GB": "CE 00 00 00 C", "IT": "RSSMRA800T10A000A"}
    if country == "ES":
        number = digits(rng, "00000000")
        return number + "TRWAGMYFPDXBNJZSQVHLCKE"[int(number) % 23]
    if country == "FR":
        number = digits(rng, "1000500000000")
        return f"{number}{97 - int(number) % 97:02d}"
    return digits(rng, forms[country].replace("800T", "80T"))


def private_item(rng: random.Random, kind: str, country: str, name: str) -> str:
    first, last = name.split()
    word = digits(rng, "a0b0c0d0e0f0A0A0") + digits(rng, "AAAA0000").lower()
    plain = re.sub(r"\W", "", last.lower())
    host = rng.choice(("gmail.com", "web.de", "libero.it", "orange.fr", "acme.co.uk", "correo.es"))
    makers: dict[str, Any] = {
        "email": lambda: rng.choice((f"{first}.{plain}{digits(rng, '00')}@{host}",
                                     f"{plain.capitalize()}_{digits(rng, '0')}+x@mail.{host}")),
        "phone": lambda: phone(rng, country), "card": lambda: card(rng),
        "iban": lambda: iban(rng, country), "id": lambda: national_id(rng, country),
        "ip": lambda: rng.choice((".".join(str(rng.randrange(11, 127)) for _ in range(4)),
                                  f"2a02:81:{rng.randrange(9**4, 16**4):x}::{rng.randrange(99)}")),
        "mac": lambda: ":".join(f"{rng.randrange(16, 256):02x}" for _ in range(6)),
        "url": lambda: rng.choice((f"https://{host}/u/{word[:5]}?token={word}",
                                   f"postgres://{first}:{word}@db.{host}/main")),
        "key": lambda: rng.choice(("s" + f"k-proj-{word}", "gh" + f"p_{word}", "AK" + "IA"
                                   + digits(rng, "A0A0A0A0A0A0A0A0"), f"password: {word[:10]}")),
        "name": lambda: rng.choice((name, first, first.capitalize(), last)),
    }  # fmt: skip
    return str(makers[kind]())


KINDS = ("email", "phone", "phone", "card", "iban", "ip", "mac", "url", "key", "id", "name")
Row = tuple[dict[str, Any], list[Item]]


def lure(rng: random.Random) -> str:
    version = ".".join(str(rng.randrange(99)) for _ in range(rng.choice((3, 4))))
    return rng.choice(LURES).format(
        v=version, p=rng.choice(("1,299.00", "612.345.678", "89,90")), d="2024-05-12",
        d2="12.05.2024", i=rng.choice(("978-3-16-148410-0", "0-306-40615-2")), y=1939, y2=1945,
        o=digits(rng, "612345000"), c="120.0.6099.109", s=rng.randrange(10, 99),
    )  # fmt: skip


def make(count: int, seed: int) -> Iterator[Row]:
    """`count` messages in conversations of five, and their items."""
    rng = random.Random(seed)
    for number in range(count // 5):
        country = rng.choice(list(COUNTRIES))
        firsts, lasts, frames = (part.split("|") for part in COUNTRIES[country])
        name = f"{rng.choice(firsts)} {rng.choice(lasts)}"
        kinds = [kind for kind in KINDS if kind != "id" or country != "DE"]
        messages, items = [], []
        for _ in range(5):
            own = [Item(k, private_item(rng, k, country, name)) for k in rng.choices(kinds, k=3)]
            items += [*own, *(lures := [Item("lure", lure(rng)) for _ in range(2)])]
            parts = [rng.choice(frames).format("number", one.text) for one in own]
            parts += [one.text for one in lures]
            rng.shuffle(parts)
            messages.append({"speaker": name, "content": ". ".join(parts)})
        messages.insert(1, {"speaker": "Support", "content": "thanks, noted"})
        yield {"id": f"c{number}", "messages": messages}, items


def measured(rows: list[Row]) -> dict[str, Counter[str]]:
    """Kind → counts of items, of those that are found, and of findings right and wrong."""
    table: dict[str, Counter[str]] = {kind: Counter() for kind in (*KINDS, "lure")}
    redaction = Redaction()
    for row, items in rows:
        found: list[tuple[str, str]] = []
        redaction.walk(row, lambda kind, text, _, f=found: f.append((kind, text)) or text)
        found = [(kind, text) for kind, text in found if not kind.startswith("row ")]
        texts = {text for _, text in found}
        for item in items:
            bare = item.text.removeprefix("password: ")
            table[item.kind]["items"] += 1
            table[item.kind]["found"] += any(bare.strip("().") in text for text in texts)
        real = [item.text for item in items if item.kind != "lure"]
        for kind, text in found:
            right = kind == "name" or any(text.strip("()") in one or one in text for one in real)
            table[kind]["right" if right else "wrong"] += 1
    return table


def left_in(rows: list[Row], folder: Path) -> int:
    """How many items stand in the redacted file."""
    source, target = folder / "chats.jsonl", folder / "safe.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row, _ in rows), encoding="utf-8")
    redact_chats(str(source), target, Redaction())
    text = target.read_text(encoding="utf-8")
    private = [one.text for _, items in rows for one in items if one.kind not in ("lure", "name")]
    return sum(one in text for one in private)


def real_hits(paths: list[str]) -> tuple[int, list[str]]:
    """Messages of people in published files (`user_queries`), and what is found in them."""
    records = [record for path in paths for record in json.loads(Path(path).read_text("utf-8"))]
    texts = [" ".join(strings_in(one)) for record in records for one in record["user_queries"]]
    return len(texts), [t[f.start : f.end] for t in texts for f in find_private(t)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", nargs="*", default=[], metavar="FILE")
    options = parser.parse_args()
    rows, start = list(make(options.messages, options.seed)), time.monotonic()
    table = measured(rows)
    seconds = time.monotonic() - start
    print(f"{'kind':8} {'items':>6} {'found':>6} {'recall':>7} {'precision':>10}")
    low = []
    for kind, counts in sorted(table.items()):
        recall = counts["found"] / counts["items"] if counts["items"] else float("nan")
        given = counts["right"] + counts["wrong"]
        precision = f"{counts['right'] / given:.3f}" if given else "-"
        print(f"{kind:8} {counts['items']:6} {counts['found']:6} {recall:7.3f} {precision:>10}")
        low += [kind] if kind != "lure" and recall < LEAST else []
    with tempfile.TemporaryDirectory() as folder:
        left = left_in(rows, Path(folder))
    print(
        f"{left} items left in the redacted file; {1000 * seconds / len(rows) / 5:.2f} ms a message"
    )
    if options.real:
        count, hits = real_hits(options.real)
        print(f"{len(hits)} hits in {count} real messages: {', '.join(hits)}")
    return int(bool(low or left or table["lure"]["found"]))


if __name__ == "__main__":
    sys.exit(main())
