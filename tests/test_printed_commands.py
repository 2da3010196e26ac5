"""Every command in the documentation runs here, or `NOT_RUN` gives a reason.

A command runs as printed, in a folder with the files that it names: generated rows, runs of a local
server, a tiny model. Only sizes are smaller, and placeholders (`RUN`, `MODEL`) are filled in. A new
command in a page needs an entry here only if it cannot run offline in seconds.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from tests.support.chats import chat
from tests.support.chats import jsonl as write_chats
from tests.support.evaluation import soul
from tests.support.prism import write_conversations
from tests.support.servers.answers import answer
from tests.support.servers.openai_server import ScriptedServer

ROOT = Path(__file__).parents[1]
RUN_IN_ORDER = {
    "write-a-task.md", "python-tasks.md", "dialogue-tasks.md", "own-chats.md",
    "first-evaluation.md", "compare-models.md", "judged-tasks-in-yaml.md",
}  # fmt: skip
"""Their commands build on each other; tests/test_docs.py runs them from top to bottom."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(
        page
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.name not in {*RUN_IN_ORDER, "tasks-in-yaml.md"}
    ),
]
WRITTEN_BY_A_PROGRAM = {"commands.md"}
"""Its indented lines are usage lines; tests/test_docs.py compares them with the commands."""

# Prefix of a command → why it does not run here. Paths in a reason must exist.
NOT_RUN = {
    "make setup": "installs packages; tests/test_project.py runs its script",
    "make test": "runs this very test",
    ".venv/bin/python scripts/gpu_check": "needs a GPU; tests/test_gpu_check.py runs it on a CPU",
    "make lint": "takes a minute and is the first thing that .ci/run does",
    "make demo": "takes minutes; tests/test_demo.py runs `soul demo`",
    "soul demo": "takes minutes; tests/test_demo.py runs it",
    "soul reproduce": "trains for minutes; tests/train/test_reproduce.py runs a small figure",
    "soul people build": "takes minutes; tests/people/test_road.py runs it",
    "soul people closeness": "continues conversations with a model; "
    "tests/people/test_closeness.py measures some",
    "soul export": "needs a trained run; tests/serving/test_export.py exports some",
    "soul simulate": "needs an agent; tests/cli/test_simulate.py runs the example of the page",
    "soul compare runs/forgetful": "tests/cli/test_simulate.py compares these runs",
    "soul certify": "needs a measured model; tests/serving/test_certificate.py certifies some",
    "soul people memory": "needs a run with canaries; tests/people/test_memory.py trains one",
    "soul people personas": "needs a model that drafts; tests/people/test_personas.py has one",
    "soul people scenarios": "the same",
    "soul train sft --model tiny --full --data train.jsonl --turns 8": "trains for minutes; "
    "tests/train/test_corpus_run.py trains on chats",
    "soul train sft --model base/model --full --data train.jsonl --turns 8": "the same",
    "soul data import chats": "needs an export; tests/data/exports/test_layouts.py imports all",
    "pip install torch": "needs the network; scripts/setup does the same",
    "pip install -e": "needs the network; scripts/setup does the same",
    "python3 -m venv ~/vllm": "needs the network and gigabytes; scripts/setup_vllm makes such an "
    "environment",
    "~/vllm/bin/pip install": "the same",
    "vllm serve": "serves until it is stopped; tests/vllm/test_two_servers.py starts one like it",
    "pip download": "needs the network and gigabytes",
    "export ": "sets a variable for the lines after it",
    ".venv/bin/python examples/tomi_ditto/": "trains for minutes; "
    "tests/test_benchmark_scripts.py runs fewer steps",
    ".venv/bin/python benchmarks/": "measures for minutes to hours; the page holds its figures",
    "soul data pull": "needs the hub; tests/cli/test_data.py pulls from a local one",
    "soul chat": "talks with somebody at the terminal; tests/serving/test_chat.py chats",
    "soul serve": "serves until it is stopped; tests/serving asks it",
    "soul data build userllm conversations.jsonl --max-cost": "needs models that draft; "
    "tests/cli/test_data_build.py has some; its --dry-run is run",
    "soul eval api --model NAME --task tau_usi --data tau_usi=retail.jsonl": "needs a service "
    "runtime; tests/tasks/tau_usi asks one",
    "soul eval api --model gpt-5-nano --task tomi --data FOLDER --batch": "needs a batch service; "
    "tests/cli/test_eval_batch.py has one",
    'soul eval api --base-url "https://': "asks Azure; tests/cli/test_addresses.py asks a stand-in",
    "soul eval api --base-url https://": "asks a provider; tests/cli/test_addresses.py asks a "
    "stand-in",
    ".venv/bin/python -m benchmarks.gpu_step": "needs a GPU; "
    "tests/train/test_fused.py runs it on a CPU",
    "soul plan train ditto --config examples/one_80gb.yaml": "the file has its output; "
    "tests/train/test_recipe.py plans it again",
    "soul plan train ditto --config examples/eight_80gb.yaml": "the same",
    "soul train ditto --config examples/": "needs models, rows and cards; "
    "tests/train/test_recipe.py runs small versions",
    "soul train ditto --model FOLDER --quantize": "needs the extra nf4; "
    "tests/train/test_quantize.py trains with it",
    "soul eval local --model FOLDER --quantize": "the same",
    "soul distill": "needs experts; "
    "tests/distill/test_whole_distillations.py makes two",
    "soul train sft --model FOLDER --data facts.jsonl": "needs a model that ends its texts; "
    "tests/train/test_mixsd.py has one",
    "soul train sft --model MODEL": "stands for any model; tests/train/test_corpus_run.py runs it "
    "with what follows, tests/test_docs.py a page of it",
    "soul train ditto --model MODEL": "the same",
    "soul train ditto --model Qwen/Qwen3-8B --task tomi --gpus": "needs GPUs; "
    "tests/train/ranks/test_launch.py starts processes on a CPU",
    "soul train ditto --model Qwen/Qwen3-8B --task tomi --engine vllm": "needs vLLM; "
    "tests/vllm/test_training.py trains with it",
    "soul judge import": "needs sheets that people filled in; tests/cli/test_judge_people.py does",
    "soul judge correct": "needs their labels; tests/cli/test_judge_people.py has some",
    "soul eval local --model ./Qwen3-4B": "needs 8 GB of weights; tests/cli/test_eval.py "
    "evaluates a tiny model with an adapter",
}  # fmt: skip
EXITS = {
    "soul judge check RECEIVED": 2,
    "soul eval api --model MODEL --task tomi --data tomi=tomi.jsonl --gate 'tomi/accuracy>=.6' "
    "--gate 'tomi>=.8'": 1,
}  # fmt: skip
"""Commands that the page shows because of their error, or of gates that do not pass."""

