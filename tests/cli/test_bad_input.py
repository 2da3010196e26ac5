"""What a user can get wrong, with models, runs and rows: always three lines, exit code 2.

Chats that are given where rows are wanted, in every layout and to every kind of command.

Every command refuses weights that are not the model's: three lines, exit 2, nothing scored.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from soulkit.cli import app as cli
from soulkit.data.files import write_rows
from soulkit.models.local.tiny import build_tiny
from soulkit.tasks.kit.registry import load_registry
from tests.support.evaluation import FAST, ROOT, examples, oracle, soul, start, three_lines
from tests.support.judged import TASKS
from tests.support.road import synth
from tests.support.servers.openai_server import ScriptedServer
from tests.support.training import random_model

NOWHERE = "http://127.0.0.1:9/v1"


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOULKIT_DATA", raising=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = load_registry().task("tomi")
    words = [task.preview(e)[0].text for e in examples("tomi", 4)]
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny", words, max_context=64)


def refused(capsys, *arguments: object) -> tuple[str, str, str]:
    capsys.readouterr()
    assert soul("eval", *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return three_lines(shown.err)


def api_refused(capsys, *arguments: object) -> tuple[str, str, str]:
    return refused(capsys, "api", "--model", "m", "--base-url", NOWHERE, *arguments)


def test_unknown_names(capsys) -> None:
    assert "Did you mean 'hitom'?" in api_refused(capsys, "--task", "hitmo")[2]
    assert "Did you mean 'small'?" in api_refused(capsys, "--suite", "smal")[2]
    what, _, fix = api_refused(capsys, "--task", "tomi", "--data", "tmi=synth:3")
    assert "'tmi'" in what
    assert "Did you mean 'tomi'?" in fix
    assert "nothing.yaml" in api_refused(capsys, "--task", "x", "--tasks", "nothing.yaml")[0]
    assert "protocol" in api_refused(capsys, "--task", "tomi", "--protocol", "papre")[0]
    assert "no model (--model)" in refused(capsys, "api", "--task", "tomi")[0]


def test_files_that_are_not_there_or_not_files(tmp_path: Path, capsys) -> None:
    write_rows(tmp_path / "rows.jsonl", synth("tomi", 3, 0), data_source="tomi")
    task = ("--task", "tomi", "--data")
    what, _, fix = api_refused(capsys, *task, tmp_path / "row.jsonl")
    assert "does not exist" in what
    assert "Did you mean 'rows.jsonl'?" in fix
    what, why, fix = api_refused(capsys, *task, tmp_path)
    assert "no rows for the task 'tomi'" in what
    assert str(tmp_path) in why
    assert "--data tomi=FILE" in fix
    (tmp_path / "rows.txt").write_text("x")
    assert "not in a supported row format" in api_refused(capsys, *task, tmp_path / "rows.txt")[0]


def test_without_data_every_way_out_is_named(capsys) -> None:
    _, why, fix = api_refused(capsys, "--task", "hitom")
    assert "SOULKIT_DATA" in why
    for way in ("--data hitom=synth:100", "--data hitom=FILE", "soul data import hitom"):
        assert way in fix


def test_files_that_hold_something_else(tmp_path: Path, capsys) -> None:
    task = ("--task", "tomi", "--data")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 this is not a table PAR1")
    what, why, _ = api_refused(capsys, *task, tmp_path / "bad.parquet")
    assert "cannot be read" in what
    assert "Parquet" in why
    (tmp_path / "empty.jsonl").write_text("")
    assert "contains no rows" in api_refused(capsys, *task, tmp_path / "empty.jsonl")[0]
    (tmp_path / "junk.jsonl").write_text("{\nnope\n")
    assert "All rows" in api_refused(capsys, *task, tmp_path / "junk.jsonl")[0]
    write_rows(tmp_path / "hitom.jsonl", synth("hitom", 3, 0), data_source="hitom")
    assert "hitom (3)" in api_refused(capsys, *task, tmp_path / "hitom.jsonl")[1]


def test_wrong_columns_name_the_alias_to_add(tmp_path: Path, capsys) -> None:
    rows = [{"the_story": r["story"], "question": r["question"], "answer": "x"}
            for r in synth("tomi", 3, 0)]  # fmt: skip
    write_rows(tmp_path / "rows.jsonl", rows)
    what, why, fix = api_refused(capsys, "--task", "tomi", "--data", tmp_path / "rows.jsonl")
    assert "missing: story" in what
    assert "Expected story, question, answer" in why
    assert "the_story" in why
    assert "columns: {story: {aliases: [the_story]}}" in fix


def test_bad_rows_are_told_and_the_good_ones_played(tmp_path: Path, capsys) -> None:
    rows = [json.dumps(row) for row in synth("tomi", 3, 0)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, "{broken"]))
    with ScriptedServer(answer=oracle("tomi", 3)) as server:
        data = ("--data", tmp_path / "rows.jsonl", "--json")
        code = soul("eval", "api", "--model", "m", "--base-url", server.base_url, "--task",
                    "tomi", "--out", tmp_path / "run", *data)  # fmt: skip
    assert code == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["n_scored"] == 3
    assert "bad rows of tomi left out: 1; the first: rows.jsonl:4" in shown.err


# --- models ---------------------------------------------------------------------------------------


def local_refused(capsys, model: object, *arguments: object) -> tuple[str, str, str]:
    base = ("--task", "tomi", "--data", "synth:4", "--max-tokens", 4)
    return refused(capsys, "local", "--model", model, *base, *arguments)


@pytest.mark.torch
def test_model_folders_that_are_not_complete(tiny: Path, tmp_path: Path, capsys) -> None:
    bare = shutil.copytree(tiny, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    what, _, fix = local_refused(capsys, bare)
    assert "lacks the tokenizer (tokenizer.json)" in what
    assert "save_pretrained" in fix
    mute = shutil.copytree(tiny, tmp_path / "mute")
    (mute / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((mute / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (mute / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "chat template" in " ".join(local_refused(capsys, mute))
    assert "There is no folder" in local_refused(capsys, tmp_path / "nothing")[0]
    assert "not an adapter" in local_refused(capsys, tiny, "--adapter", tmp_path)[0]
    assert "device" in local_refused(capsys, tiny, "--device", "tpu9")[0]


@pytest.mark.torch
def test_prompts_longer_than_the_context(tiny: Path, tmp_path: Path, capsys) -> None:
    what, why, fix = local_refused(capsys, tiny, "--out", tmp_path / "run")
    assert what == "4 of 4 prompts of 'tomi' do not fit the model's context."
    assert "the context is 64 tokens" in why
    assert fix == "Use --allow-overflow to leave those rows unscored."
    assert "Use a larger --max-context, or " in local_refused(capsys, tiny, "--max-context", 48)[2]
    assert not (tmp_path / "run").exists()


def test_keys_and_addresses(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    rows = ("--task", "tomi", "--data", "synth:2", "--out", tmp_path / "run")
    what, why, fix = refused(capsys, "api", "--model", "m", *rows)
    assert why.startswith("The key for actor m is read from this variable")
    cost, _, missing = what.partition(". ")
    assert cost == "Cost unknown: no price for m"
    assert missing == "The environment variable 'OPENAI_API_KEY' is not set."
    assert "export OPENAI_API_KEY=" in fix
    assert not (tmp_path / "run").exists()
    bad_url = refused(capsys, "api", "--model", "m", "--base-url", "ftp://x", *rows)
    assert "not an http" in bad_url[0]
    assert "both --price-in" in api_refused(capsys, *rows, "--price-in", 1)[0]
    assert "endpoint:MODEL@URL" in api_refused(capsys, *rows, "--partner", "x")[0]


# --- run folders ----------------------------------------------------------------------------------


def test_the_real_command_shows_no_traceback(tmp_path: Path) -> None:
    process = start("eval", "api", "--model", "m", "--task", "tomi", "--data", tmp_path / "no.csv")
    shown, err = process.communicate(timeout=600)
    assert (process.returncode, shown) == (2, "")
    assert "does not exist" in three_lines(err)[0]


def test_a_port_that_is_taken(capsys) -> None:
    with ScriptedServer() as server:
        port = server.base_url.split(":")[2].partition("/")[0]
        assert soul("serve", "--script", "secret_keeper", "--port", port) == 2
    what, _, fix = three_lines(capsys.readouterr().err)
    assert what == f"The address 127.0.0.1:{port} cannot be used."
    assert "--port 0" in fix


# --- rows and tasks -------------------------------------------------------------------------------

READERS = (
    ("data", "check", "{}"), ("data", "show", "{}"), ("data", "audit", "tomi", "{}"),
    ("data", "import", "fantom", "{}"), ("data", "build", "mistakes", "{}"),
    ("data", "contamination", "{}", "rows.jsonl"), ("data", "contamination", "rows.jsonl", "{}"),
    ("tasks", "check", "tomi", "--data", "{}"), ("tasks", "list", "--tasks", "{}"),
)  # fmt: skip
"""Every command that reads a file."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with `rows.jsonl`, an empty file, a folder and bytes of no text."""
    monkeypatch.chdir(tmp_path)
    write_rows(Path("rows.jsonl"), synth("tomi", 30, 0), data_source="tomi")
    Path("folder").mkdir()
    for suffix in ("jsonl", "json", "csv", "parquet"):
        Path(f"empty.{suffix}").write_bytes(b"")
        Path(f"bytes.{suffix}").write_bytes(bytes(range(256)))
    return tmp_path


