"""Problems of a tasks file, one per line: `FILE:LINE: place: what is wrong, what was expected`.

The words are our own, for the reader of a YAML file.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from soulkit.errors import BrokenFile, nearest
from soulkit.parse import ParseError, yaml_document

Spot = tuple[str | int, ...]
"""Keys and positions that lead to a value: `("tasks", "hints", "options", "texts", 0)`."""
SHOWN = 20
"""Problems to list."""
UNKNOWN = "there is no such key here."


class Problem(NamedTuple):
    """One problem at `spot` of the tasks file; of a template: in its line `line`, from 1."""

    spot: Spot
    text: str
    line: int = 0


class Misfit(ValueError):
    """Rules of a declaration are broken; spots are relative to the object that raises this."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = problems


def broken_file(path: Path, lines: Sequence[tuple[int, str]]) -> BrokenFile:
    """The error for a tasks file with problems (line, words)."""
    words = [f"{path}:{line}: {text}" for line, text in sorted(set(lines))]
    more = [f"and {len(words) - SHOWN} more"] if len(words) > SHOWN else []
    return BrokenFile(
        f"The tasks file '{path}' has {len(words)} problem{'s' * (len(words) > 1)}.",
        "\n".join([*words[:SHOWN], *more]),
        "Correct the file; docs/reference/task-keys.md lists every key.",
    )


# -- lines -----------------------------------------------------------------------------------------

_SYNTAX = {
    "'\\t'": "a tab; expected spaces",
    "mapping values are not allowed": "a second ': ' or other indentation than the lines above; "
    "expected one 'key: value', and quotes around a text with ': '",
    "could not find expected ':'": "no ': '; expected 'key: value'",
    "expected <block end>": "other indentation than the lines above, or text after a closing quote",
    "expected ',' or": "an open bracket, no comma, or a text without quotes; expected [a, b]",
    "constructor for the tag": "a tag (!…); expected plain values",
}
"""Words of PyYAML → what stands there, and what was expected."""


def parsed(path: Path, text: str) -> tuple[Any, yaml.Node | None]:
    """The plain values of a YAML text, and its nodes, which have line numbers."""
    try:
        return yaml_document(text)
    except ParseError as error:
        near = "".join(text.splitlines()[error.line - 1 : error.line]).strip()[:60]
        words = (fault for part, fault in _SYNTAX.items() if part in error.reason)
        fault = f"not YAML: '{near}': {next(words, error.reason)}"
        raise broken_file(path, [(max(error.line, 1), fault)]) from error


