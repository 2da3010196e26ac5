"""What a run leaves for others: weights that load elsewhere, with a note and a model card."""

from __future__ import annotations

import json
import os
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
from soulkit.runs.folder import read_config
from soulkit.version import __version__
from tests.support.evaluation import replaced
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