def errors(capsys, *words: object) -> tuple[str, str, str]:
    """The three lines of a command that refuses, behind the bad rows that it named."""
    capsys.readouterr()
    assert cli.main([str(word) for word in words]) == 2, words
    lines = capsys.readouterr().err.splitlines()
    return three_lines("\n".join(line for line in lines if not line.startswith("bad row ")))


@pytest.mark.slow
@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_files_that_no_command_can_use(words: tuple[str, ...], here: Path, capsys) -> None:
    files = ["nothing.jsonl", "folder", "rows.jsonl/x.jsonl", "empty.jsonl", "empty.json",
             "empty.csv", "empty.parquet", "bytes.json", "bytes.csv", "bytes.parquet"]  # fmt: skip
    for file in files:
        lines = errors(capsys, *(word.format(file) for word in words))
        assert "internal" not in " ".join(lines)
    assert {p.name for p in here.iterdir()} == {
        "rows.jsonl", "folder", *(f"{n}.{s}" for n in ("empty", "bytes")
                                  for s in ("jsonl", "json", "csv", "parquet")),
    }, "nothing is written"  # fmt: skip


@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_files_that_may_not_be_read(words: tuple[str, ...], here: Path, capsys) -> None:
    Path("locked.jsonl").write_bytes(Path("rows.jsonl").read_bytes())
    Path("locked.jsonl").chmod(0)
    if os.access("locked.jsonl", os.R_OK):
        pytest.skip("this user may read everything")
    lines = errors(capsys, *(word.format("locked.jsonl") for word in words))
    assert "Permission denied" in " ".join(lines)


