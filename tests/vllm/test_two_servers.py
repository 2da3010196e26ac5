"""Two servers of one model; one is killed half way, and the table is that of one server."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from soulkit.models.vllm.server import free_port
from tests.support.evaluation import summary
from tests.vllm.rows import evaluated, replies

if TYPE_CHECKING:
    from soulkit.models.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.torch]

START_S = 600.0
FLAGS = (
    "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--dtype", "float32",
    "--enforce-eager", "--max-model-len", "1024", "--served-model-name", "base",
)  # fmt: skip
"""As docs/guides/install.md has a server started by hand."""


def answers(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (URLError, OSError):
        return False


@pytest.fixture
def second(
    vllm_python: str, vllm_server: VllmServer, tiny_model: Path, tmp_path: Path
) -> Iterator[tuple[str, int]]:
    """(address, process group) of a server that somebody else has started, with the same key."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model)]
    where = ("--host", "127.0.0.1", "--port", str(port))
    env = {**os.environ, "VLLM_API_KEY": vllm_server.key, "VLLM_NO_USAGE_STATS": "1"}
    with (tmp_path / "second.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *where, *FLAGS], env=env, stdout=log, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + START_S
        while not answers(url):
            assert process.poll() is None and time.monotonic() < end, (
                tmp_path / "second.log"
            ).read_text("utf-8", "replace")[-2000:]
            time.sleep(0.5)
        yield url, process.pid
    finally:
        kill(process.pid)
        process.wait(60)


def kill(group: int) -> None:
    """SIGKILL to a server with its engine and workers."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def half_way(out: Path, group: int, rows: int) -> threading.Thread:
    """Kills the group as soon as half of the rows are written; the thread that waits for it."""

    def wait() -> None:
        file, end = out / "episodes.jsonl", time.monotonic() + START_S
        while time.monotonic() < end:
            if file.exists() and file.read_bytes().count(b"\n") >= rows // 2:
                return kill(group)
            time.sleep(0.005)
        return None

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_server_that_dies_half_way_changes_nothing(
    tiny_model: Path, attached: str, second: tuple[str, int], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    terms = ("--temperature", 0, "--batch-size", 4)
    one = evaluated(tmp_path / "one", tiny_model, attached, *terms)
    url, group = second
    thread = half_way(tmp_path / "two", group, rows=200)
    capsys.readouterr()
    two = evaluated(tmp_path / "two", tiny_model, f"{attached},{url}", *terms)
    thread.join(START_S)
    assert not answers(url), "the run ended before the server did"
    assert url.removeprefix("http://") in capsys.readouterr().err
    assert summary(two)["tasks"] == summary(one)["tasks"]
    before, after = replies(one), replies(two)
    assert before.keys() == after.keys() and len(after) == 200
    other = [row for row in before if before[row].token_ids != after[row].token_ids]
    assert len(other) <= 4, "ties that rounding decides; tests/vllm/test_parity.py has them"
