"""Tables of texts: found beside the module, read late, and never changed by a reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from soulkit.errors import ConfigError
from soulkit.tasks.home import BUILTIN
from soulkit.tasks.texts import NAME, Texts, read_texts

TABLES = "towns: [Tarn, Gelm]\nways:\n  kind: [[a, b]]\n"


def texts(folder: Path, content: str | None) -> Texts:
    if content is not None:
        (folder / NAME).write_text(content, encoding="utf-8")
    return Texts(str(folder / "rows.py"))


def test_lists_are_tuples(tmp_path: Path) -> None:
    tables = texts(tmp_path, TABLES)
    assert tables["towns"] == ("Tarn", "Gelm") and tables["ways"] == {"kind": (("a", "b"),)}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "cannot be read"), ("a: [", "cannot be read"), ("- a\n", "are no tables")],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        texts(tmp_path, content)["towns"]
    assert str(tmp_path / NAME) in str(caught.value)


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no table 'town'"):
        texts(tmp_path, TABLES)["town"]


def test_every_file_of_the_package_can_be_read() -> None:
    folders = [path.parent for path in BUILTIN.rglob(NAME)]
    assert folders and all(all(read_texts(folder).values()) for folder in folders)


def test_nothing_is_read_before_it_is_needed() -> None:
    modules = [
        ".".join(("soulkit.tasks", *path.relative_to(BUILTIN).parent.parts, path.stem))
        for folder in {path.parent for path in BUILTIN.rglob(NAME)}
        for path in folder.glob("*.py")
        if path.stem != "__init__"
    ]
    code = (
        "import importlib\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "from soulkit.tasks.texts import read_texts\n"
        "raise SystemExit(read_texts.cache_info().misses)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
