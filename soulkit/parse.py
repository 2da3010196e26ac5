"""Reads JSON and YAML of any origin in bounded time and memory.

Files are read up to a limit, and only regular ones: a pipe would wait forever, a device has no end.
Depth is limited before anything is built, because deep values exhaust the stack of the parser or of
the code that walks them later. Everything that cannot be read raises ParseError with a reason.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.text import byte_size

if TYPE_CHECKING:
    import yaml

DEPTH = 100
"""Maximum levels of lists and objects."""
FILE_BYTES = 64_000_000
YAML_BYTES = 1_000_000
YAML_NODES = 20_000
"""Maximum values in a YAML text, where an alias counts as all values that it repeats."""
DIGITS = 308
"""Maximum digits of a whole number, as of the largest floating-point number."""
PATTERN_ERRORS = (re.error, OverflowError, RecursionError)
"""What `re.compile` raises for a pattern that it does not accept."""
PATTERN_S, PATTERN_SIZE = 2, 200_000
"""Seconds that a pattern may take for one text, and its size with its repeats written out."""


class ParseError(ValueError):
    """The text or file cannot be read; the message is the reason. `line` is 0 if unknown."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(f"line {line}: {reason}" if line else reason)
        self.reason, self.line = reason, line


# -- files -----------------------------------------------------------------------------------------


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. ParseError for a folder, pipe, device or socket; OSError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ParseError("it is a folder, pipe, device or socket, not a regular file")
    return Path(path).open("rb")


def read_limited(path: Path, limit: int = FILE_BYTES) -> bytes:
    """The bytes of a regular file. ParseError if it is larger than `limit`; OSError."""
    with open_regular(path) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise ParseError(f"it is larger than {byte_size(limit)}")
    return content


