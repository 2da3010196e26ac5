"""Finds private data in texts: keys, addresses, telephone, card and account numbers, IDs.

Numbers are checked, not guessed: telephone numbers by their countries' numbering plans, cards and
IBANs by their check digits. Dates, prices, versions, ISBNs and order numbers are hidden first. What
`redaction` writes in place of private data is never found again: example domains, documentation
addresses, keys with the word example, invalid numbers. Every pattern takes linear time.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, count
from typing import Any, cast

from soulkit.errors import ConfigError
from soulkit.text import counted, join_and

NOUNS = {
    "key": "key", "url": "private link", "email": "e-mail", "iban": "IBAN", "mac": "MAC",
    "card": "card number", "ip": "IP", "id": "national ID", "phone": "phone number",
}  # fmt: skip
"""Kind → its name in messages; other kinds are their own names."""
REGIONS = ("US", "GB", "IE", "ES", "PT", "FR", "BE", "CH", "DE", "AT", "IT", "NL", "BR", "MX", "IN")
"""Countries whose telephone numbers are found without a country code; with it, all are."""


@dataclass(frozen=True, slots=True)
class PrivateItem:
    """One private item in a text."""

    kind: str
    start: int
    end: int


def find_private(
    text: str,
    patterns: Mapping[str, re.Pattern[str]] | None = None,
    regions: Sequence[str] = REGIONS,
) -> list[PrivateItem]:
    """The private items of a text in order; they do not overlap. `patterns` (kind → pattern) are
    the user's own and go first."""
    items: list[PrivateItem] = []
    if not patterns and not _MAYBE.search(text):
        return items
    users = [(kind, pattern, len) for kind, pattern in (patterns or {}).items()]
    for kind, pattern, check in (*users, ("", _MAYBE, None), *_TABLE):
        if check is None:
            text = text.translate(_LOWER)
            continue
        pieces, at = [], 0
        for match in pattern.finditer(text):
            start, end = match.span("it" if "it" in pattern.groupindex else 0)
            if start >= at and (length := int(check(text[start:end]))):
                length = end - start if length == 1 else length
                pieces += [text[at:start], "\0" * length]
                at = start + length
                items += [PrivateItem(kind, start, at)] if kind else []
        text = "".join([*pieces, text[at:]]) if at else text
    items += (PrivateItem("phone", *span) for span in _phones(text, tuple(regions)))
    return sorted(items, key=lambda one: one.start)


def private_counts(texts: Iterable[str]) -> Counter[str]:
    """Kind → number of private items in all texts."""
    return Counter(one.kind for text in texts for one in find_private(text))


def counts_line(counts: Mapping[str, int]) -> str:
    """`12 e-mails, 3 phone numbers and 1 card number`, the most frequent first."""
    return join_and(counted(n, NOUNS.get(kind, kind)) for kind, n in Counter(counts).most_common())


