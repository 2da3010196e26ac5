"""Logs of servers that ended, as vLLM 0.32 wrote them, and what is said of them.

A server that soulkit starts: it answers or says why not, and leaves nothing behind.

The far end is a stand-in that listens where vLLM would; the processes and sockets are real.
"""

from __future__ import annotations

import http.client
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ConfigError
from soulkit.models.vllm.command import ServerSpec
from soulkit.models.vllm.server import ServerDied, ServerFailed, VllmServer, diagnosis, last_line
from soulkit.models.vllm.settings import vllm_version
from soulkit.models.vllm.supervisor import living
from tests.support.servers.groups import children, eventually, is_gone
from tests.support.servers.vllm_stand_in import interpreter

TRACE = '(APIServer pid=3)   File "launcher.py", line 348, in create_server_socket\n'
LOGS = {
    "flag": (
        "usage: api_server.py [-h] [--headless]\napi_server.py: error: unrecognized arguments: "
        "--foo\n",
        "unrecognized arguments: --foo",
        "--vllm-arg",
    ),
    "port": (
        f"Traceback (most recent call last):\n{TRACE}OSError: [Errno 98] Address already in use\n",
        "OSError: [Errno 98] Address already in use",
        "same command again",
    ),
    "architecture": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, The checkpoint you are trying to load has model type `foo` but "
        "Transformers does not recognize this architecture.\n",
        "model type `foo`",
        "--engine local",
    ),
    "context": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, User-specified max_model_len (9999) is greater than the derived "
        "max_model_len (max_position_embeddings=1024.0)\n",
        "max_model_len (9999)",
        "--max-context",
    ),
    "hub": (
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached "
        "snapshot folder for the specified revision on the local disk\n",
        "LocalEntryNotFoundError",
        "HF_TOKEN",
    ),
    "package": (
        "RuntimeError: operator torchvision::nms does not exist\n",
        "torchvision::nms",
        "pip uninstall torchvision",
    ),
    "absent": ("/opt/bin/python: No module named vllm\n", "No module named vllm", "install vLLM"),
    "compiler": (
        "(EngineCore pid=9) torch._inductor.exc.InvalidCxxCompiler: No working C++ compiler found "
        "in torch._inductor.config.cpp.cxx: (None, 'g++')\n",
        "InvalidCxxCompiler",
        "install g++",
    ),
    "memory": (
        "(EngineCore pid=9) ERROR 11-23 03:00:46 [core.py:1199] torch.OutOfMemoryError: CUDA out "
        "of memory. Tried to allocate 2.00 GiB.\n"
        "(APIServer pid=3) Traceback (most recent call last):\n"
        "(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {}\n"
        "/opt/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: leaked\n",
        "torch.OutOfMemoryError: CUDA out of memory",
        "--max-context N",
    ),
    "weights": (
        "(Worker pid=8) ERROR 11-23 03:00:46 [multiproc_executor.py:953] safetensors._safetensors_"
        "rust.SafetensorError: Error while deserializing header: incomplete metadata\n"
        "(EngineCore pid=9) INFO 11-23 03:00:46 [multiproc_executor.py:479] [shutdown] waiting\n",
        "incomplete metadata",
        "download the folder again",
    ),
    "unknown": (
        "INFO 11-23 03:00:46 [a.py:1] one\nsomething else\n",
        "one something else",
        "Read the log",
    ),
    "empty": ("", "Its log is empty.", "Read the log"),
}


@pytest.mark.parametrize("kind", LOGS)
def test_the_cause_is_named_with_a_way_out(kind: str, tmp_path: Path) -> None:
    text, says, helps = LOGS[kind]
    log = tmp_path / "m.log"
    log.write_text(text)
    words = diagnosis(log)
    assert says in words.lines
    assert helps in words.way_out
    assert "Traceback" not in words.lines
    assert "pid=" not in words.lines
    assert "\n" not in words.lines
    assert "[shutdown]" not in words.lines
    assert words.port_taken == (kind == "port")


def test_only_this_start_counts(tmp_path: Path) -> None:
    log = tmp_path / "m.log"
    log.write_text("ValueError: of the start before\n")
    since = log.stat().st_size
    with log.open("a") as file:
        file.write("\x1b[31mKeyError: 'of this one'\x1b[0m\n")
    assert diagnosis(log, since).lines == "KeyError: 'of this one'"
    assert last_line(log, since) == "KeyError: 'of this one'"
    assert last_line(tmp_path / "none.log") == ""
    assert diagnosis(tmp_path / "none.log").lines == "Its log is empty."