MODEL = "runs/demo/warmup/model"
SMALLER = (
    (r"synth:\d+", "synth:4"), (r"--steps \d+", "--steps 2"), (r"--batch \d+", "--batch 4"),
    (r"-n \d+", "-n 12"), (r"--stories \d+", "--stories 2"), (r"--limit \d+", "--limit 1"),
    (r"--canaries \d+", "--canaries 4"),
    (r"--samples \d+", "--samples 2"), (r"--seeds \d+", "--seeds 1"),
    (r"--eval-every \d+", "--eval-every 2"), (r"--warmup_steps=\d+", "--warmup_steps=1"),
)  # fmt: skip
TRAINED = "--group-size 2 --prompts 2 --max-tokens 4"
FILLED = (
    (r"^soul plan train ditto \.\.\.$", f"soul plan train ditto --model {MODEL} --task tomi "
     "--data synth:4"),
    (r"RUN\.\.\.", "RUN"), (r"\bMETHOD\b", "ditto"), (r"TASK=FILE", "tomi=tomi.jsonl"),
    (r"--task TASK\b", "--task tomi"), (r"--model (?:FOLDER|\./m)(?= )", f"--model {MODEL}"),
    (r"--data FOLDER", "--data synth:4"), (r"--model MODEL\b", "--model m"),
    (r"PLAYER( .*)PLAYER", r"endpoint:j1\1endpoint:j2"), (r"\bPLAYER\b", "endpoint:j1"),
)  # fmt: skip


@dataclass(frozen=True)
class Printed:
    """One command of a page."""

    page: str
    line: str

    @property
    def why_not(self) -> str | None:
        return next((why for start, why in NOT_RUN.items() if self.line.startswith(start)), None)

    @property
    def with_torch(self) -> bool:
        return (
            re.match(
                r"soul (?:(?:eval local|train|plan train)\b|runs$|report$|.* runs/)", self.line
            )
            is not None
        )


# --- commands in the pages ------------------------------------------------------------------------


def lines_of(block: str) -> list[str]:
    """The commands of a block, continued lines joined, comments and prompts gone."""
    bare = re.sub(r"(?:^|\s\s+)# .*$", "", block, flags=re.MULTILINE)
    joined = re.sub(r"\s*\\\n\s*", " ", bare).splitlines()
    return [re.sub(r"^\$ ", "", " ".join(line.split())) for line in joined if line.strip()]


