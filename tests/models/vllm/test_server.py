"""A server that soulkit starts: it answers or says why not, and leaves nothing behind.

The far end is a stand-in that listens where vLLM would; the processes and sockets are real.
"""

from __future__ import annotations

import http.client
import os
import signal
import sys
from pathlib import Path

import pytest

from soulkit.errors import ConfigError
from soulkit.models.vllm.command import ServerSpec
from soulkit.models.vllm.server import ServerDied, ServerFailed, VllmServer
from soulkit.models.vllm.supervisor import living
from soulkit.models.vllm.version import vllm_version
from tests.support.servers.groups import children, eventually, is_gone
from tests.support.servers.vllm_stand_in import interpreter


def spec(folder: Path, model: str) -> ServerSpec:
    return ServerSpec(model=model, python=interpreter(folder))


def status(server: VllmServer, key: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
    answer = connection.getresponse().status
    connection.close()
    return answer


def test_a_server_answers_to_its_key_until_it_is_stopped(tmp_path: Path) -> None:
    with VllmServer.start(spec(tmp_path, "serves"), tmp_path / "vllm") as server:
        assert server.url == f"http://127.0.0.1:{server.port}"
        assert (status(server, server.key), status(server, "another")) == (200, 401)
        assert (server.served, server.version) == ("base", "0.32.0")
        assert server.log == tmp_path / "vllm" / "serves.log"
        assert "vLLM API server version" in server.log.read_text()
        assert server.key not in server.log.read_text()
        server.check()
        group = server.group
    assert is_gone(group, server.port)
    server.check()
    server.stop()


def test_every_start_has_a_key_and_a_log_of_its_own(tmp_path: Path) -> None:
    with (
        VllmServer.start(spec(tmp_path, "serves"), tmp_path) as one,
        VllmServer.start(spec(tmp_path, "serves"), tmp_path) as other,
    ):
        assert one.key != other.key
        assert [one.log.name, other.log.name] == ["serves.log", "serves-2.log"]
        assert status(one, other.key) == 401


def test_what_broke_is_said_with_what_helps(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed) as failure:
        VllmServer.start(spec(tmp_path, "breaks"), tmp_path)
    what, why, way_out = failure.value.lines()
    assert what == "The vLLM server of 'breaks' did not start: it ended with exit code 1."
    assert "ValueError: Free memory on device" in why
    assert "[key]" in why, "the server's own key must not be shown"
    assert "Traceback" not in why
    assert "gpu-memory-utilization" in way_out
    assert str(tmp_path / "breaks.log") in way_out


def test_a_start_that_takes_too_long_ends_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(children(os.getpid()))
    with pytest.raises(ServerFailed) as failure:
        VllmServer.start(spec(tmp_path, "silent"), tmp_path, limit_s=0.0)
    assert "did not answer within 0 s" in failure.value.what
    assert "--vllm-start" in failure.value.way_out
    assert set(children(os.getpid())) <= before


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_start_leaves_nothing(
    tmp_path: Path, interruption: type[BaseException]
) -> None:
    before, during = set(children(os.getpid())), set()

    def watch(seconds: float, line: str) -> None:
        assert seconds >= 0
        during.update(set(children(os.getpid())) - before)
        if line:
            assert "vLLM API server version 0.32.0" in line
            raise interruption

    with pytest.raises(interruption):
        VllmServer.start(spec(tmp_path, "silent"), tmp_path, watch=watch)
    assert len(during) == 1
    assert set(children(os.getpid())) <= before


def test_another_port_is_taken_where_somebody_was_faster(tmp_path: Path) -> None:
    with VllmServer.start(spec(tmp_path, "taken"), tmp_path) as server:
        assert "Address already in use" in server.log.read_text()
        assert status(server, server.key) == 200


def test_a_server_that_died_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    with VllmServer.start(spec(tmp_path, "serves"), tmp_path) as server:
        victim = next(process for process in living(server.group) if process != server.group)
        os.kill(victim, signal.SIGKILL)
        assert eventually(lambda: is_gone(server.group, server.port))
        with pytest.raises(ServerDied) as death:
            server.check()
    what, why, way_out = death.value.lines()
    assert what.startswith("The vLLM server of 'serves' died of SIGKILL; where nobody killed it,")
    assert "vLLM API server version 0.32.0" in why
    assert way_out == f"What was played is kept. Run the same command again. Log: {server.log}"


def test_an_interpreter_without_vllm_is_named(tmp_path: Path) -> None:
    lean = tmp_path / "lean"
    lean.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    lean.chmod(0o755)
    assert vllm_version(str(lean)) is None
    with pytest.raises(ServerFailed, match="has no vLLM"):
        VllmServer.start(ServerSpec(model="serves", python=str(lean)), tmp_path)


def test_an_interpreter_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be asked for its vLLM"):
        vllm_version(str(tmp_path / "none"))


def test_versions_that_soulkit_does_not_know(tmp_path: Path) -> None:
    folders = {v: tmp_path / v for v in ("0.30.2", "0.31.0", "0.33.1+cpu", "0.34.0", "1.0.0")}
    for folder in folders.values():
        folder.mkdir()
    installs = {v: vllm_version(interpreter(folder, v)) for v, folder in folders.items()}
    assert [v for v, install in installs.items() if install and install.supported] == [
        "0.31.0",
        "0.33.1+cpu",
    ]
    assert not any(install and install.on_gpu for install in installs.values())
