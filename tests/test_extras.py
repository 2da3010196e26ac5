"""Optional packages: each belongs to an extra, and the printed install command is right."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import soulkit
from soulkit.errors import MissingPackage
from soulkit.extras import EXTRAS, install_line

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MODULES = {
    "pyyaml": "yaml", "huggingface-hub": "huggingface_hub", "rouge-score": "rouge_score",
    "bpe-openai": "bpe_openai",
}  # fmt: skip
BROUGHT_ALONG = {
    "tokenizers": "transformers", "sklearn": "scikit-learn",
    "jsonschema_specifications": "jsonschema", "referencing": "jsonschema",
}  # fmt: skip
"""Module that soulkit imports → the dependency that installs it."""

SPEC = "soulkit[train]"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def names(requirements: list[str]) -> set[str]:
    """The modules of requirements; those of soulkit's own extras are followed."""
    modules = set()
    for line in requirements:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", line).groups()  # type: ignore[union-attr]
        if name == "soulkit":
            for extra in extras.split(","):
                modules |= names(PROJECT["optional-dependencies"][extra])
        else:
            modules.add(MODULES.get(name, name))
    return modules


def imported() -> set[str]:
    """First names of every package outside the standard library that soulkit imports anywhere."""
    packages = set()
    for path in (ROOT / "soulkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                packages |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                packages.add(node.module.partition(".")[0])
    return packages - set(sys.stdlib_module_names) - {"soulkit"}


# --- dependencies ---------------------------------------------------------------------------------


def test_everything_imported_is_in_the_core_or_has_an_extra() -> None:
    assert imported() - names(PROJECT["dependencies"]) <= EXTRAS.keys()


def test_the_core_brings_nothing_that_nobody_imports() -> None:
    assert names(PROJECT["dependencies"]) - imported() == set()


@pytest.mark.parametrize("package", EXTRAS)
def test_an_extra_brings_its_package(package: str) -> None:
    brought = names(PROJECT["optional-dependencies"][EXTRAS[package]])
    assert BROUGHT_ALONG.get(package, package) in brought


def test_an_extra_for_users_brings_something_that_is_imported_or_loaded_by_name() -> None:
    extras = PROJECT["optional-dependencies"].keys() - {"clients", "dev", "docs", "track"}
    assert extras == set(EXTRAS.values())


# --- the line -------------------------------------------------------------------------------------


def installed(home: Path, note: dict[str, Any] | None, installer: str = "pip") -> Path:
    """The package folder of an installation about which an installer noted `note`."""
    info = home / "soulkit-0.3.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: soulkit\nVersion: 0.3.0\n")
    (info / "INSTALLER").write_text(f"{installer}\n")
    if note is not None:
        (info / "direct_url.json").write_text(json.dumps(note))
    return home / "soulkit"


def git(url: str) -> dict[str, Any]:
    return {"url": url, "vcs_info": {"vcs": "git", "requested_revision": "main",
                                     "commit_id": COMMIT}}  # fmt: skip


def test_a_checkout_is_named_with_or_without_notes(tmp_path: Path) -> None:
    assert install_line("train") == f"pip install -e {shlex.quote(f'{ROOT}[train]')}"
    folder = tmp_path / "it's mine"
    home = installed(folder, {"url": "file:///elsewhere", "dir_info": {}})
    (folder / "pyproject.toml").write_text('[project]\nname = "soulkit"\n')
    words = shlex.split(install_line("report", home))
    assert words == ["pip", "install", "-e", f"{folder}[report]"]


def test_a_local_source_is_named_while_it_is_there(tmp_path: Path) -> None:
    source = tmp_path / "a folder, it's mine"
    source.mkdir()
    for number, (note, option) in enumerate([
        ({"dir_info": {}}, []),
        ({"dir_info": {"editable": True}}, ["-e"]),
        ({"archive_info": {"hash": "sha256=0"}}, []),
    ]):  # fmt: skip
        home = installed(tmp_path / str(number), {"url": source.as_uri(), **note})
        words = shlex.split(install_line("train", home))
        assert words == ["pip", "install", *option, f"{source}[train]"]
    source.rmdir()
    assert install_line("train", home) == "pip install 'soulkit[train]==0.3.0'"


