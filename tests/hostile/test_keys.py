"""Servers that send the key of a request back, in replies, errors, names and headers."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.hostile import SECRET, SHORT_SECRET, Attack, seeds
from tests.support.servers.openai_server import Fault, ScriptedServer

KEYS = {"HOSTILE_KEY": SECRET, "HOSTILE_SHORT_KEY": SHORT_SECRET}
FORMS = (
    "{}", "Bearer {}", "your key {} is wrong", "<answer>{}</answer>", '{{"key": "{}"}}', "({})",
    "\\n{}\\n", "key={}&x=1", "https://user:{}@host/", "{}!", "'{}'", "x\n{}\ny", "\t{}",
    "{} {} {}",
    "\x1b[31m{}\x1b[0m", "[{}]", "a/{}/b", "\u202e{}", "{}.", "-{}-",
)  # fmt: skip


def _faults(text: str) -> Iterator[tuple[str, dict[str, object]]]:
    """(name, arguments of the server) for every place in which a server can send `text`."""
    yield "reply", {"answer": text}
    for status in (400, 401, 404, 500):
        error = Fault.status_error(status, text, kind=text, code=text, param=text)
        yield f"status {status}", {"script": lambda n, body, e=error: e}
    body = {"choices": [{"message": {"role": text, "content": text}, "finish_reason": text}],
            "model": text, "usage": text, text: text}  # fmt: skip
    yield "odd body", {"script": lambda n, _: Fault.reply(body)}
    yield "no JSON", {"script": lambda n, _: Fault(raw=text.encode())}
    yield "models", {"models": Fault.status_error(403, text), "answer": text}


@pytest.mark.parametrize("part", seeds(2 * len(FORMS)))
def test_echoed_keys(attack_all: Callable[[Attack, Iterable[Attack]], None], part: int) -> None:
    variable, key = list(KEYS.items())[part % 2]
    form = FORMS[part // 2]
    with ExitStack() as stack:
        sound = stack.enter_context(ScriptedServer(answer="x"))
        attacks = [
            _attack(f"{form!r} in {name}", variable, stack.enter_context(server).base_url)
            for name, arguments in list(_faults(form.format(key, key, key)))[:: 1 if part else 4]
            if (server := ScriptedServer(**arguments))
        ]
        attack_all(_attack("undamaged", variable, sound.base_url), attacks)


def _attack(name: str, variable: str, url: str) -> Attack:
    return Attack(
        name,
        ("eval", "api", "--model", "m", "--base-url", url, "--api-key-env", variable, "--task",
         "cast_of_people", "--data", "synth:1", "--max-unscored", "1", "--max-attempts", "1",
         "--out", "run"),
        lambda folder: None,
    )  # fmt: skip


@pytest.mark.parametrize("word", ["ring", "RING", "Ring", "2024", "EMPTY", "none"])
def test_a_short_key_garbles_no_words(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    from soulkit import api_keys

    monkeypatch.setattr(api_keys, "_remembered", {})
    api_keys.remember(word)
    text = json.dumps({"text": f"Bring x{word}x, {word}s and 32024", "n": 2024.5})
    assert api_keys.masked(text) == text


@pytest.mark.parametrize("key", ["q7Zx", "abcdefg", "s3cr3t7"])
@pytest.mark.parametrize("form", FORMS)
def test_a_short_key_is_masked_where_it_stands_alone(
    monkeypatch: pytest.MonkeyPatch, key: str, form: str
) -> None:
    from soulkit import api_keys

    monkeypatch.setattr(api_keys, "_remembered", {})
    api_keys.remember(key)
    text = form.format(key, key, key)
    for shown in (text, json.dumps({"text": text}), json.dumps(text)):
        assert key not in api_keys.masked(shown)
        assert key not in api_keys.masked_json(shown)
        assert base64.b64encode(b"other").decode() in api_keys.masked(f"{shown} b3RoZXI=")
