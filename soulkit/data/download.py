"""Downloads files from the Hugging Face Hub: resumable, checksummed, renamed when complete.

    listing ──▶ .hitom_val.parquet.3f2a….part ──▶ checksum ──▶ hitom_val.parquet

* Requests use the Hub client's session, with its addresses, tokens, offline switch and proxies.
* The client's own download restarts from zero after a kill. Here the partial file is named after
  the checksum, and the next run resumes it.
* A file gets its final name only when its checksum matches the Hub's: sha256 for LFS files, git's
  blob hash for others.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import quote

from huggingface_hub import (
    HfApi,
    get_hf_file_metadata,
    get_session,
    get_token,
    hf_hub_url,
    hf_raise_for_status,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

# Base class of the errors raised by the Hub client's HTTP library, whichever library that is.
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from soulkit.api_keys import holds_key, printable, remember, shown_address
from soulkit.errors import ConfigError, DataError
from soulkit.parse import parse_json
from soulkit.reporting import Bar
from soulkit.runs.jsonl import append_to
from soulkit.text import byte_size, one_line, web_address

STALLED_ATTEMPTS = 5
"""Consecutive attempts without a new byte before a download fails."""
SILENCE_TIMEOUT_S = 30.0
"""Seconds without data from the server before the connection counts as broken."""
LONGEST_WAIT_S = 60.0
LISTING_BYTES, LISTING_S = 64_000_000, 120.0
"""Largest list of files that is read from a server, and the longest time to read it."""
LARGEST_FILE = 1 << 50
_BAD_URL = getattr(sys.modules[TransportError.__module__], "InvalidURL", TransportError)
_UNSENT = (TransportError, OfflineModeIsEnabled, _BAD_URL, ImportError)
"""Errors of a request without an answer; the last two come from the address of a proxy."""
_TRANSIENT = frozenset((408, 429, 500, 502, 503, 504))
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PATH = re.compile(r"[^\x00-\x1f\x7f-\x9f\\]{1,1024}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Remote:
    """One file of a dataset at one commit."""

    repo: str
    revision: str
    path: str
    bytes: int
    sha256: str | None = None
    blob: str | None = None
    """Git's blob hash, for files that are not in LFS."""

    @property
    def digest(self) -> str:
        return self.sha256 or self.blob or ""


@dataclass(frozen=True, slots=True)
class Digests:
    """Size and hashes of a file on disk."""

    bytes: int
    sha256: str
    blob: str

    def match(self, remote: Remote) -> bool:
        checksum = self.sha256 if remote.sha256 else self.blob
        return self.bytes == remote.bytes and checksum == remote.digest


def digests(path: Path) -> Digests:
    """Size, sha256 and git blob hash of a file, read once."""
    size = path.stat().st_size
    sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            sha256.update(chunk)
            blob.update(chunk)
    return Digests(size, sha256.hexdigest(), blob.hexdigest())


def partial_path(target: Path, remote: Remote) -> Path:
    """Path of the partial download; it depends on the checksum of `remote`."""
    return target.with_name(f".{target.name}.{remote.digest[:16]}.part")


def size_of(path: Path) -> int:
    """Size of a file in bytes; 0 if it does not exist."""
    return path.stat().st_size if path.is_file() else 0


