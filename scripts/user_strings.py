"""List every text of the package that people read, with file and line, for proofreading.

    .venv/bin/python scripts/user_strings.py                     # place, kind, text: one per line
    .venv/bin/python scripts/user_strings.py --kind error soulkit/eval
    .venv/bin/python scripts/user_strings.py --sample 200 --seed 1
    .venv/bin/python scripts/user_strings.py --counts

Kinds: `help` (settings, options, commands), `error` (what, why and fix), `docstring` (of modules
and public names), `page` (templates), `yaml` (descriptions in YAML files), `text` (everything else
of two words or more: progress, tables, notes). Prompts are not listed: they are part of the tasks.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ERRORS = re.compile("Error|Refused|Stopped|Unnamed|NoRows|NoFeedback|Unusable|WrongShape")
PROSE = re.compile(r"[A-Za-z’']{2,}[,;:]? +[A-Za-z’'{(`]")


class Text(NamedTuple):
    """One text and its place (file:line)."""

    place: str
    kind: str
    text: str


def texts_of(path: Path) -> Iterator[Text]:
    """The texts of one file, in order."""
    name = str(path.relative_to(ROOT))
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        tree = ast.parse(source)
        found = [*_docstrings(tree, "soulkit/cli/" in name), *_literals(tree)]
        yield from (Text(f"{name}:{line}", kind, text) for line, kind, text in sorted(found))
    elif path.suffix in (".yaml", ".yml"):
        pairs = re.finditer(r"^\s*(?:title|description|about|note):\s*(.+)$", source, re.MULTILINE)
        for m in pairs:
            yield Text(f"{name}:{source[: m.start(1)].count(chr(10)) + 1}", "yaml", m[1])
    else:
        for number, line in enumerate(source.splitlines(), start=1):
            shown = re.sub(r"<[^>]*>|\{%.*?%\}|\{#.*?#\}", " ", line).strip()
            if PROSE.search(shown) and not shown.endswith((";", "{")):
                yield Text(f"{name}:{number}", "page", shown)


Found = tuple[int, str, str]


def _docstrings(tree: ast.Module, commands: bool) -> Iterator[Found]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text and not getattr(node, "name", "").startswith("_"):
            kind = "help" if commands and _is_command(node) else "docstring"
            yield node.body[0].lineno, kind, " ".join(text.split())


def _is_command(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(
        "command" in ast.unparse(one) or "callback" in ast.unparse(one) for one in decorators
    )


def _literals(tree: ast.Module) -> Iterator[Found]:
    """Texts outside docstrings. An f-string is one text, with `{}` for each inserted value."""

    def walk(node: ast.AST, kind: str) -> Iterator[Found]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if ERRORS.search(called):
                kind = "error"
        elif isinstance(node, ast.keyword) and node.arg in ("help", "unset"):
            kind = "help"
        elif isinstance(node, ast.Raise):
            kind = "error"
        if isinstance(node, ast.JoinedStr):
            parts = [str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values]
            if PROSE.search("".join(parts)):
                yield node.lineno, kind, " ".join("".join(parts).split())
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    yield from walk(part.value, kind)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if PROSE.search(node.value) and not re.search(r"\\[sSwdb]|\(\?", node.value):
                yield node.lineno, kind, " ".join(node.value.split())
        else:
            for child in ast.iter_child_nodes(node):
                yield from walk(child, kind)

    return walk(tree, "text")


def all_texts(under: list[str]) -> list[Text]:
    """The texts of the given files and folders; default: the package and tasks.yaml."""
    files: list[Path] = []
    for place in under or ["soulkit", "tasks.yaml"]:
        path = (ROOT / place).resolve()
        files += sorted(path.rglob("*")) if path.is_dir() else [path]
    kept = [f for f in files if f.suffix in (".py", ".yaml", ".html", ".j2", ".jinja")]
    return [t for f in kept for t in texts_of(f)]


def words_per_sentence(texts: list[Text]) -> float:
    """Median words per sentence, over all sentences of two words or more."""
    sentences = [s for t in texts for s in re.split(r"(?<=[.!?;:])\s", t.text)]
    counts = [len(s.split()) for s in sentences if len(s.split()) > 1]
    return statistics.median(counts) if counts else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="List every text that people read.")
    parser.add_argument("under", nargs="*", help="files and folders (default: the whole package)")
    parser.add_argument("--kind", action="append", help="list only this kind; repeatable")
    parser.add_argument("--sample", type=int, help="list this many random texts")
    parser.add_argument("--seed", type=int, default=0, help="random seed of --sample")
    parser.add_argument("--counts", action="store_true", help="print counts per kind, not texts")
    given = parser.parse_args()
    texts = [t for t in all_texts(given.under) if not given.kind or t.kind in given.kind]
    if given.sample:
        texts = random.Random(given.seed).sample(texts, min(given.sample, len(texts)))
    if given.counts:
        for kind in sorted({t.kind for t in texts}):
            some = [t for t in texts if t.kind == kind]
            print(f"{kind:10} {len(some):6}  {words_per_sentence(some):5.1f} words per sentence")
        print(f"{'all':10} {len(texts):6}  {words_per_sentence(texts):5.1f} words per sentence")
        return 0
    for t in texts:
        print(f"{t.place}\t{t.kind}\t{t.text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