@pytest.mark.parametrize(
    "words",
    [("data", "synth", "tmoi"), ("data", "import", "tmoi", "rows.jsonl"),
     ("data", "audit", "tmoi", "rows.jsonl"), ("data", "check", "rows.jsonl", "--task", "tmoi"),
     ("data", "show", "rows.jsonl", "--task", "tmoi"), ("data", "pull", "--task", "tmoi"),
     ("data", "contamination", "rows.jsonl", "rows.jsonl", "--task", "tmoi"),
     ("tasks", "show", "tmoi"), ("tasks", "check", "tmoi")],
    ids=" ".join,
)  # fmt: skip
def test_unknown_tasks_have_a_nearest_one(words: tuple[str, ...], here: Path, capsys) -> None:
    assert "'tomi'" in errors(capsys, *words)[2]
    assert errors(capsys, *(("" if word == "tmoi" else word) for word in words))


@pytest.mark.parametrize("number", ["0", "-1"])
def test_numbers_that_ask_for_nothing(number: str, here: Path, capsys) -> None:
    rows = "rows.jsonl"
    errors(capsys, "data", "synth", "tomi", "-n", number)
    errors(capsys, "data", "synth", "tomi", "--stories", number)
    errors(capsys, "data", "audit", "tomi", f"synth:{number}")
    errors(capsys, "tasks", "check", "tomi", "--data", f"synth:{number}")
    errors(capsys, "data", "contamination", rows, rows, "--threshold", number)
    errors(capsys, "data", "show", rows, "--row", "-1" if number == "-1" else "31")


