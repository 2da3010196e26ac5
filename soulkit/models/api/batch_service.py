"""A provider's batch service: files up, batches made and looked at, files down.

    POST /files (purpose batch)    POST /batches    GET /batches/{id}    GET /files/{id}/content

Each request is made once, by the openai package on the HTTP client of `transport.py`. Where it may
help to ask again, `ServiceSilent` is raised, and the caller decides; anything else a service says
is a `UserError`. An unreadable answer to a new file or batch means that there is no such service;
about a batch that may exist it is asked for again. A batch carries a mark in its metadata, so that
one whose creation was not confirmed is found again instead of being made, and paid for, twice.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.api_keys import masked_json
from soulkit.errors import ModelLoadError, UserError
from soulkit.models.api import transport
from soulkit.models.api.addresses import ACCOUNT, Access
from soulkit.models.api.protocol import json_or_none
from soulkit.models.api.replies import NO_CREDIT, clean_detail
from soulkit.models.api.wire import rate_limit_wait, retry_after

if TYPE_CHECKING:
    from httpx2 import Request
    from openai import AsyncOpenAI
    from openai.types import Batch


CONNECTIONS = 4
CUSTOM = "OPENAI_CUSTOM_HEADERS"
"""Headers for every request of the package, whatever the host. Here they are named with
--headers."""


def make_sdk(access: Access, timeout_s: float) -> AsyncOpenAI:
    """A client for the server of `access` that retries nothing: a request that was sent twice might
    be paid for twice.

    ModelLoadError when no connection can be prepared.
    """
    from openai import AsyncOpenAI, Omit

    # By itself the package would tell every host what the environment says of OpenAI's account.
    named = {name.lower() for name in access.headers}
    silent: dict[str, Any] = {name: Omit() for name in ACCOUNT if name.lower() not in named}
    lines = os.environ.get(CUSTOM, "").split("\n")
    silent |= {line.partition(":")[0].strip(): Omit() for line in lines if ":" in line}
    client = transport.make_client(access.base_url, timeout_s, CONNECTIONS)
    if "authorization" not in named:
        client.event_hooks = {"request": [_unsigned]}
    return AsyncOpenAI(
        api_key="unused",  # the headers hold the real one, in whatever form the server wants it
        base_url=access.base_url,
        default_headers={**silent, **access.headers},
        default_query={"api-version": access.api_version} if access.api_version else None,
        timeout=timeout_s,
        max_retries=0,
        http_client=client,
    )


async def _unsigned(request: Request) -> None:
    """The package insists on an Authorization; Azure wants its key elsewhere, and only there."""
    request.headers.pop("Authorization", None)


TIMEOUT_S = 600.0
"""Of one request: a file may have 200 MB."""
FINAL = frozenset(("completed", "failed", "expired", "cancelled"))
LONGEST_ID = 500
_PASSING = frozenset((408, 409, 429))
_LISTING = "list of batches"
_OLDER_S = 3600
"""A batch that was made so long before its file was written is another one's."""


class ServiceSilent(Exception):
    """The service did not answer, not now, or not readably; the text says how."""

    def __init__(self, words: str, wait_s: float = 0.0) -> None:
        super().__init__(words)
        self.wait_s = wait_s
        """Seconds that the service asks to wait; 0 where it does not say."""


class NoBatchService(UserError):
    """There is no batch service at an address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What a service says of a batch."""

    id: str
    status: str
    total: int = 0
    completed: int = 0
    failed: int = 0
    expires_at: int = 0
    """Unix seconds; 0 where the service does not say."""
    files: tuple[str, ...] = ()
    """Ids of the files with replies and with errors, as far as there are any."""
    words: str = ""
    """Why it failed."""

    @property
    def ended(self) -> bool:
        return self.status in FINAL


