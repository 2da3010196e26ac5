"""The openai package against the tests' batch service, and what is made of it here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from soulkit.api_keys import remember
from soulkit.errors import ModelLoadError, UserError
from soulkit.models.api.addresses import Access, open_access
from soulkit.models.api.batch_service import BatchService, NoBatchService, ServiceSilent, make_sdk
from soulkit.models.api.probing import offered_models
from soulkit.models.api.transport import ClientPool, make_client
from tests.support.servers.batch_server import BatchServer
from tests.support.servers.openai_server import Fault, ScriptedServer

SECRET = "sk-test-0123456789abcdef0123456789"
MARK = {"soulkit_run": "r", "soulkit_batch": "1"}


def line(index: int) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": f"question {index}"}]}
    return {"custom_id": f"c{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def file_of(count: int) -> bytes:
    return b"".join(json.dumps(line(i)).encode() + b"\n" for i in range(count))


def test_a_batch_is_found_by_its_mark_alone(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(file_of(2))

    async def scene(server: BatchServer) -> None:
        service = BatchService(open_access(server.base_url, "NO_KEY"))
        file_id = await service.upload(tmp_path / "x.jsonl", "x.jsonl")
        assert await service.search(MARK, 0.0) is None
        await service.create(file_id, {**MARK, "soulkit_batch": "2"})
        made = await service.create(file_id, MARK)
        there = await service.search(MARK, 0.0)
        assert there is not None and there.id == made.id
        await service.close()

    with BatchServer() as server:
        asyncio.run(scene(server))


def answering(reply: tuple[int, Any], act: Callable[[BatchService], Awaitable[None]]) -> None:
    """Run `act` with the service of a server that answers everything with `reply`."""

    async def acting(url: str) -> None:
        service = BatchService(Access(url, {"Authorization": f"Bearer {SECRET}"}, "A_KEY"))
        await act(service)
        await service.close()

    with BatchServer() as server:
        server.handle = lambda *_: reply  # type: ignore[method-assign]
        asyncio.run(acting(server.base_url))


def quoted(status: int, **more: str) -> tuple[int, Any]:
    return status, {"error": {"message": f"because of {SECRET}", **more}}


JUNK: dict[str, Any] = {
    "a page": b"<html>welcome</html>", "nothing": b"", "an empty object": {}, "a list": [],
    "null": None, "a text": "in progress", "an error": {"error": {"message": "try later"}},
    "no status": {"id": "batch_0"}, "an empty status": {"id": "batch_0", "status": ""},
    "half of it": b'{"id": "batch_0", "sta', "depth": b"[" * 90_000,
}  # fmt: skip
PAGE = b"<html>sorry</html>"
NO_ID = [None, "", 7, "a\nb", "x" * 10_000]
REFUSED: dict[str, tuple[tuple[int, Any], str, type[Exception], str]] = {
    **{f"HTTP {status}": (quoted(status), "look", kind, "because of") for status, kind in (
        (400, UserError), (401, ModelLoadError), (404, UserError), (405, NoBatchService),
        (429, ServiceSilent), (503, ServiceSilent),
    )},
    **{f"not shown, {status}": (quoted(status), "look search", UserError, "refused to show")
       for status in (400, 403, 405)},
    **{f"a proxy's page, {status}": ((status, PAGE), "look fetch", ServiceSilent, str(status))
       for status in (400, 403, 404, 405)},
    **{code: (quoted(429, code=code), "look create", UserError, f"no credit left(?s:.*){code}")
       for code in ("billing_hard_limit_reached", "insufficient_quota")},
    **{f"junk: {name}": ((200, junk), "look" if "status" in name else "look search",
                         ServiceSilent, "") for name, junk in JUNK.items()},
    **{f"no batch made: {name}": ((200, junk), "create", NoBatchService, "no batch service at")
       for name, junk in JUNK.items()},
    **{f"no id: {odd!r:.9}": ((200, {"id": odd, "status": "validating"}), "upload create",
                              NoBatchService, "no id of a file") for odd in NO_ID},
}  # fmt: skip
"""Name → what the server answers, what it is asked, the error, its words."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_service_refuses_or_does_not_answer(name: str, tmp_path: Path) -> None:
    """The live road is named where there is no batch yet, never for what a batch brings."""
    reply, asked, kind, words = REFUSED[name]
    (tmp_path / "x.jsonl").write_bytes(file_of(1))

    async def act(service: BatchService) -> None:
        acts: dict[str, Callable[[], Awaitable[Any]]] = {
            "look": lambda: service.look("batch_0"),
            "search": lambda: service.search(MARK, 0.0),
            "fetch": lambda: service.fetch("file_1", tmp_path / "replies"),
            "create": lambda: service.create("file_0", MARK),
            "upload": lambda: service.upload(tmp_path / "x.jsonl", "x.jsonl"),
        }
        for one in asked.split():
            with pytest.raises(kind, match=words or None) as caught:
                await acts[one]()
            error = caught.value
            text = "\n".join(error.lines()) if isinstance(error, UserError) else str(error)
            assert SECRET not in text
            assert "no credit" not in words or "A_KEY" in text
            assert words != "refused to show" or ("--batch" not in text and "are billed" in text)

    answering(reply, act)


