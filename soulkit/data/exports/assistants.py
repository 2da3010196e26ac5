"""Exports of chats with assistants: ChatGPT, Claude, Gemini."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from soulkit.data.exports.datasets import record_layout
from soulkit.data.exports.layouts import Layout, ReadOptions
from soulkit.data.exports.records import Convert, attachment_kind, html_words, spoken_message
from soulkit.data.files import BadRecord

Fields = Mapping[str, Any]
Message = dict[str, Any]


def leaf_paths(
    parents: Mapping[str, str | None], current: str | None, branches: bool
) -> Iterator[list[str]]:
    """The ids from the root to `current`, else to the last leaf; with `branches` also to all other
    leaves."""
    inner = set(parents.values())
    leaves = [name for name in parents if name not in inner]
    first = current if current in parents else next(reversed(leaves), "")
    others = [leaf for leaf in leaves if leaf != first] if branches else []
    for node in [first, *others]:
        path: dict[str, None] = {}
        while node and node in parents and node not in path:
            path[node] = None
            node = parents[node] or ""
        yield list(path)[::-1]


def _call(name: Any, arguments: Any) -> dict[str, Any]:
    return {"function": {"name": str(name), "arguments": arguments}}


# -- ChatGPT -------------------------------------------------------------------------------------

_HIDDEN = {"thoughts": "reasoning", "reasoning_recap": "reasoning",
           "user_editable_context": "custom instructions",
           "model_editable_context": "memories"}  # fmt: skip
_POINTERS = re.compile(r"(image|audio|video)_")


def _chatgpt(record: Fields, options: ReadOptions) -> Iterator[dict[str, Any]]:
    mapping = record.get("mapping")
    if not isinstance(mapping, Mapping):
        raise BadRecord("its mapping is not an object")
    nodes = {name: node for name, node in mapping.items() if isinstance(node, Mapping)}
    parents = {name: node.get("parent") for name, node in nodes.items()}
    key = record.get("conversation_id") or record.get("id")
    for path in leaf_paths(parents, record.get("current_node"), options.branches):
        messages = (_of_node(nodes[name].get("message"), options) for name in path)
        yield {"id": key, "messages": [m for m in messages if m]}


def _of_node(message: Any, options: ReadOptions) -> Message | None:
    if not isinstance(message, Mapping):
        return None
    about, content = message.get("metadata") or {}, message.get("content") or {}
    author, kind = message.get("author") or {}, content.get("content_type")
    role, hidden = author.get("role"), _HIDDEN.get(str(kind), "")
    if not hidden and about.get("is_visually_hidden_from_conversation"):
        hidden = "hidden messages"
    parts = content.get("parts") or [content.get("text") or content.get("result")]
    texts = [part if isinstance(part, str) else _text_in(part) for part in parts]
    pointers = (p.get("content_type") for p in parts if isinstance(p, Mapping) and not _text_in(p))
    kinds = [m[1] for kind in pointers if (m := _POINTERS.match(str(kind)))]
    files = [
        attachment_kind(f.get("mime_type") or f.get("mimeType"))
        for f in about.get("attachments") or ()
    ]
    kinds += [file for file in files if file == "file" or file not in kinds]
    more: Message = {}
    text, to = "\n".join(filter(None, texts)), message.get("recipient")
    if role == "assistant" and to not in (None, "all"):
        text, more = "", {"tool_calls": [_call(to, text)]}
    elif role == "tool" and author.get("name"):
        more = {"name": author["name"]}
    turn = spoken_message("role", role, text, message.get("create_time"), kinds, **more)
    if hidden and turn:
        options.left_out[hidden] += 1
    return None if hidden else turn


def _text_in(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else ""
    return text if isinstance(text, str) else ""


# -- Claude --------------------------------------------------------------------------------------


def _claude(record: Fields, options: ReadOptions) -> Iterator[dict[str, Any]]:
    items = [m for m in record.get("chat_messages") or () if isinstance(m, Mapping)]
    nodes = {str(m.get("uuid") or n): m for n, m in enumerate(items)}
    parents = {name: m.get("parent_message_uuid") for name, m in nodes.items()}
    linked = any(parent in nodes for parent in parents.values())
    current = record.get("current_leaf_message_uuid")
    paths = leaf_paths(parents, current, options.branches) if linked else [list(nodes)]
    person = (record.get("account") or {}).get("uuid")
    for path in paths:
        messages = [m for name in path for m in _of_claude(nodes[name], options)]
        yield {"id": record.get("uuid"), **({"person": person} if person else {}),
               "messages": messages}  # fmt: skip


def _of_claude(item: Fields, options: ReadOptions) -> Iterator[Message]:
    role = {"human": "user", "assistant": "assistant"}.get(str(item.get("sender")))
    if role is None:
        raise BadRecord(f"a message has the sender {item.get('sender')}")
    files = [*(item.get("attachments") or ()), *(item.get("files") or ())]
    kinds = [attachment_kind(f.get("file_type") or f"{f.get('file_kind')}/") for f in files]
    time, texts, told = item.get("created_at"), [], []
    for block in item.get("content") or ():
        match block.get("type"):
            case "text":
                texts.append(_text_in(block))
            case "thinking":
                options.left_out["reasoning"] += 1
            case "tool_use":
                calls = [_call(block.get("name"), block.get("input"))]
                told.append(spoken_message("role", role, "", time, tool_calls=calls))
            case "tool_result":
                blocks, name = block.get("content"), block.get("name") or "tool"
                text = blocks if isinstance(blocks, str) else "\n".join(map(_text_in, blocks or ()))
                told.append(spoken_message("role", "tool", text, time, name=name))
    said = "\n".join(filter(None, texts)) or item.get("text")
    yield from filter(None, [*told, spoken_message("role", role, said, time, kinds)])


# -- Gemini --------------------------------------------------------------------------------------


def _gemini(record: Fields, options: ReadOptions) -> Iterator[dict[str, Any]]:
    """AI Studio's chats, and `contents` as the Gemini API has them."""
    chunks = (record.get("chunkedPrompt") or {}).get("chunks")
    contents = chunks or record.get("contents") or ()
    system = record.get("systemInstruction") or record.get("system_instruction") or {}
    messages = [_of_gemini(c, options) for c in contents if isinstance(c, Mapping)]
    messages = [m for m in [_of_gemini({**system, "role": "system"}, options), *messages] if m]
    yield {"id": record.get("id"), "messages": messages}