def strings_in(value: Any) -> Iterator[str]:
    """All strings in a row or list of rows, without messages marked as canaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from () if value.get("canary") is True else strings_in([*value.values()])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from strings_in(one)


def refuse_private(texts: Iterable[str], receiver: str, allow_private: bool) -> None:
    """ConfigError if `texts` contain private items and may not be sent to `receiver` (`the drafter
    gpt-5`), which is not on this machine."""
    if not allow_private and (counts := private_counts(texts)):
        raise ConfigError(
            f"The texts for {receiver} contain {counts_line(counts)}.",
            "This model is not on this machine: its provider would receive people's private data.",
            "Replace them with soul data redact FILE -o SAFE_FILE, or send them: --allow-private.",
        )


# -- checks: the length of the private part of a candidate; True stands for all of it --------------


def _digits(text: str) -> str:
    return "".join(filter(str.isdecimal, text))


def _luhn(text: str) -> bool:
    digits = [int(digit) for digit in _digits(text)[::-1]]
    return sum(digits[::2] + [d * 2 - 9 * (d > 4) for d in digits[1::2]]) % 10 == 0


_IBAN_LENGTHS = dict(re.findall(
    r"(..)(\d\d)",
    "no15be16dk18fi18fo18gl18nl18sd18mk19si19at20ba20ee20kz20lt20lu20mn20xk20ch21hr21li21lv21bg22"
    "bh22cr22de22gb22ge22ie22me22rs22va22ae23gi23il23iq23om23tl23ad24cz24es24md24pk24ro24sa24se24"
    "sk24tn24vg24ly25pt25st25is26tr26bi27dj27fr27gr27it27mc27sm27al28az28by28cy28do28gt28hu28lb28"
    "pl28br29eg29ps29qa29ua29jo30kw30mu30mt31sc31lc32ru33",
))  # fmt: skip


def _iban(text: str) -> int:
    places = [place for place, sign in enumerate(text) if sign.isalnum()]
    length = int(_IBAN_LENGTHS.get(text[:2], 99))
    word = "".join(text[place] for place in places[:length])
    valid = len(word) == length and int("".join(str(int(c, 36)) for c in word[4:] + word[:4])) % 97
    return places[length - 1] + 1 if valid == 1 else 0


def _is_machine(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified or address.is_multicast) and (
        not text.startswith(DOCUMENTATION) and not text.endswith((".0", ".255"))
    )


DOCUMENTATION = ("192.0.2.", "198.51.100.", "203.0.113.", "2001:db8:")
"""Beginnings of addresses that no machine has."""
_MADE = re.compile(r"[@/.]example\.(?:org|net)\b|\.(?:example|test|invalid)(?![\w.-])")


def _url(text: str) -> int:
    text = text.rstrip(".,;:!?)]}'*_")
    private = "?" in text or "@" in text.partition("://")[2].partition("/")[0]
    return len(text) if private and not _MADE.search(text) else 0


def _key(text: str) -> int:
    text = text.rstrip(".,")
    return 0 if "example" in text or not any(map(str.isdigit, text)) else len(text)


def _is_brazilian(text: str) -> bool:
    digits = [int(digit) for digit in _digits(text)]
    sums = [sum(digits[i] * (n - i) for i in range(n - 1)) for n in (10, 11)]
    return [s * 10 % 11 % 10 for s in sums] == digits[9:]


def _is_french(text: str) -> bool:
    return (int(_digits(text)[:13]) + int(_digits(text)[13:])) % 97 == 0


def _is_spanish(text: str) -> bool:
    number = int(_digits(text[:-1].translate(str.maketrans("xyz", "012"))))
    return "trwagmyfpdxbnjzsqvhlcke"[number % 23] == text[-1]


def _is_isbn(text: str) -> bool:
    word = re.sub(r"\W", "", text)
    weighted = sum((10 if c == "x" else int(c)) * (10 - i) for i, c in enumerate(word))
    return (len(word) == 13 and word.isdecimal()) or (len(word) == 10 and weighted % 11 == 0)


def _is_dotted(text: str) -> bool:
    """Whether 4.0.12345 is a version rather than a telephone number."""
    return any(len(part) == 1 or len(part) > 4 for part in text.split(".")[1:])


# -- patterns, for texts in lower case -------------------------------------------------------------


_LOWER = {code: code + 32 for code in range(65, 91)}
"""Keeps the length of every text, as str.lower does not; case-insensitive patterns are slow."""
_MAYBE = re.compile(r"[\d@]|://|PRIVATE KEY")
"""What every private item contains."""
_WORDS = (
    "order|purchase|invoice|ticket|case|tracking|reference|item|part|model|serial|version|build|"
    "pedido|factura|compra|commande|facture|ordine|fattura|encomenda|fatura|referencia|référence|"
    "isbn|issn|ean|sku|ref|release|firmware|driver|kernel|bestellung|rechnung|auftrag|"
    "(?:bestell|auftrags|rechnungs|artikel|sendungs|vorgangs|serien)-?(?:nummer|nr)"
)
_ORDER = (
    rf"(?:\b(?:{_WORDS})\b|#)(?: (?:number|num|no|nr|n[uú]mero|numéro|id|code)\b)?[.:]?"
    r"(?: (?:is|es|est|ist|[eèé])\b)?:? ?(?:n[º°o.]{1,2} ?|nr\.? ?)?#? ?"
    r"(?P<it>[a-z]{0,5}[-_ ]?\d(?:[ ._-]?\d)*+)"
)
_MONEY = r"(?:[$€£¥₹]|\b(?:eur(?:os?)?|usd|gbp|chf|brl|mxn|inr|reais|dollars?|pounds?|pesos?)\b)"
_PRICE = r"\d(?<![\d.,'].)(?:[.,']?\d)*+(?:[ \u00a0]\d{3}(?!\d)){0,5}+"
_SECRET = (
    r"\b(?:bearer|(?:password|passwd|pwd|passwort|kennwort|contraseña|mot de passe|senha|secret|"
    r"wachtwoord|token|(?:api|access|secret)[-_ ]?key)\b[\"']?(?: ?[:=]| is| es| ist| est| [eé]|"
    r" lautet):?) ?[\"']?(?P<it>[^\s\"'`,;<>]{6,200})"
)
_KEY = (
    r"\b(?:(?:sk|pk|rk)[-_][\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|"
    r"xox[a-z]-[\w-]{10,}|aiza[\w-]{30,}|hf_\w{20,}|npm_\w{30,}|pypi-[\w-]{30,}|"
    r"sg\.[\w-]{16,}\.[\w-]{16,}|(?:akia|asia)[a-z0-9]{16}\b|eyj[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}|"
    r"\d{8,10}:aa[\w-]{30,})"
)
_PEM = r"-----begin [a-z ]{0,30}private key-----[\w+/=\s:,]*+(?:-----end[a-z ]{0,40}-----)?"
_EMAIL = r"(?<![\w.+%-])[\w.+%-]{1,64}+@(?:[^\W_](?:[\w-]{0,62}+)\.)+[^\W\d_]{2,24}(?![\w-])"
_MAC = r"(?<![\w:-])(?!00[:-]00[:-]5e)[\da-f]{2}([:-])[\da-f]{2}(?:\1[\da-f]{2}){4}(?![\w:-])"
_DATE = (
    r"\d(?<![\d.-].)\d?([ ./-])\d{1,2}\1(?:1[89]|20)\d\d(?!\d)"
    r"|[12](?<![\d.-].)\d{3}([./-])\d{1,2}\2\d{1,2}(?:t?[\d:.]+)?"
    r"|[12](?<![\d-].)(?:(?<=1)[5-9]|(?<=2)0)\d\d ?[-–/] ?(?:1[5-9]|20)\d\d(?![\d-])"
)
_ISBN = (
    r"\d(?<![\d-].)(?:(?<=9)7[89][ -]?)?\d{0,4}([ -])\d{1,7}\1\d{1,7}\1[\dx](?![\d-])"
    r"|\b97[89]\d{10}\b"
)
_IP = (
    r"\d(?<![\w.].)\d{0,2}(?:\.\d{1,3}){3}(?![\w.]?\w)"
    r"|[23f](?<![\w:.].)[\da-f]{1,3}:[\da-f:]{2,35}(?:\b|(?<=:))"
)
_IDS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    (r"(?!000|666|9)\d{3}-(?!00)\d\d-\d{4}", bool),  # United States
    (r"(?![a-z]?[dfiquv])[a-z]{2} ?\d\d ?\d\d ?\d\d ?[a-d]", bool),  # United Kingdom
    (r"[a-z]{6}\d\d[a-ehlmprst]\d\d[a-z]\d{3}[a-z]", bool),  # Italy
    (r"\d{3}\.\d{3}\.\d{3}-\d{2}", _is_brazilian),
    (r"[12] ?\d\d ?\d\d ?\d\d ?\d{3} ?\d{3} ?\d\d", _is_french),
    (r"(?:[xyz][ -]?|\d)\d{7}[ -]?[a-z]", _is_spanish),
)
"""National IDs: form and check."""
_CARD = (
    r"(?<![\w.,-])(?:[2-6]\d{3}([ -]?)\d{4}\1\d{4}\1\d{4}|3\d{3}([ -]?)\d{6}\2\d{5})"
    r"(?![\w-]|[.,]\d)"
)
_TABLE: tuple[tuple[str, re.Pattern[str], Callable[[str], int]], ...] = tuple(
    (kind, re.compile(pattern, 0 if pattern in (_SECRET, _ORDER, _EMAIL) else re.ASCII), check)
    for kind, pattern, check in cast(list[tuple[str, str, Callable[[str], int]]], [
        ("key", _PEM, bool), ("key", _KEY, _key), ("key", _SECRET, _key),
        ("url", r"\b[a-z][a-z\d+.-]{1,14}://[^\s<>\"`{}|\\^]+", _url),
        ("email", _EMAIL, lambda text: not _MADE.search(text)),
        ("iban", r"(?<![^\W_])(?=(?P<it>[a-z]{2}\d\d(?:[ -]?[a-z\d]){11,30}))", _iban),
        ("mac", _MAC, bool),
        ("", r"\b[a-z][a-z\d+.-]{1,14}://\S+", bool),
        ("", r"\b[\da-f]{8}-[\da-f]{4}-[\da-f]{4}-[\da-f]{4}-[\da-f]{12}\b", bool),
        ("", r"\b(?:v|ver)\.? ?\d+(?:\.\d+)+", bool),
        ("", _ORDER, bool), ("", rf"{_MONEY} ?{_PRICE}|{_PRICE}[ \u00a0]?{_MONEY}", bool),
        ("", _DATE, bool), ("", _ISBN, _is_isbn), ("ip", _IP, _is_machine),
        ("", r"\d(?<![\w+.].)\d*+(?:\.\d++){2,}+(?![\w.]?\w)", _is_dotted),
        *(("id", rf"(?<![\w.-])(?:{form})(?![\w-])", check) for form, check in _IDS),
        ("card", _CARD, _luhn), ("", _CARD, bool),
        ("", r"\b(?:[a-z]{2}\d\d|\d{4})(?:[ -](?:\d{4}|[a-z]{4})){3,8}+(?:[ -]\d{1,4})?\b", bool),
    ])
)  # fmt: skip
"""Kind (empty: not private, only hidden from what follows), pattern, check."""

# -- telephone numbers -----------------------------------------------------------------------------


_GAP = r"(?:[ ()\-/\u00a0\u202f\u2010\u2011]{1,3}|\.)"
_RUN = re.compile(
    rf"(?<!\d)(?:\d{_GAP})?+\d{{2,15}}(?!\d)(?:{_GAP}(?:\d{_GAP})?+\d{{2,15}}(?!\d))*+(?:{_GAP}\d(?!\d))?+"
)
"""Groups of digits; two groups of one digit never follow each other."""
_GROUP = re.compile(r"\d+")
_OPENING = re.compile(r"\(?\+?\(?$")
_INSIDE = re.compile(r"[\w+]\||\w-\||\d[.,]\||\|(?:[.,-]?\d|-?\w|%)")
"""What stands around (|) a part of something longer."""
_DECIMAL = re.compile(r"(?:0|[1-9]\d*)\.\d+")
_GROUPS = 8
"""Maximum groups of digits in a telephone number."""
_CHECKS = 3000
"""Candidates that are checked in one text. What follows counts as a number without a check, so
that a long text takes little time and hides nothing."""


def _phones(text: str, regions: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Start and end of the telephone numbers in a text."""
    checks = count()
    for run in _RUN.finditer(text):
        if run.end() - run.start() < 8:
            continue
        spans, first = [group.span() for group in _GROUP.finditer(text, *run.span())], 0
        while first < len(spans):
            begin = spans[first][0]
            begin -= len(_OPENING.search(text[max(begin - 3, 0) : begin])[0])  # type: ignore[index]
            lengths = accumulate(end - start for start, end in spans[first : first + _GROUPS])
            for last in reversed([n for n, k in enumerate(lengths, first) if 7 < k < 16]):
                end = spans[last][1]
                begin += text[begin] == "(" and ")" not in text[begin:end]
                around = f"{text[max(begin - 2, 0) : begin]}|{text[end : end + 2]}"
                if next(checks) > _CHECKS or (
                    not _INSIDE.search(around) and _is_phone(text[begin:end], regions)
                ):
                    yield begin, end
                    first = last
                    break
            first += 1


