"""Prompt templates: files with a hash, rendered for one reader.

`prompts/<name>.md` in the task's folder, or `prompts/<task>/<name>.md` where several tasks share
one; then beside the classes that the task's own derives from; then among the prompts that all tasks
share. A template that names
something its reader may not see fails (strict undefined), it does not render an empty string.
"""

from __future__ import annotations

import hashlib
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

from soulkit.errors import ConfigError
from soulkit.tasks.home import BUILTIN


class PromptFolder:
    """The templates of one task."""

    def __init__(self, task: str, *folders: Path) -> None:
        self.task = task
        self.folders = [folder / "prompts" for folder in dict.fromkeys((*folders, BUILTIN))]

    @cached_property
    def _environment(self) -> Environment:
        # Prompts are plain text for a model, not HTML: escaping would change what the model reads.
        return Environment(
            loader=FileSystemLoader(self.folders),
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
                "Mend the braces; docs/tasks.md shows a complete prompt.",
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

    def _source(self, name: str) -> str:
        path = self._path(name)
        file = next((f / path for f in self.folders if (f / path).exists()), None)
        if file is None:
            raise self._missing(name)
        return file.read_text(encoding="utf-8")

    def _missing(self, name: str) -> ConfigError:
        return ConfigError(
            f"The prompt '{name}.md' of task '{self.task}' does not exist.",
            f"It was looked for in {', '.join(str(f) for f in self.folders)}.",
            f"Write prompts/{name}.md, or prompts/{self.task}/{name}.md, in the task's folder.",
        )