class Hub:
    """One Hub endpoint, and the command that error messages tell the user to rerun."""

    def __init__(self, command: str, endpoint: str | None = None, wait_s: float = 0.5) -> None:
        self.command, self.wait_s = command, wait_s
        address = endpoint or os.environ.get("HF_ENDPOINT") or None
        self._api = HfApi(endpoint=address.rstrip("/") if address else None)
        self.endpoint: str = _checked_address(self._api.endpoint)
        remember(get_token() or "")

    # -- listing --

    def listing(self, repo: str, revision: str | None, subject: str) -> tuple[str, list[Remote]]:
        """The commit of `revision` (None: the main branch) and all files at that commit.

        `subject` names the download in error messages. DataError if the request fails.
        """

        at = f"/revision/{quote(revision, safe='')}" if revision else ""

        def ask() -> tuple[str, list[Remote]]:
            answer = self._answer(f"{self.endpoint}/api/datasets/{repo}{at}")
            commit = _matching(_COMMIT, answer["sha"], "commit")
            files = [_remote(repo, commit, sibling) for sibling in answer["siblings"]]
            if any(holds_key(file.path) for file in files):  # it would end up in the lock file
                raise ValueError("a file name contains your access token")
            return commit, files

        return self._with_retries(ask, repo, revision, subject)

    def _answer(self, url: str) -> Any:
        """The JSON value of an answer of limited size and duration."""
        body, end = bytearray(), time.monotonic() + LISTING_S
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        with get_session().stream(
            "GET", url, headers=headers, params={"blobs": True}, timeout=SILENCE_TIMEOUT_S,
            follow_redirects=True,
        ) as response:  # fmt: skip
            _raise_for_status(response)
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > LISTING_BYTES or time.monotonic() > end:
                    limits = f"{byte_size(LISTING_BYTES)} or {LISTING_S:g} s"
                    raise ValueError(f"the list of files takes more than {limits}")
        return parse_json(bytes(body))

    def completed(self, remote: Remote) -> Remote:
        """`remote` with a checksum, requested from the server if the listing has none."""
        if remote.digest:
            return remote

        def ask() -> Remote:
            metadata = get_hf_file_metadata(
                self._url(remote), headers=build_hf_headers(), timeout=SILENCE_TIMEOUT_S,
                endpoint=self.endpoint,
            )  # fmt: skip
            tag, size = metadata.etag or "", _size(metadata.size)
            sha256 = tag if _SHA256.fullmatch(tag) else None
            blob = None if sha256 else _matching(_COMMIT, tag, "checksum")
            return Remote(remote.repo, remote.revision, remote.path, size, sha256, blob)

        return self._with_retries(ask, remote.repo, remote.revision, remote.path)

    def _with_retries(
        self, request: Callable[[], T], repo: str, revision: str | None, subject: str
    ) -> T:
        for attempt in range(STALLED_ATTEMPTS):
            try:
                return request()
            except _UNSENT as error:
                busy = isinstance(error, HfHubHTTPError) and _status(error) in _TRANSIENT
                if not busy or attempt == STALLED_ATTEMPTS - 1:
                    raise self.explained(error, repo, revision, subject) from error
                self._wait(attempt, error)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise self._no_hub(error, subject) from error
        raise AssertionError("the last attempt returns or raises")

    # -- bytes --

    def fetch(self, remote: Remote, target: Path, bar: Bar) -> Digests:
        """Download to `target`, resuming an earlier attempt. `bar` counts received bytes, and goes
        back if a damaged part is fetched again. DataError if the download fails."""
        target.parent.mkdir(parents=True, exist_ok=True)
        part = partial_path(target, remote)
        while True:
            resumed = size_of(part) > 0
            self._complete(remote, part, bar)
            actual = digests(part)
            if actual.match(remote):
                _settle(part, target)
                return actual
            part.unlink()
            if not resumed:
                raise self._damaged(remote, actual)
            # The bytes of the earlier attempt may be damaged: restart from the beginning.
            bar.advance(-actual.bytes)

    def _complete(self, remote: Remote, part: Path, bar: Bar) -> None:
        append_to(part).close()
        best, silent = size_of(part), 0
        while size_of(part) < remote.bytes:
            trouble: Exception = ConnectionError("the connection closed before the end of the file")
            try:
                self._append(remote, part, bar)
            except (TransportError, OfflineModeIsEnabled) as error:
                if not _worth_another_try(error):
                    raise self.explained(
                        error, remote.repo, remote.revision, remote.path
                    ) from error
                trouble = error
            now = size_of(part)
            silent = 0 if now > best else silent + 1
            best = max(best, now)
            if silent >= STALLED_ATTEMPTS:
                raise self.explained(
                    trouble, remote.repo, remote.revision, remote.path
                ) from trouble
            if now < remote.bytes:
                self._wait(silent, trouble)

    def _append(self, remote: Remote, part: Path, bar: Bar) -> None:
        have = size_of(part)
        # With compression, a byte range would not match the bytes on disk.
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        with get_session().stream(
            "GET",
            self._url(remote),
            headers=headers,
            timeout=SILENCE_TIMEOUT_S,
            follow_redirects=True,
        ) as response:
            _raise_for_status(response)
            from_start = have > 0 and response.status_code != 206
            span = response.headers.get("Content-Range", "")
            if response.status_code == 206 and not span.startswith(f"bytes {have}-"):
                return  # another part of the file than was requested
            if from_start:
                bar.advance(-have)
            with append_to(part) as file:
                if from_start:
                    file.truncate(0)
                for chunk in response.iter_raw():
                    file.write(chunk)
                    file.flush()  # a killed process keeps the received bytes
                    bar.advance(len(chunk), PurePosixPath(remote.path).name)
                    if file.tell() > remote.bytes:
                        return  # not the listed file: the checksum will fail

    def _url(self, remote: Remote) -> str:
        return hf_hub_url(
            remote.repo, remote.path, repo_type="dataset", revision=remote.revision,
            endpoint=self.endpoint,
        )  # fmt: skip

    def _wait(self, attempt: int, error: Exception) -> None:
        retry_after = ""
        if isinstance(error, HfHubHTTPError):
            retry_after = str(error.response.headers.get("Retry-After", ""))
        seconds = float(retry_after) if retry_after.isdecimal() else self.wait_s * 2**attempt
        time.sleep(min(seconds, LONGEST_WAIT_S))

    # -- errors --

    def explained(
        self, error: Exception, repo: str, revision: str | None, subject: str
    ) -> DataError:
        """The error message for a failed download of `subject`."""
        if isinstance(error, OfflineModeIsEnabled):
            return _error(
                f"'{subject}' cannot be downloaded because the Hub client is offline.",
                "The environment variable HF_HUB_OFFLINE is set, and the file has not been "
                "downloaded yet.",
                f"Unset the variable and run: {self.command}. Or run it on a machine with network "
                "access and copy the folder here.",
            )
        if not isinstance(error, HfHubHTTPError):
            detail = _masked_line(str(error) or type(error).__name__)
            return _error(
                f"'{subject}' cannot be downloaded: {self.endpoint} cannot be reached.",
                f"The network reports: {detail}. Received bytes are kept.",
                f"Check the network (HF_ENDPOINT can name a mirror), then rerun: {self.command}",
            )
        if _status(error) in (401, 403):
            return self._forbidden(error, repo, subject)
        return self._refused(error, repo, revision, subject)

    def _forbidden(self, error: HfHubHTTPError, repo: str, subject: str) -> DataError:
        token_note = "The access token was rejected" if get_token() else "No access token was sent"
        return _error(
            f"'{subject}' cannot be downloaded: the Hub answers {_status(error)} for the dataset "
            f"{repo}.",
            f"{token_note}; the dataset is private, gated or does not exist.",
            f"Request access at {self.endpoint}/datasets/{repo}, log in with `hf auth login` or "
            f"set HF_TOKEN, then run: {self.command}",
        )

    def _refused(
        self, error: HfHubHTTPError, repo: str, revision: str | None, subject: str
    ) -> DataError:
        if isinstance(error, RevisionNotFoundError):
            return _error(
                f"'{subject}' cannot be downloaded: the dataset {repo} has no revision "
                f"'{revision}'.",
                "The revision (commit, branch or tag) comes from --revision or from the lock file "
                "of an earlier download.",
                f"Use --revision main for the newest files. Commits are listed at "
                f"{self.endpoint}/datasets/{repo}/commits/main",
            )
        if isinstance(error, RepositoryNotFoundError):
            return _error(
                f"'{subject}' cannot be downloaded: {self.endpoint} has no dataset {repo}.",
                "It was moved or made private, or HF_ENDPOINT names a mirror without it.",
                f"Check {self.endpoint}/datasets/{repo}, then rerun: {self.command}",
            )
        return _error(
            f"'{subject}' cannot be downloaded: {self.endpoint} answers {_status(error)}.",
            f"The server reports: {_masked_line(str(error.server_message or 'no details'))}.",
            f"Wait a moment, then rerun: {self.command}",
        )

    def _damaged(self, remote: Remote, actual: Digests) -> DataError:
        kind = "sha256" if remote.sha256 else "git hash"
        checksum = actual.sha256 if remote.sha256 else actual.blob
        return _error(
            f"'{remote.path}' was damaged during the download and has been deleted.",
            f"Its {kind} is {checksum[:12]}… ({actual.bytes} bytes); the Hub lists "
            f"{remote.digest[:12]}… ({remote.bytes} bytes).",
            f"Rerun: {self.command}. If it fails again, a proxy or the mirror in HF_ENDPOINT "
            "changes the file.",
        )

    def _no_hub(self, error: Exception, subject: str) -> DataError:
        return _error(
            f"'{subject}' cannot be downloaded: {self.endpoint} does not answer like a Hub server.",
            f"The client reports: {_masked_line(f'{type(error).__name__}: {error}')}.",
            f"Correct or unset HF_ENDPOINT, then rerun: {self.command}",
        )


