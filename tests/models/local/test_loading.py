"""What kind of model a folder holds, and where an adapter goes on it.

What a model or an adapter is called, and what is told of a slip before the hub is asked.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import Qwen3_5Config, Qwen3VLConfig

from soulkit.errors import ModelLoadError
from soulkit.models.local.loading import (
    ModelPlace,
    adapter_folder,
    auto_class,
    freeze_all_but_language,
    load_base,
    load_tokenizer,
    locate,
    lora_targets,
    model_place,
)
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.weights import commit_of
from soulkit.play.requirements import missing_model
from tests.support.servers.hub_server import HubServer
from tests.support.servers.hub_server import commit_of as commit_of_files
from tests.support.shapes import KINDS, VISUAL, build, make

CPU = torch.device("cpu")
Bases = dict[str, tuple[Any, Any]]
TEXT_ONLY = [kind for kind in KINDS if kind not in VISUAL]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """A model of every kind and its tokenizer, loaded from a folder."""
    out = tmp_path_factory.mktemp("kinds")
    return {kind: load_base(str(build(kind, out / kind)), CPU, "auto") for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_comes_back_with_its_class_and_every_weight(bases: Bases, kind: str) -> None:
    model, tokenizer = bases[kind]
    saved, _ = make(kind)
    assert type(model) is type(saved) and tokenizer.chat_template
    loaded = model.state_dict()
    assert saved.state_dict().keys() == loaded.keys()
    for name, tensor in saved.state_dict().items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)


def test_one_configuration_may_stand_for_a_text_only_checkpoint() -> None:
    """Families whose text-only class shares the configuration: the checkpoint's word counts."""
    whole = Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"])
    text = Qwen3_5Config(architectures=["Qwen3_5ForCausalLM"])
    assert auto_class(whole).__name__ == "AutoModelForImageTextToText"
    assert auto_class(text).__name__ == "AutoModelForCausalLM"
    assert auto_class(Qwen3VLConfig()).__name__ == "AutoModelForImageTextToText"


@pytest.mark.parametrize("kind", VISUAL)
def test_an_adapter_goes_on_all_linear_layers_of_the_language_part(bases: Bases, kind: str) -> None:
    model, _ = bases[kind]
    pattern = lora_targets(model)
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    chosen = {n for n in linear if re.fullmatch(pattern, n)}
    assert chosen == {n for n in linear if n.startswith("model.language_model.")}
    assert {n.rpartition(".")[2] for n in chosen} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    assert any("vis" in n for n in linear if n not in chosen)


@pytest.mark.parametrize("kind", TEXT_ONLY)
def test_text_only_models_leave_the_choice_to_peft(bases: Bases, kind: str) -> None:
    model, _ = bases[kind]
    assert lora_targets(model) == "all-linear"
    freeze_all_but_language(model)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", VISUAL)
def test_the_vision_tower_is_frozen_and_the_language_part_is_not(bases: Bases, kind: str) -> None:
    model, _ = bases[kind]
    freeze_all_but_language(model)
    for name, parameter in model.named_parameters():
        language = name.startswith("model.language_model.") or name == "lm_head.weight"
        assert parameter.requires_grad == language, name


