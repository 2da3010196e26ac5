"""The detection service over real HTTP: what is sent, read and paid for, and what fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ModelLoadError, UnreadableVerdict
from soulkit.models.api.detector import Detector
from soulkit.models.api.protocol import parse_reply
from soulkit.models.ledger.ledger import Ledger, ReplayMiss
from soulkit.types import Call
from tests.support.servers.detector_server import DetectorServer

CALL = Call(role="judge", example_id="e")
KEY = "detector-key-0123456789"


def human_share(detector: Detector, ledger: Ledger | None = None, text: str = "hey there") -> float:
    return asyncio.run(detector.human(text, CALL, ledger))


def quick(url: str, **more: Any) -> Detector:
    return Detector(url=url, backoff_s=0.0, **more)


def test_a_text_goes_out_with_the_key_in_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with DetectorServer([(200, {"fraction_human": 0.75, "version": "3"})]) as server:
        assert human_share(quick(server.url, key_env="MY_KEY")) == 0.75
        assert server.requests == [{"text": "hey there"}]
        assert server.headers[0]["x-api-key"] == KEY
        assert human_share(quick(server.url, key_env="MY_KEY", header="X-Token")) == 0.75
        assert server.headers[1]["x-token"] == KEY and "x-api-key" not in server.headers[1]
        assert human_share(quick(server.url)) == 0.75
        assert KEY not in str(server.headers[2])


@pytest.mark.parametrize(("likelihood", "human"), [(0, 1.0), (1, 0.0), (0.25, 0.75)])
def test_a_field_may_say_how_much_a_machine_it_was(likelihood: float, human: float) -> None:
    with DetectorServer([(200, {"ai_likelihood": likelihood})]) as server:
        assert human_share(quick(server.url, field="ai_likelihood", machine=True)) == human


@pytest.mark.parametrize(
    "reply",
    [{"fraction_human": 1.2}, {"fraction_human": -0.1}, {"fraction_human": "0.8"}, {"other": 0.8},
     {"fraction_human": True}, {"fraction_human": None}, [], "no JSON", '{"fraction_human": NaN}'],
)  # fmt: skip
def test_what_is_no_number_of_that_scale_is_no_score(reply: Any) -> None:
    with DetectorServer([(200, reply)]) as server:
        with pytest.raises(UnreadableVerdict, match="no number in"):
            human_share(quick(server.url, attempts=2))
        assert len(server.requests) == 2


def test_a_service_that_stumbles_is_asked_again() -> None:
    replies = [(503, "busy"), (200, {}), (429, "slow down"), (200, {"fraction_human": 0.5})]
    with DetectorServer(replies) as server:
        assert human_share(quick(server.url)) == 0.5
        assert len(server.requests) == 4


def test_a_refusal_is_final_and_shows_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with DetectorServer([(401, f"bad key {KEY}")]) as server:
        with pytest.raises(UnreadableVerdict, match="HTTP 401") as caught:
            human_share(quick(server.url, key_env="MY_KEY"))
        assert len(server.requests) == 1 and KEY not in caught.value.detail


def test_the_key_does_not_follow_a_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with (
        DetectorServer([(200, {"fraction_human": 0.5})]) as other,
        DetectorServer([(307, "")], headers={"Location": other.url}) as server,
    ):
        with pytest.raises(UnreadableVerdict, match="HTTP 307"):
            human_share(quick(server.url, key_env="MY_KEY"))
        assert other.requests == []


def test_silence_and_absence_are_errors() -> None:
    with (
        DetectorServer([(200, {"fraction_human": 0.5})], delay_s=0.5) as slow,
        pytest.raises(UnreadableVerdict, match="no answer within"),
    ):
        human_share(quick(slow.url, timeout_s=0.05, attempts=1))
    with DetectorServer([(200, {})]) as gone:
        url = gone.url
    with pytest.raises(UnreadableVerdict, match="connection refused"):
        human_share(quick(url, attempts=2))


def test_of_an_endless_reply_only_the_beginning_is_read() -> None:
    body = {"fraction_human": 0.5, "padding": "x" * 120_000}
    with DetectorServer([(200, body)]) as server:
        with pytest.raises(UnreadableVerdict, match="longer than 100000 bytes"):
            human_share(quick(server.url))
        assert len(server.requests) == 1


def test_a_reply_is_paid_for_once_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with DetectorServer([(200, {"fraction_human": 0.75})]) as server:
        detector = quick(server.url)
        with Ledger(path) as ledger:
            assert [human_share(detector, ledger) for _ in range(2)] == [0.75, 0.75]
            assert len(server.requests) == 1 and ledger.totals()["calls"] == 1
    with Ledger(path, "replay") as ledger:
        assert human_share(detector, ledger) == 0.75
        with pytest.raises(ReplayMiss):
            human_share(detector, ledger, "another text")


def test_the_ledger_holds_the_reply_as_it_came_and_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    path = tmp_path / "ledger.sqlite"
    body = {"fraction_human": 0.75, "echo": KEY}
    with DetectorServer([(500, ""), (200, body)]) as server, Ledger(path) as ledger:
        human_share(quick(server.url, key_env="MY_KEY"), ledger)
        (row,) = ledger._query("SELECT reply, attempts FROM calls")
    assert json.loads(parse_reply(row[0]).text) == {**body, "echo": "[key]"} and row[1] == 2
    assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.iterdir())


def test_a_service_elsewhere_needs_its_key() -> None:
    with pytest.raises(ModelLoadError, match="'NO_SUCH_KEY' is not set"):
        human_share(Detector(url="https://detector.example/v3", key_env="NO_SUCH_KEY"))
    with pytest.raises(ModelLoadError, match="no http or https"):
        human_share(Detector(url="detector"))
