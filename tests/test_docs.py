"""The documentation is complete, its links work, and the generated pages are up to date.

The pages on writing a task, docs/tutorials/write-a-task.md and two guides, run
from top to bottom in an empty folder.

The language of a fence decides how it is tested:

    (no language)       commands, run in order; a line that ends with & runs in the background,
                        and `# exit N` gives an exit code other than 0
    text                output of the commands above it; `…` matches anything, spaces are ignored
    any, after "Save as `FILE`:"   the content of a file to write
    py, jinja, yaml     an excerpt that occurs literally in one of the examples
    sh                  not tested

The other tutorials are run in the same way.

The teaching example runs, is short, and uses the same arithmetic as the trainer.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from soulkit.cli.app import COMMANDS
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.spec import DefaultPlayer, TaskSpec
from soulkit.tasks.scaffold import TEMPLATES, YAML_TEMPLATES
from soulkit.types import Protocol

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
SETTINGS, METRICS = REFERENCE / "settings.md", REFERENCE / "metrics.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
READABLE = [
    *PAGES,
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")),
]


def generator() -> ModuleType:
    path = ROOT / "scripts" / "reference_docs.py"
    spec = importlib.util.spec_from_file_location("reference_docs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def command_page() -> str:
    """The page of commands, generated from the current code."""
    text: str = generator().page()
    return text


def test_the_command_page_is_fresh() -> None:
    page = (REFERENCE / "commands.md").read_text(encoding="utf-8")
    assert page == command_page(), "stale: run .venv/bin/python scripts/reference_docs.py"


def test_the_page_of_tasks_is_fresh() -> None:
    page = (REFERENCE / "tasks.md").read_text(encoding="utf-8")
    assert page == generator().tasks_page(), "stale: run scripts/reference_docs.py"


def test_the_settings_of_training_are_fresh() -> None:
    page = SETTINGS.read_text(encoding="utf-8")
    assert page == generator().settings_page(), "stale: run scripts/reference_docs.py"
    assert "| `lambda_fb` | `--lambda-fb` | 1.0 |" in page


def test_the_tables_of_file_formats_are_fresh() -> None:
    page = (REFERENCE / "file-formats.md").read_text(encoding="utf-8")
    assert page == generator().formats_page(), "stale: run scripts/reference_docs.py"
    assert "| `reward` | number or null (required) |" in page
    assert "\n## soulkit/summary@1\n" in page


def test_every_command_and_option_says_what_it_is_for() -> None:
    listed = dict(generator().commands())
    assert set(listed) >= {f"soul {name}" for name in COMMANDS}
    assert [name for name, command in listed.items() if not command.help] == []
    bare = [
        f"{name} {parameter.opts[0]}"
        for name, command in listed.items()
        for parameter in command.params
        if parameter.name != "help" and not getattr(parameter, "help", None)
    ]
    assert bare == []


def test_lists_of_commands_fit_a_terminal() -> None:
    first = {
        name: " ".join((command.help or "").split("\n\n")[0].split())
        for name, command in generator().commands()
        if name.count(" ") >= 2  # shorter lists show the sentences of COMMANDS
    }
    # The widest command name is ten letters; list and margins take four more.
    assert {name: text for name, text in first.items() if len(text) > 66} == {}


@pytest.mark.parametrize("path", READABLE, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (path.parent / link).exists()] == []


def test_the_navigation_names_every_page() -> None:
    site = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES]
    assert [page for page in pages if f'"{page}"' not in site] == []


@pytest.mark.parametrize("path", READABLE, ids=lambda p: p.name)
def test_commands_in_the_documentation_exist(path: Path) -> None:
    page = command_page()
    commands = set(re.findall(r"^## (soul[ \w+-]*)$", page, re.MULTILINE))
    text = path.read_text(encoding="utf-8")
    named = {
        m.group(0).strip() for m in re.finditer(r"(?<=[\n`])soul [a-z]+(?: [a-z][a-z+-]*)?", text)
    }
    for words in named:
        first_two = " ".join(words.split()[:2])
        assert first_two in commands, words
        group = any(name.startswith(f"{first_two} ") for name in commands)
        assert not group or words == first_two or words in commands, words


def test_the_figures_of_the_demo_on_the_front_page_are_those_of_the_benchmarks_page() -> None:
    """Every number with three decimals in the part of README that links to the section."""
    front, benchmarks = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/benchmarks.md")
    )
    parts = [part for part in front.split("\n## ") if "docs/benchmarks.md#the-demo" in part]
    assert parts, "README does not link to the section"
    table = benchmarks.split("## The demo\n")[1].split("\n## ")[0]
    figures = re.findall(r"(?<![\d.])\d\.\d{3}(?!\d)", parts[0])
    assert [figure for figure in figures if figure not in table] == []


def test_options_in_the_documentation_exist() -> None:
    page = command_page() + (REFERENCE / "tasks.md").read_text(encoding="utf-8")
    options = set(re.findall(r"--[a-z][a-z-]+", page))
    for path in READABLE:
        for block in re.findall(
            r"^\$? ?(soul .*(?:\\\n.*)*)", path.read_text("utf-8"), re.MULTILINE
        ):
            unknown = set(re.findall(r"(?<=\s)--[a-z][a-z-]+", block)) - options
            assert unknown == set(), f"{path.name}: {block}"


GUIDES = {
    ROOT / "docs" / "tutorials" / "write-a-task.md": {"hints", "again", "mood", "letter", "shop"},
    ROOT / "docs" / "guides" / "python-tasks.md": {"bus", "postcard"},
    ROOT / "docs" / "guides" / "dialogue-tasks.md": {"picnic", "cat"},
    ROOT / "docs" / "guides" / "judged-tasks-in-yaml.md": {"comfort", "refund"},
}
"""Page → the runs that its commands leave."""
GUIDES[ROOT / "docs" / "guides" / "tasks-in-yaml.md"] = {"hints", "diary"}
EXCERPTS = ("py", "jinja", "yaml")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVE = re.compile(r"Save as `([^`]+)`[^`]*\Z")


@dataclass(frozen=True)
class Fence:
    """A fence of the page; `file` is set if the text before it says to save it."""

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
    """The lines that are missing in `output`; order matters, spacing does not."""
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
    """A reader who follows the page in an empty folder."""

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
        """Run every fence in order; an assertion names the first difference from the page."""
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
        """Output of a command; for a background command, wait until it prints its address."""
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
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_a_guide_can_be_followed_in_an_empty_folder(page: Path, reader: Reader) -> None:
    assert list(reader.home.iterdir()) == []
    reader.follow(page.read_text(encoding="utf-8"))
    runs = {path.name for path in (reader.home / "runs").iterdir()}
    assert runs == GUIDES[page]


def fences_of_guides() -> list[Fence]:
    return [fence for page in GUIDES for fence in fences(page.read_text(encoding="utf-8"))]


def test_the_guides_show_every_kind_of_task_and_nothing_unknown() -> None:
    assert {fence.kind for fence in fences_of_guides()} == {"commands", "output", "file", *EXCERPTS}
    lines = [line for fence in fences_of_guides() for line, _ in commands(fence.text)]
    words = [
        f"{line} --kind choice".split() for line in lines if line.startswith("soul tasks new ")
    ]
    kind = {line[3]: (line[line.index("--kind") + 1], "--python" in line) for line in words}
    assert {*kind.values()} == {
        *((name, True) for name in TEMPLATES), *((name, False) for name in YAML_TEMPLATES)
    }  # fmt: skip
    for name in kind:  # each is checked and evaluated, not only written
        assert any(line.startswith(f"soul tasks check {name} ") for line in lines)
        assert any(line.startswith("soul eval ") and f"--task {name} " in line for line in lines)


@pytest.mark.parametrize(
    "fence",
    [one for one in fences_of_guides() if one.kind in EXCERPTS],
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


PAGE = ROOT / "docs" / "tutorials" / "own-chats.md"


@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    reader = Reader(tmp_path)
    reader.follow(PAGE.read_text("utf-8"))
    me = tmp_path / "me"
    people = {
        part: {json.loads(line)["person"] for line in (me / part).read_text().splitlines()}
        for part in ("06-plant/chats.jsonl", "04-split/held_out.jsonl")
    }
    assert not people["06-plant/chats.jsonl"] & people["04-split/held_out.jsonl"]
    assert "jo.field@gmail.com" not in (me / "02-redact/chats.jsonl").read_text()
    page = (me / "page.html").read_text()
    assert "<html" in page[:2000] and "Closeness against memorisation" in page
    before, after = (
        json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        for name in ("before", "after")
    )
    assert after["statuses"]["userllm"]["ok"] > 30, "its replies are not cut"
    shares = [run["tasks"]["userllm"]["ai_detector"]["mean"] for run in (before, after)]
    assert shares[1] > shares[0] + 0.2, shares


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first-evaluation", "compare-models"])
def test_a_tutorial_on_evaluation_runs_from_top_to_bottom(name: str, reader: Reader) -> None:
    page = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text(encoding="utf-8")
    reader.follow(page)
    named = set(re.findall(r"--out (runs/[\w-]+)", page))
    assert {f"runs/{run.name}" for run in (reader.home / "runs").iterdir()} == named
    ends = ("summary.json", "grid.json")
    assert all(any((reader.home / run / end).is_file() for end in ends) for run in named)


EXAMPLE = Path(__file__).parents[1] / "examples" / "minimal_ditto.py"


@pytest.mark.slow
@pytest.mark.torch
def test_the_example_runs() -> None:
    options = ["--steps", "2", "--warm-up", "12", "--rows", "240", "--prompts", "4"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *options, "--group-size", "4"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"ditto +(\d+)  draft reward ([\d.]+)  refined reward ([\d.]+)", done.stdout)
    assert [step for step, _, _ in shown] == ["1", "2"]
    assert all(0 <= float(r) <= 1 for _, *rewards in shown for r in rewards)
    assert "loss" in done.stdout


def test_the_example_is_one_short_file_without_the_engine() -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 300
    assert "simplified" in (ast.get_docstring(ast.parse(source)) or "")
    imported = {
        f"{node.module}.{name.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("soulkit")
        for name in node.names
    }
    assert imported == {
        "soulkit.tasks.tom.explain.explain",
        "soulkit.tasks.tom.generate.synth_rows",
        "soulkit.models.local.tiny.build_tiny",
        "soulkit.train.loss.advantage.GroupMember",
        "soulkit.train.loss.advantage.group_advantages",
        "soulkit.train.loss.losses.aggregate",
        "soulkit.train.loss.losses.clipped_loss",
        "soulkit.train.loss.losses.nll_loss",
    }


def table_of(page: Path) -> dict[str, list[str]]:
    """Names in the first column of a page's tables → the other cells."""
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return {name: cells for first, *cells in rows for name in re.findall(r"`([^`]+)`", first)}


