"""What a run leaves for others: weights that load elsewhere, with a note and a model card.

What can be read after supervised training: held-out conversations, continued on the way.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml

from soulkit.models.local.loading import UNSTATED, base_licence, base_of, save_model
from soulkit.models.local.sampler import LocalModel
from soulkit.report.explorer import pack_episodes
from soulkit.report.load import load_runs
from soulkit.runs.folder import read_config
from soulkit.runs.records import load_records
from soulkit.train.config import TrainConfig
from soulkit.train.state.metrics import read_step_lines
from soulkit.version import __version__
from tests.support.chats import chats_file, person_chat
from tests.support.evaluation import replaced
from tests.support.pages import takes
from tests.support.servers.hub_server import HubServer, commit_of
from tests.support.training import policy_of, random_model, soul

IDS = [[5, 9, 40, 33, 21, 64, 70, 3]]
NOBODY = 65534
RECORDED = Path(__file__).parents[1] / "recorded"
TRAIN = ("--task", "tomi", "--data", "tomi=synth:40", "--prompts", 4, "--group-size", 2,
         "--eval-every", 1, "--max-tokens", 4, "--steps", 2)  # fmt: skip

PLAIN_PEFT = """
import json, os, sys
folder, user, out = sys.argv[1:4]
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
assert "soulkit" not in sys.modules
"".encode("unicode-escape")  # an interpreter under /root cannot be read by others later
if int(user):
    os.setgroups([]); os.setgid(int(user)); os.setuid(int(user))
model = AutoPeftModelForCausalLM.from_pretrained(folder).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
with torch.no_grad():
    logits = model(input_ids=torch.tensor({ids})).logits[0, -1].tolist()
chat = tokenizer.apply_chat_template([{{"role": "user", "content": "hi"}}], tokenize=False)
print(json.dumps({{"logits": logits, "chat": chat, "user": os.getuid()}}))
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that other users can enter, unlike those of pytest."""
    folder = Path("/tmp") / f"soulkit-shared-{os.getpid()}"
    folder.mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*") if p.is_file()}


def loaded_elsewhere(folder: Path, cwd: Path, user: int = 0) -> dict[str, object]:
    """What plain PEFT makes of an adapter's folder, in another folder and as another user."""
    program = PLAIN_PEFT.format(ids=IDS)
    env = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HOME": str(cwd),
           "OMP_NUM_THREADS": "1", "HF_HOME": str(cwd / "hf")}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(user), str(cwd)],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_an_adapter_names_its_base_and_is_as_readable_as_any_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    policy = policy_of(Path("base"), lora={"r": 4, "alpha": 8})
    with umask(0o027):
        policy.save(tmp_path / "a")
    assert modes(tmp_path / "a") == {0o640}
    adapter = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "base")
    assert base_of(policy.model) == {"model": str(tmp_path / "base")}
    # Trained further where the base lies in another place: that is its base now.
    (tmp_path / "base").rename(tmp_path / "moved")
    again = policy_of(Path("moved"), adapter="a", move=0.0)
    with umask(0o077):
        again.save(tmp_path / "b")
    assert modes(tmp_path / "b") == {0o600}
    adapter = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "moved")


def test_a_tokenizer_is_saved_without_how_the_last_batch_was_padded(tmp_path: Path) -> None:
    model = LocalModel.load(random_model(tmp_path / "base"))
    model.tokenizer(["a b c", "a"], padding=True, truncation=True, max_length=2)
    save_model(model.model, model.tokenizer, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "tokenizer.json").read_text())
    assert (saved["padding"], saved["truncation"]) == (None, None)


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: mit\ntags: [a]\n---\n# x\n", {"license": "mit"}),
        ("---\nlicense: other\nlicense_name: qwen\n---\n",
         {"license": "other", "license_name": "qwen"}),
        ("# no front matter\n", UNSTATED),
        ("---\nlicense: [a]\n---\n", UNSTATED),
        ("---\n: : [\n---\n", UNSTATED),
        ("---\n", UNSTATED),
    ],
)  # fmt: skip
def test_a_licence_is_the_one_of_the_base(tmp_path: Path, card: str, licence: object) -> None:
    assert base_licence(str(tmp_path)) == UNSTATED
    (tmp_path / "README.md").write_text(card)
    assert base_licence(str(tmp_path)) == licence


