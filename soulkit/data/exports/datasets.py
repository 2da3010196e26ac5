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
from itertools import chain, islice
from typing import Any

from soulkit.data.exports.layouts import ExportFile, Layout, ReadOptions
from soulkit.data.exports.records import converted, records, sample_of
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


def message_words(item: Fields) -> tuple[str, tuple[str, ...]]:
    """The text of a message, and the kinds of its other parts: `image`."""
    marks = [str(mark) for mark in item.get("attachments") or ()]
    for name in WORDS:
        value = item.get(name)
        if isinstance(value, str):
            return value.strip(), tuple(marks)
        if not isinstance(value, list | tuple):
            continue
        texts = []
        for part in value:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                texts.append(text)
            elif isinstance(part, Mapping):
                marks.append(str(part.get("type") or "attachment").removesuffix("_url"))
        return "\n".join(text for text in texts if text).strip(), tuple(marks)
    return "", tuple(marks)


def chat_message(item: Any) -> dict[str, Any]:
    """A message with `role` (else `speaker`) and `content`; BadRecord if nobody speaks."""
    fields = item if isinstance(item, Mapping) else {}
    names = [fields[key].strip() for key in SPEAKERS if isinstance(fields.get(key), str)]
    role = next((ROLES[name.lower()] for name in names if name.lower() in ROLES), "")
    if not any(names):
        raise BadRecord("one of its messages has no speaker")
    text, marks = message_words(fields)
    extras = {name: fields[name] for name in _EXTRAS if fields.get(name) is not None}
    extras |= {"attachments": list(marks)} if marks else {}
    return {**({"role": role} if role else {"speaker": next(filter(None, names))}),
            "content": text, **extras}  # fmt: skip


def pair(asked: Any, replied: Any) -> list[Any]:
    """Two messages; either side may also be a list of messages."""
    sides = ("user", asked), ("assistant", replied)
    return [
        message
        for role, value in sides
        for message in (value if isinstance(value, list) else [{"role": role, "content": value}])
    ]


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


def _sharegpt(fields: Fields) -> Branches | None:
    items = _listed(fields)
    form = items and isinstance(items[0], Mapping) and {"from", "value"} <= items[0].keys()
    return [items] if items and form else None


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
    pair_ = [structure(fields.get(f"conversation_{side}")) for side in "ab"]
    if not all(isinstance(side, list) and side for side in pair_):
        prompt = structure(fields.get("prompt"))
        replies = [structure(fields.get(f"response_{side}")) for side in "ab"]
        if not all(replies):
            return None
        questions = prompt if isinstance(prompt, list) else [prompt]
        pair_ = [
            [message for q, r in zip(questions, reply if isinstance(reply, list) else [reply],
             strict=False) for message in pair(q, r)]
            for reply in replies
        ]  # fmt: skip
    second = str(fields.get("winner")).endswith("_b") or fields.get("winner_model_b") in (1, "1")
    return pair_[::-1] if second else pair_


def _alternating(fields: Fields) -> Branches | None:
    for name in ("data", "dialog", "dialogue", "utterances", *COLUMNS):
        texts = structure(fields.get(name))
        if (
            isinstance(texts, list)
            and len(texts) > 1
            and all(isinstance(text, str) for text in texts)
        ):
            roles = ("user", "assistant")
            return [[{"role": roles[n % 2], "content": t} for n, t in enumerate(texts)]]
    return None


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


_EXCHANGES = tuple(
    (a, r)
    for a, replies in {
        "instruction": ("output", "response", "completion"),
        "prompt": ("completion", "response", "chosen", "output"),
        "question": ("answer", "response"), "query": ("response", "answer"),
        "input": ("output",), "user": ("assistant",), "human": ("assistant",),
    }.items()
    for r in replies
)  # fmt: skip


def _exchange(fields: Fields) -> Branches | None:
    for asked, replied in _EXCHANGES:
        sides = [structure(fields.get(name)) for name in (asked, replied)]
        if not all(isinstance(v, str) or (isinstance(v, list) and _spoken(v)) for v in sides):
            continue
        more = fields.get("input") if asked == "instruction" else None
        if isinstance(more, str) and more.strip() and isinstance(sides[0], str):
            sides[0] = f"{sides[0]}\n\n{more}"
        before = structure(fields.get("history"))
        turns = [t for t in before if isinstance(t, list)] if isinstance(before, list) else []
        past = [message for turn in turns if len(turn) == 2 for message in pair(*turn)]
        others = [fields["rejected"]] if replied == "chosen" and fields.get("rejected") else []
        return [[*past, *pair(sides[0], reply)] for reply in (sides[1], *others)]
    lists = [structure(fields.get(name)) for name in ("chosen", "rejected")]
    return [v for v in lists if v] if isinstance(lists[0], list) and _spoken(lists[0]) else None


def _spoken(items: Sequence[Any]) -> bool:
    return bool(items) and all(
        isinstance(i, Mapping) and not {*SPEAKERS}.isdisjoint(i) for i in items
    )