def blocks_of(text: str) -> Iterator[str]:
    """Blocks of shell commands: shell fences, and indented blocks that begin with a command."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
    for language, block in fence.findall(text):
        if language in ("", "sh", "bash", "console"):
            yield block
    for block in re.findall(r"(?:^ {4}\S.*\n(?: {4}.*\n)*)", fence.sub("\n", text), re.MULTILINE):
        if re.match(r" +(?:soul|make|pip|export|python3|\.venv/bin/python) ", block):
            yield block


def printed() -> list[Printed]:
    lines = [
        Printed(page.name, line)
        for page in PAGES
        if page.name not in WRITTEN_BY_A_PROGRAM
        for block in blocks_of(page.read_text("utf-8"))
        for line in lines_of(block)
    ]
    return list({one.line: one for one in lines}.values())


COMMANDS = printed()
RUN_HERE = [one for one in COMMANDS if one.why_not is None]


def test_commands_are_found_in_fences_and_indented_blocks() -> None:
    text = "x\n```\n$ soul a \\\n   --b 1   # why\n# alone\nmake c\n```\n```yaml\nd: 1\n```\n\n" \
           "    pip e\n      f\n\n    no command\n"  # fmt: skip
    assert [lines_of(b) for b in blocks_of(text)] == [["soul a --b 1", "make c"], ["pip e", "f"]]
    assert len(COMMANDS) > 60


def test_a_fence_without_a_language_holds_commands_only() -> None:
    starts = (
        "soul ", "make ", "pip ", "export ", ".venv/bin/python ", "python3 -m venv ", "vllm serve ",
        "~/vllm/bin/pip ",
    )  # fmt: skip
    assert [one for one in COMMANDS if not one.line.startswith(starts)] == []


@pytest.mark.parametrize("start", NOT_RUN)
def test_reasons_are_about_printed_commands_and_name_what_is_there(start: str) -> None:
    assert any(one.line.startswith(start) for one in COMMANDS), "no page prints it any more"
    paths = re.findall(r"(?:tests|scripts|\.ci)/[\w/.]*\w", NOT_RUN[start])
    assert [path for path in paths if not (ROOT / path).exists()] == []


# --- the folder that commands run in --------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer=answer) as running:
        yield running


def in_folder(home: Path, url: str, *commands: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("OPENAI_BASE_URL", url)
        patch.setenv("OPENAI_API_KEY", "k")
        for command in commands:
            assert soul(*shlex.split(command)) == 0, command


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, server: ScriptedServer) -> Path:
    """A folder with the files and runs that the pages name."""
    home = tmp_path_factory.mktemp("desk")
    shutil.copytree(ROOT / "examples" / "my_task", home / "examples" / "my_task")
    shutil.copytree(ROOT / "examples" / "my_task", home, dirs_exist_ok=True)
    people = ("people.jsonl", "runs/demo/rows/people.jsonl", "runs/demo/rows/held_out.jsonl")
    judged = "--partner endpoint:p --judge endpoint:j --max-tokens 64"
    in_folder(
        home, server.base_url,
        "data synth tomi -n 12 -o tomi.jsonl",
        "data synth tomi -n 12 -o runs/tomi_ditto/rows/train.jsonl",
        *(f"data synth cast_of_people -n 60 --seed {seed} -o {name}"
          for seed, name in enumerate(people)),
        *(f"data synth sotopia -n 4 --seed {seed} -o {name}.jsonl" for seed, name in
          enumerate(("train", "eval"))),
        "tasks new night_bus",
        "data synth hitom -n 4 -o hitom.jsonl", "data synth hitom -n 4 -o hitom_val.parquet",
        f"eval api --model m --task sotopia --data synth:3 {judged} --out RUN",
        "eval api --model m --task tomi --data synth:4 --out A",
        "eval api --model n --task tomi --data synth:4 --out B",
    )  # fmt: skip
    released(home)
    in_folder(home, server.base_url, "data plant chats.jsonl --canaries 4 -o planted.jsonl")
    stranger(home / "RUN", home / "RECEIVED")
    return home


STORY = ("Ada entered the attic.", "The pen is in the red_box.", "Ada moved the pen to the bag.")
NUMBERED = "\n".join(f"{n} {line}" for n, line in enumerate(STORY, 1))
HITOM = {
    "prompting_type": "CoTP", "deception": False, "story_length": 1, "question_order": 0,
    "sample_id": 0, "story": NUMBERED, "question": "Where is the pen really?",
    "choices": "A. red_box, B. bag", "answer": "bag",
}  # fmt: skip
PERCEPT = {
    "index": 4, "qTypeRaw": "first_order_0_tom", "qType": "first_order_tom", "story": [*STORY],
    "question": "Where will Ada look for the pen?", "char1": "Ada", "cands": ["red_box", "bag"],
    "answer": "bag",
}  # fmt: skip
EEDI = {
    "QuestionId": 7, "SubjectName": "Fractions", "CorrectAnswer": "B",
    "QuestionText": "What is 1/2 + 1/3?", "AnswerAText": "2/5", "AnswerBText": "5/6",
    "AnswerCText": "1/6", "AnswerDText": "2/6", "MisconceptionAId": 11, "MisconceptionBId": 12,
    "MisconceptionCId": 12, "MisconceptionDId": "",
}  # fmt: skip
TOMBENCH = {
    "能力\nABILITY": "Belief: Content false beliefs", "序号\nINDEX": 7, "故事": "小梅走了。",
    "问题": "小梅在哪里？", "选项A": "A. 家里", "选项B": "B. 学校", "STORY": "Mei went.",
    "QUESTION": "Where is Mei?", "OPTION-A": "At home", "OPTION-B": "B. School",
    "答案\nANSWER": "B",
}  # fmt: skip


def released(home: Path) -> None:
    """One record in the form of each original file that the pages import."""
    (home / "Hi-ToM_data.json").write_text(json.dumps({"data": [HITOM]}))
    (home / "test.txt").write_text(f"{NUMBERED}\n4 Where is the pen really?\tbag\t1\n")
    (home / "test.trace").write_text("enter_agent_0,agent_0_moves_obj,reality,true_belief\n")
    names = [{"MisconceptionId": n, "MisconceptionName": f"Adds {n}"} for n in (11, 12)]
    for name, rows in (
        ("Percept-ToMi.csv", [PERCEPT]), ("train.csv", [EEDI]),
        ("misconception_mapping.csv", names),
    ):  # fmt: skip
        with (home / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    write_conversations(home / "conversations.jsonl", 3)
    for name in ("chats.jsonl", "chats/monday.jsonl", "unique.jsonl", "split/train.jsonl"):
        write_chats(home / name, [chat(number) for number in range(40)])
    write_chats(home / "held_out.jsonl", [chat(number) for number in range(40, 50)])
    line = json.dumps(TOMBENCH, ensure_ascii=False)
    (home / "False Belief Task.jsonl").write_text(f"{line}\n", encoding="utf-8")


def stranger(run: Path, copied: Path) -> None:
    """A run from another machine: its settings do not have this machine's seal."""
    shutil.copytree(run, copied)
    config = copied / "config.yaml"
    config.write_text(f"# sent by a friend\n{config.read_text()}")


