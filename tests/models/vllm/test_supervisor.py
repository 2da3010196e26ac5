"""Whoever of soulkit, supervisor and server is killed: nothing of the group is left.

Real processes throughout: a program that starts the group as soulkit does, the supervisor, a small
server, and the server's child that ignores every request to end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from soulkit.models.vllm.server import Supervised, free_port
from soulkit.models.vllm.supervisor import living
from tests.support.servers import stubborn
from tests.support.servers.groups import children, eventually, is_gone, listens

pytestmark = pytest.mark.skipif(
    not Path("/proc/self").is_dir(), reason="the system does not list the processes of a group"
)
SERVER = str(Path(stubborn.__file__).resolve())
STARTER = """
import os, sys, time
from soulkit.models.vllm.server import Supervised
running = Supervised([sys.executable, "-S", sys.argv[1], sys.argv[2]], os.environ, 2, grace_s=0.2)
if "fork" in sys.argv and os.fork() == 0:
    time.sleep(600)
print(running.group, flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    time.sleep(600)
"""
"""A program that starts the server as soulkit does, and on demand has a child of its own."""


class Trio:
    """A starter, its supervisor and its server."""

    def __init__(self, *words: str) -> None:
        self.port = free_port()
        self.starter = subprocess.Popen(
            [sys.executable, "-c", STARTER, SERVER, str(self.port), *words],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.starter.stdout is not None
        self.output = self.starter.stdout
        self.group = int(self.output.readline())
        assert eventually(lambda: listens(self.port) and len(living(self.group)) == 3)

    @property
    def server(self) -> int:
        return children(self.group)[0]

    def end(self) -> None:
        for group in (self.starter.pid, self.group):
            if living(group):
                os.killpg(group, signal.SIGKILL)
        self.starter.wait()
        self.output.close()
        Path(stubborn.memory_file(self.port)).unlink(missing_ok=True)


@pytest.fixture
def trio(request: pytest.FixtureRequest) -> Iterator[Trio]:
    processes = Trio(*getattr(request, "param", ()))
    yield processes
    processes.end()


@pytest.mark.parametrize(
    ("victim", "number"),
    [("supervisor", signal.SIGKILL), ("server", signal.SIGKILL), ("supervisor", signal.SIGTERM),
     ("supervisor", signal.SIGINT)],
)  # fmt: skip
def test_whoever_is_killed_or_asked_to_end_nothing_is_left(
    trio: Trio, victim: str, number: int
) -> None:
    os.kill(trio.group if victim == "supervisor" else trio.server, number)
    assert eventually(lambda: is_gone(trio.group, trio.port)), living(trio.group)
    assert trio.starter.poll() is None
    assert eventually(lambda: not Path(stubborn.memory_file(trio.port)).exists())


def test_ctrl_c_does_not_reach_the_server_and_the_end_of_soulkit_ends_it(trio: Trio) -> None:
    os.killpg(trio.starter.pid, signal.SIGINT)  # as a terminal does, to everybody in front of it
    assert trio.output.readline() == "interrupted\n"
    assert len(living(trio.group)) == 3
    assert listens(trio.port)
    os.kill(trio.starter.pid, signal.SIGKILL)
    assert eventually(lambda: is_gone(trio.group, trio.port)), living(trio.group)
    assert eventually(lambda: not Path(stubborn.memory_file(trio.port)).exists())


@pytest.mark.parametrize("trio", [("fork",)], indirect=True)
def test_a_child_that_soulkit_forked_keeps_no_server_alive(trio: Trio) -> None:
    os.kill(trio.starter.pid, signal.SIGKILL)
    assert eventually(lambda: is_gone(trio.group, trio.port))
    assert living(trio.starter.pid), "the child must have outlived its parent"


def running(port: int, log: Path, grace_s: float = 0.2) -> Supervised:
    with log.open("ab") as output:
        words = [sys.executable, "-S", SERVER, str(port)]
        return Supervised(words, os.environ, output.fileno(), grace_s)


def test_a_stop_returns_when_all_is_gone_and_may_be_repeated(tmp_path: Path) -> None:
    port = free_port()
    group = running(port, tmp_path / "log")
    assert eventually(lambda: listens(port) and len(living(group.group)) == 3)
    assert not group.wait(0.0)
    assert group.stop() == []
    assert is_gone(group.group, port)
    assert group.wait(0.0)
    assert group.code == -signal.SIGTERM
    assert group.stop() == []


def test_it_tells_how_the_program_ended(tmp_path: Path) -> None:
    group = running(free_port(), tmp_path / "log")
    assert eventually(lambda: group.process is not None)
    os.kill(group.process or 0, signal.SIGKILL)
    assert eventually(lambda: group.ended)
    assert group.code == -signal.SIGKILL
    assert group.stop() == []


def test_a_program_that_is_not_there_is_a_reason(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as output:
        group = Supervised([str(tmp_path / "none")], os.environ, output.fileno(), 0.2)
    assert eventually(lambda: group.ended)
    assert "No such file" in group.failure
    assert group.stop() == []


def test_a_fork_of_soulkit_stops_nothing(tmp_path: Path) -> None:
    port = free_port()
    group = running(port, tmp_path / "log")
    assert eventually(lambda: listens(port))
    child = os.fork()
    if child == 0:
        group.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert listens(port)
    assert not group.ended
    assert group.stop() == []


def test_the_supervisor_needs_the_standard_library_alone(tmp_path: Path) -> None:
    """It is started as a file, by a plain interpreter that finds no other package."""
    script = Path(sys.modules[living.__module__].__file__ or "")
    code = f"import sys; sys.argv=['x']; exec(open({str(script)!r}).read().split('if __name__')[0])"
    words = [sys.executable, "-I", "-S", "-c", f"{code}\nprint(*sorted(sys.modules))"]
    loaded = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert not {"soulkit", "torch", "subprocess", "asyncio", "site"} & set(loaded.split())
