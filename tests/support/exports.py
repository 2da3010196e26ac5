"""Exports in the forms that other programs write: name → (files, layout, rows read)."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

USER, REPLY, THANKS = "Which bread keeps?", "Rye.", "مرحبا, thanks"
TALK = [("user", USER), ("assistant", REPLY), ("user", THANKS)]
MESSAGES = [{"role": role, "content": text} for role, text in TALK]


@dataclass(frozen=True)
class Sample:
    """One export, and what a reader must make of it."""

    files: Mapping[str, Any]
    """Name → text, or a value that is written as JSON (lists as lines for .jsonl)."""
    layout: str
    talk: list[tuple[str, str]] = field(default_factory=lambda: list(TALK))
    """(role or speaker, text) of the first conversation."""
    conversations: int = 1

    def write(self, folder: Path, form: str = "folder") -> Path:
        """Write the export as a folder, a .zip file, or its only file."""
        folder.mkdir(parents=True, exist_ok=True)
        if form == "zip":
            with zipfile.ZipFile(folder / "export.zip", "w", zipfile.ZIP_DEFLATED) as archive:
                for name, value in self.files.items():
                    archive.writestr(name, as_text(name, value))
            return folder / "export.zip"
        for name, value in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(as_text(name, value), encoding="utf-8")
        return folder / next(iter(self.files)) if form == "file" else folder


def as_text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if name.endswith("l"):
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in value)
    return json.dumps(value, ensure_ascii=False)


def node(
    name: str, parent: str | None, role: str, parts: list[Any], **more: Any
) -> tuple[str, dict[str, Any]]:
    """A node of ChatGPT's mapping."""
    content = {"content_type": more.pop("kind", "text"), "parts": parts}
    message = {"id": name, "author": {"role": role, "name": more.pop("tool", None)},
               "create_time": 1700000000.5, "content": content, "weight": 1.0,
               "recipient": "all", "metadata": {}, **more}  # fmt: skip
    return name, {"id": name, "parent": parent, "children": [], "message": message}


PICTURE = {"content_type": "image_asset_pointer", "asset_pointer": "file-service://x"}
CHATGPT = {
    "title": "Bread", "create_time": 1700000000.1, "update_time": 1700000009.0,
    "mapping": dict([
        ("root", {"id": "root", "message": None, "parent": None, "children": ["s"]}),
        node("s", "root", "system", [""], metadata={"is_visually_hidden_from_conversation": True}),
        node("c", "s", "user", ["I bake."], kind="user_editable_context"),
        node("u1", "c", "user", [PICTURE, USER], kind="multimodal_text",
             metadata={"attachments": [{"name": "a.png", "mime_type": "image/png"},
                                       {"name": "b.pdf", "mime_type": "application/pdf"}]}),
        node("a0", "u1", "assistant", ["Cake."]),
        node("t1", "u1", "assistant", ["Hm."], kind="thoughts"),
        node("q", "t1", "assistant", ["search('rye')"], kind="code", recipient="browser"),
        node("r", "q", "tool", ["3 hits"], tool="browser"),
        node("a1", "r", "assistant", [REPLY]),
        node("u2", "a1", "user", [THANKS]),
    ]),
    "current_node": "u2", "conversation_id": "c1", "id": "c1",
}  # fmt: skip
EMPTY_CHATGPT = {"title": "New chat", "mapping": {}, "current_node": None, "id": "c0"}
CLAUDE = {
    "uuid": "c1", "name": "Bread", "created_at": "2024-05-01T10:00:00Z",
    "account": {"uuid": "u7"},
    "chat_messages": [
        {"uuid": "1", "text": USER, "sender": "human", "created_at": "2024-05-01T10:00:00Z",
         "content": [{"type": "text", "text": USER}], "files": [],
         "attachments": [{"file_name": "a.txt", "file_type": "txt", "extracted_content": "x"}]},
        {"uuid": "2", "text": "", "sender": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm."},
            {"type": "tool_use", "name": "web_search", "input": {"query": "rye"}},
            {"type": "tool_result", "name": "web_search",
             "content": [{"type": "text", "text": "3 hits"}]},
            {"type": "text", "text": REPLY}], "attachments": [], "files": []},
        {"uuid": "3", "text": THANKS, "sender": "human", "content": []},
    ],
}  # fmt: skip
ACTIVITY = [
    {"header": "Gemini Apps", "title": f"Prompted {USER}", "time": "2024-05-01T10:00:00.1Z",
     "products": ["Gemini Apps"], "safeHtmlItem": [{"html": "<p>Rye &amp; <b>spelt</b>.</p>"}]},
    {"header": "Gemini Apps", "title": "Used an Assistant feature", "products": ["Gemini Apps"]},
]  # fmt: skip
STUDIO = {"runSettings": {"model": "models/gemini"}, "systemInstruction": {"text": "Be kind."},
          "chunkedPrompt": {"chunks": [
              {"text": USER, "role": "user"}, {"text": "Hm.", "role": "model", "isThought": True},
              {"text": REPLY, "role": "model"}, {"text": THANKS, "role": "user"}]}}  # fmt: skip
CONTENTS = {"systemInstruction": {"parts": [{"text": "Be kind."}]}, "contents": [
    {"role": {"user": "user", "assistant": "model"}[role], "parts": [{"text": text}]}
    for role, text in TALK]}  # fmt: skip
KIND = [("system", "Be kind."), *TALK]
SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}[r], "value": t} for r, t in TALK]
TREE = {"message_tree_id": "t", "prompt": {"role": "prompter", "text": USER, "replies": [
    {"role": "assistant", "text": "Cake.", "rank": 1},
    {"role": "assistant", "text": REPLY, "rank": 0, "replies": [
        {"role": "prompter", "text": THANKS, "replies": []}]}]}}  # fmt: skip
