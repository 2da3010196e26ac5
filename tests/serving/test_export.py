"""Exported folders: the same model, loaded by others; refused where it would be another one.

The Hub is a server on loopback that speaks to the real client.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from soulkit.errors import ConfigError, ModelLoadError
from soulkit.models.local.loading import ADAPTER_CONFIG, NOTE
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.weights import weights_hash
from soulkit.serving.certificate import certify, find_certificate
from soulkit.serving.export import PROCESSOR, export_model, find_source
from soulkit.train.state.model_card import model_note
from tests.serving.test_certificate import evaluation
from tests.support.evaluation import soul, three_lines
from tests.support.hub import alone_with_the_hub
from tests.support.resuming import fork_context
from tests.support.servers.loopback import Asked, JsonServer, Reply
from tests.support.shapes import KINDS, build
from tests.support.training import config, policy_of, random_model

pytestmark = pytest.mark.torch
IDS = torch.tensor([[5, 9, 40, 33, 21, 64, 70, 3]])
LORA: dict[str, Any] = {"lora": {"r": 2, "alpha": 4}}
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.8, "eos_token_id": [2, 1]}


def in_bfloat16(folder: Path) -> None:
    """Store a model's weights in bfloat16."""
    file = folder / "model.safetensors"
    weights = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "dtype": "bfloat16"}))


def adapted(folder: Path, kind: str = "tiny", *, move: float = 0.05, **settings: Any) -> Path:
    """An adapter with a note in `folder`/a, on a base in `folder`/base that suggests sampling."""
    base = folder / "base"
    if kind in KINDS:
        build(kind, base)
    else:
        random_model(base)
    if kind == "bfloat16":
        in_bfloat16(base)
    (base / "generation_config.json").write_text(json.dumps(SAMPLING))
    (base / PROCESSOR[1]).write_text('{"size": 16}')
    policy = policy_of(base, move=move, **LORA, **settings)
    policy.note = model_note(config(**LORA, **settings), policy)
    policy.save(folder / "a", 3)
    return folder / "a"


def logits(folder: Path, adapter: Path | None = None, **settings: Any) -> torch.Tensor:
    """As `soul eval local` computes them."""
    model = LocalModel.load(folder, adapter=adapter, device="cpu", **settings).model
    with torch.no_grad():
        return model(input_ids=IDS).logits[0]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    "kind",
    [
        "tiny",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3-vl", "bfloat16", "nf4")),
    ],
)
def test_a_merged_model_is_base_and_adapter(kind: str, tmp_path: Path) -> None:
    if kind == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("the extra nf4 is not installed")
    quantize = {"quantize": "nf4"} if kind == "nf4" else {}
    adapter = adapted(tmp_path, kind, **quantize)
    out = tmp_path / "out"
    record = export_model(find_source(str(adapter)), out, "merged")
    expected = logits(tmp_path / "base", adapter, **quantize)
    far = (logits(out) - logits(tmp_path / "base")).abs().max()
    near = (logits(out) - expected).abs().max()
    assert near <= (0.2 if kind == "bfloat16" else 1e-4) and far > 5 * near
    dtypes = {str(t.dtype) for t in load_file(out / "model.safetensors").values()}
    assert dtypes == {f"torch.{record['dtype']}"}
    assert record["dtype"] == ("bfloat16" if kind == "bfloat16" else "float32")
    assert (PROCESSOR[1] in names(out)) == (kind == "qwen3-vl")
    settings = json.loads((out / "generation_config.json").read_text())
    assert settings.keys() <= {"eos_token_id", "pad_token_id", "transformers_version"}
    assert settings["eos_token_id"] == [1, 2]
    assert {stat.S_IMODE(p.stat().st_mode) for p in out.iterdir()} == {0o644}
    words = "".join((out / name).read_text() for name in ("README.md", NOTE, "config.json"))
    assert str(tmp_path) not in words
    assert ("unpacked nf4" in words) == (kind == "nf4")


@pytest.mark.slow
def test_an_adapter_is_copied_with_its_base_and_is_exported_again(tmp_path: Path) -> None:
    adapter = adapted(tmp_path)
    out, again = tmp_path / "out", tmp_path / "again"
    export_model(find_source(str(adapter)), out, "adapter")
    assert {ADAPTER_CONFIG, "tokenizer.json", "chat_template.jinja", NOTE} < names(out)
    assert "vllm serve BASE --enable-lora --max-lora-rank 8" in (out / "README.md").read_text()
    record = export_model(find_source(str(out)), again, "merged")
    assert record == export_model(find_source(str(adapter)), tmp_path / "direct", "merged")
    # The base was moved: it is named, and another one is refused.
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ModelLoadError, match="There is no folder"):
        export_model(find_source(str(out)), tmp_path / "x", "merged")
    assert find_source(str(out), str(tmp_path / "moved")).base.where == str(tmp_path / "moved")
    other = random_model(tmp_path / "other")
    in_bfloat16(other)
    with pytest.raises(ModelLoadError, match="is not the base"):
        find_source(str(out), str(other))


@pytest.mark.slow
def test_what_would_be_another_model_is_not_written(tmp_path: Path) -> None:
    """With a large adapter, rounding to bfloat16 changes the predictions."""
    adapter = adapted(tmp_path, "bfloat16", move=1.5)
    before = names(tmp_path)
    with pytest.raises(ModelLoadError, match="mean KL") as refusal:
        export_model(find_source(str(adapter)), tmp_path / "out", "merged")
    assert "--adapter" in refusal.value.way_out
    assert names(tmp_path) == before


