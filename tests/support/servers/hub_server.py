"""A data-set hub on a real loopback socket, which speaks to the real hub client.

    with HubServer({"owner/name": {"rows.parquet": content}}) as hub:
        Hub("soul data pull", endpoint=hub.url, wait_s=0.0)

It knows `/api/datasets/REPO[/revision/REV]` (with `blobs=true` sizes and checksums) and
`/datasets/REPO/resolve/REV/PATH` (a model's without `/datasets`), what the hub's file system asks
for (`tree`, `paths-info`), with ETag, X-Repo-Commit,
X-Linked-Etag and X-Linked-Size. Row files are in large-file storage: their `resolve` redirects to
the same server under another host name, as the hub redirects to its storage, where a token must not
follow. Ranges are honoured.

`faults` maps the number of a content request (from 0) to what goes wrong with it. Every request is
kept in `requests`, and `sent` counts the bytes of content that left the server.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.servers.loopback import Loopback

Files = Mapping[str, bytes]
STORED = (".parquet",)
"""What lies in large-file storage; everything else is a git blob."""
CHUNK = 2_048


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one request for content."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    """Promise the rest of the file, send this many bytes, close the connection."""
    damage: bool = False
    """Send other bytes of the same length."""
    whole: bool = False
    """Answer a range with the whole file and 200."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    host: str
    range: str
    authorization: str


def commit_of(files: Files) -> str:
    """The commit at which a data set has these files."""
    mark = hashlib.sha1(usedforsecurity=False)
    for name in sorted(files):
        mark.update(name.encode() + files[name])
    return mark.hexdigest()


