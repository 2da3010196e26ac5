"""What hostile text must not become on a page: elements, handlers, addresses, escapes."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

MARK = "zq7"
"""In every hostile text, so that checks recognise it; lower case survives parsers."""
LARGEST = 40_000_000
"""Bytes that a page of a small run with a text of a megabyte may take."""

_TAGS = frozenset(re.findall(r"\w+", """
    html head meta title style link body header footer main section article nav p h1 h2 h3 h4 ul li
    dl dt dd div span strong b i em s u bdi code kbd pre br small table caption thead tbody tr th td
    details summary figure figcaption form label input select option button progress fieldset legend
    noscript script svg g path rect line text circle polyline polygon desc tspan ins del blockquote
"""))  # fmt: skip
_ADDRESSES = frozenset(("href", "src", "action", "formaction", "xlink:href", "srcset", "data",
                        "poster", "background", "cite", "ping", "manifest"))  # fmt: skip
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


class _Page(HTMLParser):
    """Collects the faults of a page while it is parsed as a browser would parse it."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.policy, self.kind, self.held = "", "", ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag not in _TAGS:
            self.faults.append(f"an element <{tag[:40]}>")
        self.policy += values.get("content", "") if "http-equiv" in values else ""
        self.kind = values.get("type", "code") if tag == "script" else tag
        self.held = ""
        for name, value in values.items():
            own = value.startswith(("#", "data:,", "episodes/"))
            if name.startswith("on") or MARK in name or name == "srcdoc":
                self.faults.append(f"an attribute {name[:40]}")
            if name in _ADDRESSES and not own:
                self.faults.append(f"an address {name}={value[:60]}")
            if name == "style" and ("url" in value or MARK in value):
                self.faults.append(f"a style {value[:60]}")

    def handle_data(self, data: str) -> None:
        self.held += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "style" and (MARK in self.held or "@import" in self.held):
            self.faults.append("text in a style sheet")
        if tag == "script" and self.kind == "code":
            digest = base64.b64encode(hashlib.sha256(self.held.encode()).digest()).decode()
            if f"sha256-{digest}" not in self.policy:
                self.faults.append(f"a script {self.held[:60]!r}")
        if tag == "script" and self.kind != "code" and not re.fullmatch(r"[\w+/=\s]*", self.held):
            self.faults.append(f"data that is not in base64: {self.held[:60]!r}")

    def handle_comment(self, data: str) -> None:
        if MARK in data:
            self.faults.append(f"a comment {data[:60]!r}")

    def handle_pi(self, data: str) -> None:
        if not data.startswith("xml "):
            self.faults.append(f"an instruction {data[:60]!r}")

    def unknown_decl(self, data: str) -> None:
        self.faults.append(f"a declaration {data[:60]!r}")


def html_faults(text: str, *, alone: bool = True) -> list[str]:
    """`alone`: the text is a whole page, which must have a policy against other content."""
    page = _Page()
    page.feed(text)
    page.close()
    if alone and "default-src 'none'" not in page.policy:
        page.faults.append("no policy against other content")
    if match := _INVISIBLE.search(text):
        page.faults.append(f"the control character {match[0]!r}")
    return page.faults


def markdown_faults(text: str) -> Iterator[str]:
    """Markup that is neither escaped nor inside code."""
    plain = re.sub(r"(`+)[^`]+?\1", "", re.sub(r"\\[!-/:-@\[-`{-~]", "", text))
    for line in plain.splitlines():
        if MARK in line and (match := re.search(r"<[a-z!/?]|\]\(|!\[", line, re.IGNORECASE)):
            yield f"Markdown {match[0]!r} in {line[:80]!r}"
    if match := _INVISIBLE.search(text):
        yield f"the control character {match[0]!r}"


def page_faults(folder: Path, output: str) -> Iterator[str]:
    """What is wrong with the pages in a folder and with the output of a command."""
    if match := re.search("[\u061c\u202a-\u202e\u2066-\u2069]", output):
        yield f"a mark of direction in the output: {match[0]!r}"
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or "input" in file.relative_to(folder).parts:
            continue
        if file.stat().st_size > LARGEST:
            yield f"{file.name} has {file.stat().st_size} bytes"
        if file.suffix in (".html", ".svg", ".md"):
            text = file.read_text(encoding="utf-8")
            alone = file.suffix == ".html"
            faults = (
                markdown_faults(text) if file.suffix == ".md" else html_faults(text, alone=alone)
            )
            yield from (f"{file.name}: {fault}" for fault in faults)
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