@pytest.mark.parametrize(
    ("note", "source"),
    [
        (None, f"{SPEC}==0.3.0"),
        (git("https://host.org/soulkit.git"),
         f"{SPEC} @ git+https://host.org/soulkit.git@{COMMIT}"),
        (git("ssh://git@host.org:22/us/soulkit.git"),
         f"{SPEC} @ git+ssh://git@host.org:22/us/soulkit.git@{COMMIT}"),
        (git("file:///srv/soulkit.git"), f"{SPEC} @ git+file:///srv/soulkit.git@{COMMIT}"),
        ({**git("https://host.org/all.git"), "subdirectory": "py/soulkit"},
         f"{SPEC} @ git+https://host.org/all.git@{COMMIT}#subdirectory=py/soulkit"),
        ({"url": "https://host.org/soulkit-0.3.0-py3-none-any.whl", "archive_info": {}},
         f"{SPEC} @ https://host.org/soulkit-0.3.0-py3-none-any.whl"),
    ],
)  # fmt: skip
def test_other_sources_are_named(tmp_path: Path, note: dict[str, Any] | None, source: str) -> None:
    line = install_line("train", installed(tmp_path, note))
    assert shlex.split(line) == ["pip", "install", source]


@pytest.mark.parametrize(
    "url",
    [
        "https://me:hunter2@host.org/soulkit.git",
        "https://hunter2@host.org/soulkit.git",
        "ssh://git:hunter2@host.org/soulkit.git",
        "https://host.org/soulkit.git?private_token=hunter2",
        "https://host.org/soulkit.git#token=hunter2",
    ],
)
@pytest.mark.parametrize("kind", ["git", "archive"])
def test_no_secret_is_shown(tmp_path: Path, url: str, kind: str) -> None:
    note = git(url) if kind == "git" else {"url": url, "archive_info": {}}
    line = install_line("train", installed(tmp_path, note))
    assert "hunter2" not in line
    assert line.startswith("pip install 'soulkit[train]")


def test_notes_about_another_copy_do_not_count(tmp_path: Path) -> None:
    # This environment has installer notes about this checkout.
    assert install_line("train", tmp_path / "soulkit") == (
        "pip install '.[train]' in a checkout of soulkit"
    )


def test_uv_may_have_left_no_pip(tmp_path: Path) -> None:
    line = install_line("wandb", installed(tmp_path, None, installer="uv"))
    assert line == "uv pip install 'soulkit[wandb]==0.3.0'"


@pytest.mark.parametrize("package", EXTRAS)
def test_the_error_shows_the_line(package: str) -> None:
    error = MissingPackage(package, "this")
    assert error.way_out == f"Install it with: {install_line(EXTRAS[package])}"


# --- as pip sees it -------------------------------------------------------------------------------

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
"""


def wheel_of_this_tree(folder: Path) -> Path:
    """Build a wheel of this version that declares only the extras that a test needs."""
    folder.mkdir()
    version = soulkit.__version__
    path, info = folder / f"soulkit-{version}-py3-none-any.whl", f"soulkit-{version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: soulkit\nVersion: {version}\nProvides-Extra: train\n"
    with zipfile.ZipFile(path, "w") as archive:
        for source in sorted((ROOT / "soulkit").rglob("*")):
            if source.is_file() and "__pycache__" not in source.parts:
                archive.write(source, source.relative_to(ROOT))
        archive.write(ROOT / "tasks.yaml", "soulkit/tasks.yaml")
        archive.writestr(f"{info}/METADATA", about)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    return path


def pip(*words: object) -> None:
    quiet = ("--no-index", "--no-deps", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "install", *quiet, *map(str, words)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)


@pytest.mark.slow
def test_pip_takes_the_line_that_an_installed_wheel_prints(tmp_path: Path) -> None:
    wheel, site = wheel_of_this_tree(tmp_path / "two words"), tmp_path / "site"
    pip("--target", site, wheel)
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, site)))}
    words = ("eval", "local", "--model", "x", "--task", "tomi", "--data", "synth:2")
    done = subprocess.run(
        [sys.executable, "-m", "soulkit.cli.app", *words],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    line = done.stderr.splitlines()[2].removeprefix("fix: Install it with: ")
    assert line == f"pip install '{wheel}[train]'"
    pip("--dry-run", *shlex.split(line)[2:])


@pytest.mark.parametrize(
    "note", [b"{x", b"[]", b"null", b'{"url": "https://[x", "dir_info": null}']
)
def test_a_note_that_cannot_be_read_is_none(tmp_path: Path, note: bytes) -> None:
    home = installed(tmp_path, None)
    next(tmp_path.rglob("*.dist-info")).joinpath("direct_url.json").write_bytes(note)
    assert install_line("train", home).startswith("pip install")
