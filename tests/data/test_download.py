"""Bytes from the hub: every way in which a download can fail, told by its message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from soulkit.data.download import STALLED_ATTEMPTS, Hub
from soulkit.data.hub import LOCK, pull_files
from soulkit.errors import ConfigError, DataError
from soulkit.reporting import Bar, Reporter
from tests.support.hub import (
    AGAIN,
    EVAL,
    EVALS,
    HITOM,
    HITOM_FILE,
    NOTES,
    alone_with_the_hub,
    client,
    lines,
    names_in,
    want,
)
from tests.support.servers.hub_server import CHUNK, Fault, HubServer

NAME = "hitom_val.parquet"
TOKEN = "a-token-of-the-tests"
TIDY = {LOCK, ".soul-data.pulling"}


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone_with_the_hub(tmp_path, monkeypatch)


def refused(server: HubServer, folder: Path, **more: object) -> str:
    """The message of a pull that fails; nothing stands under the final name."""
    with server, pytest.raises(DataError) as error:
        pull_files(client(server), HITOM_FILE, folder, **more)  # type: ignore[arg-type]
    assert NAME not in names_in(folder)
    assert NAME in lines(error)
    return lines(error)


# -- resuming ------------------------------------------------------------------------------------


def test_a_cut_connection_goes_on_where_it_ended(tmp_path: Path) -> None:
    faults = {0: Fault(cut_after=12_000), 1: Fault(cut_after=5_000)}
    with HubServer({EVAL: EVALS}, faults=faults) as server:
        assert pull_files(client(server), HITOM_FILE, tmp_path)[0].state == "downloaded"
        assert server.sent == len(HITOM)
        ranges = [r.range for r in server.requests if r.path.startswith("/storage")]
    assert ranges == ["", "bytes=12000-", "bytes=17000-"]
    assert (tmp_path / NAME).read_bytes() == HITOM


def test_a_server_that_ignores_ranges_sends_all_again(tmp_path: Path) -> None:
    faults = {0: Fault(cut_after=12_000), 1: Fault(whole=True)}
    with HubServer({EVAL: EVALS}, faults=faults) as server:
        pull_files(client(server), HITOM_FILE, tmp_path)
    assert (tmp_path / NAME).read_bytes() == HITOM


def test_a_server_that_always_cuts_at_one_place_is_given_up(tmp_path: Path) -> None:
    faults = {i: Fault(cut_after=9_000, whole=True) for i in range(50)}
    server = HubServer({EVAL: EVALS}, faults=faults)
    assert "cannot be reached" in refused(server, tmp_path)
    assert server.contents == 1 + STALLED_ATTEMPTS


def test_bytes_counted_are_bytes_that_came(tmp_path: Path) -> None:
    faults = {0: Fault(cut_after=12_000), 1: Fault(whole=True)}
    seen: list[int] = []

    totals: list[int | None] = []

    class CountedBytes(Bar):
        def advance(self, steps: int = 1, note: str = "") -> None:
            if steps > 0:
                assert note == NAME
            seen.append(steps)

    class Counter(Reporter):
        @contextmanager
        def progress(
            self, total: int | None, unit: Callable[[float], str] | None = None
        ) -> Iterator[Bar]:
            totals.append(total)
            yield CountedBytes()
            assert sum(seen) == len(HITOM)

    with HubServer({EVAL: EVALS}, faults=faults) as server:
        pull_files(client(server), HITOM_FILE, tmp_path, reporter=Counter())
    assert (totals, min(seen)) == ([len(HITOM)], -12_000)


def test_bad_bytes_of_an_earlier_start_are_fetched_again(tmp_path: Path) -> None:
    with HubServer({EVAL: EVALS}, faults={0: Fault(cut_after=10)}) as server:
        hub, faulty = client(server), Fault(status=401)
        server.faults[1] = faulty
        with pytest.raises(DataError):
            pull_files(hub, HITOM_FILE, tmp_path)
        part = next(tmp_path.glob(f".{NAME}.*.part"))
        assert part.read_bytes() == HITOM[:10]
        part.write_bytes(b"0123456789")
        assert pull_files(hub, HITOM_FILE, tmp_path)[0].state == "resumed"
    assert (tmp_path / NAME).read_bytes() == HITOM
    assert names_in(tmp_path) == {NAME, *TIDY}


PULL = """
import sys
from pathlib import Path
from soulkit.cli.app import main
sys.exit(main(["data", "pull", "--task", "hitom", "--split", "eval", *sys.argv[1:]]))
"""


def start(server_url: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_ENDPOINT": server_url, **variables}
    return subprocess.Popen(
        [sys.executable, "-c", PULL, *arguments], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_killed_download_is_taken_up(tmp_path: Path) -> None:
    with HubServer({EVAL: EVALS}, pause_s=0.1) as server:
        process = start(server.url, "--out", str(tmp_path))
        end = time.monotonic() + 600
        while server.sent < 5 * CHUNK and time.monotonic() < end:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate()
        assert server.sent >= 5 * CHUNK, err
        assert names_in(tmp_path) & {NAME} == set()
        have = next(tmp_path.glob(f".{NAME}.*.part")).stat().st_size
        assert 0 < have < len(HITOM)
        server.pause_s, server.sent = 0.0, 0
        server.requests.clear()
        assert pull_files(client(server), HITOM_FILE, tmp_path)[0].state == "resumed"
        assert [r.range for r in server.requests][-1] == f"bytes={have}-"
        assert server.sent <= len(HITOM) - have + CHUNK  # one piece of the killed one may follow
    assert (tmp_path / NAME).read_bytes() == HITOM


# -- refusals ------------------------------------------------------------------------------------


def test_a_wrong_checksum_leaves_nothing(tmp_path: Path) -> None:
    refusal = refused(HubServer({EVAL: EVALS}, wrong_checksum=True), tmp_path)
    assert "was damaged" in refusal
    assert "Its sha256 is" in refusal
    assert AGAIN in refusal
    assert names_in(tmp_path) == TIDY


def test_damaged_bytes_are_caught_in_git_files_too(tmp_path: Path) -> None:
    with HubServer({EVAL: EVALS}, faults={0: Fault(damage=True)}) as server:
        with pytest.raises(DataError, match="was damaged") as error:
            pull_files(client(server), want("notes.jsonl"), tmp_path)
        assert "Its git hash is" in lines(error)
        pull_files(client(server), want("notes.jsonl"), tmp_path)
    assert (tmp_path / "notes.jsonl").read_bytes() == NOTES


@pytest.mark.parametrize(("gated", "status"), [(False, 401), (True, 403)])
def test_without_a_token_the_way_to_log_in_is_told(
    tmp_path: Path, gated: bool, status: int
) -> None:
    server = HubServer({EVAL: EVALS}, token=TOKEN, gated=gated)
    refusal = refused(server, tmp_path)
    assert f"answers {status} for the dataset {EVAL}" in refusal
    assert "No access token was sent" in refusal
    assert "hf auth login" in refusal
    assert "HF_TOKEN" in refusal
    assert AGAIN in refusal


def test_a_token_that_does_not_fit_is_told_and_not_shown(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-wrong-one")
    refusal = refused(HubServer({EVAL: EVALS}, token=TOKEN), tmp_path)
    assert "The access token was rejected" in refusal
    assert "a-wrong-one" not in refusal


def test_the_token_goes_to_the_hub_and_not_to_its_storage(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with HubServer({EVAL: EVALS}, token=TOKEN) as server:
        pull_files(client(server), HITOM_FILE, tmp_path)
        sent = {(r.host, r.authorization) for r in server.requests}
    assert sent == {("127.0.0.1", f"Bearer {TOKEN}"), ("localhost", "")}


def test_an_unknown_revision(tmp_path: Path) -> None:
    refusal = refused(HubServer({EVAL: EVALS}), tmp_path, revision="v9")
    assert f"the dataset {EVAL} has no revision 'v9'" in refusal
    assert "--revision main" in refusal


def test_an_unknown_data_set(tmp_path: Path) -> None:
    assert f"has no dataset {EVAL}" in refused(HubServer({"a/b": EVALS}), tmp_path)


def test_a_file_that_is_listed_and_not_served(tmp_path: Path) -> None:
    server = HubServer({EVAL: EVALS}, faults={0: Fault(status=404)})
    assert "answers 404" in refused(server, tmp_path)


# -- a server in trouble -------------------------------------------------------------------------


def test_a_busy_server_is_waited_for(tmp_path: Path) -> None:
    slow = Fault(status=429, headers={"Retry-After": "0"})
    with HubServer({EVAL: EVALS}, faults={0: Fault(status=503), 1: slow}) as server:
        pull_files(client(server), HITOM_FILE, tmp_path)
    assert (tmp_path / NAME).read_bytes() == HITOM


def test_a_server_that_stays_busy_is_told(tmp_path: Path) -> None:
    server = HubServer({EVAL: EVALS}, faults={i: Fault(status=503) for i in range(20)})
    assert "answers 503" in refused(server, tmp_path)
    assert server.contents == STALLED_ATTEMPTS
    server = HubServer({EVAL: EVALS}, api_status=500)
    refusal = refused(server, tmp_path)
    assert "answers 500" in refusal
    assert "the kitchen is closed" in refusal


@pytest.mark.parametrize(
    "body", [b"<html>hello</html>", b"{}", b'{"id": "a/b", "sha": "x"}', b"[]"]
)
def test_what_is_no_hub_is_told(tmp_path: Path, body: bytes) -> None:
    refusal = refused(HubServer({EVAL: EVALS}, api_body=body), tmp_path)
    assert "does not answer like a Hub server" in refusal
    assert "HF_ENDPOINT" in refusal


@pytest.mark.parametrize("address", ["127.0.0.1:9", "http://127.0.0.1:x", "ftp://host", "mirror"])
def test_an_address_that_is_none(monkeypatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(ConfigError, match="not a valid Hub address") as error:
        Hub(AGAIN)
    assert "HF_ENDPOINT" in error.value.way_out


def test_nobody_there(tmp_path: Path) -> None:
    address = "http://127.0.0.1:9"
    with pytest.raises(DataError) as error:
        pull_files(Hub(AGAIN, endpoint=address + "/"), HITOM_FILE, tmp_path)
    refusal = lines(error)
    assert f"'{NAME}' cannot be downloaded" in refusal
    assert address in refusal
    assert AGAIN in refusal


def test_offline_names_the_file_and_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "my rows"
    with HubServer({EVAL: EVALS}) as server:
        process = start(server.url, "--out", str(folder), HF_HUB_OFFLINE="1")
        out, err = process.communicate(timeout=600)
        assert server.requests == []
    assert (process.returncode, out) == (2, "")
    what, why, fix = err.splitlines()
    assert what == f"error: '{NAME}' cannot be downloaded because the Hub client is offline."
    assert "HF_HUB_OFFLINE" in why
    assert f"soul data pull --task hitom --split eval --out '{folder}'" in fix


# -- tokens that come back ----------------------------------------------------------------------


def in_json(token: str) -> str:
    return "".join(f"\\u{ord(c):04x}" for c in token)


ECHOES = {
    "plain": lambda token: f"no access with {token}",
    "escaped": lambda token: f"no access with {in_json(token)}",
    "in HTML": lambda token: "".join(f"&#{ord(c)};" for c in token),
    "cut where it stands": lambda token: "x" * 190 + token,
}


@pytest.mark.parametrize(
    ("status", "form", "stored"),
    [
        *((status, "plain", False) for status in (400, 401, 403, 404, 500)),
        *((500, form, False) for form in ECHOES if form != "plain"),
        (500, "plain", True),
    ],
)
def test_a_token_that_a_mirror_repeats_is_not_told(
    status: int, form: str, stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read from HF_TOKEN, or from where `hf auth login` put it."""
    if stored:
        (tmp_path / "no-token").write_text(f"{TOKEN}\n")
    else:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    server = HubServer({EVAL: EVALS}, api_status=status, says=ECHOES[form](TOKEN))
    refusal = refused(server, tmp_path / "data")
    assert server.requests[0].authorization == f"Bearer {TOKEN}"
    assert TOKEN[:6] not in refusal and in_json(TOKEN[:4]) not in refusal
    assert "".join(f"&#{ord(c)};" for c in TOKEN[:3]) not in refusal