@pytest.mark.slow
def test_plain_peft_loads_an_adapter_from_anywhere_and_for_anybody(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model(shared / "base")
    for path in (shared / "base").iterdir():
        path.chmod(0o644)  # this base was made by tests; what is saved below is not touched
    monkeypatch.chdir(shared)
    policy = policy_of(Path("base"), lora={"r": 4, "alpha": 8})
    with umask(0o022):
        policy.save(shared / "adapter")
    ours = LocalModel.load(shared / "base", adapter=shared / "adapter")
    with torch.no_grad():
        logits = ours.model(input_ids=torch.tensor(IDS)).logits[0, -1]
        bare = LocalModel.load(shared / "base").model(input_ids=torch.tensor(IDS)).logits[0, -1]
    assert not torch.allclose(logits, bare, atol=1e-3)  # the adapter does something
    elsewhere = shared / "elsewhere"
    elsewhere.mkdir(mode=0o777)
    elsewhere.chmod(0o777)
    user = NOBODY if hasattr(os, "getuid") and os.getuid() == 0 else 0
    answer = loaded_elsewhere(shared / "adapter", elsewhere, user)
    assert answer["user"] == (user or os.getuid())
    torch.testing.assert_close(torch.tensor(answer["logits"]), logits, rtol=1e-5, atol=1e-5)
    chat = [{"role": "user", "content": "hi"}]
    assert answer["chat"] == ours.tokenizer.apply_chat_template(chat, tokenize=False)


@pytest.mark.slow
def test_a_run_says_beside_its_weights_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home-of-somebody"
    random_model(home / "base")
    (home / "base" / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n")
    monkeypatch.chdir(tmp_path)
    assert soul("train", "ditto", "--model", home / "base", *TRAIN, "--out", "run") == 0
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    step, dev = summary["best_step"], summary["tasks"]["tomi"]["dev"]["mean"]
    for name, at in (("model", 2), ("best", step), ("checkpoints/step_000002", 2)):
        note = json.loads((run / name / "soulkit.json").read_text())
        assert note["schema"] == "soulkit/model@1" and note["soulkit"] == __version__
        assert (note["method"], note["protocol"], note["tasks"]) == ("ditto", "paper", {"tomi": 1})
        assert note["base"]["model"] == str(home / "base") and len(note["base"]["weights"]) == 16
        assert (note["kind"], note["step"]) == ("adapter", at)
    for name in ("model", "best"):
        card = (run / name / "README.md").read_text()
        front = yaml.safe_load(card.split("---")[1])
        assert front["license"] == "cc-by-4.0" and front["library_name"] == "peft"
        assert "base_model" not in front and {"ditto", "tomi", "lora"} <= set(front["tags"])
        assert str(home) not in card and str(tmp_path) not in card
        assert f"* step {step if name == 'best' else 2} of 2" in card
        assert "| tomi | accuracy drafts |" in card and "| rules |" in card and "`synth:40`" in card
    # Each card says what its own weights scored.
    card = (run / "model" / "README.md").read_text()
    assert f"| tomi | accuracy dev (step {summary['dev_steps']}) | {dev:.3f}" in card
    card = (run / "best" / "README.md").read_text()
    assert f"| tomi | accuracy dev (step {step}) | {summary['best_dev']:.3f}" in card
    assert card.count(" dev (step") == 1 and "--coach" not in card
    assert not (run / "checkpoints" / "step_000002" / "README.md").exists()
    assert modes(run) <= {0o644, 0o600} and modes(run / "model") == {0o644}


@pytest.mark.slow
def test_a_teacher_is_recorded_and_stands_in_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy_of(random_model(tmp_path / "base"), lora={"r": 4, "alpha": 8}).save(tmp_path / "expert")
    monkeypatch.chdir(tmp_path)
    teacher = ("--teacher-adapter", "expert", "--max-tokens", 4, "--prompts", 2, "--group-size", 2)
    command = ("train", "opd", "--model", "base", *teacher, *TRAIN[:4], "--steps", 1)
    assert soul(*command, "--out", "run") == 0
    record = json.loads((tmp_path / "run" / "summary.json").read_text())["provenance"]["teacher"]
    assert (record["model"], record["adapter"]) == ("base", "expert")
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert f"* teacher: `base` (`{record['weights']}`) + `expert`" in card


@pytest.mark.slow
def test_the_command_of_a_card_names_who_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model(tmp_path / "base")
    for name in ("one.yaml", "two|three.yaml"):
        shutil.copy(RECORDED / "judge.yaml", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    essay = ("--tasks", RECORDED / "judged_task" / "tasks.yaml", "--task", "essay",
             "--data", f"essay={RECORDED / 'rows' / 'essay.jsonl'}")  # fmt: skip
    judges = ("--judge", "scripted:one.yaml",
              "--judge", f"scripted:{tmp_path / 'two|three.yaml'}")  # fmt: skip
    small = ("--prompts", 2, "--group-size", 2, "--max-tokens", 4, "--steps", 1)
    assert soul("train", "grpo", "--model", "base", *essay, *judges, *small, "--out", "run") == 0
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "--judge scripted:one.yaml --judge 'scripted:two|three.yaml'" in card
    rows = [line for line in card.splitlines() if line.startswith("| essay | drafts")]
    assert rows and all(row.count("|") == 6 for row in rows)
    assert str(tmp_path) not in card


@pytest.mark.slow
def test_base_and_adapter_of_the_hub_are_recorded_with_their_commits(tmp_path: Path) -> None:
    """Training and evaluation in processes of their own, with the hub's real client."""
    policy = policy_of(random_model(tmp_path / "base"), lora={"r": 4, "alpha": 8})
    policy.save(tmp_path / "adapter")
    base, adapter = files(tmp_path / "base"), files(tmp_path / "adapter")
    base["README.md"] = b"---\nlicense: mit\n---\n"
    newer = {**base, "extra.txt": b"newer"}
    with HubServer({"me/base": newer, "me/expert": adapter}, older={"me/base": [base]}) as server:
        name = f"me/base@{commit_of(base)}"
        who = ("--model", name, "--adapter", "me/expert", "--max-tokens", 4)
        train = ["train", "ditto", *replaced(TRAIN, (*who, "--out", "run"))]
        play = ["eval", "local", *who, "--task", "tomi", "--data", "synth:3", "--out", "scores",
                "--max-unscored", 1]  # fmt: skip
        in_a_process(server, tmp_path, train, play)
        paths = [r.path for r in server.requests if "me/base" in r.path]
    assert paths and [p for p in paths if commit_of(base) not in p] == []
    commits = {"revision": commit_of(base), "adapter_revision": commit_of(adapter)}
    for run in ("run", "scores"):
        assert read_config(tmp_path / run)["model"] == name
        summary = json.loads((tmp_path / run / "summary.json").read_text())
        assert commits.items() <= summary["provenance"]["actor"].items()
    saved = json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())
    assert (saved["base_model_name_or_path"], saved["revision"]) == ("me/base", commit_of(base))
    note = json.loads((tmp_path / "run" / "best" / "soulkit.json").read_text())
    assert note["base"] == {
        "model": "me/base", "revision": commit_of(base), "licence": {"license": "mit"}
    }  # fmt: skip
    assert note["adapter"]["revision"] == commit_of(adapter)
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert (front["base_model"], front["base_model_relation"]) == ("me/base", "adapter")
    assert f"soul eval local --model me/base@{commit_of(base)} --adapter FOLDER" in card


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def in_a_process(server: HubServer, folder: Path, *commands: list[object]) -> None:
    """The command line, several times, in a process that has this hub and an empty cache."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"HF_ENDPOINT": server.url, "HF_HOME": str(folder / "hf"), "NO_PROXY": "127.0.0.1"}
    program = "import json, sys; from soulkit.cli.app import main\n"
    program += "sys.exit(sum(main(command) for command in json.loads(sys.argv[1])))"
    words = [[str(word) for word in command] for command in commands]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(words)],
        cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


CHATS = ("train", "sft", "--model", "tiny", "--full", "--side", "human", "--batch", 4,
         "--deterministic")  # fmt: skip


@pytest.fixture(scope="module")
def chat_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    chats_file(folder / "chats.jsonl", 40)
    chats_file(folder / "valid.jsonl", 12, seed=2)
    return folder


def trained(chat_files: Path, out: Path, *more: object, steps: int = 4) -> int:
    return soul(
        *CHATS, "--data", chat_files / "chats.jsonl", "--validation", chat_files / "valid.jsonl",
        "--steps", steps, "--eval-every", 2, "--out", out, *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(chat_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "sft"
    assert trained(chat_files, out) == 0
    return out


@pytest.mark.slow
def test_some_are_kept_beside_what_the_person_wrote(run: Path) -> None:
    records = load_records(run / "samples.jsonl")
    assert sorted({r.step for r in records}) == [1, 3] and len(records) == 8
    for record in records:
        row = int(record.example_id.rpartition(":")[2]) - 1
        remarks = person_chat(row, seed=2)["messages"]
        assert record.gold == [m["content"] for m in remarks if m["role"] == "user"][-1].strip()
        for message, who in zip(remarks[1:3], ("person", "assistant"), strict=True):
            assert f"{who}: {message['content']}" in record.prompt, "not by the learned role"
        assert remarks[2]["content"] in record.prompt and record.gold not in record.prompt
        assert record.score.value is None and record.episode.transcript[0].seat == "model"


@pytest.mark.slow
def test_show_and_the_page_show_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = load_records(run / "samples.jsonl")[0]
    assert soul("show", run) == 0
    err = capsys.readouterr().err
    assert "8 episodes" in err
    for command in err.partition("next: ")[2].strip().split("; "):  # nothing of it has a score
        assert soul(*shlex.split(command)[1:]) == 0, command
    capsys.readouterr()
    assert soul("show", run, "--example", first.example_id, "--step", 1) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "person wrote" in shown and first.gold.split()[0] in shown
    said = json.dumps(takes(pack_episodes(load_runs([run], episodes=False))))
    assert "What the person wrote" in said and json.dumps(first.gold)[1:-1] in said


@pytest.mark.slow
def test_they_change_no_weight_and_are_printed_when_asked_for(
    chat_files: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(chat_files, tmp_path / "none", "--show-samples", 0) == 0
    assert not (tmp_path / "none" / "samples.jsonl").exists()
    losses = [
        [line.learned.loss for line in read_step_lines(out / "metrics.jsonl")]
        for out in (run, tmp_path / "none")
    ]
    assert losses[0] == losses[1]
    assert "sample after step" not in capsys.readouterr().err
    assert trained(chat_files, tmp_path / "two", "--show-samples", 2, steps=2) == 0
    printed = capsys.readouterr().err
    assert printed.count("sample after step 2, valid.jsonl:") == 2 and "; person “" in printed
    assert "soul show" in printed  # the next command


@pytest.mark.slow
def test_reinforcement_prints_the_same_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert soul(
        "train", "ditto", "--model", random_model(tmp_path / "base"), "--task", "tomi", "--data",
        "synth:24", "--steps", 2, "--prompts", 2, "--group-size", 2, "--max-tokens", 6,
        "--eval-every", 1, "--show-samples", 2, "--out", tmp_path / "run",
    ) == 0  # fmt: skip
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("sample after step")]
    assert len(lines) == 4 and all("model “" in x and "; gold “" in x for x in lines)
    assert lines[0].startswith("sample after step 1, ")


def test_they_need_turns_to_be_taken(tmp_path: Path) -> None:
    plain = {"method": "grpo", "model": "m", "tasks": {"tomi": 1.0}, "show_samples": 2}
    with pytest.raises(Exception, match="--eval-every STEPS"):
        TrainConfig.load(env={}, flags=plain)
    assert (
        "show_samples" not in TrainConfig.load(env={}, flags={**plain, "eval_every": 1}).identity()
    )


def test_lines_need_something_that_is_held_out(
    chat_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = ("--data", chat_files / "chats.jsonl", "--steps", 2, "--eval-every", 1)
    assert soul(*CHATS, *alone, "--show-samples", 1, "--out", tmp_path / "run") == 2
    assert "held-out conversations: --validation FILE" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_played_nothing_is_not_offered_to_be_shown(
    chat_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert soul(*CHATS, "--data", chat_files / "chats.jsonl", "--steps", 1, "--out", out) == 0
    capsys.readouterr()
    assert soul("runs", tmp_path) == 0
    assert capsys.readouterr().err.strip().endswith(f"next: soul report {out}")