def _error(what: str, why: str, way_out: str) -> DataError:
    remember(get_token() or "")  # it may have changed since the Hub was opened
    return DataError(printable(what), printable(why), printable(way_out))


def _masked_line(text: str) -> str:
    """A server or library message on one line, with secrets masked before it is shortened."""
    remember(get_token() or "")
    return one_line(printable(text), 200).rstrip(".")


def _checked_address(endpoint: str) -> str:
    if web_address(endpoint) is None:
        raise ConfigError(
            f"'{shown_address(endpoint)}' is not a valid Hub address.",
            "HF_ENDPOINT must contain scheme, host and port of a mirror.",
            "Write it as https://host or http://host:port, or unset HF_ENDPOINT.",
        )
    return endpoint


def _remote(repo: str, commit: str, sibling: Mapping[str, Any]) -> Remote:
    """One file of a listing; an exception for an entry that is none."""
    path, lfs = _matching(_PATH, sibling["rfilename"], "path"), sibling.get("lfs")
    if lfs is not None:
        sha256 = _matching(_SHA256, lfs["sha256"], "checksum")
        return Remote(repo, commit, path, _size(lfs["size"]), sha256=sha256)
    if sibling.get("size") is None or sibling.get("blobId") is None:
        return Remote(repo, commit, path, 0)  # some mirrors list only names
    blob = _matching(_COMMIT, sibling["blobId"], "checksum")
    return Remote(repo, commit, path, _size(sibling["size"]), blob=blob)