def spec(folder: Path, model: str) -> ServerSpec:
    return ServerSpec(model=model, python=interpreter(folder))


def started(spec: ServerSpec, folder: Path, **more: Any) -> VllmServer:
    return VllmServer.start_all([spec], folder, **more)[0]


def status(server: VllmServer, key: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
    answer = connection.getresponse().status
    connection.close()
    return answer


def test_a_server_answers_to_its_key_until_it_is_stopped(tmp_path: Path) -> None:
    with started(spec(tmp_path, "serves"), tmp_path / "vllm") as server:
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
        started(spec(tmp_path, "serves"), tmp_path) as one,
        started(spec(tmp_path, "serves"), tmp_path) as other,
    ):
        assert one.key != other.key
        assert [one.log.name, other.log.name] == ["serves.log", "serves-2.log"]
        assert status(one, other.key) == 401


def test_what_broke_is_said_with_what_helps(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed) as failure:
        started(spec(tmp_path, "breaks"), tmp_path)
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
        started(spec(tmp_path, "silent"), tmp_path, limit_s=0.0)
    assert "did not answer within 0 s" in failure.value.what
    assert "--vllm-start" in failure.value.way_out
    assert set(children(os.getpid())) <= before


def test_servers_that_start_together_share_the_time_limit(tmp_path: Path) -> None:
    told: list[float] = []
    specs = [spec(tmp_path, name) for name in ("serves", "silent")]
    with pytest.raises(ServerFailed, match="'silent' did not answer within 2 s"):
        VllmServer.start_all(
            specs, tmp_path, limit_s=2.0, watch=lambda so_far, _: told.append(so_far)
        )
    assert told == sorted(told) and told[-1] >= 1


def test_an_interrupted_start_leaves_nothing(tmp_path: Path) -> None:
    before, during = set(children(os.getpid())), set()

    def watch(seconds: float, line: str) -> None:
        assert seconds >= 0
        during.update(set(children(os.getpid())) - before)
        if line:
            assert "vLLM API server version 0.32.0" in line
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        started(spec(tmp_path, "silent"), tmp_path, watch=watch)
    assert len(during) == 1
    assert set(children(os.getpid())) <= before


def test_another_port_is_taken_where_somebody_was_faster(tmp_path: Path) -> None:
    with started(spec(tmp_path, "taken"), tmp_path) as server:
        assert "Address already in use" in server.log.read_text()
        assert status(server, server.key) == 200


def test_a_server_that_died_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    with started(spec(tmp_path, "serves"), tmp_path) as server:
        victim = next(process for process in living(server.group) if process != server.group)
        os.kill(victim, signal.SIGKILL)
        assert eventually(lambda: is_gone(server.group, server.port))
        with pytest.raises(ServerDied) as death:
            server.check()
    what, why, way_out = death.value.lines()
    assert what.startswith("The vLLM server of 'serves' died of SIGKILL; unless someone killed it,")
    assert "vLLM API server version 0.32.0" in why
    assert way_out == f"Finished work is kept. Run the same command again. Log: {server.log}"


def test_an_interpreter_without_vllm_is_named(tmp_path: Path) -> None:
    lean = tmp_path / "lean"
    lean.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    lean.chmod(0o755)
    assert vllm_version(str(lean)) is None
    with pytest.raises(ConfigError, match="vLLM is not installed for"):
        started(ServerSpec(model="serves", python=str(lean)), tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        vllm_version(str(tmp_path / "none"))


def test_versions_that_soulkit_does_not_know(tmp_path: Path) -> None:
    folders = {v: tmp_path / v for v in ("0.30.2", "0.31.0", "0.33.1+cpu", "0.34.0", "1.0.0")}
    for folder in folders.values():
        folder.mkdir()
    installs = {v: vllm_version(interpreter(folder, v)) for v, folder in folders.items()}
    supported = [v for v, install in installs.items() if install and install.supported]
    assert supported == ["0.31.0", "0.33.1+cpu"]
    assert not any(install and install.on_gpu for install in installs.values())
