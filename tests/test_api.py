"""`import soulkit as sk`: its public names, lazy imports, and that no module shadows a name."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import soulkit as sk
from soulkit.data.files import write_rows
from soulkit.errors import ConfigError, RunError
from tests.support.chats import chats_file
from tests.support.evaluation import ROOT
from tests.support.road import synth
from tests.support.servers.openai_server import ScriptedServer

NAMES = [name for name in sk.__all__ if not name.startswith("_")]


def import_everything() -> None:
    for module in pkgutil.walk_packages(sk.__path__, "soulkit."):
        needs_extra = module.name.endswith(".ray_launch") and find_spec("ray") is None
        if "templates" not in module.name and not needs_extra:
            importlib.import_module(module.name)


def test_no_name_is_that_of_a_module() -> None:
    modules = {module.name for module in pkgutil.iter_modules(sk.__path__)}
    assert modules.isdisjoint(NAMES) and set(NAMES) <= set(dir(sk))


def test_a_name_that_is_not_offered() -> None:
    with pytest.raises(AttributeError, match="no attribute 'evaluat'"):
        _ = sk.evaluat  # type: ignore[attr-defined]


def test_every_name_stays_what_it_is_after_every_module_was_imported() -> None:
    before = {name: getattr(sk, name) for name in NAMES}
    import_everything()
    assert {name: getattr(sk, name) for name in NAMES} == before
    assert all(callable(value) for value in before.values())


def test_each_function_does_its_work_twice(tmp_path: Path) -> None:
    import_everything()
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, synth("tomi", 4, 3), data_source="tomi", replace=False)
    with ScriptedServer(answer=lambda _: "<answer>box</answer>") as server:
        for out in (tmp_path / "a", tmp_path / "b"):
            summary = sk.evaluate(
                "m", "tomi", base_url=server.base_url, data={"tomi": str(rows)}, out=out
            )
            assert summary is not None
    for _ in range(2):
        run = sk.load_run(tmp_path / "a")
        assert [record.task for record in run.records] == ["tomi"] * 4
        difference = sk.compare(tmp_path / "a", tmp_path / "b")
        assert difference.tasks[0].paired.n_shared == 4
        task = sk.load_task("tomi")
        assert (
            isinstance(task, sk.ChoiceTask) and task.example(synth("tomi", 1, 0)[0]).task == "tomi"
        )
        assert isinstance(sk.load_task("secret_keeper"), sk.DialogueTask)


@pytest.mark.slow
def test_training_from_python_twice(tmp_path: Path) -> None:
    import_everything()
    for out in (tmp_path / "a", tmp_path / "a"):
        summary = sk.train_model(
            "sft", "tiny", {"tomi": 1.0}, data={"tomi": "synth:16"}, steps=2, full=True, out=out
        )
        assert summary is not None and (out / "model").is_dir()


@pytest.mark.parametrize(
    ("call", "wrapped"),
    [("train_model('sft', 'tiny'", "{}"), ("evaluate('tiny'", "asyncio.run(sk.a{}")],
)
def test_without_torch_the_error_says_what_to_install(
    call: str, wrapped: str, tmp_path: Path
) -> None:
    begin = f"sk.{call}" if wrapped == "{}" else wrapped.format(call)
    more = "'tomi', data='synth:4')" + (")" if wrapped != "{}" else "")
    code = (
        "import asyncio, soulkit as sk\nfrom soulkit.errors import UserError\n"
        f"try:\n    {begin}, {more}\nexcept UserError as error:\n    print(*error.lines())"
    )
    path = os.pathsep.join([str(ROOT / "tests" / "without_torch"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert "'torch' is not installed" in done.stdout and "pip install" in done.stdout, done.stderr


@pytest.mark.parametrize("data", ["synth:4", ["synth:4"], ["tomi=synth:4"]])
def test_rows_are_named_as_on_the_command_line(data: object, tmp_path: Path) -> None:
    with ScriptedServer(answer="<answer>box</answer>") as server:
        summary = sk.evaluate(
            "m", "tomi", base_url=server.base_url, data=data, out=tmp_path / "run"
        )
    assert summary.n == 4


@pytest.mark.slow
def test_chats_are_named_as_on_the_command_line(tmp_path: Path) -> None:
    chats = chats_file(tmp_path / "chats.jsonl", 12)
    sk.train_model(
        "sft", "tiny", {}, data=str(chats), side="human", steps=1, full=True, out=tmp_path / "run"
    )
    assert (tmp_path / "run" / "model").is_dir()


def test_what_the_command_refuses_is_refused_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_task"):
        sk.evaluate("m", "no_such_task", base_url="http://127.0.0.1:9/v1", out=tmp_path / "x")


def test_a_task_has_two_protocols() -> None:
    with pytest.raises(ConfigError, match="There is no protocol 'refrence'"):
        sk.load_task("tomi", protocol="refrence")  # type: ignore[arg-type]


# --- inside a running event loop -----------------------------------------------------------------


def in_notebook(work: Callable[[], Any]) -> Any:
    """The result of `work()` as in a notebook cell: inside a coroutine of a running event loop."""

    async def cell() -> Any:
        asyncio.get_running_loop()
        return work()

    return asyncio.run(cell())


def test_remarks_are_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ScriptedServer(answer="box") as server, caplog.at_level(logging.INFO, "soulkit"):
        evaluate(server, tmp_path / "run", 2)
    lines = [record.getMessage() for record in caplog.records]
    assert f"answered: m at {urlsplit(server.base_url).netloc}" in lines
    assert f"run folder {tmp_path / 'run'}" in lines
    assert {record.levelname for record in caplog.records if "soulkit" in record.name} == {"INFO"}


def evaluate(server: ScriptedServer, out: Path, n: int = 4, **settings: Any) -> Any:
    return sk.evaluate(
        "m", "tomi", base_url=server.base_url, data={"tomi": f"synth:{n}"}, out=out, **settings
    )


def box(body: dict[str, Any]) -> str:
    return "<answer>box</answer>"


def test_it_works_within_a_running_loop_and_gives_the_same(tmp_path: Path) -> None:
    with ScriptedServer(answer=box) as server:
        inside = in_notebook(lambda: evaluate(server, tmp_path / "inside"))
        outside = evaluate(server, tmp_path / "outside")
    assert inside.n_scored == 4 and inside.tasks == outside.tasks


def test_the_loop_goes_on_while_it_is_awaited(tmp_path: Path) -> None:
    async def main(url: str) -> tuple[int, int]:
        ticks = 0
        awaited = asyncio.create_task(
            sk.aevaluate("m", "tomi", base_url=url, data={"tomi": "synth:4"}, out=tmp_path / "run")
        )
        while not awaited.done():
            await asyncio.sleep(0.02)
            ticks += 1
        return ticks, (await awaited).n_scored

    with ScriptedServer(answer=box, delay_s=0.3) as server:
        ticks, scored = asyncio.run(main(server.base_url))
    assert scored == 4 and ticks > 5


@pytest.mark.parametrize("awaited", [False, True])
def test_what_is_refused_is_refused_within_a_running_loop(awaited: bool, tmp_path: Path) -> None:
    def call(out: Path, n: int) -> Any:
        settings: dict[str, Any] = {"base_url": server.base_url, "data": {"tomi": f"synth:{n}"}}
        if awaited:
            return asyncio.run(sk.aevaluate("m", "tomi", out=out, **settings))
        return in_notebook(lambda: sk.evaluate("m", "tomi", out=out, **settings))

    with ScriptedServer(answer=box) as server:
        call(tmp_path / "run", 4)
        with pytest.raises(RunError):  # found by the thread: the folder holds another evaluation
            call(tmp_path / "run", 5)
        with pytest.raises(ConfigError, match="no_such_task"):
            in_notebook(lambda: sk.evaluate("m", "no_such_task", base_url=server.base_url))


class SlowServer(ScriptedServer):
    """Takes a quarter of a second for a reply, and notes when the first was asked for."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.replies = 0
        super().__init__(answer=self.reply)

    def reply(self, body: dict[str, Any]) -> str:
        self.asked.set()
        time.sleep(0.25)
        self.replies += 1
        return box(body)


