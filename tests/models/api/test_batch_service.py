"""The openai package against the tests' batch service, and what is made of it here."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from soulkit.api_keys import remember
from soulkit.errors import ModelLoadError, UserError
from soulkit.models.api.addresses import Access, open_access
from soulkit.models.api.batch_service import BatchService, NoBatchService, ServiceSilent, make_sdk
from soulkit.models.api.probing import offered_models
from soulkit.models.api.transport import ClientPool, make_client
from tests.support.servers.batch_server import BatchServer, Ending
from tests.support.servers.openai_server import Fault, ScriptedServer

SECRET = "sk-test-0123456789abcdef0123456789"
MARK = {"soulkit_run": "r", "soulkit_batch": "1"}


def line(index: int) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": f"question {index}"}]}
    return {"custom_id": f"c{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def file_of(count: int) -> bytes:
    return b"".join(json.dumps(line(i)).encode() + b"\n" for i in range(count))


def test_the_packages_own_client_is_served_as_by_a_provider() -> None:
    """The server that the other tests rely on is one to the people who wrote the client."""
    with BatchServer(answer=lambda body: "B", ends=lambda batch: Ending("expired", 2)) as server:
        client = openai.OpenAI(api_key="unused", base_url=server.base_url, max_retries=0)
        with client:
            file = client.files.create(file=("x.jsonl", io.BytesIO(file_of(3))), purpose="batch")
            assert (file.filename, file.purpose, file.bytes) == (
                "x.jsonl",
                "batch",
                len(file_of(3)),
            )
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h",
                metadata=MARK,
            )  # fmt: skip
            states = []
            while (batch := client.batches.retrieve(batch.id)).status != "expired":
                states.append(batch.status)
            assert states == ["validating", "in_progress", "finalizing"]
            assert [one.id for one in client.batches.list()] == [batch.id]
            assert batch.request_counts is not None and batch.request_counts.total == 3
            assert batch.output_file_id and batch.error_file_id
            output = client.files.content(batch.output_file_id).text.splitlines()
            assert [json.loads(one)["custom_id"] for one in output] == ["c0", "c1"]
            rest = json.loads(client.files.content(batch.error_file_id).text)
            assert rest["error"]["code"] == "batch_expired" and rest["response"] is None
            other = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            assert client.batches.cancel(other.id).status == "cancelled"
            assert [model.id for model in client.models.list()] == ["scripted", "another"]


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


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, UserError), (405, NoBatchService), (401, ModelLoadError), (400, UserError),
     (503, ServiceSilent), (429, ServiceSilent)],
)  # fmt: skip
def test_what_a_service_refuses_is_told_apart(status: int, kind: type[Exception]) -> None:
    async def scene(url: str) -> None:
        service = BatchService(Access(url, {"Authorization": f"Bearer {SECRET}"}, "A_KEY"))
        with pytest.raises(kind, match="because of") as caught:
            await service.look("batch_0")
        assert type(caught.value) is kind and SECRET not in str(caught.value)
        await service.close()

    fault = Fault.status_error(status, f"because of {SECRET}")
    with BatchServer(service=lambda request, index: "") as server:
        server.handle = lambda *_: (fault.status, json.loads(fault.raw or b""))  # type: ignore[method-assign]
        asyncio.run(scene(server.base_url))


JUNK: dict[str, Any] = {
    "a page": b"<html>welcome</html>", "nothing": b"", "an empty object": {}, "a list": [],
    "null": None, "a text": "in progress", "an error": {"error": {"message": "try later"}},
    "no status": {"id": "batch_0"}, "half of it": b'{"id": "batch_0", "sta', "depth": b"[" * 90_000,
}  # fmt: skip


@pytest.mark.parametrize("what", JUNK)
def test_an_unreadable_answer_about_a_batch_that_exists_is_asked_for_again(what: str) -> None:
    async def scene(url: str) -> None:
        service = BatchService(open_access(url, "NO_KEY"))
        with pytest.raises(ServiceSilent):
            await service.look("batch_0")
        if what != "no status":
            with pytest.raises(ServiceSilent):
                await service.search(MARK, 0.0)
        with pytest.raises(NoBatchService, match="There is no batch service at"):
            await service.create("file_0", MARK)
        await service.close()

    with BatchServer() as server:
        server.handle = lambda *_: (200, JUNK[what])  # type: ignore[method-assign]
        asyncio.run(scene(server.base_url))


@pytest.mark.parametrize("status", [400, 403, 404, 405])
def test_an_error_page_of_a_proxy_says_nothing_about_a_batch(status: int, tmp_path: Path) -> None:
    async def scene(url: str) -> None:
        service = BatchService(open_access(url, "NO_KEY"))
        for asked in (service.look("batch_0"), service.fetch("file_1", tmp_path / "replies")):
            with pytest.raises(ServiceSilent, match=str(status)):
                await asked
        await service.close()

    with BatchServer() as server:
        server.handle = lambda *_: (status, b"<html>sorry</html>")  # type: ignore[method-assign]
        asyncio.run(scene(server.base_url))


@pytest.mark.parametrize("code", ["billing_hard_limit_reached", "insufficient_quota"])
def test_a_billing_limit_is_said_at_once(code: str) -> None:
    fault = Fault.status_error(429, "You reached it.", code=code)

    async def scene(url: str) -> None:
        service = BatchService(Access(url, {}, "A_KEY"))
        for asked in (service.look("batch_0"), service.create("file_0", MARK)):
            with pytest.raises(UserError, match="no credit left") as caught:
                await asked
            assert code in caught.value.what and "A_KEY" in caught.value.lines()[2]
        await service.close()

    with BatchServer() as server:
        server.handle = lambda *_: (429, json.loads(fault.raw or b""))  # type: ignore[method-assign]
        asyncio.run(scene(server.base_url))


@pytest.mark.parametrize("status", [400, 403, 405])
def test_nobody_is_told_to_pay_live_for_what_a_batch_brings(status: int) -> None:
    async def scene(url: str) -> None:
        service = BatchService(open_access(url, "NO_KEY"))
        for asked in (service.look("batch_0"), service.search(MARK, 0.0)):
            with pytest.raises(UserError, match="refused to show") as caught:
                await asked
            assert "--batch" not in str(caught.value) and "paid for" in caught.value.why
        await service.close()

    with BatchServer() as server:
        server.handle = lambda *_: (status, {"error": {"message": "no"}})  # type: ignore[method-assign]
        asyncio.run(scene(server.base_url))


def offered(access: Access, timeout_s: float = 5.0) -> list[str]:
    async def scene() -> list[str]:
        pool = ClientPool(partial(make_client, access.base_url, timeout_s), 1)
        try:
            return await offered_models(access, pool, timeout_s)
        finally:
            await pool.close()

    return asyncio.run(scene())


def heads(server: BatchServer, access: Access) -> dict[str, str]:
    """What a server hears beside a request of the package."""

    async def scene() -> None:
        async with make_sdk(access, 5.0) as sdk:
            await sdk.models.list()

    asyncio.run(scene())
    return server.heads[-1]


ODD: list[dict[str, Any]] = [
    {"request_counts": [1]}, {"request_counts": {"total": "x"}}, {"expires_at": "soon"},
    {"errors": "none"}, {"errors": {"data": [1]}},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_a_report_with_odd_fields_is_one_all_the_same(odd: dict[str, Any]) -> None:
    status = "in\nprogress\nbatch: done"

    async def scene(url: str) -> None:
        service = BatchService(open_access(url, "NO_KEY"))
        report = await service.look("batch_0")
        assert (report.total, report.completed, report.expires_at, report.ended) == (0, 0, 0, False)
        assert report.status == "in progress batch: done"
        await service.close()

    with BatchServer() as server:
        server.handle = lambda *_: (200, {"id": "b", "status": status, **odd})  # type: ignore[method-assign]
        asyncio.run(scene(server.base_url))


@pytest.mark.parametrize("odd", [None, "", 7, "a\nb", "x" * 10_000])
def test_an_answer_without_an_id_is_none(odd: object, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(file_of(1))

    async def scene(url: str) -> None:
        service = BatchService(open_access(url, "NO_KEY"))
        with pytest.raises(NoBatchService, match="without the id"):
            await service.upload(tmp_path / "x.jsonl", "x.jsonl")
        with pytest.raises(NoBatchService, match="without the id"):
            await service.create("file_0", MARK)
        await service.close()

    with BatchServer() as server:
        server.handle = lambda *_: (200, {"id": odd, "status": "validating"})  # type: ignore[method-assign]
        asyncio.run(scene(server.base_url))


def test_a_list_that_begins_again_for_ever_ends(tmp_path: Path) -> None:
    async def scene(server: BatchServer) -> None:
        service = BatchService(open_access(server.base_url, "NO_KEY"))
        assert await service.search(MARK, 0.0) is None
        assert server.requests["GET /batches"] == 2
        await service.close()

    page = {"object": "list", "data": [{"id": "a"}, {"id": "b"}], "has_more": True}
    with BatchServer() as server:
        server.handle = lambda *_: (200, page)  # type: ignore[method-assign]
        asyncio.run(scene(server))


def test_a_list_of_models_that_never_ends_is_none() -> None:
    """Each read in time, and no end of them."""

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            with suppress(OSError):
                while not over.wait(0.02):
                    connection.sendall(b" ")

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        access = open_access(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "NO_KEY")
        assert offered(access, 0.3) == []
        over.set()
        thread.join(60)


def test_headers_that_the_package_has_of_the_environment_go_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Team: team-secret\nAuthorization: Bearer other")
    with BatchServer() as server:
        access = Access(server.base_url, {"Authorization": f"Bearer {SECRET}"}, "A_KEY")
        sent = heads(server, access)
    assert "x-team" not in sent and sent["authorization"] == f"Bearer {SECRET}"


def test_an_organisation_in_the_environment_is_nobodys_business(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-somebody")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-of-somebody")
    with BatchServer() as server:
        access = Access(server.base_url, {"Authorization": f"Bearer {SECRET}"}, "A_KEY")
        sent = heads(server, access)
    assert sent["authorization"] == f"Bearer {SECRET}"
    assert not [value for value in sent.values() if "of-somebody" in value]


def test_azure_hears_its_key_and_its_version() -> None:
    with BatchServer() as server:
        sent = heads(server, Access(server.base_url, {"api-key": SECRET}, "A_KEY", "2024-10-21"))
    assert sent["api-key"] == SECRET and "authorization" not in sent
    assert sent["?"] == "api-version=2024-10-21"


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