FLAT = [
    {"message_id": "1", "parent_id": None, "role": "prompter", "text": USER, "user_id": "u"},
    {"message_id": "2", "parent_id": "1", "role": "assistant", "text": "Cake.", "rank": 1},
    {"message_id": "3", "parent_id": "1", "role": "assistant", "text": REPLY, "rank": 0},
    {"message_id": "4", "parent_id": "3", "role": "prompter", "text": THANKS},
]
REPLIES = [
    {"conversation_id": "c", "turn": 0, "user_prompt": USER, "model_response": REPLY, "score": 9},
    {"conversation_id": "c", "turn": 0, "user_prompt": USER, "model_response": "Cake.", "score": 1},
    {"conversation_id": "c", "turn": 1, "user_prompt": THANKS, "model_response": "Yes."},
]
HH = "".join(f"\n\n{'Human' if role == 'user' else 'Assistant'}: {text}" for role, text in TALK)
ONE = TALK[:2]
CAKE = [*MESSAGES[:1], {"role": "assistant", "content": "Cake."}]

SAMPLES: dict[str, Sample] = {
    "ChatGPT": Sample(
        {"conversations.json": [EMPTY_CHATGPT, CHATGPT], "user.json": {"id": "user-1"},
         "chat.html": "<html>", "message_feedback.json": [{"id": "1", "rating": "thumbsUp"}],
         "file-x.png": "x"}, "ChatGPT export",
        [("user", USER), ("assistant", ""), ("tool", "3 hits"), *TALK[1:]]),
    "ChatGPT in parts": Sample(
        {"conversations-000.json": [CHATGPT], "conversations-001.json": [{**CHATGPT, "id": "c2",
         "conversation_id": "c2"}]}, "ChatGPT export",
        [("user", USER), ("assistant", ""), ("tool", "3 hits"), *TALK[1:]], conversations=2),
    "Claude": Sample(
        {"conversations.json": [CLAUDE, {**CLAUDE, "uuid": "c2", "chat_messages": []}],
         "users.json": [{"uuid": "u7", "full_name": "Ada"}],
         "projects.json": [{"uuid": "p", "name": "x", "docs": []}]}, "Claude export",
        [("user", USER), ("assistant", ""), ("tool", "3 hits"), *TALK[1:]]),
    "Gemini activity": Sample(
        {"My Activity/Gemini Apps/MyActivity.json": ACTIVITY}, "Gemini activity",
        [("user", USER), ("assistant", "Rye & spelt.")]),
    "AI Studio": Sample({"Bread.json": STUDIO}, "Gemini chat", KIND),
    "Gemini contents": Sample({"train.jsonl": [CONTENTS] * 2}, "Gemini chat", KIND, 2),
    "messages": Sample({"a.jsonl": [{"messages": MESSAGES}]}, "messages"),
    "messages in an array": Sample({"a.json": [{"id": 1, "turns": MESSAGES}]}, "messages"),
    "messages as text": Sample({"a.csv": 'id,messages\n1,"{}"\n'.format(
        json.dumps(MESSAGES).replace('"', '""'))}, "messages"),
    "ShareGPT": Sample({"sg.json": [{"id": "x", "conversations": SHAREGPT}]}, "messages"),
    "ShareGPT in one object": Sample({"sg.json": {"conversations": SHAREGPT}}, "messages"),
    "branches": Sample({"a.jsonl": [{"conversation_history": [
        {"turn": 0, "role": "user", "content": USER},
        {"turn": 0, "role": "model", "content": "Cake.", "if_chosen": False},
        {"turn": 0, "role": "model", "content": REPLY, "if_chosen": True},
        {"turn": 1, "role": "user", "content": THANKS}]}]}, "branches"),
    "tree": Sample({"trees.jsonl": [TREE]}, "tree"),
    "flat tree": Sample({"flat.jsonl": FLAT}, "flat tree"),
    "replies": Sample({"a.jsonl": REPLIES}, "replies", [*TALK, ("assistant", "Yes.")]),
    "Arena": Sample({"arena.json": [{"question_id": "q", "winner": "model_b",
        "conversation_a": CAKE, "conversation_b": MESSAGES}]}, "Arena pairs"),
    "Arena texts": Sample({"arena.csv": "id,prompt,response_a,response_b,winner_model_b\n1,"
        f'"[""{USER}""]","[""Cake.""]","[""{REPLY}""]",1\n'}, "Arena pairs", ONE),
    "HH": Sample({"hh.jsonl": [{"chosen": HH, "rejected": HH + "x"}]}, "HH texts"),
    "guanaco": Sample({"a.jsonl": [{"text": f"### Human: {USER}### Assistant: {REPLY}"}]},
        "HH texts", ONE),
    "UltraChat": Sample({"a.jsonl": [{"id": "0", "data": [text for _, text in TALK]}]},
        "lists of texts"),
    "prompt and completion": Sample({"a.jsonl": [{"prompt": USER, "completion": REPLY}]},
        "prompt and completion", ONE),
    "lists of prompt and completion": Sample({"a.jsonl": [{"prompt": MESSAGES[:1],
        "completion": MESSAGES[1:]}]}, "prompt and completion"),
    "instructions": Sample({"alpaca.json": [{"instruction": "Answer.", "input": USER,
        "output": REPLY}]}, "prompt and completion",
        [("user", f"Answer.\n\n{USER}"), ("assistant", REPLY)]),
    "question and answer": Sample({"qa.csv": f"question,answer\n{USER},{REPLY}\n"},
        "prompt and completion", ONE),
}  # fmt: skip
"""Case → sample. The first sample of a layout stands for it; the others are its variants."""
