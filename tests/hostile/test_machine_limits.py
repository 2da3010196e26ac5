"""Limits of the machine: open files, file sizes, odd places, proxies, clocks, streams, locales."""

from __future__ import annotations

import io
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from soulkit.errors import RunError
from soulkit.models.ledger.view import LedgerView
from soulkit.runs.records import scored_keys
from tests.support.hostile import Attack, faults, seeded
from tests.support.servers.openai_server import ScriptedServer

Run = Callable[[Attack, Iterable[Attack]], None]
Enter = Callable[[], object]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer="(A) somewhere") as running:
        yield running


def evaluation(server: ScriptedServer, out: str = "run", rows: int = 3, *more: str) -> list[str]:
    words = ("eval", "api", "--model", "m", "--base-url", server.base_url, "--task", "tomi",
             "--data", f"synth:{rows}", "--out", out, "--backoff", "0",
             "--max-unscored", "1")  # fmt: skip
    return [*map(str, words), *more]


def entered(name: str, command: Iterable[str], enter: Enter) -> Attack:
    return Attack(name, tuple(command), lambda folder: None, enter=enter)


def limit(what: int, value: int) -> Enter:
    return lambda: resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def few_files(count: int) -> Enter:
    """At most `count` open files, without those that the tests before this one have left open."""

    def enter() -> None:
        os.closerange(3, 4096)
        limit(resource.RLIMIT_NOFILE, count)()

    return enter


def test_few_open_files(attack_all: Run, server: ScriptedServer) -> None:
    command = evaluation(server, "run", 40, "--concurrency", "512")
    attack_all(
        entered("undamaged", command, lambda: None),
        (entered(f"{n} files", command, few_files(n)) for n in (256, 24)),
    )


@pytest.mark.hostile
def test_very_few_open_files(attack_all: Run, server: ScriptedServer) -> None:
    command = evaluation(server, "run", 40, "--concurrency", "512")
    attack_all(
        entered("undamaged", command, lambda: None),
        (entered(f"{n}", command, few_files(n)) for n in (128, 64, 20, 14, 9)),
    )


@pytest.mark.parametrize(
    "size", [3_000, *(pytest.param(2**n, marks=pytest.mark.hostile) for n in range(10, 18))]
)
def test_a_full_disk_loses_nothing(tmp_path: Path, server: ScriptedServer, size: int) -> None:
    """No file can grow beyond `size` bytes; with more space the run is resumed, and no reply that
    was stored is requested again."""
    folder, command = tmp_path / "attack", tuple(evaluation(server, str(tmp_path / "run"), 30))
    folder.mkdir()
    limited = limit(resource.RLIMIT_FSIZE, size)
    bad = faults(Attack("full", command, lambda folder: None, enter=limited), folder)
    assert [fault for fault in bad if "fewer than three" not in fault] == []  # they did not fit
    before = stored(tmp_path / "run")
    sent = len(server.requests)
    assert faults(Attack("resumed", command, lambda f: None, codes=frozenset({0})), folder) == []
    assert len(server.requests) - sent == 30 - before
    assert len(scored_keys(tmp_path / "run" / "episodes.jsonl")) == 30


def stored(run: Path) -> int:
    if not (run / "ledger.sqlite").is_file() or not (run / "ledger.sqlite").stat().st_size:
        return 0
    with suppress(RunError), LedgerView(run / "ledger.sqlite") as view:
        return len({call.entry.call.example_id for call in view.entries()})
    return 0  # an empty file of a start that could not make the tables


PLACES = ("/proc/run", "/sys/run", "/dev/null/run", "file", "file/run", "loop/run",
          "x" * 300, "a/../../../../../../../proc/x", "fifo", "fifo/x")  # fmt: skip


def make_places(folder: Path) -> None:
    (folder / "file").write_text("mine\n")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")


@pytest.mark.hostile
@pytest.mark.parametrize("kind", ["eval", "synth", "report", "tasks"])
def test_odd_places(attack_all: Run, server: ScriptedServer, tmp_path: Path, kind: str) -> None:
    def command(place: str) -> tuple[str, ...]:
        return {
            "eval": (*evaluation(server, place, 2),),
            "synth": ("data", "synth", "tomi", "--rows", "3", "--out", place),
            "report": ("report", "made", "--format", "html", "--out", place),
            "tasks": ("tasks", "new", "mine", "--out", place),
        }[kind]

    def prepare(folder: Path) -> None:
        make_places(folder)
        (folder / "made").mkdir()
        (folder / "made" / "summary.json").write_text("{}")

    codes = frozenset({0, 1, 2})
    bad: list[str] = []
    for number, place in enumerate(PLACES):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = faults(Attack(place, command(place), prepare, codes), folder)
        bad += [f"{place[:20]}: {fault}" for fault in found]
        assert (folder / "file").read_text() == "mine\n" or place == "file"
    assert not bad, "\n".join(bad)