Read = Callable[[Fields], Branches | None]
_ONE = '{"role": "user", "content": "hi"}'
FORMS: Mapping[str, tuple[str, Read]] = {
    "branches": ('{"conversation_history": [{"turn": 0, "role": "user", "content": "hi", '
                 '"if_chosen": true}]}', _chosen_replies),
    "ShareGPT": ('{"conversations": [{"from": "human", "value": "hi"}]}', _sharegpt),
    "messages": (f'{{"messages": [{_ONE}]}}', _messages),
    "tree": ('{"prompt": {"role": "prompter", "text": "hi", "replies": []}}', _nested_tree),
    "Arena pairs": (f'{{"conversation_a": [{_ONE}], "conversation_b": [{_ONE}], '
                    '"winner": "model_a"}', _arena),
    "HH texts": ('{"chosen": "Human: hi Assistant: hello"}', _texts),
    "lists of texts": ('{"data": ["hi", "hello", "bye"]}', _alternating),
    "prompt and completion": ('{"prompt": "hi", "completion": "hello"}', _exchange),
}  # fmt: skip
"""Name → example and reader; the first form that reads a record is used."""
CONVERSATIONS = ("branches", "ShareGPT", "messages", "tree")
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
    about = {"id": _first(fields, KEYS), "person": person_in(fields)}
    rest = {name: fields[name] for name in _KEPT if fields.get(name) is not None}
    named = {name: value for name, value in about.items() if value}
    return {**named, **rest, "messages": [chat_message(item) for item in messages]}


def _first(fields: Fields, names: Iterable[str]) -> str:
    return next((str(fields[name]) for name in names if fields.get(name)), "")


def person_in(fields: Fields) -> str:
    """The id of the person in a record; empty if it has none."""
    return _first(fields, PEOPLE)


# -- several records -----------------------------------------------------------------------------


def is_scattered(columns: Iterable[str]) -> bool:
    """Whether a conversation spans several records with these columns."""
    names = frozenset(columns)
    return names >= REPLIES or names >= TREE


def grouped(rows: Sequence[Fields]) -> Iterator[tuple[str, Fields, Iterator[Sequence[Any]]]]:
    """(layout, first record, branches) of every conversation in records of REPLIES or TREE."""
    names = frozenset(name for row in rows for name in row)
    if names >= REPLIES:
        threads: dict[str, list[Fields]] = defaultdict(list)
        for row in rows:
            threads[str(row.get("conversation_id"))].append(row)
        yield from (("replies", thread[0], _replies(thread)) for thread in threads.values())
        return
    children: dict[str, list[Fields]] = defaultdict(list)
    for row in rows:
        children[str(row.get("parent_id") or "")].append(row)
    for root in children[""]:
        yield "tree", root, _paths(root, lambda n: children.get(str(n.get("message_id"))))


def _replies(thread: Iterable[Fields]) -> Iterator[Sequence[Any]]:
    turns: dict[float, list[Fields]] = defaultdict(list)
    for row in thread:
        turns[_number(row.get("turn"))].append(row)
    order = [_best_first(turns[turn]) for turn in sorted(turns)]
    for path in _with_others(order):
        exchanges = (pair(r.get("user_prompt"), r.get("model_response")) for r in path)
        yield list(chain.from_iterable(exchanges))


# -- layouts -------------------------------------------------------------------------------------


def _layout(form: str) -> Layout:
    example, read = FORMS[form]

    def fits(file: ExportFile) -> bool:
        return any(_reads(read, record) for record in sample_of(file))

    def convert(record: Any, options: ReadOptions) -> Iterator[dict[str, Any]]:
        try:
            fields = flatten(record)
        except ValueError as error:
            raise BadRecord(str(error)) from error
        branches = branches_of(fields)[1]
        for messages in islice(branches, None if options.branches else 1):
            yield chat_row(fields, messages)

    return Layout(form, example, fits, lambda files, options: converted(files, convert, options))


def _reads(read: Read, record: Any) -> bool:
    try:
        return bool(read(flatten(record)))
    except (BadRecord, ValueError):
        return False


def _group_layout(name: str, example: str, columns: frozenset[str]) -> Layout:
    def fits(file: ExportFile) -> bool:
        rows = sample_of(file)
        return any(isinstance(row, Mapping) and row.keys() >= columns for row in rows)

    def rows(
        files: Sequence[ExportFile], options: ReadOptions
    ) -> Iterator[dict[str, Any] | BadRow]:
        everything = [row for file in files for _, row in records(file)]
        yield from (row for row in everything if isinstance(row, BadRow))
        for _, first, branches in grouped([row for row in everything if isinstance(row, Mapping)]):
            try:
                for messages in islice(branches, None if options.branches else 1):
                    yield chat_row(first, messages)
            except BadRecord as error:
                yield BadRow(_first(first, KEYS), str(error))

    return Layout(name, example, fits, rows)


LAYOUTS = (
    _group_layout("replies", '{"conversation_id": "c1", "turn": 0, "user_prompt": "hi", '
                  '"model_response": "hello"}', REPLIES),
    _group_layout("flat tree", '{"message_id": "m1", "parent_id": null, "role": "prompter", '
                  '"text": "hi"}', TREE),
    *map(_layout, FORMS),
)  # fmt: skip