@pytest.fixture(scope="module")
def desk_with_models(desk: Path, server: ScriptedServer) -> Path:
    """The same with a tiny model and an adapter in every folder where the pages have one."""
    tomi = "--task tomi --data tomi=tomi.jsonl"
    in_folder(
        desk, server.base_url,
        "train sft --model tiny --full --task tomi,secret_keeper --data tomi=tomi.jsonl "
        "--data secret_keeper=synth:8 --steps 2 --batch 4 --out runs/demo/warmup",
        f"train grpo --model {MODEL} {tomi} --steps 1 {TRAINED} --out runs/demo/ditto",
        "export runs/demo/ditto --adapter --out my-adapter",
    )  # fmt: skip
    for copied in (
        "runs/warm",
        "base",
        "runs/ditto",
        "runs/first-ditto",
        "runs/shuffled",
        "runs/my-run",
        "runs/tomi",
        "runs/hitom",
        "runs/tomi_ditto/warmup",
    ):
        source = "warmup" if copied in ("runs/warm", "base", "runs/tomi_ditto/warmup") else "ditto"
        shutil.copytree(desk / "runs" / "demo" / source, desk / copied)
    return desk


def filled(one: Printed, url: str, home: Path) -> str:
    """The command with its placeholders filled in and its sizes reduced."""
    line = one.line
    for pattern, value in (*FILLED, *SMALLER):
        line = re.sub(pattern, value, line)
    line = re.sub(r"\b[ab]\.jsonl\b", "synth:4", line)
    line = re.sub(r"http://127\.0\.0\.1:\d+/v1|\bURL\b", url, line)
    if "--example ID" in line:
        episode = json.loads((home / "RUN" / "episodes.jsonl").read_text("utf-8").splitlines()[0])
        line = line.replace("--example ID", f"--example {episode['example_id']}")
    if line.startswith("soul eval local "):
        line = re.sub(r" --max-unscored \S+", "", line)
        line += " --max-unscored 1"  # a stand-in of two steps hardly ever ends a reply
    return shortened(line) if line.startswith("soul train ") else line


