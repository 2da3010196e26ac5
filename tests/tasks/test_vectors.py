"""Conformance of readers that tasks share: thinking, long texts, and stories out of strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from soulkit.data.literals import parse_candidates, parse_choices, parse_story
from soulkit.judge.verdict import remove_think
from soulkit.metrics.text import token_f1
from soulkit.tasks.fantom.task import name_list
from soulkit.tasks.kit.prompting import first_words, last_words
from soulkit.tasks.social_r1.task import leading_letter
from tests.support.vectors import Vector, assert_matches, conformance
from tests.tasks.humanllm.reference import reformat_history

# -- published readers that no command runs --------------------------------------------------------


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


# -- thinking and long texts ---------------------------------------------------------------------

Input = Mapping[str, Any]


def split(fields: Input) -> dict[str, str]:
    think, content = split_think(fields["text"] or "")
    return {"think": think, "content": content}


READERS: dict[str, Callable[[Input], Any]] = {
    "remove_think": lambda fields: remove_think(fields["text"], fields["remove_unclosed"]),
    "split_think": split,
    "truncate_text": lambda fields: first_words(fields["text"], fields["n_words"]),
    "truncate_text_left": lambda fields: last_words(fields["text"], fields["n_words"]),
    "truncate_turns_for_reference": lambda fields: turns_within(
        fields["turns"], fields["max_words_per_turn"]
    ),
}
FORMULAS = {"split_think", "truncate_turns_for_reference"}


@conformance("common.parse", formula=FORMULAS)
def test_vector(vector: Vector) -> None:
    if vector.family != "split_think" and vector.input.get("text", "") is None:
        # A missing completion never gets here: there is no text to take anything out of.
        assert vector.expected["result"] is None
        return
    assert_matches(READERS[vector.family](vector.input), vector.expected["result"])


ROW_READERS: dict[str, Callable[[Any], Any]] = {
    "hitom.parse_choices": lambda value: parse_choices(value, "reference"),
    "paratomi.parse_story": lambda value: parse_story(value, "reference"),
    "paratomi.parse_candidates": lambda value: parse_candidates(value, "reference"),
    "humanllm.reformat_history": reformat_history,
    "social_r1.gold_letter": leading_letter,
    "fantom.str_to_list": name_list,
}
DIFFER = {"evaluates-python-source": "a data file must not run code"}


@conformance("rows.parse", differ=DIFFER, formula={"humanllm.reformat_history"})
def test_vector_of_rows(vector: Vector) -> None:
    if vector.family == "fantom.f1":
        f1 = token_f1(vector.input["gold"], vector.input["pred"])
        assert_matches(f1, vector.expected["result"])
        return
    value = vector.input["text" if "text" in vector.input else "value"]
    assert_matches(ROW_READERS[vector.family](value), vector.expected["result"])
