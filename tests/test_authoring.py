"""The author's guide, docs/authoring.md, run from top to bottom in an empty folder.

What stands in its fences decides what happens:

    (no language)       commands, one after the other; a line that ends with & is left running,
                        and `# exit N` says how a command ends where that is not 0
    text                what the commands above it print, `…` for anything; spaces do not count
    any, after "Save as `FILE`:"   the file is written
    py, jinja, yaml     an excerpt, which stands word for word in one of the examples
    toml                not looked at
"""

from __future__ import annotations

import os
import re
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "authoring.md"
EXCERPTS = ("py", "jinja", "yaml")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVE = re.compile(r"Save as `([^`]+)`[^`]*\Z")


@dataclass(frozen=True)
class Fence:
    """A fence of the page; `file` where the prose before it says to save it."""

    language: str
    text: str
    file: str

    @property
    def kind(self) -> str:
        if self.file:
            return "file"
        return {"": "commands", "text": "output"}.get(self.language, self.language)


def fences(page: str) -> Iterator[Fence]:
    end = 0
    for match in _FENCE.finditer(page):
        place = _SAVE.search(page[end : match.start()])
        yield Fence(match[1], match[2], place[1] if place else "")
        end = match.end()


def commands(block: str) -> list[tuple[str, int]]:
    """(command, its exit code) of a block, continued lines joined."""
    lines = re.sub(r"\s*\\\n\s*", " ", block).splitlines()
    exits = [re.search(r"# exit (\d+)$", line) for line in lines]
    bare = [re.sub(r"(?:^|\s\s+)# .*$", "", line) for line in lines]
    return [(b, int(e[1]) if e else 0) for b, e in zip(bare, exits, strict=True) if b.strip()]


def missing(lines: str, output: str) -> list[str]:
    """The lines that `output` does not have, in their order, however it is spaced."""
    place, printed, absent = 0, " ".join(output.split()), []
    for line in filter(None, (" ".join(text.split()) for text in lines.splitlines())):
        match = re.compile(".*?".join(map(re.escape, line.split("…")))).search(printed, place)
        if match is None:
            absent.append(line)
        else:
            place = match.end()
    return absent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Reader:
    """Somebody who does what the page says, in a folder of their own."""

    home: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("OPENAI_")}
        return {
            **kept, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "160", "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def follow(self, page: str) -> None:
        """Every fence in turn; an assertion names what does not go as the page says."""
        for port in sorted(set(re.findall(r"\b88\d\d\b", page))):
            page = page.replace(port, str(free_port()))
        output = ""
        for fence in fences(page):
            if fence.kind == "file":
                (self.home / fence.file).write_text(fence.text, encoding="utf-8")
            elif fence.kind == "commands":
                output = "".join(self.run(*command) for command in commands(fence.text))
            elif fence.kind == "output":
                assert missing(fence.text, output) == [], output

    def run(self, command: str, code: int) -> str:
        """What a command prints; one in the background is awaited until it prints its address."""
        if command.endswith("&"):
            return self._serve(command.removesuffix("&").strip())
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.home, env=self.environment(), timeout=300,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}"
        return f"{done.stdout}\n{done.stderr}\n"

    def _serve(self, command: str) -> str:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=self.home, env=self.environment(),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.running.append(process)
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 120)[0], f"{command}\nprints no address"
        address = process.stdout.readline()
        assert address.startswith("http://127.0.0.1:"), command
        return address

    def leave(self) -> None:
        for process in self.running:
            process.terminate()
            process.communicate(timeout=60)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    someone = Reader(tmp_path)
    yield someone
    someone.leave()


@pytest.mark.slow
def test_the_guide_can_be_followed_in_an_empty_folder(reader: Reader) -> None:
    assert list(reader.home.iterdir()) == []
    reader.follow(GUIDE.read_text(encoding="utf-8"))
    runs = {path.name for path in (reader.home / "runs").iterdir()}
    assert runs == {"bus", "postcard", "picnic", "cat"}


def test_the_guide_shows_every_kind_of_task_and_nothing_unknown() -> None:
    page = GUIDE.read_text(encoding="utf-8")
    kinds = [fence.kind for fence in fences(page)]
    assert set(kinds) == {"commands", "output", "file", "toml", *EXCERPTS}
    lines = [line for fence in fences(page) for line, _ in commands(fence.text)]
    words = [line.split() for line in lines if line.startswith("soul tasks new ")]
    kind = {line[3]: line[5] if len(line) > 4 else "choice" for line in words}
    assert sorted(kind.values()) == ["choice", "dialogue", "judged", "scene"]
    for name in kind:  # each is checked and evaluated, not only written
        assert any(line.startswith(f"soul tasks check {name} ") for line in lines)
        assert any(line.startswith("soul eval ") and f"--task {name} " in line for line in lines)


@pytest.mark.parametrize(
    "fence",
    [one for one in fences(GUIDE.read_text(encoding="utf-8")) if one.kind in EXCERPTS],
    ids=lambda fence: fence.text.strip().splitlines()[0],
)
def test_excerpts_stand_in_the_examples(fence: Fence) -> None:
    files = [path for path in (ROOT / "examples").rglob("*.*") if path.suffix != ".pyc"]
    texts = [path.read_text(encoding="utf-8") for path in files if path.is_file()]
    assert any(fence.text in text for text in texts), fence.text


# --- the reader notices ---------------------------------------------------------------------------


def test_fences_are_read_for_what_they_are() -> None:
    page = (
        "Save as `a.py`:\n\n```python\nx\n```\n\nThen\n\n```\nb \\\n  c   # why\nd  # exit 2\n```\n"
    )
    assert [(f.kind, f.file) for f in fences(page)] == [("file", "a.py"), ("commands", "")]
    assert commands([*fences(page)][1].text) == [("b c", 0), ("d", 2)]
    assert missing("a … d\nx", "a  b\nc d e") == ["x"]
    assert missing("b\na", "a b") == ["a"]


@pytest.mark.parametrize(
    "page",
    [
        "```\nsoul tasks shwo tomi\n```\n",
        "```\ntrue    # exit 1\n```\n",
        "```\nprintf 'one two'\n```\n\n```text\none three\n```\n",
        "```\necho nothing &\n```\n",
    ],
)
def test_a_page_that_is_wrong_is_noticed(page: str, reader: Reader) -> None:
    with pytest.raises(AssertionError):
        reader.follow(page)


def test_a_page_that_is_right_is_followed(reader: Reader) -> None:
    page = "Save as `a.txt`:\n\n```text\nhello\n```\n\n```\ncat a.txt\n```\n\n```text\nh…o\n```\n"
    reader.follow(page)
    assert shutil.which("soul", path=reader.environment()["PATH"])