def shortened(line: str) -> str:
    """A training command with small sizes in place of the defaults."""
    if "--steps" not in line:
        line += " --steps 2"
    if line.startswith("soul train ablate") and "--methods" not in line:
        line += " --methods grpo,ditto" + ("" if "--seeds" in line else " --seeds 1")
    if line.startswith("soul train sft"):
        return line
    for flag in re.findall(r"--[\w-]+", TRAINED):  # an option is given once
        line = re.sub(rf" {flag}[ =]\S+", "", line)
    return f"{line} {TRAINED}"


def cleared(words: list[str], home: Path) -> None:
    """Delete the files that the command is about to write."""
    if words[1:3] == ["tasks", "new"]:
        shutil.rmtree(home / words[3])
    for flag in ("-o", "--out"):
        if flag in words:
            target = home / words[words.index(flag) + 1]
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)


def run(one: Printed, desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> int:
    home = tmp_path / "home"
    shutil.copytree(desk, home)
    monkeypatch.chdir(home)
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    words = shlex.split(filled(one, url, home), comments=True)
    if words[0] == "make":
        return subprocess.run(words, cwd=ROOT, capture_output=True, check=False).returncode
    assert words[0] == "soul"
    cleared(words, home)
    return soul(*words[1:])


def measured(one: Printed) -> Any:
    """A command that takes long on every row of every task is no quick test."""
    return pytest.param(one, marks=pytest.mark.slow) if one.line == "soul tasks check" else one


@pytest.mark.parametrize(
    "one", [measured(one) for one in RUN_HERE if not one.with_torch], ids=lambda one: one.line
)
def test_a_printed_command_runs(
    one: Printed, desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    server: ScriptedServer,
) -> None:  # fmt: skip
    assert run(one, desk, tmp_path, monkeypatch, server.base_url) == EXITS.get(one.line, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "one", [one for one in RUN_HERE if one.with_torch], ids=lambda one: one.line
)
def test_a_printed_command_with_a_model_runs(
    one: Printed, desk_with_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    server: ScriptedServer,
) -> None:  # fmt: skip
    assert run(one, desk_with_models, tmp_path, monkeypatch, server.base_url) == 0


PROGRAMS_ELSEWHERE = {
    "pandas.read_json": "tests/test_schemas.py reads a run with it",
    "load_dataset(": "the same",
}
PROGRAMS = [
    block
    for page in PAGES
    for block in re.findall(
        r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
]


def test_programs_that_run_elsewhere_are_still_printed() -> None:
    for words in PROGRAMS_ELSEWHERE:
        assert any(words in block for block in PROGRAMS), words


@pytest.mark.parametrize(
    "block",
    [block for block in PROGRAMS if not any(words in block for words in PROGRAMS_ELSEWHERE)],
    ids=lambda block: block.split("\n")[-2][:40],
)
def test_a_printed_program_runs(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ScriptedServer
) -> None:
    monkeypatch.chdir(tmp_path)
    source = re.sub(r"http://127\.0\.0\.1:\d+/v1", server.base_url, block)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    exec(compile(source, "page", "exec", dont_inherit=True), vars(module))


# --- the example for GitHub -----------------------------------------------------------------------


def test_the_workflow_evaluates_gates_and_reports(
    desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ScriptedServer
) -> None:
    text = (ROOT / "examples" / "github-actions.yml").read_text("utf-8")
    steps = yaml.safe_load(text)["jobs"]["evaluate"]["steps"]
    evaluate, report = (Printed("", s["run"].strip()) for s in steps if "soul " in s.get("run", ""))
    assert run(evaluate, desk, tmp_path, monkeypatch, server.base_url) in (0, 1)  # a made model
    (suite,) = ElementTree.parse("runs/ci/junit.xml").getroot()
    assert [case.attrib["name"] for case in suite] == ["tomi/accuracy>=0.8"]
    assert soul(*shlex.split(report.line)[1:]) == 0 and Path("runs/ci/report/index.html").is_file()
    (upload,) = (step["with"]["path"] for step in steps if "upload" in step.get("uses", ""))
    assert upload == "runs/ci"
    assert evaluate.line.split("run: ")[-1] in " ".join(
        (ROOT / "docs" / "guides" / "gates.md").read_text("utf-8").split()
    )
