"""Odd replies of endpoints and judges, sent by a loopback server."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from soulkit.serving.backend import ScriptBackend
from tests.support.hostile import (
    ODD_BYTES,
    ODD_VALUES,
    SECRET,
    SHORT_SECRET,
    Attack,
    mutations,
    seeds,
)
from tests.support.servers.loopback import Asked, JsonServer, Reply
from tests.support.servers.serving import served

Runner = Callable[[Attack, Iterable[Attack]], None]
GOOD = json.dumps({
    "id": "x", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "logprobs": None,
                 "message": {"role": "assistant", "content": "Morning! Heard about the rain?"}}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14},
}).encode()  # fmt: skip


class OddServer(JsonServer):
    """Answers every request with `reply`."""

    reply = Reply(content=GOOD)

    def answer(self, asked: Asked) -> Reply:
        return self.reply


def attacks_on(server: OddServer, replies: Iterable[tuple[str, Reply]]) -> Iterator[Attack]:
    """One run of one row for each reply; a judge may be the one who gets it."""
    player = ("eval", "api", "--model", "m", "--base-url", server.url, "--task", "cast_of_people",
              "--data", "synth:1", "--timeout", "2", "--backoff", "0.01", "--out", "run",
              "--api-key-env", "HOSTILE_KEY", "--price-in", "1", "--price-out", "1")  # fmt: skip
    for name, reply in replies:
        key = "HOSTILE_SHORT_KEY" if SHORT_SECRET in str(reply.content) else "HOSTILE_KEY"
        command = [word.replace("HOSTILE_KEY", key) for word in player]  # only that is masked
        yield Attack(name, command, lambda folder, reply=reply: setattr(server, "reply", reply))


def run(attack_all: Runner, replies: Iterable[tuple[str, Reply]]) -> None:
    with OddServer() as server:
        every = attacks_on(server, [("undamaged", Reply(content=GOOD)), *replies])
        attack_all(next(every), every)


@pytest.mark.parametrize("seed", seeds(8))
def test_damaged_replies(attack_all: Runner, seed: int) -> None:
    run(attack_all, ((n, Reply(content=c)) for n, c in mutations(seed, GOOD, 12 if seed else 3)))


def odd_replies() -> Iterator[tuple[str, Reply]]:
    def changed(**values: Any) -> bytes:
        return json.dumps({**json.loads(GOOD), **values}).encode()

    for value in ODD_VALUES:
        for name in (b'"Morning! Heard about the rain?"', b"9", b'"stop"'):
            yield f"{value[:20]!r} for {name[:9]!r}", Reply(content=GOOD.replace(name, value, 1))
        yield f"alone {value[:20]!r}", Reply(content=value)
    for odd in ODD_BYTES:
        yield f"bytes {odd!r}", Reply(content=odd)
    for status in (199, 204, 301, 400, 401, 404, 413, 418, 429, 500, 503, 599):
        yield f"status {status}", Reply(status=status, content={"error": {"message": "\x1b[2Jno"}})
    for depth in (150, 900, 100_000):
        yield f"{depth} lists", Reply(content=b"[" * depth + b"]" * depth)
        yield f"{depth} inside", Reply(content=GOOD.replace(b"null", b"[" * depth + b"]" * depth))
    for key in (SECRET, SHORT_SECRET):
        yield (
            f"key {key[:2]}",
            Reply(content=changed(choices=[{"message": {"content": f"x {key}"}}])),
        )
        yield f"key in error {key[:2]}", Reply(status=401, content={"error": {"message": key}})
    yield "huge", Reply(content=GOOD.replace(b"rain", b"x" * 60_000_000))
    yield "blank", Reply(content=b" " * 1_000_000)
    yield "list of choices", Reply(content=changed(choices=[[]] * 5))
    yield "many choices", Reply(content=changed(choices=[{}] * 100_000))
    yield "header", Reply(content=GOOD, headers={"Retry-After": "9" * 400})
    yield "wait", Reply(status=429, headers={"Retry-After": "-1"}, content={})
    yield "packed", Reply(content=GOOD, headers={"Content-Encoding": "gzip"})


@pytest.mark.hostile
@pytest.mark.parametrize("part", range(6))
def test_odd_replies(attack_all: Runner, part: int) -> None:
    run(attack_all, (one for n, one in enumerate(odd_replies()) if n % 6 == part))


VERDICT = b'{"persona": {"reasoning": "Typed by a person.", "score": 8}, "purpose": {"score": 7}}'
LINES = "/feedback\n/again\nSince \x1b[31mwhen?\n/why\n/\x1b[2J\n/end\n"


@pytest.mark.hostile
@pytest.mark.parametrize("seed", range(4))
def test_odd_words_of_everyone_in_a_chat(attack_all: Runner, seed: int) -> None:
    words = [VERDICT.decode()]
    with served(ScriptBackend("odd", lambda messages: words[0])) as url:
        player = f"endpoint:odd@{url}"

        def attack(name: str, text: bytes) -> Attack:
            said = text.decode("utf-8", "replace")
            command = ("chat", url, "--judge", player, "--coach", player, "--out", "run")
            return Attack(
                name, command, lambda folder: words.__setitem__(0, said),
                enter=lambda: setattr(sys, "stdin", io.StringIO(LINES)),
            )  # fmt: skip

        odd = [(repr(text[:20]), text) for text in (*ODD_BYTES, *ODD_VALUES)]
        texts = [*odd[seed::4], *mutations(seed, VERDICT, 15)]
        attack_all(attack("undamaged", VERDICT), (attack(*one) for one in texts))