def _matching(form: re.Pattern[str], value: object, what: str) -> str:
    if not isinstance(value, str) or not form.fullmatch(value):
        raise ValueError(f"{str(value)[:60]!r} is not a {what}")
    return value


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST_FILE:
        raise ValueError(f"{str(value)[:60]!r} is not the size of a file")
    return value


def _raise_for_status(response: Any) -> None:
    """The Hub client's error for a refused request. The client would read all of an answer that may
    be endless and have any shape; it gets the beginning, as text."""
    if response.status_code < 400:
        return
    text: Any = next(response.iter_raw(4_096), b"").decode("utf-8", "replace")
    with suppress(ValueError, LookupError, TypeError):  # any other text is quoted as it is
        text = parse_json(text)["error"]
    names = ("X-Error-Code", "X-Error-Message", "Retry-After")
    headers = {n: response.headers[n].encode() for n in names if n in response.headers}
    content = json.dumps({"error": str(text)[:1_000]}).encode()
    hf_raise_for_status(
        type(response)(response.status_code, headers=headers, content=content,
                       request=response.request)
    )  # fmt: skip


def _settle(part: Path, target: Path) -> None:
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(target)


def _status(error: HfHubHTTPError) -> int:
    return int(error.response.status_code)


def _worth_another_try(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError):
        return _status(error) in _TRANSIENT
    return not isinstance(error, OfflineModeIsEnabled)
