"""What a model or an adapter is called, and what is told of a slip before the hub is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from soulkit.errors import ModelLoadError
from soulkit.models.local.loading import ModelPlace, adapter_folder, commit_of, model_place
from soulkit.play.requirements import missing_model
from tests.support.servers.hub_server import HubServer
from tests.support.servers.hub_server import commit_of as commit_of_files


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a run with a model, a folder of models, one model beside them."""
    for name in ("runs/warm/model", "runs/warm/checkpoints", "models/qwen", "small-model"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("small-model", "models/qwen"):
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
    folders: Path, name: str, place: tuple[str, str | None]
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
        ("models/zzz", "named as models/zzz@main"),
        ("small-modle", "Did you mean 'small-model'?"),
        ("../nowhere/x", "Check the path."),
        ("owner/name@", "Check the path."),
        ("a/b/c", "Check the path."),
    ],
)
def test_a_slip_is_told_at_once_with_its_neighbour(folders: Path, name: str, hint: str) -> None:
    with pytest.raises(ModelLoadError, match="There is no folder") as caught:
        model_place(name)
    assert hint in caught.value.way_out
    gap = missing_model("owner/name", name)[0]
    assert gap.fatal and hint in gap.error.way_out


@pytest.mark.parametrize("name", ["small-model@main", "models/qwen@v1", "runs/warm@main"])
def test_a_revision_of_a_folder_is_refused(folders: Path, name: str) -> None:
    """The libraries would load the folder without a word."""
    folder = name.partition("@")[0]
    with pytest.raises(ModelLoadError, match=f"there is a folder '{folder}'") as caught:
        adapter_folder(name)
    assert f"Name the folder as '{folder}'" in caught.value.way_out
    with pytest.raises(ModelLoadError, match="names a model of the hub"):
        model_place(name)
    assert missing_model("owner/name", name)[0].fatal


def test_a_path_is_never_the_hubs(folders: Path) -> None:
    with pytest.raises(ModelLoadError, match="no folder 'owner/name'"):
        model_place(Path("owner/name"))
    (folders / "notes").write_text("")
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
        with pytest.raises(ModelLoadError, match="'me/base' is no adapter that can be read"):
            adapter_folder("me/base")
        with pytest.raises(ModelLoadError, match="'me/base@v9' cannot be had from the hub"):
            adapter_folder("me/base@v9")
        with pytest.raises(ModelLoadError, match="'me/nobody' cannot be had"):
            adapter_folder("me/nobody")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "offline"),
    [("adapter", False), ("model", False), ("model", True), ("tokenizer", True)],
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
    assert "is not on this machine, and the hub cannot be reached at " in error, done.stderr
    assert "secret" not in error


def test_a_model_that_is_to_be_downloaded_is_named_with_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    [gap] = missing_model("owner/name@v2")
    assert not gap.fatal and gap.error.way_out == "Run: hf download owner/name --revision v2"
    assert model_place("owner/name@v2") == ModelPlace("owner/name", "v2")
