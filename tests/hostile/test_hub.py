"""Odd answers of a hub, and odd files where `soul data pull` writes."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import soulkit.data.download as download
from soulkit.data.download import Hub
from soulkit.data.hub import LOCK
from tests.support.hostile import Attack, mutations, seeded, seeds
from tests.support.hub import EVAL, EVALS, HITOM, alone_with_the_hub
from tests.support.odd_runs import ODDITIES, odd_nodes
from tests.support.servers.hub_server import HubServer, commit_of

Run = Callable[[Attack, Iterable[Attack]], None]
PULL = ("data", "pull", "--task", "hitom", "--split", "eval", "--out", "data")
CORPUS = ("data", "pull", "--corpus", "mid-training", "--out", "data")
NAME = "hitom_val.parquet"
MID = "cmu-lti/osim-mid-training"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub that the commands use, with short waits."""
    alone_with_the_hub(tmp_path, monkeypatch)
    monkeypatch.setattr(Hub.__init__, "__defaults__", (None, 0.0))
    for name, value in (("SILENCE_TIMEOUT_S", 1.0), ("LONGEST_WAIT_S", 0.0),
                        ("LISTING_S", 2.0), ("LISTING_BYTES", 8_000_000)):  # fmt: skip
        monkeypatch.setattr(download, name, value)
    with HubServer({EVAL: EVALS, MID: {"rows.jsonl": b'{"text": "x"}\n'}}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def on_hub(name: str, hub: HubServer, command: Iterable[str] = PULL, **changes: Any) -> Attack:
    """An attack for which the hub has these attributes."""

    def prepare(folder: Path) -> None:
        hub.raw, hub.api_body, hub.plain_listing = {}, None, False
        for attribute, value in changes.items():
            setattr(hub, attribute, value)

    return Attack(name, tuple(command), prepare)


def listing(hub: HubServer, repo: str = EVAL) -> dict[str, Any]:
    return hub.listed(repo, hub.commits[repo][0], True)


@pytest.mark.parametrize("seed", seeds(4))
def test_odd_lists_of_files(attack_all: Run, hub: HubServer, seed: int) -> None:
    rng, value = seeded(seed), listing(hub)
    value["siblings"] = [s for s in value["siblings"] if s["rfilename"] == NAME]
    odd = [odd_nodes(rng, value) for _ in range(12 if seed else 2)]
    bodies = [(what, text.encode()) for text, what in odd]
    bodies += list(mutations(seed, json.dumps(value).encode(), 6 if seed else 1))
    attack_all(
        on_hub("undamaged", hub), (on_hub(f"{n} {seed}", hub, api_body=b) for n, b in bodies)
    )


PATHS = ("../../x.jsonl", "/tmp/x.jsonl", "a/../../x.jsonl", "..\\x.jsonl", "\x1b[2J.jsonl",
         "a\x00.jsonl", "", ".", "a" * 300 + ".jsonl", "a/" * 600 + "x.jsonl", "x\n.jsonl",
         "CON.jsonl", "rows.jsonl/rows.jsonl", "\ud800.jsonl", "-rf.jsonl", "$(touch owned).jsonl",
         ".jsonl")  # fmt: skip
DIGESTS = (
    "",
    "x" * 64,
    "../" * 20 + "x" * 4,
    "A" * 64,
    "0" * 63,
    None,
    0,
    ["0" * 64],
    "0" * 64 + "\n",
)
SIZES = (-1, 0, 2**40, 2**62, 2**70, 1.5, None, "12", True, [], float("1e300"))


@pytest.mark.hostile
@pytest.mark.parametrize("command", [PULL, CORPUS])
def test_odd_entries(attack_all: Run, hub: HubServer, command: tuple[str, ...]) -> None:
    repo, name = (EVAL, NAME) if command is PULL else (MID, "rows.jsonl")

    def attacks() -> Iterator[Attack]:
        for key, odd_values in (("rfilename", PATHS), ("blobId", DIGESTS), ("size", SIZES)):
            for odd in odd_values:
                value = listing(hub, repo)
                value["siblings"] = [
                    {**s, key: odd} for s in value["siblings"] if s["rfilename"] == name
                ]
                if command is PULL:
                    value["siblings"] = [lfs_of(s, key, odd) for s in value["siblings"]]
                body = json.dumps(value).encode()
                yield on_hub(f"{key}={odd!r:.30}", hub, command, api_body=body)

    attack_all(on_hub("undamaged", hub, command), attacks())


def lfs_of(entry: dict[str, Any], key: str, odd: object) -> dict[str, Any]:
    name = {"blobId": "sha256", "size": "size"}.get(key, "other")
    return {**entry, "lfs": {**entry["lfs"], name: odd}}


def endless(start: bytes, chunk: bytes, pause_s: float = 0.0) -> Iterator[bytes]:
    yield start
    while True:
        yield chunk


def reply(status: str, body: bytes = b"", **headers: str) -> list[bytes]:
    lines = [f"HTTP/1.1 {status}", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    lines += [] if "Content_Length" in headers else [f"Content-Length: {len(body)}"]
    return ["\r\n".join([*lines, "", ""]).encode("latin-1") + body]


OPEN = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
REFUSED = b"HTTP/1.1 500 x\r\nConnection: close\r\n\r\n"
GZIP = gzip.compress(b"[" * (1 << 28), 1)
ANSWERS: Mapping[str, Callable[[], Iterable[bytes]]] = {
    "endless": lambda: endless(OPEN, b"[" * 65_536),
    "endless spaces": lambda: endless(OPEN, b" " * 65_536),
    "endless drip": lambda: endless(OPEN, b""),
    "endless error": lambda: endless(REFUSED, b"x" * 65_536),
    "endless 404": lambda: endless(REFUSED.replace(b"500", b"404"), b"{" * 65_536),
    "endless head": lambda: endless(b"HTTP/1.1 200 OK\r\n", b"X-A: " + b"x" * 1_000 + b"\r\n"),
    "no reply": lambda: [],
    "silence": lambda: endless(b"", b""),
    "garbage": lambda: [b"\x00\xff" * 500],
    "old": lambda: [b"HTTP/0.9\r\n\r\n"],
    "status x": lambda: [b"HTTP/1.1 xyz OK\r\n\r\n"],
    "status 999": lambda: reply("999 odd"),
    "status 304": lambda: reply("304 x"),
    "status 204": lambda: reply("204 x"),
    "status 206": lambda: reply("206 x", b"abc", Content_Range="bytes 7-9/3"),
    "status 416": lambda: reply("416 x", b"abc"),
    "error list": lambda: reply("404 x", b"[1, 2]"),
    "error number": lambda: reply("404 x", b"1"),
    "error deep": lambda: reply("404 x", b"[" * 100_000),
    "error object": lambda: reply("400 x", b'{"error": {"a": "\\u001b[2J"}}'),
    "error escapes": lambda: reply("400 x", b'{"error": "\\u001b[2J\\u009b31m"}',
                                   X_Error_Message="\x9b31m"),
    "error code": lambda: reply("400 x", b"{}", X_Error_Code="RevisionNotFound"),
    "retry after": lambda: reply("429 x", b"{}", Retry_After="9" * 500),
    "retry after x": lambda: reply("503 x", b"{}", Retry_After="\xb2"),
    "redirect to itself": lambda: reply("302 x", Location="/api/datasets/a/b"),
    "redirect to a file": lambda: reply("302 x", Location="file:///etc/passwd"),
    "redirect to nowhere": lambda: reply("302 x", Location="http://127.0.0.1:1/x"),
    "redirect to nothing": lambda: reply("302 x"),
    "redirect empty": lambda: reply("307 x", Location=""),
    "redirect odd": lambda: reply("301 x", Location="http://[::1:::"),
    "redirect port": lambda: reply("301 x", Location="http://127.0.0.1:99999/"),
    "redirect ftp": lambda: reply("301 x", Location="ftp://x/y"),
    "redirect escapes": lambda: reply("301 x", Location="http://127.0.0.1:1/\x9b31m"),
    "gzip bomb": lambda: reply("200 OK", GZIP, Content_Encoding="gzip"),
    "not gzip": lambda: reply("200 OK", b"abc", Content_Encoding="gzip"),
    "odd coding": lambda: reply("200 OK", b"abc", Content_Encoding="zstd, br, x"),
    "odd chunks": lambda: [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
    "huge chunk": lambda: [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n"],
    "length x": lambda: reply("200 OK", b"{}", Content_Length="x"),
    "length -1": lambda: reply("200 OK", b"{}", Content_Length="-1"),
    "length 1e18": lambda: reply("200 OK", b"{}", Content_Length="1" + "0" * 18),
    "null": lambda: reply("200 OK", b"null"),
    "list": lambda: reply("200 OK", b"[]"),
    "deep": lambda: reply("200 OK", b"[" * 100_000),
    "bytes": lambda: reply("200 OK", b"\xff\xfe\x00"),
    "digits": lambda: reply("200 OK", b'{"sha": ' + b"9" * 100_000 + b"}"),
}  # fmt: skip


@pytest.mark.hostile
@pytest.mark.parametrize(
    "path", ["GET /api/", "GET /storage/", "HEAD /datasets/", "GET /datasets/"]
)
def test_odd_answers(attack_all: Run, hub: HubServer, path: str) -> None:
    plain = path.startswith("HEAD")
    attack_all(
        on_hub("undamaged", hub, plain_listing=plain),
        (
            on_hub(f"{path} {n}", hub, raw={path: a}, plain_listing=plain)
            for n, a in ANSWERS.items()
        ),
    )


HEADERS = ("X-Linked-Etag", "X-Linked-Size", "X-Repo-Commit", "Location", "ETag")
ODD_HEADERS = (
    "",
    "x",
    "-1",
    "../../x",
    "0" * 64,
    '"' + "A" * 64 + '"',
    "9" * 400,
    "\x9b31m",
    "1.5",
)


@pytest.mark.hostile
def test_odd_metadata(attack_all: Run, hub: HubServer) -> None:
    usual = {"X_Linked_Etag": f'"{hub.sha256(HITOM)}"', "X_Linked_Size": str(len(HITOM)),
             "X_Repo_Commit": commit_of(EVALS), "Location": f"{hub.url}/storage/x"}  # fmt: skip

    def odd(name: str, value: str) -> Callable[[], Iterable[bytes]]:
        return lambda: reply("302 x", **{**usual, name.replace("-", "_"): value})

    attack_all(
        on_hub("undamaged", hub, plain_listing=True),
        (on_hub(f"{n}={v[:20]}", hub, plain_listing=True, raw={"HEAD /datasets/": odd(n, v)})
         for n in HEADERS for v in ODD_HEADERS),
    )  # fmt: skip


# -- odd files where the command writes ------------------------------------------------------------

PART = f".{NAME}.{hashlib.sha256(HITOM).hexdigest()[:16]}.part"
VICTIM = b"a file of the user\n" * 3


def link(name: str, target: str = "victim") -> Callable[[Path], object]:
    return lambda data: (data / name).symlink_to(data.parent / target)


@pytest.mark.parametrize("name", [PART, ".soul-data.pulling", LOCK, f".{LOCK}.tmp", NAME])
def test_links_are_never_followed(tmp_path: Path, hub: HubServer, name: str) -> None:
    from tests.support.hostile import faults

    def prepare(folder: Path) -> None:
        (folder / "data").mkdir()
        (folder / "victim").write_bytes(VICTIM)
        link(name)(folder / "data")

    folder = tmp_path / "attack"
    folder.mkdir()
    assert faults(Attack(name, PULL, prepare), folder) == []
    assert (folder / "victim").read_bytes() == VICTIM


def odd_places(seed: int) -> Iterator[tuple[str, Callable[[Path], object]]]:
    entry = {"repo": EVAL, "revision": commit_of(EVALS), "path": NAME, "bytes": len(HITOM),
             "sha256": hashlib.sha256(HITOM).hexdigest()}  # fmt: skip
    lock = {"version": 1, "repos": {EVAL: commit_of(EVALS)}, "files": {NAME: entry}}
    rng = seeded(seed)
    for number in range(6):
        text, what = odd_nodes(rng, lock)
        yield f"lock {number} {what}", lambda data, text=text: (data / LOCK).write_text(text)
    for what, damaged in mutations(seed, json.dumps(lock).encode(), 4):
        yield f"lock {what}", lambda data, damaged=damaged: (data / LOCK).write_bytes(damaged)


@pytest.mark.parametrize("seed", seeds(4))
def test_odd_locks(attack_all: Run, hub: HubServer, seed: int) -> None:
    places = islice(odd_places(seed), None if seed else 3)
    attack_all(on_hub("undamaged", hub), (placed(n, hub, c) for n, c in places))


@pytest.mark.hostile
@pytest.mark.parametrize("name", [PART, ".soul-data.pulling", LOCK, NAME])
def test_odd_files_in_the_folder(attack_all: Run, hub: HubServer, name: str) -> None:
    attack_all(
        on_hub("undamaged", hub),
        (placed(f"{name} {what}", hub, lambda data, make=make: make(data / name))
         for what, make in ODDITIES.items()),
    )  # fmt: skip


def placed(name: str, hub: HubServer, change: Callable[[Path], object]) -> Attack:
    def prepare(folder: Path) -> None:
        hub.raw, hub.api_body, hub.plain_listing = {}, None, False
        (folder / "data").mkdir()
        change(folder / "data")

    return Attack(name, PULL, prepare)