def test_the_guide_lists_every_setting_with_its_default() -> None:
    from soulkit.train.config import LoraSettings, TrainConfig

    table = table_of(SETTINGS)
    adapter = {f"lora.{name}": info for name, info in LoraSettings.model_fields.items()}
    settings = {**TrainConfig.model_fields, **adapter}
    del settings["lora"]
    assert sorted(table) == sorted(settings)
    for name, info in settings.items():
        default = info.default
        shown = table[name][1].split("; sft: ")[0]  # which has its own
        if isinstance(default, bool):
            assert shown in {True: ("on", "true"), False: ("off", "false")}[default], name
        elif isinstance(default, int | float):
            assert float(shown) == default, name
        elif isinstance(default, str):
            assert shown == default, name


@pytest.mark.torch
def test_the_guide_explains_every_metric() -> None:
    from soulkit.train.state.metrics import StepLine, names_of
    from tests.train.test_train_run import STEP_KEYS

    names, prefixes = names_of(StepLine)
    table = set(table_of(METRICS))
    open_names = {name for name in table if name.startswith(prefixes)}
    assert table - open_names == names
    assert {prefix for prefix in prefixes for name in table if name.startswith(prefix)} == set(
        prefixes
    )
    assert {name for name in STEP_KEYS if not name.startswith(prefixes)} <= names


