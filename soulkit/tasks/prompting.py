"""Prompt templates: files with a hash, rendered for one reader.

`prompts/<name>.md` in the task's folder, or `prompts/<task>/<name>.md` where several tasks share
one; then beside the classes that the task's own derives from; then among the prompts that all tasks
share. A template that names
something its reader may not see fails (strict undefined), it does not render an empty string.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import (
    Environment,
    FileSystemLoader,
    StrictUndefined,
    TemplateNotFound,
    TemplateSyntaxError,
    UndefinedError,
)
from jinja2.sandbox import SandboxedEnvironment

from soulkit.errors import ConfigError
from soulkit.tasks.home import BUILTIN


class _Noting(FileSystemLoader):
    """Notes which files were opened, those that a template includes as well."""

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
        """The files that were rendered so far: what a check of the task looks at."""
        self.folders = [folder / "prompts" for folder in dict.fromkeys((*folders, BUILTIN))]
        self.sandboxed = False

    def over(self, folder: Path) -> PromptFolder:
        """The same templates, but those in `folder` go before all others.

        They are rendered in a sandbox: a folder of edited prompts may travel with a run.
        """
        edited = PromptFolder(self.task)
        edited.folders, edited.sandboxed = [folder, *self.folders], True
        return edited

    @cached_property
    def _environment(self) -> Environment:
        # Prompts are plain text for a model, not HTML: escaping would change what the model reads.
        kind = SandboxedEnvironment if self.sandboxed else Environment
        return kind(
            loader=_Noting(self.folders, self.opened),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
        )

    def _path(self, name: str) -> str:
        task_path = f"{self.task}/{name}.md"
        return (
            task_path
            if any((folder / task_path).exists() for folder in self.folders)
            else f"{name}.md"
        )

    def render(self, name: str, /, **values: Any) -> str:
        """The text of template `name`. ConfigError when it is missing or names an unknown value."""
        try:
            return self._environment.get_template(self._path(name)).render(**values).strip()
        except TemplateNotFound as error:
            raise self._missing(name) from error
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"The prompt '{name}.md' of task '{self.task}' is no valid template.",
                f"Jinja says, in line {error.lineno}: {error.message}.",
                "Mend the braces; docs/authoring.md shows a complete prompt.",
            ) from error
        except UndefinedError as error:
            raise ConfigError(
                f"The prompt '{name}.md' of task '{self.task}' uses something it may not see.",
                f"Jinja says: {error.message}.",
                "Name the reader in the column's audience, or take the value out of the template.",
            ) from error

    def hashes(self, *names: str) -> dict[str, str]:
        """Template name → first 12 hex digits of the SHA-256 of its source."""
        return {n: hashlib.sha256(self._source(n).encode()).hexdigest()[:12] for n in names}

    def sizes(self, *starts: str) -> dict[str, int]:
        """Words of the task's own templates whose names begin with one of `starts`, by name."""
        files: list[Path] = []
        for folder in self.folders:
            if folder != BUILTIN / "prompts":
                files += [*folder.glob("*.md"), *folder.glob(f"{self.task}/*.md")]
        names = sorted({file.stem for file in files if file.stem.startswith(starts)})
        return {name: len(self._source(name).split()) for name in names}

    def is_shared(self, name: str) -> bool:
        """Whether the task has no template `name` of its own, and takes that of all tasks."""
        file = self._file(name)
        return file is not None and BUILTIN / "prompts" in file.parents

    def unopened(self, folder: Path) -> list[str]:
        """The task's templates in `folder`/prompts that were never rendered, by their paths."""
        prompts = folder / "prompts"
        files = [*prompts.glob("*.md"), *prompts.joinpath(self.task).glob("*.md")]
        return sorted(f.relative_to(prompts).as_posix() for f in files if f not in self.opened)

    def _source(self, name: str) -> str:
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
            f"It was looked for in {', '.join(str(f) for f in self.folders)}.",
            f"Write prompts/{name}.md, or prompts/{self.task}/{name}.md, in the task's folder.",
        )