def test_nothing_is_overwritten_and_the_same_export_is_not_repeated(tmp_path: Path) -> None:
    source, out = find_source(str(adapted(tmp_path))), tmp_path / "out"
    out.mkdir()
    first = export_model(source, out, "merged")  # an empty folder is no obstacle
    written = (out / "model.safetensors").stat().st_mtime_ns
    assert export_model(source, out, "merged") == first
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    for form, place in (("adapter", out), ("merged", tmp_path / "base"), ("merged", out / NOTE)):
        with pytest.raises(ConfigError, match="not empty"):
            export_model(source, place, form)  # type: ignore[arg-type]


@pytest.mark.slow
def test_full_weights_are_copied_without_the_state_of_the_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train = ("train", "sft", "--model", "tiny", "--full", "--task", "tomi", "--data", "synth:8")
    assert soul(*train, "--steps", 1, "--batch", 2, "--out", run) == 0
    scored = evaluation(tmp_path / "scored", weights_hash(run / "model"))
    certify(str(run), runs=[scored])
    for name, place in (("last", run), ("step", run / "checkpoints" / "step_000001")):
        assert soul("export", place, "--merge", "--out", tmp_path / name) == 0
        assert not {"optimizer.safetensors", "position.json"} & names(tmp_path / name)
        assert torch.equal(logits(tmp_path / name), logits(run / "model"))
    assert "* Certificate" in (tmp_path / "last" / "README.md").read_text()
    assert "stale" not in (find_certificate(str(tmp_path / "last")) or {"stale": "none"})
    capfd.readouterr()
    assert soul("export", run, "--adapter", "--out", tmp_path / "x") == 2
    assert "not an adapter" in three_lines(capfd.readouterr().err)[0]
    (run / "checkpoints" / "step_000001" / "model.safetensors").write_bytes(b"")
    assert soul("export", run / "checkpoints" / "step_000001", "--merge", "--out", "x") == 2
    assert "is damaged" in three_lines(capfd.readouterr().err)[0]


def merge_once(adapter: str, out: str) -> None:
    """Merge in a process of its own."""
    torch.set_num_threads(1)
    export_model(find_source(adapter), Path(out), "merged")


@pytest.mark.slow
def test_a_killed_export_leaves_nothing_and_is_started_again(tmp_path: Path) -> None:
    adapted(tmp_path)
    process = fork_context().Process(
        target=merge_once, args=(str(tmp_path / "a"), str(tmp_path / "out"))
    )
    process.start()
    while not (tmp_path / ".out.part" / "model.safetensors").exists():
        assert process.is_alive()
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL and names(tmp_path) == {"base", "a", ".out.part"}
    merge_once(str(tmp_path / "a"), str(tmp_path / "out"))
    assert names(tmp_path) == {"base", "a", "out"}


# --- the Hub --------------------------------------------------------------------------------------


class _Hub(JsonServer):
    """Keeps one repository; what is uploaded is in `files`."""

    def __init__(self, *, private: bool = True, status: int = 200) -> None:
        self.private, self.status = private, status
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        super().__init__()

    def answer(self, asked: Asked) -> Reply | None:
        if asked.target == "/api/agent-harnesses":
            return Reply(404)
        if not asked.has_key("hf_made_up_1") or self.status != 200:
            return Reply(self.status if self.status != 200 else 401, {"error": "no"})
        if asked.target == "/api/repos/create":
            self.created.append(asked.body)
            return Reply(content={"url": f"{self.url}/me/x"})
        if "/preupload/" in asked.target:
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for one in asked.body["files"]]  # fmt: skip
            return Reply(content={"files": files})
        if "/commit/" in asked.target:
            for line in map(json.loads, asked.raw.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return Reply(
                content={"commitUrl": f"{self.url}/me/x/commit/{'a' * 40}", "commitOid": "a" * 40}
            )
        return Reply(content={"id": "me/x", "private": self.private, "sha": "a" * 40})


@pytest.mark.slow
def test_an_export_is_pushed_to_a_private_repository_with_the_token_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    alone_with_the_hub(tmp_path, monkeypatch)
    adapted(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ("export", "a", "--merge", "--out", "out", "--push-to-hub", "me/x")

    def refusal(hub: _Hub, *arguments: object) -> str:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert soul(*arguments) == 2
        assert not hub.files
        return " ".join(
            three_lines(capfd.readouterr().err.partition("error: ")[2].join(["error: ", ""]))
        )

    with _Hub() as hub:
        assert "HF_TOKEN" in refusal(hub, *words)
        assert not (tmp_path / "out").exists()
        monkeypatch.setenv("HF_TOKEN", "hf_made_up_1")
        adapter = ("export", "a", "--adapter", "--out", "b", "--push-to-hub", "me/x")
        assert "local folder" in refusal(hub, *adapter)
    with _Hub(status=403) as hub:  # the export stays, and is not made again
        assert "was not pushed" in refusal(hub, *words)
        written = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    with _Hub(private=False) as hub:
        assert "is public" in refusal(hub, *words)
    with _Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert soul(*words, "--json") == 0
        assert json.loads(capfd.readouterr().out)["hub"] == f"{hub.url}/me/x"
        assert hub.files.keys() == names(tmp_path / "out")
        assert [one["visibility"] for one in hub.created] == ["private"]
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == written