def interrupt_when(asked: threading.Event) -> None:
    def press() -> None:
        if asked.wait(30):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


@pytest.mark.parametrize("awaited", [False, True])
def test_ctrl_c_within_a_running_loop_stops_the_work_and_the_same_call_resumes(
    awaited: bool, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    before = signal.getsignal(signal.SIGINT)
    with SlowServer() as server:
        settings: dict[str, Any] = {
            "base_url": server.base_url, "data": {"tomi": "synth:40"}, "concurrency": 1, "out": out,
        }  # fmt: skip
        interrupt_when(server.asked)
        with pytest.raises(KeyboardInterrupt):
            if awaited:
                asyncio.run(sk.aevaluate("m", "tomi", **settings))
            else:
                in_notebook(lambda: sk.evaluate("m", "tomi", **settings))
        assert signal.getsignal(signal.SIGINT) == before
        stopped = server.replies
        assert stopped < 10
        time.sleep(0.6)
        assert server.replies <= stopped + 1, "the thread asks on"
    port = urlsplit(server.base_url).port
    with ScriptedServer(answer=box, port=port or 0) as resumed:
        assert evaluate(resumed, out, 40, concurrency=1).n_scored == 40


def test_a_cancelled_call_stops_before_the_cancellation_is_passed_on(tmp_path: Path) -> None:
    async def main(server: SlowServer) -> None:
        task = asyncio.create_task(
            sk.aevaluate("m", "tomi", base_url=server.base_url, data={"tomi": "synth:40"},
                         concurrency=1, out=tmp_path / "run")
        )  # fmt: skip
        await asyncio.to_thread(server.asked.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stopped = server.replies
        await asyncio.sleep(0.6)
        assert server.replies <= stopped + 1 < 10

    with SlowServer() as server:
        asyncio.run(main(server))


@pytest.mark.slow
@pytest.mark.torch
def test_training_within_a_running_loop_gives_the_same_losses(tmp_path: Path) -> None:
    def trained(out: str) -> Any:
        return sk.train_model(
            "sft", "tiny", "tomi", data={"tomi": "synth:16"}, steps=2, full=True, out=tmp_path / out
        )

    inside, outside = in_notebook(lambda: trained("a")), trained("b")
    assert inside.tasks == outside.tasks
