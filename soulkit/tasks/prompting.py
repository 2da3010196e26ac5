"""Prompt templates: files with a hash, rendered for one reader.

`prompts/<task>/<name>.md` in the package, or beside a user's own tasks file. A template that names
something its reader may not see fails (strict undefined), it does not render an empty string.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from importlib import resources
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


class PromptFolder:
    """The templates of one task."""

    def __init__(self, task: str, folder: Path | None = None) -> None:
        self.task = task
        packaged = Path(str(resources.files("soulkit.tasks"))) / "prompts"
        self.folders = [*([folder / "prompts"] if folder else []), packaged]

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
        own = f"{self.task}/{name}.md"
        shared = f"shared/{name}.md"
        return own if any((folder / own).exists() for folder in self.folders) else shared

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
        found = next((f / path for f in self.folders if (f / path).exists()), None)
        if found is None:
            raise self._missing(name)
        return found.read_text(encoding="utf-8")

    def _missing(self, name: str) -> ConfigError:
        return ConfigError(
            f"The prompt '{name}.md' of task '{self.task}' does not exist.",
            f"It was looked for in {', '.join(str(f / self.task) for f in self.folders)}.",
            f"Write prompts/{self.task}/{name}.md beside your tasks file.",
        )
