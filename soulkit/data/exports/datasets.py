"""Layouts of data sets: one conversation per record, or per group of records.

FORMS reads a record on its own, so the same code reads exports, training data and the chats of
tasks. GROUPED needs all records: one reply per record (REPLIES) and trees with one message per
record (TREE). A record with several branches gives the best one first: the one that was chosen,
won, or has the best rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, cycle, islice, starmap
from typing import Any

from soulkit.data.exports.layouts import ExportFile, Layout, ReadOptions
from soulkit.data.exports.records import TREE_DEPTH, converted, records, sample_of
from soulkit.data.files import BadRecord, BadRow, flatten
from soulkit.data.literals import structure

COLUMNS = ("messages", "conversation", "conversations", "turns", "conversation_history")
"""Columns that may hold the list of messages; the first one present is used."""
REPLIES = frozenset(("conversation_id", "user_prompt", "model_response"))
TREE = frozenset(("message_id", "parent_id", "role", "text"))
KEYS = ("conversation_id", "conversation_hash", "message_tree_id", "id")
PEOPLE = ("person", "user_id", "hashed_ip", "author")
ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "person"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatbot", "bot", "ai"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "ipython", "observation", "function_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
SPEAKERS = ("role", "from", "speaker", "name", "author")
WORDS = ("content", "value", "text")
_EXTRAS = ("time", "attachments", "canary", "trained", "weight", "token_ids", "tool_calls", "name")
_KEPT = ("data_source", "system", "fact", "tokenizer", "evaluation_only", "licence")

Fields = Mapping[str, Any]
Branches = Iterable[Sequence[Any]]


# -- messages ------------------------------------------------------------------------------------


def fields_of(row: Any) -> dict[str, Any]:
    """A record as flat fields; BadRecord if it is none."""
    try:
        return flatten(row, TREE_DEPTH)
    except ValueError as error:
        raise BadRecord(str(error)) from error


def message_words(item: Fields) -> tuple[str, tuple[str, ...]]:
    """The text of a message, and the kinds of its other parts: `image`."""
    marks = [str(mark) for mark in item.get("attachments") or ()]
    values = (item.get(name) for name in WORDS)
    value = next((v for v in values if isinstance(v, str | list | tuple)), "")
    texts = []
    for part in [value] if isinstance(value, str) else value:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            texts.append(text)
        elif isinstance(part, Mapping):
            marks.append(str(part.get("type") or "attachment").removesuffix("_url"))
    return "\n".join(filter(None, texts)).strip(), tuple(marks)


def speaker_words(item: Any) -> tuple[dict[str, str], str]:
    """What a message says about its speaker, by key, and the role; BadRecord if it says nothing."""
    if not isinstance(item, Mapping):
        raise BadRecord("one of its messages is not an object")
    said = {key: item[key].strip() for key in SPEAKERS if isinstance(item.get(key), str)}
    words = {key: word for key, word in said.items() if word}
    if not words:
        raise BadRecord("one of its messages has no speaker")
    return words, next((ROLES[w.lower()] for w in words.values() if w.lower() in ROLES), "")


def chat_message(item: Any) -> dict[str, Any]:
    """A message with `role` (else `speaker`) and `content`; BadRecord if nobody speaks."""
    words, role = speaker_words(item)
    text, marks = message_words(item)
    extras = {name: item[name] for name in _EXTRAS if item.get(name) is not None}
    extras |= {"attachments": list(marks)} if marks else {}
    who = {"role": role} if role else {"speaker": next(iter(words.values()))}
    return {**who, "content": text, **extras}


def pair(asked: Any, replied: Any) -> list[Any]:
    """Two messages; either side may also be a list of messages."""
    sides = ("user", asked), ("assistant", replied)
    return [message for role, value in sides
            for message in (value if isinstance(value, list)
                            else [{"role": role, "content": value}])]  # fmt: skip


# -- one record: its branches, the best one first; None if it has another form ---------------------


def _listed(fields: Fields) -> Sequence[Any] | None:
    values = (structure(fields.get(name)) for name in COLUMNS)
    return next((v for v in values if isinstance(v, list | tuple) and v), None)


def _chosen_replies(fields: Fields) -> Branches | None:
    items = _listed(fields)
    if not items or not any(isinstance(i, Mapping) and "if_chosen" in i for i in items):
        return None
    turns: dict[tuple[Any, Any], list[Fields]] = {}
    for item in items:
        if not isinstance(item, Mapping):
            raise BadRecord(f"an entry of its history is not an object: {item!r:.60}")
        turns.setdefault((item.get("turn"), chat_message(item).get("role")), []).append(item)
    return _with_others([_best_first(replies) for replies in turns.values()])


def _with_others(turns: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
    """The conversation of all first entries; then up to each other entry, which ends it."""
    path = [replies[0] for replies in turns]
    yield path
    for place, replies in enumerate(turns):
        yield from ([*path[:place], other] for other in replies[1:])


def _best_first(replies: Sequence[Fields]) -> list[Fields]:
    """The reply that the person continued with, then by rating."""
    return sorted(replies, key=lambda r: (not r.get("if_chosen"), -_number(r.get("score"))))


def _number(value: Any, absent: float = float("-inf")) -> float:
    return float(value) if isinstance(value, int | float) else absent


def _messages(fields: Fields) -> Branches | None:
    items = _listed(fields)
    return None if items is None or isinstance(items[0], str) else [items]


def _nested_tree(fields: Fields) -> Branches | None:
    root = structure(fields.get("prompt"))
    if not isinstance(root, Mapping) or not isinstance(root.get("replies"), list):
        return None
    return _paths(root, lambda node: node.get("replies"))


def _paths(root: Fields, below: Callable[[Fields], Any]) -> Iterator[list[Fields]]:
    """The paths from a root to its leaves, the lowest rank (the best reply) first."""
    stack = [[root]]
    while stack:
        path = stack.pop()
        replies = below(path[-1])
        nodes = [n for n in replies or () if isinstance(n, Mapping)]
        nodes = [node for node in nodes if all(node is not before for before in path)]
        nodes.sort(key=lambda node: _number(node.get("rank"), float("inf")), reverse=True)
        stack += [[*path, node] for node in nodes]
        if not nodes:
            yield path


def _arena(fields: Fields) -> Branches | None:
    talks = [structure(fields.get(f"conversation_{side}")) for side in "ab"]
    if not all(isinstance(talk, list) and talk for talk in talks):
        asked, *replies = (structure(fields.get(n)) for n in ("prompt", "response_a", "response_b"))
        if not all(replies):
            return None
        turns = [zip(_several(asked), _several(reply), strict=False) for reply in replies]
        talks = [list(chain.from_iterable(starmap(pair, exchanges))) for exchanges in turns]
    second = str(fields.get("winner")).endswith("_b") or fields.get("winner_model_b") in (1, "1")
    return talks[::-1] if second else talks


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _alternating(fields: Fields) -> Branches | None:
    names = ("data", "dialog", "dialogue", "utterances", *COLUMNS)
    lists = (_several(structure(fields.get(name))) for name in names)
    texts = next((v for v in lists if len(v) > 1 and all(isinstance(t, str) for t in v)), None)
    roles = cycle(("user", "assistant"))
    return texts and [[{"role": next(roles), "content": text} for text in texts]]


_TURN = re.compile(r"(?:(?:^|\n)\s*|#{2,3} ?)(Human|User|Assistant):")


def _texts(fields: Fields) -> Branches | None:
    names = ("chosen", "rejected", "text", "transcript", "conversation")
    texts = [fields[n] for n in names if isinstance(fields.get(n), str)]
    texts = [text for text in texts if (first := _TURN.search(text)) and not first.start()]
    if not texts:
        return None
    return [
        [{"role": "assistant" if who == "Assistant" else "user", "content": text}
         for who, text in zip(parts[1::2], parts[2::2], strict=True) if text.strip()]
        for parts in map(_TURN.split, texts)
    ]  # fmt: skip


_REPLIES = {
    "instruction": ("output", "response", "completion"),
    "prompt": ("completion", "response", "chosen", "output"),
    "question": ("answer", "response"), "query": ("response", "answer"),
    "input": ("output",), "user": ("assistant",), "human": ("assistant",),
}  # fmt: skip
"""Column of a question → columns that may hold the reply."""


def _exchange(fields: Fields) -> Branches | None:
    for asked, names in _REPLIES.items():
        replied = next((name for name in names if _is_side(structure(fields.get(name)))), "")
        question, reply = (structure(fields.get(name)) for name in (asked, replied))
        if not replied or not _is_side(question):
            continue
        more = fields.get("input") if asked == "instruction" else None
        if isinstance(more, str) and more.strip() and isinstance(question, str):
            question = f"{question}\n\n{more}"
        before = _several(structure(fields.get("history")))
        turns = (turn for turn in before if isinstance(turn, list) and len(turn) == 2)
        past = list(chain.from_iterable(starmap(pair, turns)))
        others = [fields["rejected"]] if replied == "chosen" and fields.get("rejected") else []
        return [[*past, *pair(question, one)] for one in (reply, *others)]
    lists = [structure(fields.get(name)) for name in ("chosen", "rejected")]
    whole = isinstance(lists[0], list) and _is_side(lists[0])
    return [messages for messages in lists if messages] if whole else None


def _is_side(value: Any) -> bool:
    """Whether a value is a text or a list of messages."""
    return isinstance(value, str) or (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(i, Mapping) and not {*SPEAKERS}.isdisjoint(i) for i in value)
    )


Read = Callable[[Fields], Branches | None]
_ONE = '{"role": "user", "content": "hi"}'
FORMS: Mapping[str, tuple[str, Read]] = {
    "branches": ('{"conversation_history": [{"turn": 0, "role": "user", "content": "hi", '
                 '"if_chosen": true}]}', _chosen_replies),
    "messages": (f'{{"messages": [{_ONE}]}}', _messages),
    "tree": ('{"prompt": {"role": "prompter", "text": "hi", "replies": []}}', _nested_tree),
    "Arena pairs": (f'{{"conversation_a": [{_ONE}], "conversation_b": [{_ONE}], '
                    '"winner": "model_a"}', _arena),
    "HH texts": ('{"chosen": "Human: hi Assistant: hello"}', _texts),
    "lists of texts": ('{"data": ["hi", "hello", "bye"]}', _alternating),
    "prompt and completion": ('{"prompt": "hi", "completion": "hello"}', _exchange),
}  # fmt: skip
"""Name → example and reader; the first form that reads a record is used."""
CONVERSATIONS = ("branches", "messages", "tree")
"""Forms of recorded conversations; the others may also be rows of tasks."""


def branches_of(fields: Fields, forms: Iterable[str] = FORMS) -> tuple[str, Iterator[Any]]:
    """The form of a record and its branches, best first; BadRecord if it has none of `forms`."""
    for form in forms:
        branches = FORMS[form][1](fields)
        if branches is not None:
            return form, iter(branches)
    raise BadRecord(f"it has no list of messages under {', '.join(COLUMNS)}")


def chat_row(fields: Fields, messages: Iterable[Any]) -> dict[str, Any]:
    """A row of chats: the id and the person of a record, and its messages."""
    about = {"id": key_in(fields), "person": person_in(fields)}
    about |= {name: fields[name] for name in _KEPT if fields.get(name) is not None}
    known = {name: value for name, value in about.items() if value != ""}
    return {**known, "messages": [chat_message(item) for item in messages]}


def key_in(fields: Fields) -> str:
    """The id of the conversation in a record; empty if it has none."""
    return next((str(fields[name]) for name in KEYS if fields.get(name)), "")


def person_in(fields: Fields) -> str:
    """The id of the person in a record; empty if it has none."""
    return next((str(fields[name]) for name in PEOPLE if fields.get(name)), "")


# -- several records -----------------------------------------------------------------------------


def is_scattered(columns: Iterable[str]) -> bool:
    """Whether a conversation spans several records with these columns."""
    names = frozenset(columns)
    return names >= REPLIES or names >= TREE


def grouped(rows: Sequence[Fields]) -> Iterator[tuple[str, Fields, Iterator[Sequence[Any]]]]:
    """(layout, first record, branches) of every conversation in records of REPLIES or TREE."""
    flat = frozenset(name for row in rows for name in row) >= REPLIES
    groups: dict[str, list[Fields]] = defaultdict(list)
    for row in rows:
        groups[str(row.get("conversation_id" if flat else "parent_id") or "")].append(row)
    if flat:
        yield from (("replies", thread[0], _replies(thread)) for thread in groups.values())
    else:
        for root in groups[""]:
            yield "tree", root, _paths(root, lambda n: groups.get(str(n.get("message_id"))))


def _replies(thread: Iterable[Fields]) -> Iterator[Sequence[Any]]:
    turns: dict[float, list[Fields]] = defaultdict(list)
    for row in thread:
        turns[_number(row.get("turn"))].append(row)
    for path in _with_others([_best_first(turns[turn]) for turn in sorted(turns)]):
        exchanges = (pair(r.get("user_prompt"), r.get("model_response")) for r in path)
        yield list(chain.from_iterable(exchanges))


# -- layouts -------------------------------------------------------------------------------------


def record_layout(
    name: str, example: str, fits: Callable[[Fields], Any],
    convert: Callable[[Any, ReadOptions], Iterable[dict[str, Any]]],
) -> Layout:  # fmt: skip
    """A layout with a conversation per record, known by its first records."""

    return Layout(name, example, partial(_has_record, fits), partial(converted, convert))


def _has_record(fits: Callable[[Fields], Any], file: ExportFile) -> bool:
    return any(isinstance(record, Mapping) and fits(record) for record in sample_of(file))


def _rows(record: Any, options: ReadOptions) -> Iterator[dict[str, Any]]:
    fields = fields_of(record)
    return _chat_rows(fields, branches_of(fields)[1], options)


def _chat_rows(
    fields: Fields, branches: Iterable[Sequence[Any]], options: ReadOptions
) -> Iterator[dict[str, Any]]:
    for messages in islice(branches, None if options.branches else 1):
        yield chat_row(fields, messages)


def _reads(read: Read, record: Fields) -> bool:
    try:
        return bool(read(fields_of(record)))
    except BadRecord:
        return False


def _grouped_rows(
    files: Sequence[ExportFile], options: ReadOptions
) -> Iterator[dict[str, Any] | BadRow]:
    everything = [row for file in files for _, row in records(file)]
    yield from (row for row in everything if isinstance(row, BadRow))
    for _, first, branches in grouped([row for row in everything if isinstance(row, Mapping)]):
        try:
            yield from _chat_rows(first, branches, options)
        except BadRecord as error:
            yield BadRow(key_in(first), str(error))


LAYOUTS = (
    Layout("replies", '{"conversation_id": "c1", "turn": 0, "user_prompt": "hi", '
           '"model_response": "hello"}', partial(_has_record, lambda r: r.keys() >= REPLIES),
           _grouped_rows),
    Layout("flat tree", '{"message_id": "m1", "parent_id": null, "role": "prompter", '
           '"text": "hi"}', partial(_has_record, lambda r: r.keys() >= TREE), _grouped_rows),
    *(record_layout(form, example, partial(_reads, read), _rows)
      for form, (example, read) in FORMS.items()),
)  # fmt: skip
