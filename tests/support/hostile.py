"""Attacks of tests/hostile: run one `soul` command in a child process and list what went wrong.

A child is forked from the test process, so that hundreds of commands take seconds, and a crash, a
hang or a memory bomb ends the child only.
"""

from __future__ import annotations

import importlib
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SECRET = "sk-hostile-0123456789"  # value of the variable HOSTILE_KEY in every attack
SHORT_SECRET = "q7Zx"  # value of HOSTILE_SHORT_KEY: the shortest key that is masked
SECONDS = 60  # wall clock for one attack; a quiet command takes less than one
_SLOW = ("soulkit.", "httpx2", "openai", "pydantic", "typer", "rich", "ijson", "yaml", "jinja2",
         "numpy", "huggingface_hub", "phonenumbers")  # fmt: skip
MEGABYTES = 400  # memory that one attack may add to the test process


@dataclass(frozen=True)
class Attack:
    """One command on one odd input. `prepare(folder)` writes the input before the command runs."""

    name: str
    command: Sequence[str]
    prepare: Callable[[Path], object]
    codes: frozenset[int] = frozenset({0, 1, 2})
    canaries: Sequence[str] = field(default=())  # files that appear if the input was executed
    enter: Callable[[], object] = lambda: None  # runs in the child before the command
    after: Callable[[Path, str], Iterable[str]] = lambda folder, text: ()  # further faults


def faults(
    attack: Attack, folder: Path, *, seconds: float = SECONDS, megabytes: int = MEGABYTES
) -> list[str]:
    """What went wrong, in words (empty: nothing). `folder` is empty and the child's directory."""
    from soulkit.cli.app import main

    attack.prepare(folder)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile("w+") as modules:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.monotonic()
        child = os.fork()
        if child == 0:  # pragma: no cover - in the child
            _run(main, attack, folder, output.fileno(), modules)
        code, peak = _wait(child, started + seconds)
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
        modules.seek(0)
        for name in modules.read().split():  # the next child need not import them again
            with suppress(ImportError):
                importlib.import_module(name)
    return [*_faults_of(attack, folder, text, code), *_memory_fault(before, peak, megabytes)]


def _run(
    main: Callable[[list[str]], int], attack: Attack, folder: Path, output: int, modules: Any
) -> None:
    code, before = 99, set(sys.modules)
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
        sys.stdin = open(os.devnull)  # noqa: SIM115
        os.chdir(folder)
        os.environ.update(HOSTILE_KEY=SECRET, HOSTILE_SHORT_KEY=SHORT_SECRET)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        attack.enter()
        code = main([str(word) for word in attack.command])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 98
    finally:
        try:
            new = set(sys.modules) - before
            if attack.name == "undamaged":
                modules.write("\n".join(name for name in new if name.startswith(_SLOW)))
                modules.flush()
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        finally:
            os._exit(code)


def _wait(child: int, deadline: float) -> tuple[int, int]:
    """Exit code (negative: signal; -9 also after the deadline) and peak memory in KiB."""
    while time.monotonic() < deadline:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), usage.ru_maxrss
        time.sleep(0.002)
    os.killpg(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss


def _faults_of(attack: Attack, folder: Path, text: str, code: int) -> Iterator[str]:
    last = " / ".join(text.strip().splitlines()[-4:])[:600]
    if code == -signal.SIGKILL:
        yield f"still running after {SECONDS} s: {last}"
    elif code not in attack.codes:
        yield f"exit code {code}: {last}"
    if "internal error" in text or "Traceback (most recent" in text:
        yield f"internal error: {last}"
    elif code == 2 and len([line for line in text.splitlines() if line.strip()]) < 3:
        yield f"an error of fewer than three lines: {last}"
    if any((ord(c) < 32 and c not in "\n\r\t") or 0x7F <= ord(c) < 0xA0 for c in text):
        yield f"control characters in the output: {last!r}"
    if SECRET in text or SHORT_SECRET in text:
        yield "a key in the output"
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            content = file.read_bytes()
            if SECRET.encode() in content or SHORT_SECRET.encode() in content:
                yield f"a key in {file.relative_to(folder)}"
    yield from attack.after(folder, text)
    yield from (
        f"the input was executed: {name}" for name in attack.canaries if (folder / name).exists()
    )


def _memory_fault(before: int, peak: int, megabytes: int) -> Iterator[str]:
    if peak - before > megabytes << 10:
        yield f"{(peak - before) >> 10} MB more memory"


def seeds(count: int, quick: int = 1) -> list[Any]:
    """Parameters for one test: seeds from 0 on, of which the first `quick` run in `make test`."""
    marks = pytest.mark.hostile
    return [n if n < quick else pytest.param(n, marks=marks) for n in range(count)]


def seeded(seed: int | str) -> random.Random:
    """A generator for `seed`; another one for every value of SOULKIT_ATTACK_SEED."""
    other = os.environ.get("SOULKIT_ATTACK_SEED", "")
    return random.Random(f"{other}/{seed}" if other else seed)


def mutations(seed: int, text: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    """`count` pairs (name, damaged copy of `text`), the same for the same seed."""
    rng = seeded(seed)
    for number in range(count):
        kind = rng.choice(list(_MUTATORS))
        yield f"{kind}-{number}", _MUTATORS[kind](rng, text)


def _cut(rng: random.Random, text: bytes) -> bytes:
    return text[: rng.randrange(len(text) + 1)]


def _flip(rng: random.Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.choice((1, 1, 3, 20))):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _insert(rng: random.Random, text: bytes) -> bytes:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(ODD_BYTES) + text[at:]


def _twice(rng: random.Random, text: bytes) -> bytes:
    start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    return text[:end] + text[start:end] + text[end:]


def _drop(rng: random.Random, text: bytes) -> bytes:
    start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    return text[:start] + text[min(end, start + 40) :]


def _value(rng: random.Random, text: bytes) -> bytes:
    """Put an odd JSON value in the place of a random value after a colon."""
    places = [i for i, byte in enumerate(text) if byte == ord(":")]
    if not places:
        return _insert(rng, text)
    at = rng.choice(places) + 1
    end = min(
        (e for e in (text.find(b",", at), text.find(b"}", at), text.find(b"\n", at)) if e > 0),
        default=len(text),
    )
    return text[:at] + b" " + rng.choice(ODD_VALUES) + text[end:]


_MUTATORS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "cut": _cut, "flip": _flip, "insert": _insert, "twice": _twice, "drop": _drop, "value": _value,
}  # fmt: skip

ODD_VALUES = (
    b"null", b"true", b"-1", b"1e400", b"NaN", b"-Infinity", b"9" * 5000, b"[]", b"{}", b'""',
    b'"\\ud800"', b'"\\u0000"', b'"\\u001b[31m"', b"[" * 300 + b"]" * 300, b'[{"a": 1}]',
    b'{"": ""}', b'"' + b"x" * 100_000 + b'"', b"0.1e-999", b'"../../etc/passwd"', b"[null, []]",
)  # fmt: skip
ODD_BYTES = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\x1b[2J", b"\r", b"\n\n", b"\xe2\x80\xae", b"{", b"]",
    b'"', b"\xed\xa0\x80", b",", b": ", b"- ", b"&a *a", b"!!python/object:os.system x", b"\t",
    b"%", b"\\u0000",
)  # fmt: skip