def default_coach(spec: TaskSpec, protocol: Protocol) -> str:
    """In the words of the page on Ditto."""
    coach = spec.players.under(protocol, "coach")
    if isinstance(coach, DefaultPlayer):
        return coach.model
    if coach == "none":
        return "none"
    judged = coach is None and spec.players.under(protocol, "judge") is not None
    return "the judge's model" if judged else "the rules"


def test_the_page_on_ditto_names_the_default_coaches() -> None:
    page = (ROOT / "docs" / "explanation" / "ditto.md").read_text(encoding="utf-8")
    section = page.split("## Who writes the feedback\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    specs, named = load_registry().specs, set[str]()
    for tasks, paper, reference in rows[1:]:
        for word in re.findall(r"\w+(?=,|$)", tasks.split(", your own")[0]):
            found = [name for name in specs if name == word or name.startswith(f"{word}_")]
            found = [word] if word in specs else found
            assert found, word
            for name in found:
                assert default_coach(specs[name], "paper") == paper, name
                assert default_coach(specs[name], "reference") == reference.split(",")[0], name
            named.update(found)
    left = {name for name in specs if name not in named}
    assert all(specs[name].evaluation_only for name in left), left


def test_the_keys_of_a_task_are_complete() -> None:
    from soulkit.data.rows import Column
    from soulkit.tasks.kit.declared.keys import Declaration
    from soulkit.tasks.kit.spec import Suite, TaskSpec

    text = (REFERENCE / "task-keys.md").read_text(encoding="utf-8")
    parts = {"Tasks without code": {*Declaration.model_fields, "rows"},
             "All tasks": {*TaskSpec.model_fields} - {"declaration"},
             "Keys of a column": {*Column.model_fields}}  # fmt: skip
    for title, fields in parts.items():
        part = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
        first = [line.split(" | ")[0] for line in part.splitlines() if line.startswith("| `")]
        assert sorted(re.findall(r"`(\w+)`", " ".join(first))) == sorted(fields)
    suites = text.split("\n## Suites\n")[1].split("\n## ")[0]
    assert [key for key in Suite.model_fields if key not in suites] == []