def _of_gemini(content: Fields, options: ReadOptions) -> Message | None:
    role = {"model": "assistant", "system": "system"}.get(str(content.get("role")), "user")
    texts, kinds, calls = [], [], []
    for part in [content] if "parts" not in content else content["parts"] or ():
        if part.get("isThought") or part.get("thought"):
            options.left_out["reasoning"] += 1
        elif call := part.get("functionCall"):
            calls.append(_call(call.get("name"), call.get("args")))
        elif answer := part.get("functionResponse"):
            return spoken_message("role", "tool", answer.get("response"), name=answer.get("name"))
        elif text := _text_in(part):
            texts.append(text)
        else:  # inlineImage, driveVideo, fileData
            inner = ((re.sub("^(inline|drive)", "", name).lower(), value)
                     for name, value in part.items() if isinstance(value, Mapping))  # fmt: skip
            kinds += [attachment_kind(value.get("mimeType") or f"{kind}/") for kind, value in inner]
    time, text = content.get("createTime"), "\n".join(texts)
    return spoken_message("role", role, text, time, kinds, tool_calls=calls)


def _activity(record: Fields, options: ReadOptions) -> Iterator[dict[str, Any]]:
    """One entry of Takeout's My Activity: a question and its reply, without a conversation."""
    asked, replies = str(record.get("title", "")), record.get("safeHtmlItem") or ()
    texts = [html_words(str(item.get("html", ""))) for item in replies]
    if not texts:
        options.left_out["activities without a reply"] += 1
        return
    kinds = [
        attachment_kind(name)
        for name in record.get("attachedFiles") or record.get("imageFile") or ()
    ]
    time = record.get("time")
    question = spoken_message("role", "user", asked.removeprefix("Prompted "), time, kinds)
    messages = [question, spoken_message("role", "assistant", "\n".join(texts), time)]
    yield {"messages": [message for message in messages if message]}


# -- layouts -------------------------------------------------------------------------------------


def _layout(name: str, example: str, fits: Callable[[Fields], Any], convert: Convert) -> Layout:
    def rows(record: Any, options: ReadOptions) -> Iterable[dict[str, Any]]:
        if not isinstance(record, Mapping) or not fits(record):
            raise BadRecord(f"it is not a record of a {name}")
        return convert(record, options)

    return record_layout(name, example, fits, rows)


LAYOUTS = (
    _layout("ChatGPT export", '[{"title": "Bread", "mapping": {"id1": {"message": {"author": '
            '{"role": "user"}, "content": {"parts": ["hi"]}}}}, "current_node": "id2"}]',
            lambda r: isinstance(r.get("mapping"), Mapping) and not {"current_node", "title",
            "conversation_id"}.isdisjoint(r), _chatgpt),
    _layout("Claude export", '[{"uuid": "c1", "chat_messages": [{"sender": "human", '
            '"text": "hi"}]}]',
            lambda r: "chat_messages" in r, _claude),
    _layout("Gemini activity", '[{"header": "Gemini Apps", "title": "Prompted hi", '
            '"safeHtmlItem": [{"html": "<p>hello</p>"}]}]',
            lambda r: "title" in r and "Gemini" in f"{r.get('header')} {r.get('products')}",
            _activity),
    _layout("Gemini chat", '{"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}',
            lambda r: ("chunks" in r["chunkedPrompt"] if isinstance(r.get("chunkedPrompt"), Mapping)
            else isinstance(r.get("contents"), list)), _gemini),
)  # fmt: skip