def test_what_is_there_is_not_replaced(here: Path, capsys) -> None:
    before = Path("rows.jsonl").read_bytes()
    Path("other.jsonl").write_bytes(before)
    for words in (
        ("data", "synth", "tomi", "-n", "3", "-o", "other.jsonl"),
        ("data", "import", "tomi", "rows.jsonl", "-o", "rows.jsonl"),
        ("data", "audit", "tomi", "synth:50", "-o", "other.jsonl"),
        ("data", "contamination", "rows.jsonl", "other.jsonl", "--exclude", "rows.jsonl"),
    ):
        errors(capsys, *words)
    assert Path("rows.jsonl").read_bytes() == Path("other.jsonl").read_bytes() == before
    same = ("data", "synth", "tomi", "-n", "30", "-o", "rows.jsonl")
    assert cli.main(list(same)) == 0, "the same rows once more are no loss"
    assert not list(here.glob(".*.part"))


@pytest.mark.parametrize(
    "words",
    [("data", "synth", "tomi", "-o", "{}"), ("data", "audit", "tomi", "synth:9", "-o", "{}"),
     ("data", "import", "tomi", "rows.jsonl", "-o", "{}"),
     ("data", "contamination", "rows.jsonl", "rows.jsonl", "--exclude", "{}")],
    ids=" ".join,
)  # fmt: skip
def test_places_where_nothing_can_be_written(words: tuple[str, ...], here: Path, capsys) -> None:
    for place in ("folder", "rows.txt", "rows", "rows.jsonl/x.jsonl", "/dev/full", "x" * 300):
        lines = errors(capsys, *(word.format(place) for word in words))
        assert "internal" not in " ".join(lines)


def test_data_is_named_once_for_a_task(here: Path, capsys) -> None:
    rows = ("--data", "rows.jsonl")
    assert "a second file" in errors(capsys, "tasks", "check", "tomi", *rows, *rows)[0]
    assert "no file" in errors(capsys, "tasks", "check", "tomi", "--data", "")[0]
    named = ("--data", "tomi=rows.jsonl")
    assert "a second file" in errors(capsys, "tasks", "check", *named, *named)[0]
    overlap = ("data", "contamination", "rows.jsonl", "rows.jsonl", "--drop", "")
    assert "at least one kind of overlap" in errors(capsys, *overlap)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "ending"),
    [("tasks list --json", "| head -c 1"), ("tasks list", ">&-"),
     ("data show rows.jsonl", "| head -c 1"), ("data synth tomi -n 3", ">&- 2>&-")],
)  # fmt: skip
def test_output_that_nobody_reads(words: str, ending: str, here: Path) -> None:
    command = f"set -o pipefail; {sys.executable} -m soulkit.cli.app {words} {ending}"
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600)
    errors = [line for line in process.stderr.splitlines() if not line.startswith("next: ")]
    assert (process.returncode, errors) == (0, [])