def _is_phone(text: str, regions: tuple[str, ...]) -> bool:
    digits, foreign = _digits(text), text.lstrip("(").startswith("+")
    if text.count("(") != text.count(")") or _DECIMAL.fullmatch(text):
        return False
    if foreign or digits.startswith("00"):
        return _is_foreign("+" + (digits if foreign else digits[2:]))
    least = 8 if text.isdecimal() else 7
    return len(digits) > least and _national(regions).fullmatch(digits) is not None


def _is_foreign(digits: str) -> bool:
    import phonenumbers as plans

    try:
        return plans.is_valid_number(plans.parse(digits))
    except plans.NumberParseException:
        return False


_SERVICES = (
    "fixed_line mobile toll_free premium_rate shared_cost personal_number voip pager uan voicemail"
)


@cache
def _national(regions: tuple[str, ...]) -> re.Pattern[str]:
    """The regions' valid numbers without country code, as digits only. In most of Europe they
    must begin with 0."""
    from phonenumbers import PhoneMetadata

    forms = []
    for region in regions:
        data: Any = PhoneMetadata.metadata_for_region(region)
        if data is None:
            raise ConfigError(
                f"'{region}' is no country for telephone numbers.",
                "Countries are written with two capital letters.",
                "Write for example --regions ES,FR.",
            )
        zero = region != "BR" and any(
            (form.national_prefix_formatting_rule or "").lstrip("(").startswith("0")
            and not form.national_prefix_optional_when_formatting for form in data.number_format
        )  # fmt: skip
        services = [getattr(data, name) for name in _SERVICES.split()]
        numbers = "|".join(one.national_number_pattern for one in services
                           if one and one.national_number_pattern)  # fmt: skip
        forms.append(f"(?:{data.national_prefix or ''}){'' if zero else '?'}(?:{numbers})")
    return re.compile("|".join(forms))