class BatchService:
    """The batch service of one server."""

    def __init__(self, access: Access) -> None:
        self.base_url, self._access = access.base_url, access
        self.path: Any = f"/v1{access.protocol.path}"
        """What every line of a batch asks, whatever else is in the server's address."""
        self._sdk: AsyncOpenAI | None = None

    @property
    def sdk(self) -> AsyncOpenAI:
        if self._sdk is None:
            self._sdk = make_sdk(self._access, TIMEOUT_S)
        return self._sdk

    async def upload(self, path: Path, name: str) -> str:
        """The id of the file with the requests."""
        with path.open("rb") as stream:
            async with self._asking(unbounded=True):
                file = await self.sdk.files.create(file=(name, stream), purpose="batch")
                return _name(file.id)

    async def create(self, file_id: str, mark: Mapping[str, str]) -> BatchReport:
        """A new batch of an uploaded file. After ServiceSilent it may be there all the same."""
        async with self._asking():
            batch = await self.sdk.batches.create(
                completion_window="24h",
                endpoint=self.path,
                input_file_id=file_id,
                metadata=dict(mark),
            )
            return _report(batch)

    async def search(self, mark: Mapping[str, str], since: float) -> BatchReport | None:
        """The batch with this mark, not older than `since` (Unix seconds); None without one."""
        ids: set[str] = set()
        async with self._asking(_LISTING):
            async for page in (await self.sdk.batches.list(limit=100)).iter_pages():
                if not isinstance(page.data, list):
                    raise ValueError("an answer without a list of batches")
                for batch in page.data:
                    if (batch.metadata or {}) == mark:
                        return _report(batch)
                    if batch.id in ids or (batch.created_at or since) < since - _OLDER_S:
                        return None  # older ones, or a service that gives its first page for ever
                    ids.add(batch.id)
        return None

    async def look(self, batch_id: str) -> BatchReport:
        """How far a batch is."""
        async with self._asking(f"batch {batch_id}"):
            return _report(await self.sdk.batches.retrieve(batch_id))

    async def fetch(self, file_id: str, path: Path) -> None:
        """Write a file of the service to `path`, whole or not at all, any key in it masked."""
        part, safe = (path.with_name(f".{path.name}.{os.getpid()}.{n}.tmp") for n in (1, 2))
        try:
            async with (
                self._asking(f"file {file_id}", unbounded=True),
                self.sdk.files.with_streaming_response.content(file_id) as reply,
            ):
                await reply.stream_to_file(part)
            _mask(part, safe)
            safe.replace(path)
        finally:
            for file in (part, safe):
                file.unlink(missing_ok=True)

    async def close(self) -> None:
        if self._sdk is not None:
            await self._sdk.close()
            self._sdk = None

    @asynccontextmanager
    async def _asking(self, there: str = "", *, unbounded: bool = False) -> AsyncIterator[None]:
        """Turns the package's errors into ours; `there` is what exists at the service. Files are
        `unbounded`: as long as something of them comes they may take their time."""
        import httpx2
        from openai import APIConnectionError, APIStatusError, OpenAIError

        try:
            async with asyncio.timeout(None if unbounded else TIMEOUT_S):
                yield
        except (TimeoutError, APIConnectionError, httpx2.HTTPError) as error:
            raise ServiceSilent(_words(error)) from error
        except APIStatusError as error:
            headers, text = error.response.headers, f"{error.code} {error.type} {error}"
            if error.status_code == 429 and NO_CREDIT.search(text):
                raise self._no_credit(f"{error.code or error.type}: {_words(error)}") from error
            if error.status_code in _PASSING or error.status_code >= 500:
                limited = error.status_code == 429
                wait_s = rate_limit_wait(headers, text) if limited else retry_after(headers)
                raise ServiceSilent(_words(error), wait_s or 0.0) from error
            known = there not in ("", _LISTING)
            # Not in the words of the service: of a proxy before it, for instance.
            is_page = not isinstance(json_or_none(error.response.text), dict)
            if known and error.status_code != 401 and is_page:
                raise ServiceSilent(f"no readable {there}: {_words(error)}") from error
            if known and error.status_code == 404:
                raise self._gone(there, _words(error)) from error
            raise self._refusal(error, there) from error
        except (OpenAIError, ValueError, TypeError, AttributeError, RecursionError) as error:
            # Not in the form of the service: a web page, for instance.
            if there:
                raise ServiceSilent(f"no readable {there}: {_words(error)}") from error
            raise self._unusable(_words(error)) from error

    def _refusal(self, error: Any, there: str) -> UserError:
        missing = error.status_code in (404, 405, 501)
        if missing and not there:
            return self._unusable(_words(error))
        if error.status_code == 401:
            return ModelLoadError(
                f"The batch service at {self.base_url} does not take the key: {_words(error)}.",
                "Without it no batch can be made or looked at.",
                f"The key is read from {self._access.key_env}: check it.",
            )
        if there:
            return (NoBatchService if missing else UserError)(
                f"The batch service at {self.base_url} refused to show the {there}: "
                f"{_words(error)}.",
                "Batches that this run sent go on there and are paid for.",
                "Fix what it names and run the same command again: the batches are picked up.",
            )
        return UserError(
            f"The batch service at {self.base_url} refused: {_words(error)}.",
            "No batch was made of this; what was answered before is in the run's ledger.",
            "Mend what it names and run the same command again, or run it without --batch.",
        )

    def _no_credit(self, words: str) -> UserError:
        return UserError(
            f"The account at {self.base_url} has no credit left, or reached its billing limit: "
            f"{words}.",
            "Batches that this run sent before go on there; replies that came are in its ledger.",
            f"Add credit or raise the limit of the account of the key in {self._access.key_env}, "
            "then run the same command again.",
        )

    def _gone(self, what: str, words: str) -> UserError:
        return UserError(
            f"The batch service at {self.base_url} knows no {what}: {words}.",
            "It was there when this run made it: with the key of another account or project, or it "
            "has been removed since.",
            f"Run the same command with the key of that time (in {self._access.key_env}). To pay "
            "for its requests anew, remove batches.json from the run folder first.",
        )

    def _unusable(self, words: str) -> NoBatchService:
        return NoBatchService(
            f"There is no batch service at {self.base_url}: {words}.",
            "--batch needs the paths /files and /batches there, as OpenAI has them.",
            "Run it without --batch, with --batch-judges where only the judges' server has one, or "
            "say 'by_batch: false' of this model in the endpoints file.",
        )


