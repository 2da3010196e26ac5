"""Training without --model: the Soul tasks have a default, data of your own has none, and a line
says what is downloaded before anything is.

A task of a user that breaks, or leaves, on some rows: evaluation and training go on without.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from soulkit.runs.records import load_records
from soulkit.train.config import DEFAULT_MODEL, TrainConfig
from soulkit.train.run import prepare_training
from soulkit.train.setup.data import download_remark
from tests.support.reporting import Heard
from tests.support.servers.openai_server import ScriptedServer
from tests.support.shades import TASKS, steps_of, write_rows
from tests.support.training import random_model, soul

DITTO = ("ditto", "--coach", "symbolic")
COMMANDS = {
    "conversations": ("sft", "--data", "chats.jsonl", "--side", "human"),
    "rows of a file": (*DITTO, "--task", "tomi", "--data", "own.jsonl"),
    "rows of a file, imitated": ("sft", "--task", "tomi", "--data", "tomi=own.jsonl"),
    "a task": ("grpo", "--tasks", "mine/tasks.yaml", "--task", "mine", "--data", "synth:4"),
    "a comparison": ("ablate", "--methods", "grpo", "--task", "tomi", "--data", "own.jsonl"),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations, rows and a task of its own."""
    folder = tmp_path_factory.mktemp("own")
    talk = [{"role": "user", "content": "Soup?"}, {"role": "assistant", "content": "Soup."},
            {"role": "user", "content": "Not again."}]  # fmt: skip
    (folder / "chats.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    for task, name in (("tomi", "own.jsonl"), ("hitom", "hitom_rl_train.parquet")):
        assert soul("data", "synth", task, "-n", 6, "-o", folder / name) == 0
    assert soul("tasks", "new", "mine", "--python", "--out", folder / "mine") == 0
    return folder


@pytest.fixture
def folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, without a cache of the hub."""
    monkeypatch.chdir(made)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(made / "hub"))
    return made


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_data_of_your_own_has_no_default_model(
    folder: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    for more in ((), ("--dry-run",)):
        capfd.readouterr()
        assert soul("train", *words, *more, "--steps", 1, "--out", "none") == 2
        lines = capfd.readouterr().err.strip().splitlines()
        assert [line.partition(":")[0] for line in lines[-3:]] == ["error", "why", "fix"]
        assert "needs --model" in lines[-3]
        assert DEFAULT_MODEL in lines[-2] and "17.5 GB" in lines[-2]
        assert "--model FOLDER" in lines[-1]
        assert not Path("none").exists()


SAID = (
    f"the model {DEFAULT_MODEL} (the default, about 17.5 GB) is not on this machine and will be "
    "downloaded first; choose another with --model FOLDER or --model OWNER/NAME"
)


@pytest.mark.parametrize("data", ["synth:4", "hitom_rl_train.parquet", "."])
def test_a_soul_task_says_what_it_downloads(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], data: str
) -> None:
    flags = {"method": "ditto", "tasks": {"hitom": 1.0}, "data": {"hitom": data}}
    remarks: list[str] = []
    config = TrainConfig.load(env={}, flags={**flags, "coach": "symbolic"})
    prepare_training(config, tmp_path / "run", Heard(remarks))
    assert remarks[0] == SAID
    capfd.readouterr()
    words = (*DITTO, "--task", "hitom", "--data", data, "--steps", 1)
    assert soul("train", *words, "--dry-run") == 0
    assert SAID in capfd.readouterr().err.splitlines()


def test_its_size_is_said_when_a_key_is_missing_too(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    words = ("ditto", "--task", "hitom", "--data", "synth:4", "--judge", "endpoint:gpt-5-nano")
    capfd.readouterr()
    assert soul("train", *words, "--steps", 1, "--out", "none") == 2
    error = capfd.readouterr().err.splitlines()[-3]
    assert "no key in OPENAI_API_KEY" in error
    assert f"{DEFAULT_MODEL} on this machine (the default, about 17.5 GB)" in error


@pytest.mark.slow
def test_it_is_said_before_the_download(folder: Path, tmp_path: Path) -> None:
    """A process that may not ask the hub fails at the download, after that line."""
    soul_command = (sys.executable, "-m", "soulkit.cli.app", "train", *DITTO, "--task", "hitom")
    words = (*soul_command, "--data", "synth:4", "--steps", "1", "--out", tmp_path / "run")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    lines = ended.stderr.strip().splitlines()
    assert SAID in lines[:-3]
    assert "is not on this machine, and the Hub cannot be reached" in lines[-3]
    assert "HF_HUB_OFFLINE" in lines[-1]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (DEFAULT_MODEL, f"the model {DEFAULT_MODEL} (about 17.5 GB) is not"),
        ("owner/other", "the model owner/other is not on this machine"),
        ("tiny", ""),
        (".", ""),
    ],
)
def test_the_line_says_what_is_known_of_a_model_that_is_named(
    folder: Path, model: str, words: str
) -> None:
    Path("hub/hub/models--owner--here").mkdir(parents=True, exist_ok=True)
    settings = TrainConfig(method="grpo", model=model, tasks={"tomi": 1.0})
    remark = download_remark(settings)
    assert remark.startswith(words) and bool(remark) == bool(words)
    here = settings.model_copy(update={"model": "owner/here"})
    assert download_remark(here) == ""


def test_a_model_from_the_environment_is_named(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOULKIT_MODEL", "owner/other")
    capfd.readouterr()
    assert soul("train", *COMMANDS["conversations"], "--steps", 1, "--dry-run") == 0
    assert "the model owner/other is not on this machine" in capfd.readouterr().err


BREAKS = """

class Breaking(Kind):
    async def score(self, example, episode, cast):
        said = example.fields["said"]
        if said.startswith(LEAVES):
            sys.exit("enough")
        if said.startswith(DIVIDES):
            return 1 / 0
        score = await super().score(example, episode, cast)
        return replace(score, value=float("nan")) if said.startswith("Speaker 2 ") else score
"""


def home(folder: Path, leaves: str, divides: str = "Speaker 1 ") -> Path:
    """The shade task with a class that breaks, in a folder of its own."""
    place = Path(shutil.copytree(TASKS.parent, folder / "task"))
    code = (place / "shade.py").read_text(encoding="utf-8")
    ends = (
        f"import sys\nfrom dataclasses import replace\nLEAVES, DIVIDES = {leaves!r}, {divides!r}\n"
    )
    (place / "shade.py").write_text(code + ends + BREAKS, encoding="utf-8")
    tasks = (place / "tasks.yaml").read_text(encoding="utf-8")
    entry = '  breaking: {<<: *shade, module: "shade:Breaking"}\n'
    (place / "tasks.yaml").write_text(tasks + entry, encoding="utf-8")
    return place / "tasks.yaml"


def task_options(folder: Path, leaves: str = "Speaker 0 ") -> tuple[object, ...]:
    rows = write_rows(folder / "rows.jsonl", 12)
    return ("--tasks", home(folder, leaves), "--task", "breaking", "--data", f"breaking={rows}")


def test_an_evaluation_goes_on_and_names_the_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options, out = task_options(tmp_path), tmp_path / "run"
    with ScriptedServer(answer="<answer>A</answer>") as server:
        command = ("eval", "api", "--model", "m", "--base-url", server.base_url, *options,
                   "--out", out)  # fmt: skip
        assert soul(*command, "--json") == 1  # three of twelve are more than --max-unscored
        output = capfd.readouterr()
        summary = json.loads(output.out)
        cell = summary["tasks"]["breaking"]["value"]
        assert cell["n_scored"] == 9 and cell["unscored"] == {"task_error": 3}
        for words in ("SystemExit: enough", "ZeroDivisionError", "returned a value of nan"):
            assert f"task error in breaking.score: {words}" in output.err.replace("score() ", "")
        assert "Traceback" not in output.err
        words = [r.score.words for r in load_records(out / "episodes.jsonl") if not r.score.scored]
        assert len(words) == 3 and all("shade.py:" in one for one in words)
        task = tmp_path / "task" / "shade.py"
        code = task.read_text(encoding="utf-8")
        task.write_text(code[: code.index("class Breaking")] + "class Breaking(Kind): ...\n",
                        encoding="utf-8")  # fmt: skip
    capfd.readouterr()
    loaded = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    for name in [name for name, file in loaded.items() if file == str(task)]:
        del sys.modules[name]  # another process would read the file anew
    assert soul("rescore", out, "--out", tmp_path / "again", "--json") == 0
    records = load_records(tmp_path / "again" / "episodes.jsonl")
    assert len(records) == 12 and all(record.score.scored for record in records)


@pytest.mark.parametrize("code", ["1 / 0", "sys.exit(0)"])
@pytest.mark.parametrize("method", ["prepare", "calls", "remarks"])
def test_a_task_that_breaks_before_anything_is_played_is_named_with_file_and_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str, code: str
) -> None:
    tasks, rows = home(tmp_path, "nobody"), write_rows(tmp_path / "rows.jsonl", 2)
    broken = f"\n\nclass Broken(Kind):\n    def {method}(self, *args):\n        {code}\n"
    with (tmp_path / "task" / "shade.py").open("a", encoding="utf-8") as file:
        file.write(broken)
    with tasks.open("a", encoding="utf-8") as file:
        file.write('  broken: {<<: *shade, module: "shade:Broken"}\n')
    with ScriptedServer(answer="<answer>A</answer>") as server:
        assert soul("eval", "api", "--model", "m", "--base-url", server.base_url, "--tasks", tasks,
                    "--task", "broken", "--data", f"broken={rows}", "--out",
                    tmp_path / "run") == 2  # fmt: skip
        assert server.requests == []
    error, why, fix = capfd.readouterr().err.strip().splitlines()[-3:]
    kind = "SystemExit: 0" if "exit" in code else "ZeroDivisionError: division by zero"
    assert error.startswith(f"error: The task 'broken' raised an error: {kind} (")
    assert error.endswith(f", in {method}).") and "shade.py:" in error
    assert why.startswith("why: ") and "Correct the code" in fix


def test_what_the_kit_cannot_use_is_an_error_of_the_task_that_gave_it(tmp_path: Path) -> None:
    options, out = task_options(tmp_path), tmp_path / "run"
    broken = "\n\nclass Breaking(Kind):\n    def parse(self, *args):\n        return None\n"
    with (tmp_path / "task" / "shade.py").open("a", encoding="utf-8") as file:
        file.write(broken)
    with ScriptedServer(answer="<answer>A</answer>") as server:
        assert soul("eval", "api", "--model", "m", "--base-url", server.base_url, *options,
                    "--out", out) == 1  # fmt: skip
    for record in load_records(out / "episodes.jsonl"):
        assert record.score.reason == "task_error"
        assert "(soulkit/tasks/kit/choice.py:" in record.score.words
        assert record.score.words.endswith(", on values from Breaking)")


def test_a_task_file_that_leaves_while_it_is_read_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = task_options(tmp_path)
    with (tmp_path / "task" / "shade.py").open("a", encoding="utf-8") as file:
        file.write("\nsys.exit(0)\n")
    assert soul("eval", "api", "--model", "m", *options, "--out", tmp_path / "run") == 2
    assert "SystemExit: 0" in capfd.readouterr().err


@pytest.mark.slow
def test_training_goes_on_without_the_rows_that_break_and_stops_where_all_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = random_model(tmp_path / "model")
    small = ("--prompts", 12, "--group-size", 2, "--max-tokens", 4, "--lora-r", 2)
    options, out = task_options(tmp_path), tmp_path / "run"
    command = ("train", "grpo", "--model", model, *options, *small, "--steps", 2, "--out", out)
    assert soul(*command) == 0
    lines = steps_of(out)
    assert [line["unscored/task_error"] for line in lines] == [6, 6]
    assert [line["rollouts/draft"] for line in lines] == [24, 24]
    capfd.readouterr()
    (tmp_path / "all").mkdir()
    every = task_options(tmp_path / "all", leaves="Speaker ")
    assert soul("train", "grpo", "--model", model, *every, *small, "--steps", 2,
                "--out", tmp_path / "dead") == 1  # fmt: skip
    error, why, fix = capfd.readouterr().err.strip().splitlines()[-3:]
    assert (
        "None of 24 drafts was scored; the last one failed with task_error: SystemExit: enough"
        in error
    )
    assert "code of the task" in why and "that line" in fix