def test_no_file_is_named_after_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    files = {**EVALS, f"{TOKEN}.parquet": HITOM}
    refusal = refused(HubServer({EVAL: files}), tmp_path / "data")
    assert TOKEN[:6] not in refusal and "a file name contains your access token" in refusal
    assert not any(TOKEN in name for name in names_in(tmp_path / "data"))


def test_a_body_that_is_no_listing_may_hold_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for body in (f'{{"sha": "{TOKEN}"}}', f"{{{TOKEN}", f'"{in_json(TOKEN)}"'):
        refusal = refused(HubServer({EVAL: EVALS}, api_body=body.encode()), tmp_path / "data")
        assert TOKEN[:6] not in refusal


def test_a_mirrors_password_is_not_told(tmp_path: Path) -> None:
    hub = Hub(AGAIN, endpoint="http://me:hunter2hunter2@127.0.0.1:9", wait_s=0.0)
    with pytest.raises(DataError) as error:
        pull_files(hub, HITOM_FILE, tmp_path)
    assert "hunter2" not in lines(error) and "127.0.0.1:9" in lines(error)
    with pytest.raises(ConfigError) as wrong:
        Hub(AGAIN, endpoint="me:hunter2hunter2@mirror")
    assert "hunter2" not in lines(wrong)


def test_debug_tells_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """The traceback ends in the client's own error, which quotes the server."""
    from soulkit.cli.app import main

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server = HubServer({EVAL: EVALS}, api_status=400, says=f"no access with {TOKEN}")
    with server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        out = str(tmp_path / "data")
        assert main(["data", "pull", "--task", "hitom", "--split", "eval", "--out", out,
                     "--debug"]) == 2  # fmt: skip
    err = capfd.readouterr().err
    assert "Traceback" in err and "no access with [key]" in err and TOKEN[:6] not in err