@pytest.mark.parametrize(
    "odd",
    [{"request_counts": [1]}, {"request_counts": {"total": "x"}}, {"expires_at": "soon"},
     {"errors": "none"}, {"errors": {"data": [1]}}],
)  # fmt: skip
def test_a_report_with_odd_fields_is_one_all_the_same(odd: dict[str, Any]) -> None:
    async def act(service: BatchService) -> None:
        report = await service.look("batch_0")
        assert (report.total, report.completed, report.expires_at, report.ended) == (0, 0, 0, False)
        assert report.status == "in progress batch: done"

    answering((200, {"id": "b", "status": "in\nprogress\nbatch: done", **odd}), act)


def test_a_list_that_begins_again_for_ever_ends() -> None:
    async def act(service: BatchService) -> None:
        assert await service.search(MARK, 0.0) is None

    answering((200, {"object": "list", "data": [{"id": "a"}, {"id": "b"}], "has_more": True}), act)


def offered(access: Access, timeout_s: float = 5.0) -> list[str]:
    async def scene() -> list[str]:
        pool = ClientPool(partial(make_client, access.base_url, timeout_s), 1)
        try:
            return await offered_models(access, pool, timeout_s)
        finally:
            await pool.close()

    return asyncio.run(scene())


def test_a_server_hears_the_headers_of_its_access_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package takes more from the environment, and Azure wants its key elsewhere."""

    async def listing(access: Access) -> None:
        async with make_sdk(access, 5.0) as sdk:
            await sdk.models.list()

    with BatchServer() as server:
        asyncio.run(listing(Access(server.base_url, {"api-key": SECRET}, "A_KEY", "2024-10-21")))
        monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Team: of-somebody\nAuthorization: Bearer x")
        monkeypatch.setenv("OPENAI_ORG_ID", "org-of-somebody")
        monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-of-somebody")
        key = {"Authorization": f"Bearer {SECRET}"}
        asyncio.run(listing(Access(server.base_url, key, "A_KEY")))
        azure, plain = server.heads
    assert plain["authorization"] == f"Bearer {SECRET}"
    assert not [value for value in plain.values() if "of-somebody" in value]
    assert azure["api-key"] == SECRET and "authorization" not in azure
    assert azure["?"] == "api-version=2024-10-21"


def test_a_key_that_a_reply_quotes_is_not_kept(tmp_path: Path) -> None:
    remember(SECRET)
    quoted = json.dumps({"custom_id": "c0", "response": {"body": f"you sent {SECRET}"}})

    async def scene(server: BatchServer) -> None:
        service = BatchService(open_access(server.base_url, "NO_KEY"))
        server.files["file_0"] = quoted.encode() + b"\n" + file_of(1)
        await service.fetch("file_0", tmp_path / "replies.jsonl")
        await service.close()

    with BatchServer() as server:
        asyncio.run(scene(server))
    first, second = (tmp_path / "replies.jsonl").read_text().splitlines()
    assert SECRET not in first and json.loads(first)["custom_id"] == "c0"
    assert json.loads(second) == line(0)
    assert [path.name for path in tmp_path.iterdir()] == ["replies.jsonl"]


def test_models_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTING_KEY", SECRET)
    with BatchServer(key=SECRET) as server:
        access = open_access(server.base_url, "LISTING_KEY")
        assert offered(access) == ["another", "scripted"]


@pytest.mark.parametrize(
    "fault",
    [Fault.status_error(500, "no list"), Fault.closed(), Fault(raw=b"<html>"), Fault.reply([1])],
)
def test_a_server_without_a_list_has_no_hint(fault: Fault) -> None:
    with ScriptedServer(models=fault) as server:
        assert offered(open_access(server.base_url, "NO_KEY")) == []
