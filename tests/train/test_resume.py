"""A run that is killed and started again writes, to the bit, what an untouched run writes.

Kills come at drawn moments, between a run's first file and its last. Five of them for the run with
everything on, unless the environment variable SOULKIT_KILLS asks for more (20 take minutes).
Compared are the metrics, episodes, weights, checkpoints and summary, without what a clock says:
`time/sample` and `time/train` of a step, `seconds` of positions and of the summary, and the
`usage` of completions, which holds latencies.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from soulkit.cli.app import main
from soulkit.runs.folder import read_jsonl
from soulkit.tasks.secret_keeper.visitor import visitor_line
from soulkit.train.state.checkpoint import checkpoints, damage
from tests.support.servers.openai_server import Fault, ScriptedServer
from tests.support.training import lines_of, soul

KILLS = int(os.environ.get("SOULKIT_KILLS", "5"))
STEPS, EVERY = 5, 2


# --- the runs -------------------------------------------------------------------------------------


def ditto(model: Path, out: Path) -> list[str]:
    """Several updates a step, two kinds of prompt length, a dev split, a warm-up."""
    words = (
        "train", "ditto", "--model", model, "--task", "tomi", "--data", "tomi=synth:40",
        "--prompts", 4, "--group-size", 4, "--max-tokens", 12, "--lr", 3e-3, "--lora-r", 4,
        "--steps", STEPS, "--checkpoint-every", EVERY, "--eval-every", 3, "--out", out,
        "--set", "mini_batch_prompts=2", "--set", "batch_size=8", "--set", "warmup_steps=3",
        "--set", "dev_limit=6",
    )  # fmt: skip
    return [str(w) for w in words]


def everything(model: Path, out: Path, url: str) -> list[str]:
    """Dialogues and questions, partner and coach over HTTP, a checkpoint a step, the best kept."""
    words = (
        "train", "ditto", "--model", model, "--task", "tomi,secret_keeper:0.5",
        "--data", "tomi=synth:24", "--data", "secret_keeper=synth:12",
        "--partner", f"endpoint:visitor@{url}", "--coach", f"endpoint:wise@{url}",
        "--prompts", 3, "--group-size", 2, "--max-tokens", 8, "--lr", 3e-3, "--lora-r", 4,
        "--steps", 3, "--checkpoint-every", 1, "--eval-every", 1, "--out", out,
        "--set", "deterministic=true", "--set", "keep_last=1", "--set", "keep_best=1",
        "--set", "mini_batch_prompts=2", "--set", "batch_size=8", "--set", "dev_limit=3",
        "--set", "sampler_cap=2.0", "--set", "kl_coef=0.01", "--set", "warmup_steps=2",
    )  # fmt: skip
    return [str(w) for w in words]


def taught(model: Path, out: Path, url: str) -> list[str]:
    """A moving average as teacher; rarer checkpoints, so that several steps are taken again."""
    words = (
        "train", "sdpo-token", "--model", model, "--task", "tomi", "--data", "tomi=synth:30",
        "--prompts", 4, "--group-size", 3, "--max-tokens", 10, "--lr", 3e-3, "--lora-r", 4,
        "--steps", 5, "--checkpoint-every", 2, "--out", out, "--set", "teacher=ema",
        "--set", "ema_tau=0.2", "--set", "deterministic=true", "--set", "mini_batch_prompts=2",
        "--set", "batch_size=8",
    )  # fmt: skip
    return [str(w) for w in words]


RUNS: dict[str, Callable[[Path, Path, str], list[str]]] = {"ditto": everything, "sdpo": taught}


def sft(model: Path, out: Path) -> list[str]:
    words = ("train", "sft", "--model", "tiny", "--full", "--task", "tomi", "--data",
             "tomi=synth:30", "--steps", STEPS, "--batch", 6, "--lr", 1e-3, "--out", out,
             "--checkpoint-every", EVERY, "--set", "lr_schedule=cosine")  # fmt: skip
    return [str(w) for w in words]


def reply(body: dict[str, Any]) -> str:
    """The partner's next line, or a coach's remark that depends on the draft."""
    if body["model"] == "visitor":
        return visitor_line(body["messages"])
    hints = ("Look again at who was in the room.", "Think of what was last seen.", "Keep it short.")
    return hints[len(str(body["messages"])) % len(hints)]


def jitter(index: int, body: dict[str, Any]) -> Fault:
    """Replies in an order that no two runs share."""
    return Fault.slow(0.004 * random.random())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ScriptedServer(answer=reply, script=jitter) as server:
        yield server.base_url


# --- what is compared -----------------------------------------------------------------------------


def episodes(run: Path) -> list[dict[str, Any]]:
    """The run's records, without how long and how expensive they were."""
    records = read_jsonl(run / "episodes.jsonl")
    for record in records:
        record["episode"]["usage"] = None
        for trace in record["episode"]["traces"]:
            for turn in trace["turns"]:
                turn["completion"]["usage"] = None
    return records