@pytest.mark.parametrize(("visual", "text"), [("qwen3-vl", "qwen3"), ("gemma3-vl", "gemma3")])
def test_without_images_the_language_part_is_its_text_only_sibling(
    bases: Bases, visual: str, text: str
) -> None:
    ids = torch.randint(20, 600, (2, 24), generator=torch.Generator().manual_seed(0))
    both = [bases[k][0].eval() for k in (visual, text)]
    with torch.no_grad():
        a, b = (model(input_ids=ids).logits for model in both)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_template_kept_for_the_processor_is_found(tmp_path: Path) -> None:
    folder = build("qwen3-vl", tmp_path / "m")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelLoadError, match="chat template"):
        LocalModel.load(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert LocalModel.load(folder).tokenizer.chat_template == template
    (folder / "chat_template.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be used"):
        LocalModel.load(folder)


@pytest.mark.parametrize("family", ["no_such_family", "vit"])
def test_a_family_that_is_unknown_or_writes_no_text_is_told(family: str, tmp_path: Path) -> None:
    folder = build("qwen3", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": family}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="cannot be loaded") as caught:
        load_base(locate(folder), CPU, "auto")
    assert family == "vit" or family in caught.value.why


# -- a hub that says tokens back -------------------------------------------------------------------


class _Echo(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.server.tokens.append(token)  # type: ignore[attr-defined]
        body = f'{{"error": "no access with {token}"}}'.encode()
        self.send_response(403)
        self.send_header("X-Error-Message", f"no access with {token}")
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.mark.slow
def test_a_token_that_the_hub_repeats_is_not_told(tmp_path: Path) -> None:
    token = "token-0123456789abcdef-of-mine"
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    server.tokens = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.001,), daemon=True).start()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_TOKEN": token,
            "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "soulkit.cli.app", "eval", "local", "--model", "owner/gated",
         "--task", "tomi", "--data", "synth:2", "--out", str(tmp_path / "run"), "--debug"],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    server.shutdown()
    server.server_close()
    assert done.returncode == 2, done.stderr
    assert token in server.tokens  # type: ignore[attr-defined]
    assert "transformers says:" in done.stderr
    assert token[:10] not in done.stdout + done.stderr


