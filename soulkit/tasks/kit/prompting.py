"""Prompt templates with hashes, word budgets, and text tables next to a module.

A template is `prompts/<name>.md` in the task's folder, or `prompts/<task>/<name>.md` if several
tasks share the folder. Rendering fails if a template names a value that its reader may not see.

All templates run in Jinja's sandbox. A user's template is first rendered in a child process with
limits on time and memory, since it may loop forever.

Budgets: equally important texts share a budget fairly (63 words for texts of 3, 40 and 50 words
keep 3, 30 and 30); a history loses its oldest entries.

Texts: `TEXTS = Texts(__file__)` reads `texts.yaml` next to the module on first use; its lists
become tuples, so they cannot be changed.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from jinja2 import (
    ChoiceLoader,
    DictLoader,
    Environment,
    FileSystemLoader,
    StrictUndefined,
    TemplateNotFound,
    TemplateSyntaxError,
    UndefinedError,
    pass_context,
)
from jinja2.sandbox import ImmutableSandboxedEnvironment

from soulkit.errors import ConfigError, did_you_mean
from soulkit.models.local.threads import trial
from soulkit.models.players.functions import error_words
from soulkit.parse import ParseError, parse_yaml, read_limited
from soulkit.tasks.kit.user_code import BUILTIN
from soulkit.text import word_count
from soulkit.types import Feedback, Segment

WITHOUT_CONSTANTS: Mapping[str, Any] = {
    "optimized": False, "finalize": pass_context(lambda context, value: value),
}  # fmt: skip
"""Options of Jinja: compute no constants while compiling, where `'x' * 10**10` has no limits."""
PROMPT_MB = 256
"""Memory in which a user's prompt must be rendered. Several are rendered at once."""
MARK = "[...]"
"""Replaces words that were cut."""


def total_words(texts: Iterable[str]) -> int:
    """Whitespace-separated words of all texts together."""
    return sum(len(text.split()) for text in texts)


def first_words(text: str, count: int) -> str:
    """The first `count` words, unchanged, followed by MARK if words were cut."""
    # Listing all words would take fifty times the memory of a long text. Most texts fit, and
    # checking that is ten times faster without the positions of their words.
    if count > 0 and len(text.split(None, count)) <= count:
        return text
    ends = [word.end() for word in islice(re.finditer(r"\S+", text), max(count, 0) + 1)]
    if len(ends) <= count:
        return text
    return f"{text[: ends[count - 1]]} {MARK}" if count > 0 else MARK


def last_words(text: str, count: int) -> str:
    """The last `count` words, unchanged, preceded by MARK if words were cut."""
    starts = deque((word.start() for word in re.finditer(r"\S+", text)), maxlen=max(count, 0) + 1)
    if len(starts) <= count:
        return text
    return f"{MARK} {text[starts[1] :]}" if count > 0 else MARK


def fair_cap(lengths: Sequence[int], budget: int) -> int:
    """The largest cap (in words) under which texts of these lengths fit the budget together."""
    words_left = budget
    for place, length in enumerate(sorted(lengths)):
        share = words_left // (len(lengths) - place)
        if length > share:
            return share
        words_left -= length
    return max(lengths, default=0)


def share_fairly(
    items: Sequence[Mapping[str, str]], budget: int | None
) -> tuple[tuple[Mapping[str, str], ...], int]:
    """The items, cut so that their texts fit the budget together, and the number of words cut. No
    item is dropped."""
    texts = [text for item in items for text in item.values()]
    total = total_words(texts)
    if budget is None or total <= budget:
        return tuple(items), 0
    cap = fair_cap([len(text.split()) for text in texts], budget)
    fitted = tuple({k: first_words(text, cap) for k, text in item.items()} for item in items)
    return fitted, sum(max(len(text.split()) - cap, 0) for text in texts)