def placed(node: yaml.Node | None, problem: Problem, whole: type[BaseModel]) -> tuple[int, str]:
    """(line, words) of a problem of a file of the class `whole`: the line of the last key of its
    spot that the file has, and a hint for an unknown key."""
    mark, part = node, None
    for part in problem.spot:
        if isinstance(node, yaml.MappingNode):
            pairs = [pair for pair in node.value if pair[0].value == str(part)]
            mark, node = pairs[-1] if pairs else (mark, None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            mark = node = node.value[part]
    line = 1 if mark is None else mark.start_mark.line + 1
    block = isinstance(node, yaml.ScalarNode) and node.style in ("|", ">")
    place = ".".join(map(str, problem.spot)) or "the file"
    hint = f" {_hint(str(part), problem.spot[:-1], whole)}" if problem.text == UNKNOWN else ""
    return line + max(problem.line - (not block), 0), f"{place}: {problem.text}{hint}"


# -- words -----------------------------------------------------------------------------------------

_EXPECTED = {
    "string": "a text", "int": "a whole number", "float": "a number", "bool": "true or false",
    "tuple": "a list", "dict": "keys with values", "model": "keys with values",
    "string_too_short": "a text that is not empty",
}  # fmt: skip
"""Type of a validation error, or its first word → what was expected."""


def misfits(
    error: ValidationError, entry: Any, spot: Spot, *, rules: bool = True
) -> Iterator[Problem]:
    """The problems behind the validation error of `entry`, which is at `spot` of the file; without
    `rules` only those of single values."""
    wrong: dict[Spot, dict[str, None]] = {}
    for one in error.errors():
        kind, loc, about = one["type"], one["loc"], one.get("ctx", {})
        here, cause = _in_file(entry, loc), about.get("error")
        if cause is not None:
            faults = cause.problems if isinstance(cause, Misfit) else [Problem((), str(cause))]
            for fault in faults if rules else ():
                place = _in_file(entry, (*loc, *fault.spot))
                yield Problem((*spot, *place), fault.text, fault.line)
        elif loc[-1:] == ("[key]",):
            of = "of letters, digits and underscores" if "pattern" in kind else "between quotes"
            yield Problem((*spot, *here), f"this key does not fit; expected a text {of}")
        elif kind == "extra_forbidden":
            yield Problem((*spot, *here), UNKNOWN)
        elif kind == "missing":
            yield Problem((*spot, *here), f"the key '{loc[-1]}' is missing")
        else:
            wrong.setdefault(here, {})[_expected(kind, about)] = None
    for here, words in wrong.items():
        value = entry
        for part in here:
            value = value[part]
        shown, expected = reprlib.repr(value), " or ".join(words)
        shown = {"None": "an empty value", "True": "true", "False": "false"}.get(shown, shown)
        near = nearest(str(value), re.findall(r"[^|]+", expected.removeprefix("one of ")))
        hint = f". Did you mean '{near}'?" if near else ""
        if "a text" in words and isinstance(value, bool | int | float):
            hint = " between quotes (YAML reads yes, no, on and off as true and false)"
        yield Problem((*spot, *here), f"{shown} does not fit; expected {expected}{hint}")


def _in_file(value: Any, loc: Spot) -> Spot:
    """The parts of a validation error's place that the file has."""
    spot: Spot = ()
    for part in loc:
        places = range(len(value)) if isinstance(value, list) else ()
        keys = value if isinstance(value, Mapping) else places
        if part in keys:
            value, spot = value[part], (*spot, part)
    return spot


def _expected(kind: str, about: Mapping[str, Any]) -> str:
    if "expected" in about:
        return "one of " + "|".join(re.findall(r"'(.*?)'", about["expected"]))
    bounds = [f"a number {sign} {about[k]}" for k, sign in (("gt", ">"), ("ge", "≥")) if k in about]
    first = kind.partition("_")[0]
    return next(iter(bounds), _EXPECTED.get(kind) or _EXPECTED.get(first, "another value"))


def _hint(key: str, spot: Spot, whole: type[BaseModel]) -> str:
    """The nearest key of a place, else where the key belongs."""
    keys, of_task = _keys_at(spot, whole), _keys_at(("tasks", ""), whole)
    homes = [
        home for home in sorted(of_task) if key in _keys_at(("tasks", "", home), whole) - of_task
    ]
    if near := nearest(key, keys - {key}):
        return f"Did you mean '{near}'?"
    if key in keys:
        return "It needs a 'kind:'."
    if key in of_task and len(spot) > 2:
        return f"It belongs beside '{spot[2]}:'."
    return f"It belongs under '{homes[0]}:'." if homes else f"Expected: {', '.join(sorted(keys))}."


def _keys_at(spot: Spot, whole: type[BaseModel]) -> set[str]:
    """The keys that a place of a tasks file may have."""
    kinds = [whole.model_fields]
    for name in spot:
        inner = [f for fields in kinds if name in fields for f in _fields(fields[name].annotation)]
        kinds = inner or kinds  # a name in a mapping, a position in a list, or a plain value
    return {key for fields in kinds for key in fields} - {"declaration"}


def _fields(annotation: Any) -> Iterator[dict[str, FieldInfo]]:
    """The fields of the classes in an annotation; a task also has those of its `declaration`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield (fields := annotation.model_fields)
        yield from _fields(fields["declaration"].annotation) if "declaration" in fields else ()
    for part in get_args(annotation):
        yield from _fields(part)