@pytest.fixture
def folders_of_model_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a run with a model, a folder of models, one model beside them."""
    here = tmp_path / "work"  # alone in its folder: nothing beside it has a similar name
    for name in ("runs/warm/model", "runs/warm/checkpoints", "models/qwen", "small-model"):
        (here / name).mkdir(parents=True)
    for name in ("small-model", "models/qwen"):
        (here / name / "config.json").write_text("{}")
    monkeypatch.chdir(here)
    return here


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("owner/name", ("owner/name", None)),
        ("owner/name@v1.2", ("owner/name", "v1.2")),
        ("owner/name@refs/pr/3", ("owner/name", "refs/pr/3")),
        ("gpt2", ("gpt2", None)),
        ("models/zzz@main", ("models/zzz", "main")),
        ("runs/warm/model", ("runs/warm/model", None)),
    ],
)
def test_a_name_is_a_folder_or_the_hubs(
    folders_of_model_names: Path, name: str, place: tuple[str, str | None]
) -> None:
    assert model_place(name) == place
    assert str(model_place(name)) == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("runs/warm/modle", "Did you mean 'runs/warm/model'?"),
        ("./runs/wram/model", "Did you mean 'runs/warm/model'?"),
        ("models/qwn", "Did you mean 'models/qwen'?"),
        ("modles/qwen", "Did you mean 'models/qwen'?"),
        ("models/zzz", "write models/zzz@main"),
        ("small-modle", "Did you mean 'small-model'?"),
        ("../nowhere/x", "Check the path."),
        ("owner/name@", "Check the path."),
        ("a/b/c", "Check the path."),
    ],
)
def test_a_slip_is_told_at_once_with_its_neighbour(
    folders_of_model_names: Path, name: str, hint: str
) -> None:
    with pytest.raises(ModelLoadError, match="There is no folder") as caught:
        model_place(name)
    assert hint in caught.value.way_out
    gap = missing_model("owner/name", name)[0]
    assert gap.fatal and hint in gap.error.way_out


@pytest.mark.parametrize("name", ["small-model@main", "models/qwen@v1", "runs/warm@main"])
def test_a_revision_of_a_folder_is_refused(folders_of_model_names: Path, name: str) -> None:
    """The libraries would load the folder without a word."""
    folder = name.partition("@")[0]
    with pytest.raises(ModelLoadError, match=f"there is also a folder '{folder}'") as caught:
        adapter_folder(name)
    assert f"Use the folder as '{folder}'" in caught.value.way_out
    with pytest.raises(ModelLoadError, match="is a model on the Hub"):
        model_place(name)
    assert missing_model("owner/name", name)[0].fatal


def test_a_path_is_never_the_hubs(folders_of_model_names: Path) -> None:
    with pytest.raises(ModelLoadError, match="no folder 'owner/name'"):
        model_place(Path("owner/name"))
    (folders_of_model_names / "notes").write_text("")
    with pytest.raises(ModelLoadError, match="'notes' is a file, not an adapter"):
        model_place("notes", "adapter")


# -- an adapter of the hub -------------------------------------------------------------------------

OLD = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"old", "soulkit.json": b"{}"}
NEW = {**OLD, "adapter_model.safetensors": b"new"}


def on_hub(server: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
    settings = {"ENDPOINT": server.url, "HF_HUB_CACHE": str(cache)}
    for name, value in {**settings, "HUGGINGFACE_CO_URL_TEMPLATE": template}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


def test_an_adapter_of_the_hub_comes_at_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubServer({"me/expert": NEW}, older={"me/expert": [OLD]}) as server:
        on_hub(server, tmp_path, monkeypatch)
        newest = adapter_folder("me/expert")
        older = adapter_folder(f"me/expert@{commit_of_files(OLD)}")
        assert [commit_of(newest), commit_of(older)] == [commit_of_files(NEW), commit_of_files(OLD)]
        assert {p.name: p.read_bytes() for p in older.iterdir()} == OLD
        server.requests.clear()
        assert adapter_folder("me/expert") == newest and server.requests == []
    assert commit_of(tmp_path) == ""


def test_what_the_hub_does_not_have_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubServer({"me/base": {"config.json": b"{}"}}) as server:
        on_hub(server, tmp_path, monkeypatch)
        with pytest.raises(ModelLoadError, match="'me/base' on the Hub is not a PEFT adapter"):
            adapter_folder("me/base")
        with pytest.raises(ModelLoadError, match="'me/base@v9' cannot be downloaded from the Hub"):
            adapter_folder("me/base@v9")
        with pytest.raises(ModelLoadError, match="'me/nobody' cannot be downloaded"):
            adapter_folder("me/nobody")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "offline"), [("adapter", False), ("model", True), ("tokenizer", True)]
)
def test_a_hub_that_cannot_be_reached_is_no_wrong_name(
    kind: str, offline: bool, tmp_path: Path
) -> None:
    """In a process of its own: the hub's client reads the environment once."""
    places = "from soulkit.models.local.loading import adapter_folder, model_place\n"
    loading = "import torch\nfrom soulkit.models.local.loading import load_base, load_tokenizer\n"
    code = {
        "adapter": f"{places}adapter_folder('me/expert')",
        "model": f"{places}{loading}load_base('me/expert', torch.device('cpu'), 'auto')",
        "tokenizer": f"{places}{loading}load_tokenizer(model_place('me/expert'))",
    }[kind]
    quick = "import time\ntime.sleep = lambda seconds: None\n"  # the client tries six times
    env = {**os.environ, "HF_ENDPOINT": "http://me:secret@127.0.0.1:9", "HF_HOME": str(tmp_path)}
    env |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    done = subprocess.run(
        [sys.executable, "-c", quick + code], env=env, capture_output=True, text=True, check=False
    )
    error = done.stderr.strip().splitlines()[-1]
    assert "is not on this machine, and the Hub cannot be reached at " in error, done.stderr
    assert "secret" not in error


def test_a_model_that_is_to_be_downloaded_is_named_with_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    [gap] = missing_model("owner/name@v2")
    assert not gap.fatal and gap.error.way_out == "Run: hf download owner/name --revision v2"
    assert model_place("owner/name@v2") == ModelPlace("owner/name", "v2")


@pytest.mark.parametrize(("name", "content"), [
    ("config.json", {"model_type": "qwen3", "num_labels": 10**9}),
    ("tokenizer.json", {"model": {"vocab": {"x": 10**9}}}),
])  # fmt: skip
def test_the_files_of_a_hub_model_are_checked_before_a_library_reads_them(
    name: str, content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"config.json": {"model_type": "qwen3"}, name: content}
    packed = {file: json.dumps(one).encode() for file, one in files.items()}
    with HubServer({"me/odd": packed}) as server:
        on_hub(server, tmp_path, monkeypatch)
        with pytest.raises(ModelLoadError, match="cannot be used") as caught:
            load_tokenizer(model_place("me/odd"))
    assert name in caught.value.what