def keep_latest(entries: Sequence[str], budget: int | None) -> tuple[tuple[str, ...], int]:
    """The last entries that fit the budget, and the number of words cut. An entry is only shortened
    if even the last one alone exceeds the budget."""
    total = total_words(entries)
    if budget is None or total <= budget:
        return tuple(entries), 0
    latest: list[str] = []
    words_left = budget
    for entry in reversed(entries):
        length = len(entry.split())
        if length > words_left:
            break
        latest.insert(0, entry)
        words_left -= length
    if latest:
        return tuple(latest), total - total_words(latest)
    return (first_words(entries[-1], budget),), total - budget


NAME = "texts.yaml"


class Texts:
    """The text tables of one folder."""

    def __init__(self, module_file: str) -> None:
        self.path = Path(module_file).with_name(NAME)

    def __getitem__(self, table: str) -> Any:
        tables = read_texts(self.path.parent)
        if table not in tables:
            raise ConfigError(
                f"There is no table '{table}' in '{self.path}'.",
                "A module in that folder needs the table.",
                f"{did_you_mean(table, tables)} Or add the table to the file.",
            )
        return tables[table]


@cache
def read_texts(folder: Path) -> Mapping[str, Any]:
    """The tables of `texts.yaml` in a folder; ConfigError if they cannot be read."""
    path = folder / NAME
    try:
        tables = parse_yaml(read_limited(path), ours=path.is_relative_to(Path(__file__).parents[2]))
    except (OSError, ParseError) as error:
        raise ConfigError(
            f"The texts in '{path}' cannot be read.",
            " ".join(str(error).split()),
            "Reinstall soulkit to restore the file, or correct it if the task is your own.",
        ) from error
    if not isinstance(tables, dict):
        raise ConfigError(
            f"'{path}' is not a mapping of text tables.",
            "The file must map names to lists or mappings.",
            "Reinstall soulkit to restore the file, or correct it if the task is your own.",
        )
    return {str(name): _frozen(table) for name, table in tables.items()}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(part) for key, part in value.items()}
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value


