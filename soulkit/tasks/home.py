"""Where a task lives, and how the names in its declaration become Python objects.

A declaration names what belongs to a task as `module:attribute`, and the module is looked for in
the folder of the task first: beside the user's tasks file, in `soulkit/tasks/<folder>/`, or in the
folder of an installed package. So a task is laid out alike wherever it comes from.

    synth: rows:make_rows      →  the function make_rows of rows.py in the task's folder
    module: my_lab.tasks:Game  →  no such file there: the installed package my_lab

Which installed packages bring tasks of their own is known to installed.py.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

BUILTIN = Path(__file__).parent
"""The folder with the kit, its shared prompts, and one folder for each built-in benchmark."""


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of a task, and its name as a package where it is one."""

    folder: Path = BUILTIN
    package: str = ""
    distribution: str = ""
    """What was installed to bring the package; empty for others."""

    @classmethod
    def builtin(cls, name: str) -> Home:
        """The home of a benchmark that comes with soulkit."""
        return cls(BUILTIN / name, f"soulkit.tasks.{name}")

    @property
    def builtin_task(self) -> bool:
        """Whether a task that comes with soulkit lives here."""
        return self.folder.parent == BUILTIN

    @property
    def origin(self) -> str:
        """What an error adds to the name of a task that was installed."""
        return f" of the distribution '{self.distribution}'" if self.distribution else ""

    def load(self, reference: str) -> Any:
        """The object that `module:attribute` names.

        Raises what Python raises: ImportError, AttributeError, SyntaxError, ValueError. What else
        a module raises while it is imported is an ImportError here.
        """
        module, _, attribute = reference.partition(":")
        try:
            return getattr(self._module(module), attribute or "missing")
        except (ImportError, AttributeError, SyntaxError, ValueError):
            raise
        except (Exception, SystemExit) as error:
            raise ImportError(f"{type(error).__name__}: {error}") from error

    def _module(self, name: str) -> ModuleType:
        file = self.folder.joinpath(*name.split(".")).with_suffix(".py")
        if not file.is_file():
            self._beside()
            return importlib.import_module(name)
        if self.package:
            return importlib.import_module(f"{self.package}.{name}")
        self._beside()
        # A name of its own: two users' files may both be called my_task.py, or random.py.
        mark = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
        unique = f"soulkit_user_{mark}.{name}"
        return sys.modules.get(unique) or _execute(unique, file)

    def _beside(self) -> None:
        """What a user's file imports from beside it is found, too."""
        if not self.package and self.folder != BUILTIN and str(self.folder) not in sys.path:
            sys.path.append(str(self.folder))


def _execute(unique: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(unique, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"no loader for {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module