def test_ctrl_c_says_so_and_leaves_no_part_of_a_file(here: Path) -> None:
    # The part of a file is a pipe here: the command writes, and cannot end before it is stopped.
    command = [sys.executable, "-m", "soulkit.cli.app", "data", "synth", "hitom", "-n", "1000"]
    process = subprocess.Popen(
        ["bash", "-c", 'mkfifo "$0/.big.jsonl.$$.part" && exec "$@" -o "$0/big.jsonl"', here,
         *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    part = here / f".big.jsonl.{process.pid}.part"
    while not part.exists():
        assert process.poll() is None
        time.sleep(0.005)
    with open(os.open(part, os.O_RDONLY | os.O_NONBLOCK), "rb") as pipe:
        assert select.select([pipe], [], [], 600)[0], "nothing was written"
        process.send_signal(signal.SIGINT)
        os.set_blocking(pipe.fileno(), True)
        pipe.read()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert err.startswith("interrupted") and err.count("\n") == 1
    assert not (here / "big.jsonl").exists() and not list(here.glob(".*.part"))


SAID = [("user", "hi, my bike is stuck"), ("assistant", "Oil it."), ("user", "thanks!")]
MESSAGES = [{"role": role, "content": text} for role, text in SAID]
SHARED = [{"from": {"user": "human", "assistant": "gpt"}[r], "value": t} for r, t in SAID]
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"person": "p", "messages": MESSAGES}],
    "conversation": [{"conversation": MESSAGES}],
    "from and value": [{"id": "c", "conversations": SHARED}],
    "replies": [
        {"conversation_id": "c", "turn": n, "user_prompt": u, "model_response": "Oil it."}
        for n, u in enumerate(("hi, my bike is stuck", "thanks!"))
    ],
}  # fmt: skip