def blob_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class HubServer(Loopback):
    """Serves data sets until it is left; `older` are commits before the newest, newest first."""

    def __init__(
        self,
        repos: Mapping[str, Files],
        *,
        older: Mapping[str, list[Files]] | None = None,
        faults: Mapping[int, Fault] | None = None,
        token: str | None = None,
        gated: bool = False,
        plain_listing: bool = False,
        wrong_checksum: bool = False,
        api_status: int | None = None,
        api_body: bytes | None = None,
        says: str = "the kitchen is closed",
        pause_s: float = 0.0,
    ) -> None:
        self.commits: dict[str, list[Files]] = {
            repo: [files, *(older or {}).get(repo, [])] for repo, files in repos.items()
        }
        self.faults = dict(faults or {})
        self.token, self.gated = token, gated
        self.plain_listing, self.wrong_checksum = plain_listing, wrong_checksum
        self.says = says
        self.raw: Mapping[str, Callable[[], Iterable[bytes]]] = {}
        """Method and start of a path → the bytes to send in place of an answer, for ever if need
        be; an empty chunk is a pause."""
        self.api_status, self.api_body, self.pause_s = api_status, api_body, pause_s
        self.requests: list[Request] = []
        self.sent = 0
        self.contents = 0
        self.lock = threading.Lock()
        super().__init__(_Http(("127.0.0.1", 0), self))

    def push(self, repo: str, files: Files) -> str:
        """A new commit on the main branch."""
        self.commits[repo].insert(0, files)
        return commit_of(files)

    def paths(self, method: str) -> list[str]:
        return [r.path for r in self.requests if r.method == method]

    def at(self, repo: str, revision: str | None) -> Files | None:
        commits = self.commits[repo]
        if revision in (None, "main"):
            return commits[0]
        return next((files for files in commits if commit_of(files) == revision), None)

    def sha256(self, content: bytes) -> str:
        return hashlib.sha256(content + (b"x" if self.wrong_checksum else b"")).hexdigest()

    def listed(self, repo: str, files: Files, blobs: bool) -> dict[str, Any]:
        siblings = [self._sibling(name, files[name], blobs) for name in sorted(files)]
        return {"id": repo, "sha": commit_of(files), "private": False, "siblings": siblings}

    def _sibling(self, name: str, content: bytes, blobs: bool) -> dict[str, Any]:
        if not blobs or self.plain_listing:
            return {"rfilename": name}
        entry = {"rfilename": name, "size": len(content), "blobId": blob_hash(content)}
        if name.endswith(STORED):
            stored = {"size": len(content), "sha256": self.sha256(content), "pointerSize": 130}
            return {**entry, "lfs": stored}
        return entry


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], owner: HubServer) -> None:
        self.owner = owner
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is killed in the middle is part of the tests, not a fault to print."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def do_POST(self) -> None:
        self._route()

    def _route(self) -> None:
        owner, url = self.server.owner, urlsplit(self.path)
        host = (self.headers.get("Host") or "").partition(":")[0]
        token = self.headers.get("Authorization", "")
        seen = Request(self.command, url.path, host, self.headers.get("Range", ""), token)
        with owner.lock:
            owner.requests.append(seen)
        for start, answer in owner.raw.items():
            if f"{self.command} {url.path}".startswith(start):
                self._send_raw(answer())
                return
        path = unquote(url.path)
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._listing(match[1], match[2], "blobs" in url.query)
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", path):
            self._tree(match[1], match[2], match[3] or "", "recursive=true" in url.query.lower())
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/paths-info/([^/]+)", path):
            self._paths(match[1], match[2])
        elif match := re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/storage/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            self._content(match[1], match[2], match[3])
        else:
            self._error(404, "", "no such page")

    def _send_raw(self, chunks: Iterable[bytes]) -> None:
        self.close_connection, end = True, time.monotonic() + 60
        for chunk in chunks:
            self.wfile.write(chunk or b"")
            self.wfile.flush()
            if not chunk:
                time.sleep(0.2)
            if time.monotonic() > end:
                return

    # -- what the hub refuses --

    def _refused(self, repo: str, revision: str | None) -> bool:
        owner = self.server.owner
        if owner.token and self.headers.get("Authorization") != f"Bearer {owner.token}":
            if owner.gated:
                self._error(403, "GatedRepo", f"Access to dataset {repo} is restricted.")
            else:
                self._error(401, "RepoNotFound", "Invalid username or password.")
        elif repo not in owner.commits:
            self._error(404, "RepoNotFound", "Repository not found")
        elif owner.at(repo, revision) is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return False
        return True

    def _error(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self._send(status, json.dumps({"error": message}).encode(), headers)

    # -- what it serves --

    def _listing(self, repo: str, revision: str | None, blobs: bool) -> None:
        owner = self.server.owner
        if owner.api_status is not None:
            self._error(owner.api_status, "", owner.says)
        elif owner.api_body is not None:
            self._send(200, owner.api_body, {})
        elif not self._refused(repo, revision):
            files = owner.at(repo, revision)
            assert files is not None
            self._send(200, json.dumps(owner.listed(repo, files, blobs)).encode(), {})

    def _tree(self, repo: str, revision: str, folder: str, deep: bool) -> None:
        """What lies in a folder, as the file system of the hub's client asks for it."""
        if self._refused(repo, revision):
            return
        files = self.server.owner.at(repo, revision)
        assert files is not None
        start = f"{folder}/" if folder else ""
        below = {name: content for name, content in files.items() if name.startswith(start)}
        entries = [self._entry(name, content) for name, content in sorted(below.items())]
        if not deep:
            nested = {name for name in below if "/" in name.removeprefix(start)}
            heads = {start + name.removeprefix(start).partition("/")[0] for name in nested}
            entries = [e for e in entries if e["path"] not in nested]
            entries += [{"type": "directory", "path": h, "oid": "0" * 40} for h in sorted(heads)]
        if not entries:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        self._send(200, json.dumps(entries).encode(), {})

    def _entry(self, name: str, content: bytes) -> dict[str, Any]:
        entry = {"type": "file", "path": name, "size": len(content), "oid": blob_hash(content)}
        if name.endswith(STORED):
            stored = {"oid": self.server.owner.sha256(content), "size": len(content)}
            return {**entry, "lfs": {**stored, "pointerSize": 130}}
        return entry

    def _paths(self, repo: str, revision: str) -> None:
        """The files among the paths that are asked about; others are left out."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self._refused(repo, revision):
            return
        files = self.server.owner.at(repo, revision)
        assert files is not None
        typed = "json" in (self.headers.get("Content-Type") or "")
        asked_for = json.loads(body)["paths"] if typed else parse_qs(body.decode())["paths"]
        paths = [asked_for] if isinstance(asked_for, str) else asked_for
        entries = [self._entry(name, files[name]) for name in paths if name in files]
        folders = [n for n in paths if any(f.startswith(f"{n}/") for f in files)]
        entries += [{"type": "directory", "path": n, "oid": "0" * 40} for n in folders]
        self._send(200, json.dumps(entries).encode(), {})

    def _resolve(self, repo: str, revision: str, path: str) -> None:
        if self._refused(repo, revision):
            return
        owner = self.server.owner
        files = owner.at(repo, revision)
        assert files is not None
        if path not in files:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        content, commit = files[path], commit_of(files)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not path.endswith(STORED):
            self._body(content, {**headers, "ETag": f'"{blob_hash(content)}"'})
            return
        linked = {"X-Linked-Etag": f'"{owner.sha256(content)}"', "X-Linked-Size": str(len(content))}
        there = f"http://localhost:{owner.port}/storage/{repo}/{commit}/{path}"
        self._send(302, b"", {**headers, **linked, "Location": there})

    def _content(self, repo: str, commit: str, path: str) -> None:
        files = self.server.owner.at(repo, commit)
        if files is None or path not in files:
            self._error(404, "EntryNotFound", "Entry not found")
        else:
            self._body(files[path], {"ETag": f'"{hashlib.sha256(files[path]).hexdigest()}"'})

    def _body(self, content: bytes, headers: Mapping[str, str]) -> None:
        fault = self._next_fault()
        if fault.status != 200:
            self._send(fault.status, b"{}", fault.headers)
            return
        if fault.damage:
            content = bytes(255 - byte for byte in content)
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(byte_range[1]) if byte_range and not fault.whole else 0
        inside = bool(byte_range and byte_range[2] and not fault.whole)
        total = len(content)
        content = content[: int(byte_range[2]) + 1] if byte_range and inside else content
        ranged = {"Content-Range": f"bytes {start}-{len(content) - 1}/{total}"}
        partial = bool(start or inside)
        self.send_response(206 if partial else 200)
        for name, value in {**headers, **(ranged if partial else {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "GET":
            self._stream(content[start:], fault)

    def _next_fault(self) -> Fault:
        owner = self.server.owner
        if self.command != "GET":
            return Fault()
        with owner.lock:
            number, owner.contents = owner.contents, owner.contents + 1
        return owner.faults.get(number, Fault())

    def _stream(self, content: bytes, fault: Fault) -> None:
        owner = self.server.owner
        end = len(content) if fault.cut_after is None else fault.cut_after
        for start in range(0, end, CHUNK):
            chunk = content[start : min(start + CHUNK, end)]
            with owner.lock:  # before the client has it: it may look at once
                owner.sent += len(chunk)
            self.wfile.write(chunk)
            self.wfile.flush()
            if owner.pause_s:
                time.sleep(owner.pause_s)
        if fault.cut_after is not None:
            self.close_connection = True

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: tests read `requests` instead of a log."""