def summary(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run / "summary.json").read_text())
    values["provenance"].pop("dates")
    return {k: v for k, v in values.items() if k not in ("seconds", "model")}


def states(run: Path) -> dict[str, Any]:
    """Every file of every checkpoint; of its position what no clock says."""
    contents: dict[str, Any] = {}
    for path in checkpoints(run / "checkpoints"):
        assert not damage(path)
        contents |= {f"{path.name}/{name}": held for name, held in files(path).items()}
        position = json.loads(contents.pop(f"{path.name}/position.json"))
        # Offsets depend on how many digits the clock's numbers have.
        contents[path.name] = {name: position[name] for name in ("step", "policy", "dev")}
    return contents


def models(run: Path) -> dict[str, Any]:
    """The files of the final and of the best model."""
    there = [run / name for name in ("model", "best") if (run / name).exists()]
    return {f"{p.name}/{name}": held for p in there for name, held in files(p).items()}


def files(folder: Path) -> dict[str, Any]:
    """Name → content. PEFT writes its settings with sets in them, in any order."""
    contents: dict[str, Any] = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    if "adapter_config.json" in contents:
        settings = json.loads(contents["adapter_config.json"])
        contents["adapter_config.json"] = {**settings, "target_modules": None}
    return contents


def assert_same(run: Path, untouched: Path) -> None:
    assert lines_of(run) == lines_of(untouched)
    assert episodes(run) == episodes(untouched)
    assert models(run).keys() == models(untouched).keys() and models(run) == models(untouched)
    assert states(run).keys() == states(untouched).keys() and states(run) == states(untouched)
    assert summary(run) == summary(untouched)
    sampled = run / "sampled.jsonl"
    assert not sampled.exists() or not sampled.read_bytes()  # the last checkpoint needs none of it