def chats(folder: Path, layout: str = "messages", name: str = "chats.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in LAYOUTS[layout]]
    (folder / name).write_text("".join(lines), encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("task", ["userllm", "mirrorbench", "twinvoice"])
def test_the_command_that_drafts_rows_is_named(
    task: str, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = chats(tmp_path, layout)
    assert soul("data", "check", file, "--task", task) == 2
    what, _, fix = three_lines(capsys.readouterr().err)
    assert f"soul data build {task} {file} --drafter " in fix
    if (task, layout) != ("userllm", "replies"):  # the layout of a release that its importer knows
        assert what == f"'{file}' holds chats, but '{task}' needs rows."
        assert f"soul train sft --model MODEL --data {file} --side human" in fix


@pytest.mark.parametrize(
    "command",
    ["eval api --model m --base-url http://127.0.0.1:9/v1 --judge endpoint:j@http://127.0.0.1:9/v1",
     "train ditto --model m --judge endpoint:j@http://127.0.0.1:9/v1", "train grpo --model m "
     "--judge endpoint:j@http://127.0.0.1:9/v1", "train sft --model m",
     "plan eval api --model m --base-url http://127.0.0.1:9/v1", "data show FILE",
     "data check FILE"],
)  # fmt: skip
@pytest.mark.parametrize("folder", [False, True])
def test_every_command_that_reads_rows_recognises_chats(
    command: str, folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    place = chats(tmp_path / "mine")
    place = place.parent if folder else place
    words = command.replace("FILE", str(place)).split()
    data = () if "FILE" in command else ("--data", place)
    assert soul(*words, "--task", "userllm", *data) == 2
    what, _, fix = three_lines("\n".join(capsys.readouterr().err.splitlines()[-3:]))
    assert what == f"'{place}' holds chats, but 'userllm' needs rows."
    assert ("soul data dedupe " in fix) == folder
    assert "soul data build userllm " in fix


@pytest.mark.parametrize("folder", [False, True])
def test_an_audit_recognises_chats(
    folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = chats(tmp_path / "mine").parent if folder else chats(tmp_path / "mine")
    for task in ("userllm", "tomi", "sotopia"):
        assert soul("data", "audit", task, place) == 2
        what, _, fix = three_lines(capsys.readouterr().err)
        assert what == f"'{place}' holds chats, but '{task}' needs rows."
        assert f"--data {place} --side human" in fix


def test_a_folder_of_chats_is_looked_at_with_a_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = chats(tmp_path / "mine").parent
    for command, named in (("check", f"--data {place}"), ("show", f"soul data show {place}")):
        assert soul("data", command, place) == 2
        what, _, fix = three_lines(capsys.readouterr().err)
        assert f"'{place}' holds chats" in what and f"{named} --side human" in fix
    assert soul(*fix.partition("soul ")[2].split()) == 0


def test_a_folder_of_rows_that_hold_conversations_is_no_folder_of_chats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows").mkdir()
    assert soul("data", "synth", "mirrorbench", "-n", 3, "-o", tmp_path / "rows/r.jsonl") == 0
    capsys.readouterr()
    for command in (("check",), ("show",), ("check", "--task", "mirrorbench")):
        assert soul("data", command[0], tmp_path / "rows", *command[1:]) == 2
        assert "is a folder, not a file" in three_lines(capsys.readouterr().err)[0]


def test_a_task_that_nobody_drafts_rows_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = chats(tmp_path)
    for task, more in (("tomi", ()), ("essay", ("--tasks", TASKS))):
        assert soul("data", "check", file, "--task", task, *more) == 2
        what, _, fix = three_lines(capsys.readouterr().err)
        assert "holds chats" in what and "soul train sft --model MODEL --data" in fix
        assert f"soul data build {task}" not in fix
    assert soul("data", "check", file) == 2
    assert "holds chats" in three_lines(capsys.readouterr().err)[0]


def test_rows_that_lack_a_column_are_no_chats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"story": "s", "question": "q", "messages": MESSAGES}) + "\n")
    assert soul("data", "check", file, "--task", "tomi") == 2
    assert "answer" in three_lines(capsys.readouterr().err)[0]


TOMI = ("--task", "tomi", "--data", "tomi=synth:4")
KEEPER = ("--task", "secret_keeper", "--data", "secret_keeper=synth:2")
STEP = ("--steps", 1, "--max-tokens", 4)
GONE = "model.layers.1.mlp.down_proj.weight"
HALF = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`whole`, `holed` (a projection is missing), `adapter`, `halved` (it lacks every B)."""
    out = tmp_path_factory.mktemp("models")
    whole, holed = random_model(out / "whole"), out / "holed"
    shutil.copytree(whole, holed)
    without(holed / "model.safetensors", GONE)
    base = AutoModelForCausalLM.from_pretrained(whole)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(base, lora).save_pretrained(out / "adapter")
    shutil.copytree(out / "adapter", out / "halved")
    without(out / "halved" / "adapter_model.safetensors", "lora_B")
    return {name: out / name for name in ("whole", "holed", "adapter", "halved")}


def without(file: Path, part: str) -> None:
    tensors = {k: t for k, t in load_file(file).items() if part not in k}
    save_file(tensors, file, metadata={"format": "pt"})


ROADS: dict[str, tuple[object, ...]] = {
    "the actor": ("eval", "local", "--model", "holed", *TOMI, *FAST),
    "its adapter": ("eval", "local", "--model", "whole", "--adapter", "halved", *TOMI, *FAST),
    "a partner": ("eval", "local", "--model", "whole", "--partner", "local:holed", *KEEPER, *FAST),
    "a base to train": ("train", "grpo", "--model", "holed", *TOMI, *STEP),
    "all of its weights": ("train", "sft", "--full", "--model", "holed", *TOMI, "--steps", 1),
    "an adapter to go on with": (
        "train", "grpo", "--model", "whole", "--adapter", "halved", *TOMI, *STEP
    ),
    "a coach": ("train", "ditto", "--model", "whole", "--coach", "local:holed", *TOMI, *STEP),
    "a teacher": ("train", "opd", "--model", "whole", "--teacher-model", "holed", *TOMI, *STEP),
    "a teacher's adapter": (
        "train", "opd", "--model", "whole", "--teacher-adapter", "halved", *TOMI, *STEP
    ),
}  # fmt: skip


@pytest.mark.parametrize("road", ROADS)
def test_weights_that_are_missing_are_named(
    road: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [_placed(a, models) for a in ROADS[road]]
    assert soul(*arguments, "--out", tmp_path / "run") == 2
    printed = capsys.readouterr().err.splitlines(keepends=True)
    # A coach is loaded after the trained model, when the size of its passes has been printed.
    said = (
        line
        for line in printed
        if not line.startswith(("run folder ", "4,096 tokens", "16,384 tokens"))
    )
    lines = " ".join(three_lines("".join(said)))
    broken = next(name for name in ("holed", "halved") if any(name in str(a) for a in arguments))
    assert str(models[broken]) in lines and (GONE if broken == "holed" else HALF) in lines
    assert not list((tmp_path / "run").rglob("summary.json"))


def _placed(argument: object, models: dict[str, Path]) -> object:
    kind, mark, name = str(argument).rpartition(":")
    return f"{kind}{mark}{models[name]}" if name in models else argument
