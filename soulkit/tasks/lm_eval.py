"""Tasks of lm-evaluation-harness as tasks without code (`soul tasks import lm-eval FILE`).

Every key is converted, refused with its line, or left out because it changes no score here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from soulkit.data.files import read_bytes, read_rows
from soulkit.errors import BrokenFile, ConfigError
from soulkit.parse import PATTERN_ERRORS
from soulkit.tasks.kit.declared.problems import Problem, parsed, placed
from soulkit.tasks.kit.spec import RegistryFile

ASKED = """Multiple choice is asked here (the model writes a letter), not scored by log-likelihood:
figures of lm-evaluation-harness are not comparable."""
_IDLE = re.compile(
    r"task(_alias)?|tag|group|metadata|dataset_\w+|\w+_split|fewshot_\w+|description"
    r"|target_delimiter|\w*decontaminat\w+"
)
"""Keys without a step of their own. Few-shot examples are refused as `num_fewshot`."""
_NAME = re.compile(r"(?:\{\{)?\s*(\w+)(?:\.text)?\s*(?:\}\})?")
_NAMES = re.compile(r"\{\{\s*\[([\w\s,]+)\]\s*\}\}")
_INDEX = re.compile(r"\{\{.*\.index\(\s*(\w+)[\w.()]*\s*\)\s*\}\}")
LONGEST = 1000
"""Maximum characters of a text that may be one of these; the patterns take quadratic time."""
_SAMPLING = {"max_gen_toks": "max_tokens", "temperature": "temperature", "top_p": "top_p"}


class _Conversion:
    def __init__(self, task: Mapping[str, Any], columns: set[str]) -> None:
        self.task, self.columns = task, columns
        self.entry: dict[str, Any] = {}
        self.notes: list[str] = []
        self.problems: list[Problem] = []
        steps = {"output_type": self._kind, "doc_to_text": self._prompt,
                 "doc_to_choice": self._options, "doc_to_target": self._gold,
                 "generation_kwargs": self._sampling, "filter_list": self._filter,
                 "metric_list": self._metric}  # fmt: skip
        for key, value in task.items():
            neutral = (key, value) in (("num_fewshot", 0), ("repeats", 1))
            if key not in steps and not _IDLE.fullmatch(str(key)) and not neutral:
                self._refuse("this key may change scores and cannot be converted", key)
        for key, step in steps.items():
            try:
                step(key, task.get(key))
            except (AttributeError, TypeError, LookupError, *PATTERN_ERRORS):
                self._refuse("this value cannot be converted", key)

    def _refuse(self, why: str, *spot: str | int) -> None:
        self.problems.append(Problem(spot, why))

    def _column(self, value: Any, pattern: re.Pattern[str] = _NAME) -> str:
        """The column that a name or a template names; empty if it is none."""
        text = str(value).strip()
        match = pattern.fullmatch(text) if len(text) < LONGEST else None
        return match[1] if match and match[1] in self.columns else ""

    def _kind(self, key: str, value: Any) -> None:
        self.entry["kind"] = {"multiple_choice": "choice"}.get(value, "text")
        if value not in ("multiple_choice", "generate_until", None):
            self._refuse("expected multiple_choice or generate_until", key)
        self.notes += [ASKED] if self.entry["kind"] == "choice" else []

    def _prompt(self, key: str, value: str) -> None:
        text = f"{{{{ {value} }}}}" if value in self.columns else value
        if self.entry["kind"] == "choice":  # the options and the form of the answer follow
            bare = text.rstrip()
            text = bare.removesuffix("Answer:").rstrip() if bare.endswith("Answer:") else text
        self.entry["prompt"] = self.task.get("description", "") + text

    def _options(self, key: str, value: Any) -> None:
        if self.entry["kind"] == "text":
            return
        names = _NAMES.fullmatch(str(value).strip())
        parts = names[1].split(",") if names else value if isinstance(value, list) else []
        columns = [self._column(part) for part in parts]
        if names or any("{{" in str(part) for part in parts):
            self.entry["options"] = {"columns": columns} if all(columns) else ""
        else:
            self.entry["options"] = [str(part) for part in parts] or self._column(value)
        if not self.entry["options"]:
            self._refuse("expected a list of texts, a column, or {{ [some, columns] }}", key)

    def _gold(self, key: str, value: Any) -> None:
        options = self.entry.get("options")
        if isinstance(value, int) and isinstance(options, dict):
            self.entry["gold"] = options["columns"][value]
        else:
            self.entry["gold"] = self._column(value) or self._column(value, _INDEX)
        if not self.entry["gold"]:
            self._refuse("expected a column, or {{ list.index(column) }}", key)

    def _sampling(self, key: str, value: Any) -> None:
        sampling = {"temperature": 0.0} if (value or {}).get("do_sample") is False else {}
        for name, setting in (value or {}).items():
            if name in _SAMPLING:
                sampling[_SAMPLING[name]] = setting
            elif name == "until":
                self.notes.append("Replies are not cut at the texts of 'until'.")
            elif name != "do_sample":
                self._refuse("this setting cannot be converted", key, name)
        self.entry |= {"sampling": sampling} if sampling else {}

    def _filter(self, key: str, value: Any) -> None:
        for place, step in enumerate(value[0]["filter"] if value else ()):
            function, pattern = step["function"], step.get("regex_pattern", "")
            if function == "regex" and (groups := re.compile(pattern).groups) < 2:
                self.entry["answer"] = pattern if groups else f"({pattern or '.+'})"
                self.notes.append("The answer is the last match of the pattern.")
            elif function == "lowercase":
                self.entry["scorer"] = "normalised"
            elif function not in ("take_first", "remove_whitespace"):
                self._refuse("this filter cannot be converted", key, 0, "filter", place)
        if len(value or ()) > 1:
            self.notes.append(f"Of {len(value)} filters only '{value[0].get('name')}' is used.")

    def _metric(self, key: str, value: Any) -> None:
        choice, scorer = self.entry["kind"] == "choice", self.entry.get("scorer", "exact")
        for place, one in enumerate(value or ()):
            if one["metric"] not in (("acc", "acc_norm") if choice else ("exact_match",)):
                self._refuse(f"expected {'acc' if choice else 'exact_match'}", key, place, "metric")
            loose = one.get("ignore_case") or one.get("ignore_punctuation")
            scorer = "number" if "regexes_to_ignore" in one else "normalised" if loose else scorer
        if not choice:
            self.entry["scorer"] = scorer
            self.notes.append(f"Answers are compared by the scorer '{scorer}'.")


def import_lm_eval(
    path: Path, rows: Path | None, folder: Path | None
) -> tuple[str, Path, list[str]]:
    """Convert a task's file; (task, tasks file written, notes). BrokenFile if it cannot be
    converted, ConfigError if the tasks file exists."""
    raw, node = parsed(path, read_bytes(path).decode("utf-8", "replace"))
    task = raw if isinstance(raw, Mapping) else {}
    read = read_rows(rows)[0] if rows is not None else []
    converted = _Conversion(task, {name for row in read for name in row.fields})
    problems = converted.problems
    if rows is None:
        problems = [Problem(("dataset_path",), "rows are not downloaded: give a file, --data ROWS")]
    if problems:
        places = sorted(placed(node, problem, RegistryFile) for problem in problems)
        lines = "\n".join(f"{path}:{line}: {words}" for line, words in places)
        fix = "Remove what the task can do without, or see docs/guides/tasks-in-yaml.md."
        raise BrokenFile(f"'{path}' cannot be converted.", lines, fix)
    name = re.sub(r"\W", "_", str(task.get("task") or path.stem))
    notes = [f"From {path.name} of lm-evaluation-harness.", *converted.notes]
    comments = "".join(f"# {line}\n" for line in "\n".join(notes).splitlines())
    entry = yaml.safe_dump({"tasks": {name: converted.entry}}, sort_keys=False, allow_unicode=True)
    target = (folder or Path(name)) / "tasks.yaml"
    if target.exists():
        why = "It is not overwritten."
        raise ConfigError(f"'{target}' exists already.", why, "Choose another folder with -o.")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(comments + entry, encoding="utf-8")
    return name, target, converted.notes