class _Noting(FileSystemLoader):
    def __init__(self, folders: Sequence[Path], opened: set[Path]) -> None:
        super().__init__(folders)
        self.opened = opened

    def get_source(
        self, environment: Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        source = super().get_source(environment, template)
        self.opened.add(Path(source[1]))
        return source


class PromptFolder:
    """The templates of one task."""

    def __init__(self, task: str, *folders: Path) -> None:
        self.task = task
        self.opened: set[Path] = set()
        """Template files rendered so far, for the self-check."""
        self.folders = [folder / "prompts" for folder in dict.fromkeys((*folders, BUILTIN))]
        self._tried: set[str] = set()
        self.texts: Mapping[str, str] = {}
        """Templates by name that are declared as text; they take precedence over files."""

    def with_texts(self, texts: Mapping[str, str]) -> PromptFolder:
        """The same templates, but `texts` (by name) take precedence."""
        folder = PromptFolder(self.task)
        folder.folders, folder.texts = self.folders, dict(texts)
        return folder

    def over(self, folder: Path) -> PromptFolder:
        """The same templates, but files in `folder` take precedence."""
        edited = PromptFolder(self.task)
        edited.folders = [folder, *self.folders]
        edited.texts = {n: t for n, t in self.texts.items() if not edited._edits(folder, n)}
        return edited

    def _edits(self, folder: Path, name: str) -> bool:
        return any((folder / path).exists() for path in (f"{self.task}/{name}.md", f"{name}.md"))

    @cached_property
    def _environment(self) -> Environment:
        # Prompts are plain text, not HTML: escaping would change what the model reads.
        return ImmutableSandboxedEnvironment(
            **WITHOUT_CONSTANTS,
            loader=ChoiceLoader(
                [
                    DictLoader({f"{name}.md": text for name, text in self.texts.items()}),
                    _Noting(self.folders, self.opened),
                ]
            ),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
        )

    def _path(self, name: str) -> str:
        if name in self.texts:
            return f"{name}.md"
        task_path = f"{self.task}/{name}.md"
        return (
            task_path
            if any((folder / task_path).exists() for folder in self.folders)
            else f"{name}.md"
        )

    def render(self, name: str, /, **values: Any) -> str:
        """The text of template `name`. ConfigError if it is missing or names an unknown value."""
        if name not in self._tried:
            file = None if name in self.texts else self._file(name)
            ours = file is not None and file.is_relative_to(BUILTIN)
            if not ours and (why := trial(lambda: self._rendered(name, values), PROMPT_MB)):
                raise self._unusable(name, why)
            self._tried.add(name)
        try:
            return self._rendered(name, values)
        except TemplateNotFound as error:
            raise self._missing(name) from error
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"The prompt '{name}.md' of task '{self.task}' is not a valid template.",
                f"Jinja reports in line {error.lineno}: {error.message}.",
                "Correct the template; docs/tutorials/write-a-task.md shows a complete prompt.",
            ) from error
        except UndefinedError as error:
            raise ConfigError(
                f"The prompt '{name}.md' of task '{self.task}' uses an unavailable value.",
                f"Jinja reports: {error.message}. The value is missing, or the prompt's reader "
                "may not see it.",
                "Add the reader to the column's audience, or remove the value from the template.",
            ) from error
        except Exception as error:
            raise self._unusable(name, error_words(error)) from error

    def _rendered(self, name: str, values: Mapping[str, Any]) -> str:
        return self._environment.get_template(self._path(name)).render(**values).strip()

    def _unusable(self, name: str, why: str) -> ConfigError:
        return ConfigError(
            f"The prompt '{name}.md' of task '{self.task}' cannot be rendered.",
            f"Jinja reports: {why}.",
            "Correct the template; docs/tutorials/write-a-task.md shows a complete prompt.",
        )

    def opening(
        self, name: str, feedback: Feedback | None, values: Mapping[str, Any],
        role: Literal["system", "user"] = "system",
    ) -> Segment:  # fmt: skip
        """Template `name` as a message with its feedback slot filled; `bare` has the slot empty."""
        bare = self.render(name, feedback=None, **values)
        text = bare if feedback is None else self.render(name, feedback=feedback.text, **values)
        return Segment(role, text, bare=bare)

    def hashes(self, *names: str) -> dict[str, str]:
        """Template name → first 12 hex digits of the SHA-256 of its source."""
        return {n: hashlib.sha256(self.source(n).encode()).hexdigest()[:12] for n in names}

    def sizes(self, *starts: str) -> dict[str, int]:
        """Template name → words, for the task's own templates that start with one of `starts`."""
        files: list[Path] = []
        for folder in self.folders:
            if folder != BUILTIN / "prompts":
                files += [*folder.glob("*.md"), *folder.glob(f"{self.task}/*.md")]
        names = sorted({file.stem for file in files if file.stem.startswith(starts)})
        names = [*(n for n in self.texts if n.startswith(starts) and n not in names), *names]
        return {name: word_count(self.source(name)) for name in names}

    def is_shared(self, name: str) -> bool:
        """Whether the task uses the shared template `name` because it has none of its own."""
        file = None if name in self.texts else self._file(name)
        return file is not None and BUILTIN / "prompts" in file.parents

    def unopened(self, folder: Path) -> list[str]:
        """Paths of the task's templates in `folder`/prompts that were never rendered."""
        prompts = folder / "prompts"
        files = [*prompts.glob("*.md"), *prompts.joinpath(self.task).glob("*.md")]
        return sorted(f.relative_to(prompts).as_posix() for f in files if f not in self.opened)

    def source(self, name: str) -> str:
        """The text of template `name`, not rendered."""
        if name in self.texts:
            return self.texts[name]
        file = self._file(name)
        if file is None:
            raise self._missing(name)
        return file.read_text(encoding="utf-8")

    def _file(self, name: str) -> Path | None:
        path = self._path(name)
        return next((f / path for f in self.folders if (f / path).exists()), None)

    def _missing(self, name: str) -> ConfigError:
        return ConfigError(
            f"The prompt '{name}.md' of task '{self.task}' does not exist.",
            f"Searched in {', '.join(str(f) for f in self.folders)}.",
            f"Add prompts/{name}.md or prompts/{self.task}/{name}.md to the task's folder.",
        )
