"""A provider's batch API: upload files, create and check batches, download files.

    POST /files (purpose batch)    POST /batches    GET /batches/{id}    GET /files/{id}/content

The openai package sends each request once, with the HTTP client of `transport.py`. `ServiceSilent`
means that a retry may help, and the caller decides; every other error is a `UserError`. An
unreadable answer to a new file or batch means that there is no batch API. An unreadable answer
about an existing batch is requested again. Each batch has a mark in its metadata, so that an
unconfirmed batch is found instead of being created and paid for twice.
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
from soulkit.models.api.replies import NO_CREDIT, clean_detail
from soulkit.models.api.wire import rate_limit_wait, retry_after
from soulkit.parse import json_or_none

if TYPE_CHECKING:
    from httpx2 import Request
    from openai import AsyncOpenAI
    from openai.types import Batch


CONNECTIONS = 4
CUSTOM = "OPENAI_CUSTOM_HEADERS"
"""The openai package sends these headers to every host; soulkit uses --headers instead."""


def make_sdk(access: Access, timeout_s: float) -> AsyncOpenAI:
    """A client for the server of `access` without retries, since a repeated request may be paid
    for twice.

    ModelLoadError if no connection can be prepared.
    """
    from openai import AsyncOpenAI, Omit

    # By default the package sends the OpenAI account headers of the environment to every host.
    named = {name.lower() for name in access.headers}
    silent: dict[str, Any] = {name: Omit() for name in ACCOUNT if name.lower() not in named}
    lines = os.environ.get(CUSTOM, "").split("\n")
    silent |= {line.partition(":")[0].strip(): Omit() for line in lines if ":" in line}
    client = transport.make_client(access.base_url, timeout_s, CONNECTIONS)
    if "authorization" not in named:
        client.event_hooks = {"request": [_unsigned]}
    return AsyncOpenAI(
        api_key="unused",  # the real key is in the headers, in the form the server expects
        base_url=access.base_url,
        default_headers={**silent, **access.headers},
        default_query={"api-version": access.api_version} if access.api_version else None,
        timeout=timeout_s,
        max_retries=0,
        http_client=client,
    )


async def _unsigned(request: Request) -> None:
    """Remove the Authorization that the package adds; Azure expects only its own header."""
    request.headers.pop("Authorization", None)


TIMEOUT_S = 600.0
"""Timeout of one request in seconds; a file may have 200 MB."""
FINAL = frozenset(("completed", "failed", "expired", "cancelled"))
LONGEST_ID = 500
_PASSING = frozenset((408, 409, 429))
_LISTING = "list of batches"
_OLDER_S = 3600
"""A batch created this long before its file was written belongs to someone else."""


class ServiceSilent(Exception):
    """The service gave no readable answer; a retry may help. The message has the details."""

    def __init__(self, words: str, wait_s: float = 0.0) -> None:
        super().__init__(words)
        self.wait_s = wait_s
        """Seconds that the service asks to wait; 0 if it does not say."""


class NoBatchService(UserError):
    """The address has no batch API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """The state of a batch, as reported by the service."""

    id: str
    status: str
    total: int = 0
    completed: int = 0
    failed: int = 0
    expires_at: int = 0
    """Unix seconds; 0 if unknown."""
    files: tuple[str, ...] = ()
    """Ids of the files with replies and errors, if any."""
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
        """Endpoint path in every line of a batch; does not depend on the server's address."""
        self._sdk: AsyncOpenAI | None = None

    @property
    def sdk(self) -> AsyncOpenAI:
        if self._sdk is None:
            self._sdk = make_sdk(self._access, TIMEOUT_S)
        return self._sdk

    async def upload(self, path: Path, name: str) -> str:
        """Upload a file of requests and return its id."""
        with path.open("rb") as stream:
            async with self._asking(unbounded=True):
                file = await self.sdk.files.create(file=(name, stream), purpose="batch")
                return _name(file.id)

    async def create(self, file_id: str, mark: Mapping[str, str]) -> BatchReport:
        """Create a batch of an uploaded file. It may exist even if ServiceSilent is raised."""
        async with self._asking():
            batch = await self.sdk.batches.create(
                completion_window="24h",
                endpoint=self.path,
                input_file_id=file_id,
                metadata=dict(mark),
            )
            return _report(batch)

    async def search(self, mark: Mapping[str, str], since: float) -> BatchReport | None:
        """The batch with this mark, created after `since` (Unix seconds); None if there is none."""
        ids: set[str] = set()
        async with self._asking(_LISTING):
            async for page in (await self.sdk.batches.list(limit=100)).iter_pages():
                if not isinstance(page.data, list):
                    raise ValueError("the answer has no list of batches")
                for batch in page.data:
                    if (batch.metadata or {}) == mark:
                        return _report(batch)
                    if batch.id in ids or (batch.created_at or since) < since - _OLDER_S:
                        return None  # older batches, or a service that repeats its first page
                    ids.add(batch.id)
        return None

    async def look(self, batch_id: str) -> BatchReport:
        """The current state of a batch."""
        async with self._asking(f"batch {batch_id}"):
            return _report(await self.sdk.batches.retrieve(batch_id))

    async def fetch(self, file_id: str, path: Path) -> None:
        """Download a file to `path`, completely or not at all, with all keys masked."""
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
        """Convert the package's errors into ours. `there` names an object that exists at the
        service. File transfers are `unbounded`: only their idle time is limited."""
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
            # Probably not from the service itself but, for instance, from a proxy.
            is_page = not isinstance(json_or_none(error.response.text), dict)
            if known and error.status_code != 401 and is_page:
                raise ServiceSilent(f"the {there} could not be read: {_words(error)}") from error
            if known and error.status_code == 404:
                raise self._gone(there, _words(error)) from error
            raise self._refusal(error, there) from error
        except (OpenAIError, ValueError, TypeError, AttributeError, RecursionError) as error:
            # Not the expected format but, for instance, a web page.
            if there:
                raise ServiceSilent(f"the {there} could not be read: {_words(error)}") from error
            raise self._unusable(_words(error)) from error

    def _refusal(self, error: Any, there: str) -> UserError:
        missing = error.status_code in (404, 405, 501)
        if missing and not there:
            return self._unusable(_words(error))
        if error.status_code == 401:
            return ModelLoadError(
                f"The batch service at {self.base_url} rejects the key: {_words(error)}.",
                "Batches cannot be created or checked without a valid key.",
                f"Check the key in {self._access.key_env}.",
            )
        if there:
            return (NoBatchService if missing else UserError)(
                f"The batch service at {self.base_url} refused to show the {there}: "
                f"{_words(error)}.",
                "Batches that this run has sent continue there and are billed.",
                "Fix the problem and run the same command again: it continues with these batches.",
            )
        return UserError(
            f"The batch service at {self.base_url} refused the batch: {_words(error)}.",
            "No batch was created; earlier replies are in the run's ledger.",
            "Fix the problem and run the same command again, or run it without --batch.",
        )

    def _no_credit(self, words: str) -> UserError:
        return UserError(
            f"The account at {self.base_url} has no credit left, or reached its billing limit: "
            f"{words}.",
            "Batches sent earlier continue there; replies received so far are in the run's ledger.",
            f"Add credit to the account of the key in {self._access.key_env} or raise its limit, "
            "then run the same command again.",
        )

    def _gone(self, what: str, words: str) -> UserError:
        return UserError(
            f"The batch service at {self.base_url} cannot find the {what}: {words}.",
            "This run created it, either with the key of another account or project, or it has "
            "been deleted since.",
            f"Set {self._access.key_env} to the original key and run the same command again. To "
            "pay for the requests again, first delete batches.json in the run folder.",
        )

    def _unusable(self, words: str) -> NoBatchService:
        return NoBatchService(
            f"There is no batch service at {self.base_url}: {words}.",
            "--batch needs OpenAI's batch API (/files and /batches) at that address.",
            "Run it without --batch, or with --batch-judges if only the judges' server has a batch "
            "API, or set 'by_batch: false' for this model in the endpoints file.",
        )


def _mask(source: Path, goal: Path) -> None:
    """Copy lines with all keys masked: some servers quote the request."""
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
    """Whether the service refused the request and did nothing; if False, the outcome is unknown."""
    from openai import APIStatusError

    return isinstance(error.__cause__, APIStatusError)


def _report(batch: Batch) -> BatchReport:
    """The report of a batch. The package validates nothing, so any field may be missing."""
    if not (isinstance(batch.status, str) and batch.status):
        raise ValueError("the answer has no batch status")
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
    raise ValueError("the answer has no id of a file or batch")


def _number(holder: object, name: str) -> int:
    value = getattr(holder, name, None)
    return value if isinstance(value, int) and 0 < value < 1 << 53 else 0