def _mask(source: Path, goal: Path) -> None:
    """Copy lines without any key: some servers quote what they were sent."""
    with source.open("rb") as lines, goal.open("wb") as stream:
        for line in lines:
            text = masked_json(line.decode("utf-8", "replace").rstrip("\n"))
            stream.write(text.encode("utf-8", "replace") + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def _words(error: BaseException) -> str:
    cause = error.__cause__
    more = f" ({cause})" if cause is not None and str(cause) else ""
    return clean_detail(f"{error}{more}" or type(error).__name__).rstrip(".")


def was_refused(error: UserError) -> bool:
    """Whether a service said no, and did nothing; otherwise nobody knows what it did."""
    from openai import APIStatusError

    return isinstance(error.__cause__, APIStatusError)


def _report(batch: Batch) -> BatchReport:
    """The package checks nothing of what it reads: any of it may be missing."""
    if not (isinstance(batch.status, str) and batch.status):
        raise ValueError("an answer without the status of a batch")
    counts, errors = batch.request_counts, getattr(batch.errors, "data", None)
    lines = [
        f"{getattr(one, 'code', None) or 'error'}: {getattr(one, 'message', '')}"
        for one in (errors if isinstance(errors, list) else [])[:3]
    ]
    return BatchReport(
        id=_name(batch.id), status=clean_detail(str(batch.status)),
        total=_number(counts, "total"), completed=_number(counts, "completed"),
        failed=_number(counts, "failed"), expires_at=_number(batch, "expires_at"),
        words=clean_detail("; ".join(lines)),
        files=tuple(_name(f) for f in (batch.output_file_id, batch.error_file_id) if f),
    )  # fmt: skip


def _name(value: object) -> str:
    if isinstance(value, str) and value.isprintable() and 0 < len(value) <= LONGEST_ID:
        return value
    raise ValueError("an answer without the id of a file or batch")


def _number(holder: object, name: str) -> int:
    value = getattr(holder, name, None)
    return value if isinstance(value, int) and value > 0 else 0
