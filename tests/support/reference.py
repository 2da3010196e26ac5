"""Published readers shared by several benchmarks that no command runs: vectors alone check them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from soulkit.judge.verdict import remove_think
from soulkit.tasks.kit.prompting import first_words


def split_think(text: str) -> tuple[str, str]:
    """(the thoughts of closed blocks, `seed` blocks first; what is left), both stripped."""
    blocks = [body for kind in ("seed:think", "think") for body in _bodies(text, kind)]
    return "\n".join(body.strip() for body in blocks).strip(), remove_think(text)


def _bodies(text: str, kind: str) -> Iterator[str]:
    """What stands between each opening mark of a kind and the next closing one."""
    opening, closing = f"<{kind}>", f"</{kind}>"
    start = text.find(opening)
    while start >= 0 and (end := text.find(closing, start + len(opening))) >= 0:
        yield text[start + len(opening) : end]
        start = text.find(opening, end + len(closing))


def turns_within(turns: Iterable[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Messages with at most `count` words each; a message without content says nothing."""
    return [{**turn, "content": _cut(turn.get("content", ""), count)} for turn in turns]


def _cut(content: Any, count: int) -> Any:
    return first_words(content, count) if isinstance(content, str) else content