PROXIES = ("garbage", "http://", "socks5://127.0.0.1:1", "http://user:pw@127.0.0.1:1", "ftp://x",
           "http://[::1", "http://127.0.0.1:99999", "\x1b[2J", " ", "http://x:y:z", "//", "http://\u00e9",
           "https://127.0.0.1:1", "socks4://", "http://127.0.0.1:-1")  # fmt: skip
NO_PROXIES = ("*", "[::", ",,,", "http://", "127.0.0.1:x", "\x1b[2J", "::1/999")


@pytest.mark.hostile
@pytest.mark.parametrize("kind", ["eval", "pull"])
def test_odd_proxies(attack_all: Run, server: ScriptedServer, kind: str) -> None:
    pull = ("data", "pull", "--task", "hitom", "--split", "eval", "--out", "data")
    command = evaluation(server, "run", 2) if kind == "eval" else pull

    def enter(name: str, value: str) -> Enter:
        def change() -> None:
            os.environ.update({"HF_ENDPOINT": "http://127.0.0.1:1", name: value})
            if name.startswith("NO"):
                os.environ["HTTP_PROXY"] = "http://127.0.0.1:1"
            _fewer_waits()

        return change

    attack_all(
        entered("undamaged", evaluation(server, "run", 2), lambda: None),
        (
            entered(f"{name}={value!r}", command, enter(name, value))
            for name, values in (("HTTP_PROXY", PROXIES), ("ALL_PROXY", PROXIES),
                                 ("NO_PROXY", NO_PROXIES))
            for value in values
        ),
    )  # fmt: skip


def _fewer_waits() -> None:
    from soulkit.data import download

    download.Hub.__init__.__defaults__ = (None, 0.0)  # type: ignore[attr-defined]


def clock(seed: int) -> Enter:
    """Wall clock that jumps between 1970 and 2200 at every look."""
    rng = seeded(seed)

    def change() -> None:
        time.time = lambda: rng.choice((0.0, 1e9, time.monotonic(), 7e9, -1.0))

    return change


@pytest.mark.hostile
def test_clocks_that_jump(attack_all: Run, server: ScriptedServer) -> None:
    attack_all(
        entered("undamaged", evaluation(server), lambda: None),
        (entered(f"clock {seed}", evaluation(server), clock(seed)) for seed in range(6)),
    )


def full_output() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def closed_output() -> None:
    sys.stdout = None  # type: ignore[assignment]
    os.close(1)


def closed_streams() -> None:
    closed_output()
    sys.stderr = None  # type: ignore[assignment]
    os.close(2)


def broken_pipe() -> None:
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115


def encoded(name: str) -> Enter:
    def change() -> None:
        sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding=name)  # noqa: SIM115
        sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), encoding=name)  # noqa: SIM115

    return change


def variable(name: str, value: str) -> Enter:
    return lambda: os.environ.update({name: value})


STREAMS: dict[str, Enter] = {
    "full output": full_output, "closed output": closed_output, "closed streams": closed_streams,
    "broken pipe": broken_pipe, "ascii": encoded("ascii"), "latin-1": encoded("latin-1"),
    "cp437": encoded("cp437"),
    **{f"{n}={v}": variable(n, v) for n, v in (
        ("LANG", "xx_YY.garbage"), ("LC_ALL", "C"), ("LC_ALL", "tr_TR.UTF-8"), ("COLUMNS", "0"),
        ("COLUMNS", "-5"), ("COLUMNS", "x"), ("COLUMNS", "99999999"), ("LINES", "x"), ("TERM", ""),
        ("TERM", "\x1b[2J"), ("TZ", "garbage/../x"), ("TZ", "\x1b"), ("HOME", "/nowhere"),
        ("HOME", ""), ("TMPDIR", "/nowhere"), ("XDG_STATE_HOME", "/dev/null"),
        ("XDG_STATE_HOME", "relative"), ("SOULKIT_STATE", "/proc/x"), ("SOULKIT_DATA", "/dev/null"),
        ("SOULKIT_DATA", "\x1b[2J"), ("NO_COLOR", "x"), ("PYTHONIOENCODING", "x"),
        ("LOCAL_WORLD_SIZE", "abc"), ("LOCAL_RANK", "abc"), ("WORLD_SIZE", "abc"), ("RANK", "x"),
        ("OMP_NUM_THREADS", "abc"), ("SOULKIT_TASKS", "\x1b[2J"), ("SOULKIT_SUITE", "\udcff"),
    )},
}  # fmt: skip


@pytest.mark.hostile
@pytest.mark.parametrize("kind", ["eval", "list", "train"])
def test_odd_streams_and_locales(attack_all: Run, server: ScriptedServer, kind: str) -> None:
    command = {
        "eval": evaluation(server), "list": ["tasks", "list"],
        "train": ["train", "ditto", "--dry-run", "--model", "tiny", "--task", "cast_of_people",
                  "--data", "synth:8", "--out", "run"],
    }[kind]  # fmt: skip
    attack_all(
        entered("undamaged", command, lambda: None),
        (entered(name, command, enter) for name, enter in STREAMS.items()),
    )