# --- killing --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forked() -> Any:
    """Processes that begin with everything imported; one thread each, like this one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["soulkit.train.run", "soulkit.cli.app", "peft"])
    return context


def kill_at(context: Any, arguments: list[str], out: Path, lines: int, delay: float) -> bool:
    """Start the command and kill it `delay` seconds after line `lines` of its metrics came.

    Whether it was still at work then.
    """
    process = context.Process(target=silent, args=(arguments,))
    process.start()
    first = out / ("metrics.jsonl" if lines else "config.yaml")
    end = time.monotonic() + 600
    while process.is_alive() and (not first.exists() or count(first) < lines):
        assert time.monotonic() < end
        time.sleep(0.001)
    time.sleep(delay)
    alive: bool = process.is_alive()
    if alive:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode in ((-signal.SIGKILL, 0) if alive else (0,))
    return alive and not (out / "summary.json").exists()


def silent(arguments: list[str]) -> None:
    """The command in a process of its own, without its progress."""
    torch.set_num_threads(1)
    with Path(os.devnull).open("w") as nothing:
        sys.stdout = sys.stderr = nothing
        sys.exit(main(arguments))


def kill_when(arguments: list[str], due: Callable[[], bool]) -> None:
    """Start the installed command as a user does and end it with −9 once `due` says so."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "soulkit.cli.app", *arguments], env=env,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    end = time.monotonic() + 600
    try:
        while not due():
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            assert time.monotonic() < end
            time.sleep(0.0005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture(scope="module")
def whole(warm: Path, tmp_path_factory: pytest.TempPathFactory, url: str) -> Callable[[str], Path]:
    """The untouched run of a name, made when it is first asked for."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("whole") / name
            assert soul(*RUNS[name](warm / "model", made[name], url)) == 0
        return made[name]

    return of


def moments(name: str, number: int, run: Path) -> list[tuple[int, float]]:
    """Line and delay of each kill of a trial; every fifth trial is killed while it resumes, too."""
    rng = random.Random(f"{name}/{number}")
    lines = read_jsonl(run / "metrics.jsonl")
    paces = [line["time/sample"] + line["time/train"] for line in lines if "policy/version" in line]
    kills, done = [], 0
    for _ in range(1 + (number % 5 == 4)):
        done = rng.randrange(done, len(paces))
        kills.append((done * len(lines) // len(paces), rng.random() * paces[done]))
    return kills


TRIALS = [*(("ditto", n) for n in range(KILLS)), *(("sdpo", n) for n in range((KILLS + 1) // 2))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), TRIALS)
def test_a_killed_run_goes_on_to_the_bit(
    tmp_path: Path, warm: Path, whole: Callable[[str], Path], forked: Any, url: str,
    name: str, number: int, record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    untouched, out = whole(name), tmp_path / "run"
    command = RUNS[name](warm / "model", out, url)
    for lines, delay in moments(name, number, untouched):
        while not kill_at(forked, command, out, lines, delay):  # too late: it had ended
            shutil.rmtree(out)
            delay /= 2
        left = {n: count(out / f"{n}.jsonl") for n in ("metrics", "episodes", "sampled")}
        record_property("lines left", left)
    assert not (out / "summary.json").exists()
    assert soul(*command) == 0
    assert_same(out, untouched)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["trained.safetensors", "position.json"])
def test_a_checkpoint_that_was_being_written_is_not_used(
    tmp_path: Path, warm: Path, whole: Callable[[str], Path], url: str, file: str
) -> None:
    out, untouched = tmp_path / "run", whole("ditto")
    command = everything(warm / "model", out, url)
    points = out / "checkpoints"
    kill_when(command, lambda: any(points.glob(f".step_*2.part/{file}")))
    assert not (out / "summary.json").exists()
    assert soul(*command) == 0
    assert_same(out, untouched)
    assert not list(points.glob(".*"))
    assert len(json.loads((out / "environment.json").read_text())["resumed"]) == 1


@pytest.fixture(scope="module")
def untouched(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("untouched") / "run"
    assert soul(*ditto(warm / "model", out)) == 0
    return out


@pytest.mark.slow
def test_a_run_without_its_last_step_goes_on_to_the_bit(
    tmp_path: Path, warm: Path, untouched: Path
) -> None:
    """What a kill leaves, made by hand: the newest checkpoint gone, files longer than the rest."""
    out = tmp_path / "run"
    shutil.copytree(untouched, out)
    shutil.rmtree(out / "checkpoints" / f"step_{STEPS:06d}")
    with (out / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "torn')
    (out / "checkpoints" / f".step_{STEPS:06d}.part").mkdir()
    assert soul(*ditto(warm / "model", out)) == 0
    assert_same(out, untouched)
    assert (out / "metrics.jsonl.cut").exists()  # the tail is kept aside, not thrown away


def test_supervised_runs_go_on_to_the_bit(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert soul(*sft(whole, whole)) == 0
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / f"step_{STEPS:06d}")
    shutil.rmtree(out / "model")
    assert soul(*sft(out, out)) == 0
    assert_same(out, whole)


def test_another_configuration_is_refused_by_name(
    untouched: Path, warm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (untouched / "metrics.jsonl").read_bytes()
    arguments = [*ditto(warm / "model", untouched), "--lambda-fb", "0.5", "--seed", "7"]
    assert soul(*arguments) == 2
    message = capsys.readouterr().err
    assert "lambda_fb: 1.0 -> 0.5" in message and "seed: 0 -> 7" in message
    assert (untouched / "metrics.jsonl").read_bytes() == before


def test_a_run_killed_after_its_last_checkpoint_is_tidied_up(
    tmp_path: Path, warm: Path, untouched: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(untouched, out)
    for left in ("model", "best"):
        shutil.move(out / left, out / f".{left}.part")
    points = out / "checkpoints"
    shutil.copytree(points / f"step_{STEPS:06d}", points / ".step_000002.old")
    shutil.copytree(out / ".best.part", points / f".step_{STEPS:06d}.part")
    assert soul(*ditto(warm / "model", out)) == 0
    assert_same(out, untouched)
    assert not [*points.glob(".*"), *out.glob(".*.part")]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, warm: Path, untouched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(untouched, out)
    newest = out / "checkpoints" / f"step_{STEPS:06d}"
    data = bytearray((newest / "trained.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "trained.safetensors").write_bytes(data)
    assert soul(*ditto(warm / "model", out)) == 0
    remarks = [line for line in capsys.readouterr().err.splitlines() if "is damaged" in line]
    assert len(remarks) == 1 and "step_000005 is damaged (trained.safetensors" in remarks[0]
    assert "going on from step_000004" in remarks[0]
    assert_same(out, untouched)


def test_a_run_without_a_whole_checkpoint_is_not_begun_again(
    tmp_path: Path, warm: Path, untouched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(untouched, out)
    for path in checkpoints(out / "checkpoints"):
        (path / "optimizer.safetensors").write_bytes(b"")
    assert soul(*ditto(warm / "model", out)) == 2
    assert "checkpoints in" in capsys.readouterr().err
    assert lines_of(out) == lines_of(untouched)


@pytest.mark.slow
def test_training_draws_nothing_from_the_global_generator(
    tmp_path: Path, warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a checkpoint would have to keep its state."""
    from soulkit.train.state.loop import Loop

    seen = []
    checkpoint = Loop.checkpoint

    def noting(loop: Loop, dev: float | None = None) -> None:
        seen.append(torch.random.get_rng_state())
        checkpoint(loop, dev)

    monkeypatch.setattr(Loop, "checkpoint", noting)
    again = [*ditto(warm / "model", tmp_path / "run"), "--checkpoint-every", "1", "--steps", "3"]
    assert soul(*again) == 0
    assert len(seen) == 3 and all(torch.equal(seen[0], state) for state in seen)
