"""API keys are found in every spelling and removed completely; other text stays unchanged."""

from __future__ import annotations

import base64
import html
import json
import time
from urllib.parse import quote

import pytest

from soulkit.api_keys import holds_key, masked, masked_json, printable, remember, shown_address

KEYS = ("sk-test-0123456789abcdef", "gsk/4f+09aB17cD22eF93==", "pAss%41word&#115;x\\y")


@pytest.fixture(scope="module", params=KEYS)
def key(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _known() -> None:
    for one in KEYS:
        remember(one)


def escaped(key: str) -> str:
    return "".join(f"\\u{ord(c):04X}" for c in key)


SPELLINGS = {
    "plain": lambda key: key,
    "upper case": str.upper,
    "JSON": escaped,
    "one character escaped": lambda key: escaped(key[0]) + key[1:],
    "JSON in JSON": lambda key: json.dumps(json.dumps({"key": key})),
    "escapes in JSON in JSON": lambda key: json.dumps(escaped(key)),
    "JSON's slashes": lambda key: key.replace("/", "\\/"),
    "hexadecimal escapes": lambda key: "".join(f"\\x{ord(c):02x}" for c in key),
    "HTML": lambda key: "".join(f"&#{ord(c)};" for c in key),
    "hexadecimal HTML": lambda key: "".join(f"&#x{ord(c):04x};" for c in key),
    "HTML in HTML": lambda key: html.escape("".join(f"&#{ord(c)};" for c in key)),
    "address": lambda key: "".join(f"%{ord(c):02X}" for c in key),
    "quoted address": lambda key: quote(key, safe=""),
    "quoted twice": lambda key: quote(quote(key, safe=""), safe=""),
    "two lines": lambda key: f"{key[:9]}\n   {key[9:]}",
    "two escaped lines": lambda key: f"{key[:9]}\\r\\n{key[9:]}",
    "spaced": " ".join,
    "invisible space": lambda key: f"{key[:7]}\u200b{key[7:]}",
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 behind a user": lambda key: base64.b64encode(f"me:{key}".encode()).decode(),
    "bytes": lambda key: key.encode().hex(),
    "all but the end": lambda key: f"{key[:-4]}…",
    "all but the beginning": lambda key: f"…{key[4:]}",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_key_is_cut_out_however_it_is_written(key: str, spelling: str) -> None:
    written = SPELLINGS[spelling](key)
    text = f"Bad key '{written}' was sent"
    assert holds_key(text)
    output = masked(text)
    assert "[key]" in output and not holds_key(output)
    assert output == "[key]" or (output.startswith("Bad key '") and output.endswith("' was sent"))
    assert not any(key[i : i + 6] in output for i in range(len(key) - 6))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_json_text_stays_one(key: str, spelling: str) -> None:
    written = SPELLINGS[spelling](key)
    raw = json.dumps({"n": 1.5, "a": [f"x {written} y"], written: None}, ensure_ascii=False)
    value = json.loads(masked_json(raw))
    assert value["n"] == 1.5 and len(value) == 3 and not holds_key(json.dumps(value))
    by_hand = '{"n": 1, "a": "' + escaped(key) + '"}'
    assert json.loads(masked_json(by_hand)) == {"n": 1, "a": "[key]"}


def test_everything_else_stays_as_it_came() -> None:
    raw = '{"a" : "50 % of \\u0073pecial \\"sk-\\" & more",\n "b": 1e3, "a": "twice"}'
    assert masked_json(raw) == raw and masked(raw) == raw
    assert masked_json("no JSON at all {") == "no JSON at all {"


def test_several_keys_in_one_text() -> None:
    assert masked(f"{KEYS[0]} and {KEYS[1]},{KEYS[0]}") == "[key] and [key],[key]"


def test_placeholders_garble_nothing() -> None:
    for word in ("x", "EMPTY", "unused"):
        remember(word)
    text = "EMPTY boxes are unused, x times."
    assert masked(text) == text


def test_a_word_is_masked_as_it_stands_and_no_other_text_for_it() -> None:
    remember("localtest")
    assert masked("key localtest, or \\u006cocaltest") == "key [key], or [key]"
    assert json.loads(masked_json('{"a": "\\u006cocal\\u0074est"}')) == {"a": "[key]"}
    for text in ("a local test", "LocalTest", "local\ntest", "localtes"):
        assert masked(text) == text


def test_addresses_are_shown_without_users_and_passwords() -> None:
    assert (
        printable("no way to http://me:hunter2@proxy:3128/") == "no way to http://[key]@proxy:3128/"
    )
    assert shown_address("htp://me:hunter2@host/v1?key=hunter2#hunter2") == "host/v1"


@pytest.mark.parametrize(
    "text", ["\\", "s", "&#", "%", " ", "sk-test-", "\\u0073", "&amp;", "\\\\n", "é", '"\\"'],
)  # fmt: skip
def test_a_megabyte_is_looked_through_at_once(text: str) -> None:
    whole = text * (1_000_000 // len(text))
    started = time.process_time()
    assert masked(whole) == whole
    assert time.process_time() - started < 10.0  # linear: 0.4 s; quadratic: minutes