def decoded(content: bytes) -> str:
    """UTF-8 text without a byte order mark; ParseError for other bytes."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ParseError("it is not UTF-8 text", content.count(b"\n", 0, error.start) + 1) from None


# -- JSON ------------------------------------------------------------------------------------------


def _constant(name: str) -> float:
    raise ParseError(f"{name} is not a valid number")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ParseError(f"the number {digits[:20]} is too large")
    return number


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ParseError(f"it has a number of more than {DIGITS} digits")
    return int(digits)


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ParseError(f"the key '{twice[:60]}' appears twice")
    return made


_LENIENT = json.JSONDecoder()
_FINITE = json.JSONDecoder(parse_float=_finite, parse_constant=_constant)
_NUMBERS: dict[str, Any] = {"parse_int": _whole, "parse_float": _finite}
STRICT = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=_constant, **_NUMBERS)
_ROW = json.JSONDecoder(
    object_pairs_hook=unique_keys, **_NUMBERS,
    parse_constant=lambda name: None if name == "NaN" else _constant(name),
)  # fmt: skip
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
_STRING = re.compile(rb'"[^"]*"')


def parse_json(
    text: str | bytes, *, depth: int = DEPTH, strict: bool = True, finite: bool = False,
    nan_is_null: bool = False,
) -> Any:  # fmt: skip
    """The value of a JSON text; ParseError if it is not JSON or deeper than `depth` levels.

    `strict` refuses what JSON allows or Python adds, but others cannot read or store: repeated
    keys, numbers without a finite value, unpaired surrogates. Without it, reading costs no more
    than `json.loads`, and `finite` refuses only numbers without a finite value. `nan_is_null` reads
    NaN as None.
    """
    if isinstance(text, bytes):
        text = decoded(text)
    if is_deep(text, depth):
        raise ParseError(f"it is nested too deeply (more than {depth} levels)")
    decoder = _ROW if nan_is_null else STRICT if strict else _FINITE if finite else _LENIENT
    try:
        value = decoder.decode(text.removeprefix("\ufeff"))
    except ParseError:
        raise
    except RecursionError:  # where `depth` allows more than Python's stack
        raise ParseError("it is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, or a number with too many digits for Python
        words = str(error) if isinstance(error, json.JSONDecodeError) else "a number is too long"
        raise ParseError(words) from None
    if strict and "\\u" in text and _SURROGATE.search(text) and _has_lone_surrogate(value):
        raise ParseError("it contains an unpaired surrogate, which cannot be stored as text")
    return value


def json_or_none(text: str) -> Any:
    """The value of a JSON text of a server or model; None if it is not JSON or too deep."""
    try:
        return parse_json(text, strict=False)
    except ParseError:
        return None


def is_deep(text: str, depth: int = DEPTH) -> bool:
    """Whether the JSON in `text` has more than `depth` levels; it need not be valid."""
    if text.count("[") + text.count("{") <= depth:
        return False
    content = text.encode("utf-8", "surrogatepass")
    if b"\\" in content:
        content = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = _STRING.sub(b"", content.translate(None, _NO_BRACKETS).replace(b'""', b""))
    left = brackets
    for removed in range(0, depth, 2):  # each pass removes the innermost one or two levels
        if removed + len(left) // 2 <= depth:
            return False
        left = left.replace(b"[]", b"").replace(b"{}", b"")
    return max(accumulate(1 if sign in b"[{" else -1 for sign in brackets)) > depth


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


# -- YAML ------------------------------------------------------------------------------------------


def parse_yaml(text: str | bytes, *, ours: bool = False) -> Any:
    """The plain value of a YAML text; ParseError if it is not YAML or too large or deep.

    Dates stay text, and tags such as `!!bool` are refused. `ours`: the text comes with soulkit, so
    it is read without limits by libyaml, which crashes on deeply nested input.
    """
    if ours:
        import yaml

        return yaml.load(text, Loader=_loader(fast=True))
    return yaml_document(text)[0]


def yaml_document(text: str | bytes) -> tuple[Any, yaml.Node | None]:
    """The value of a YAML text like `parse_yaml`, and its nodes, which know their lines."""
    import yaml

    if len(text) > YAML_BYTES:
        raise ParseError(f"it is larger than {byte_size(YAML_BYTES)}")
    text = decoded(text) if isinstance(text, bytes) else text
    try:
        loader = _loader()(text)
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    # PyYAML raises the others for values that it recognises but cannot build.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError,
            ArithmeticError, RecursionError) as error:  # fmt: skip
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = mark.line if mark else text.count("\n", 0, getattr(error, "position", 0) or 0)
        words = getattr(error, "problem", None) or getattr(error, "reason", None)
        raise ParseError(str(words or "a value that YAML cannot read"), line + 1) from error


@cache
def _loader(*, fast: bool = False) -> Any:
    """A loader for plain values that refuses repeated keys; without `fast`, also tags, deep values
    and aliases that repeat too much."""
    import yaml
    from yaml.constructor import ConstructorError

    base: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader) if fast else yaml.SafeLoader

    class OnceLoader(base):
        yaml_implicit_resolvers = {  # noqa: RUF012
            sign: [(tag, form) for tag, form in forms if not tag.endswith(":timestamp")]
            for sign, forms in base.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    if key.value in seen:
                        words = f"the key '{key.value}' appears twice"
                        raise ConstructorError(None, None, words, key.start_mark)
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    class LimitedLoader(OnceLoader):
        depth, nodes = 0, 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event, before = self.peek_event(), self.nodes
            sizes = self.__dict__.setdefault("sizes", {})
            alias = isinstance(event, yaml.AliasEvent)
            self.depth += 1
            self.nodes += sizes.get(event.anchor, 0) if alias else 1
            if problem := self.problem(event, alias and event.anchor not in sizes):
                raise ConstructorError(None, None, problem, event.start_mark)
            node = super().compose_node(parent, index)
            self.depth -= 1
            if event.anchor and not alias:
                sizes[event.anchor] = self.nodes - before
            return node

        def problem(self, event: Any, unknown: bool) -> str:
            tag, value = getattr(event, "tag", None), getattr(event, "value", "")
            if self.depth > DEPTH:
                return f"it is nested too deeply (more than {DEPTH} levels)"
            if self.nodes > YAML_NODES:
                return f"it has more than {YAML_NODES} values, counting what aliases repeat"
            if unknown:
                return f"the alias '*{event.anchor[:60]}' has no value before it"
            if tag not in (None, "!", "tag:yaml.org,2002:str"):
                return f"could not determine a constructor for the tag {tag[:60]!r}"
            if len(value) > DIGITS and self.resolve(
                yaml.ScalarNode, value, event.implicit
            ).endswith(":int"):
                return f"it has a number of more than {DIGITS} digits"
            if "\0" in value:
                return "it contains a null character"
            return "it contains an unpaired surrogate" if _has_lone_surrogate(value) else ""

    return OnceLoader if fast else LimitedLoader


# -- patterns --------------------------------------------------------------------------------------


def pattern_matches(pattern: str, text: str, flags: int = 0) -> Iterator[Any]:
    """The matches of a pattern from a file. ParseError if it is not valid, or takes too long, as
    `(a|aa)+$` does, or too much memory, as `a{99999999}` does."""
    import regex

    try:
        if _written_out(pattern) > PATTERN_SIZE:
            raise ParseError("its repeats are too large")
        yield from regex.finditer(pattern, text, flags, timeout=PATTERN_S)
    except TimeoutError as error:
        raise ParseError(f"it takes over {PATTERN_S} s for one text") from error
    except (regex.error, *PATTERN_ERRORS) as error:
        raise ParseError(str(error)) from error


_PIECE = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|\{(\d{1,9})\d*(?:,\d*)?\}|.", re.DOTALL
)


@lru_cache(1000)
def _written_out(pattern: str) -> int:
    """About the number of nodes of a pattern if `{n}` is written out n times, as `regex` does."""
    sizes, last = [0], 0
    for piece in _PIECE.finditer(pattern):
        if piece[1]:
            last, more = last * max(int(piece[1]), 1), last * max(int(piece[1]) - 1, 0)
        elif piece[0] == "(":
            sizes.append(0)
            continue
        elif piece[0] == ")" and len(sizes) > 1:
            last = more = sizes.pop() + 1
        else:
            last = more = 1
        sizes[-1] += more
    return sum(sizes)
