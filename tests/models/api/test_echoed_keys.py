"""Servers that say keys back: no record, no error and no line on a screen holds them.

The detection service over real HTTP: what is sent, read and paid for, and what fails.
"""

from __future__ import annotations

import asyncio
import base64
import html
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from soulkit.api_keys import holds_key
from soulkit.errors import ModelLoadError, ProviderError, UnreadableVerdict
from soulkit.models.api.detector import Detector
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.protocol import parse_reply
from soulkit.models.api.transport import make_client
from soulkit.models.ledger.ledger import Ledger, ReplayMiss
from soulkit.types import Call
from tests.models.asking import ask
from tests.support.evaluation import api, oracle, records
from tests.support.servers.detector_server import DetectorServer
from tests.support.servers.openai_server import Fault, ScriptedServer

KEY, OTHER = "sk-echo-0123456789abcdef", "gw/other+key/9876543210=="
CALL = Call(role="judge", example_id="e1")


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OTHER_KEY", OTHER)


def in_json(key: str) -> str:
    return "".join(f"\\u{ord(c):04x}" for c in key)


def reply(content: str, **more: str) -> bytes:
    """A completion, its strings as they stand here."""
    fields = "".join(f', "{name}": "{value}"' for name, value in more.items())
    return (
        f'{{"choices": [{{"index": 0, "finish_reason": "stop", "message": '
        f'{{"role": "assistant", "content": {content}{fields}}}}}]}}'
    ).encode()


REPLIES: dict[str, Callable[[str], bytes]] = {
    "escaped": lambda k: reply(f'"it is {in_json(k)}"'),
    "one letter escaped": lambda k: reply(f'"it is {in_json(k[0])}{k[1:]}"'),
    "reasoning": lambda k: reply('"well"', reasoning_content=f"it is {in_json(k)}"),
    "refusal": lambda k: reply("null", refusal=f"not with {in_json(k)}"),
    "parts": lambda k: reply(
        f'[{{"type": "text", "text": "{k[:9]}"}}, {{"type": "text", "text": "{k[9:]}"}}]'
    ),
    "HTML": lambda k: reply(json.dumps("".join(f"&#{ord(c)};" for c in k))),
    "address": lambda k: reply(json.dumps(f"https://x/?k={quote(k, safe='')}")),
    "base64": lambda k: reply(json.dumps(base64.b64encode(f"Bearer {k}".encode()).decode())),
    "lines": lambda k: reply(json.dumps(f"{k[:10]}\n{k[10:]}")),
    "elsewhere": lambda k: reply('"well", "name": "' + in_json(k) + '"'),
    "name of a field": lambda k: reply('"well", "' + in_json(k) + '": 1'),
}


@pytest.mark.parametrize("key", [KEY, OTHER])
@pytest.mark.parametrize("form", REPLIES)
def test_a_reply_is_kept_without_the_key(form: str, key: str, tmp_path: Path) -> None:
    """A server of one key may know the other one: a gateway in front of both, for instance."""
    fault = Fault(raw=REPLIES[form](key))
    with ScriptedServer(script=lambda i, body: fault) as server:
        Endpoint(model="o", base_url=server.base_url, api_key_env="OTHER_KEY")
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            got = ask(Endpoint(model="m", base_url=server.base_url, ledger=ledger))
        with Ledger(tmp_path / "ledger.sqlite", "replay") as ledger:
            again = ask(Endpoint(model="m", base_url=server.base_url, ledger=ledger))
    assert (again.text, again.reasoning) == (got.text, got.reasoning)
    for text in (got.text, got.reasoning):
        assert key not in text and not holds_key(html.unescape(text))
    assert "[key]" in got.text + got.reasoning or "well" in got.text
    for file in tmp_path.iterdir():
        content = file.read_bytes().decode("utf-8", "ignore")
        assert key not in content and in_json(key) not in content
        assert base64.b64encode(key.encode()).decode()[:16] not in content


ERRORS: dict[str, Callable[[str], Fault]] = {
    "escaped": lambda k: Fault(
        status=401, raw=f'{{"error": {{"message": "bad key {in_json(k)}"}}}}'.encode()
    ),
    "HTML page": lambda k: Fault(
        status=403, raw=("<p>" + "".join(f"&#{ord(c)};" for c in k) + "</p>").encode()
    ),
    "in the kind": lambda k: Fault(
        status=400, raw=f'{{"error": {{"message": "no", "type": "{in_json(k)}"}}}}'.encode()
    ),
    "redirect": lambda k: Fault(
        status=307, raw=b"", headers={"Location": f"https://x/?key={quote(k, safe='')}"}
    ),
    "status 200": lambda k: Fault(raw=f'{{"error": {{"message": "bad {in_json(k)}"}}}}'.encode()),
    "no JSON": lambda k: Fault(raw=f"your key {in_json(k)} is bad".encode()),
    "no choices": lambda k: Fault(raw=f'{{"your key": "{in_json(k)}"}}'.encode()),
    "cut where it stands": lambda k: Fault.status_error(403, "x" * 195 + in_json(k)),
    "its first half": lambda k: Fault.status_error(403, f"bad key {k[: len(k) // 2 + 2]}..."),
}


@pytest.mark.parametrize("form", ERRORS)
def test_an_error_is_told_without_the_key(form: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "soulkit")
    fault = ERRORS[form](OTHER)
    with (
        ScriptedServer(script=lambda i, body: fault) as server,
        pytest.raises(ProviderError) as caught,
    ):
        ask(Endpoint(model="m", base_url=server.base_url, api_key_env="OTHER_KEY", backoff_s=0.0,
                     max_attempts=2))  # fmt: skip
    messages = caught.value.detail + caplog.text
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert (
        not holds_key(messages)
        and OTHER[:8] not in messages
        and in_json(OTHER)[:40] not in messages
    )


def test_a_run_holds_no_key_and_prints_none(tmp_path: Path, capfd: Any) -> None:
    """The actor repeats its key, escaped; every third time its server complains of it instead."""
    gold = oracle("tomi", 6)

    def script(index: int, body: dict[str, Any]) -> Fault:
        if index % 3 == 2:
            return ERRORS["escaped"](KEY)
        return Fault(raw=reply(json.dumps(gold(body))[:-1] + f' {in_json(KEY)}"'))

    with ScriptedServer(script=script) as server:
        soul_code = api(server.base_url, tmp_path / "run", "--max-unscored", 1)
        assert soul_code == 0
    assert len(records(tmp_path / "run")) == 6
    printed = capfd.readouterr()
    texts = [printed.out, printed.err]
    texts += [f.read_bytes().decode("utf-8", "ignore") for f in tmp_path.rglob("*") if f.is_file()]
    assert not any(KEY in text or in_json(KEY) in text for text in texts)
    assert any("[key]" in text for text in texts)


def test_debug_shows_no_key_either(tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    """A traceback ends in the words of a library, which may quote a server's."""
    from soulkit.eval.run import runner

    def broken(config: Any) -> None:
        try:
            raise ValueError(f"the server said {in_json(KEY)}")
        except ValueError as error:
            raise ModelLoadError("It broke.", f"It said {KEY}.", "Mend it.") from error

    monkeypatch.setattr(runner, "check_endpoints", broken)
    with ScriptedServer() as server:
        Endpoint(model="m", base_url=server.base_url)  # reads the key
        assert api(server.base_url, tmp_path / "run", "--debug") == 2
    err = capfd.readouterr().err
    assert "Traceback" in err and "the server said [key]" in err and "why: It said [key]." in err
    assert not holds_key(err)


def test_a_proxys_password_is_not_shown(monkeypatch: Any) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "odd://me:hunter2hunter2@proxy:1")
    with pytest.raises(ModelLoadError) as caught:
        make_client("https://example.org/v1", 1.0, 1)
    assert "hunter2" not in " ".join(caught.value.lines())


# -- the detector ----------------------------------------------------------------------------------


DETECTOR_CALL = Call(role="judge", example_id="e")
DETECTOR_KEY = "detector-key-0123456789"


def human_share(detector: Detector, ledger: Ledger | None = None, text: str = "hey there") -> float:
    return asyncio.run(detector.human(text, DETECTOR_CALL, ledger))


def quick(url: str, **more: Any) -> Detector:
    return Detector(url=url, backoff_s=0.0, **more)


def test_a_text_goes_out_with_the_key_in_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", DETECTOR_KEY)
    with DetectorServer([(200, {"fraction_human": 0.75, "version": "3"})]) as server:
        assert human_share(quick(server.url, key_env="MY_KEY")) == 0.75
        assert server.requests == [{"text": "hey there"}]
        assert server.headers[0]["x-api-key"] == DETECTOR_KEY
        assert human_share(quick(server.url, key_env="MY_KEY", header="X-Token")) == 0.75
        assert server.headers[1]["x-token"] == DETECTOR_KEY and "x-api-key" not in server.headers[1]
        assert human_share(quick(server.url)) == 0.75
        assert DETECTOR_KEY not in str(server.headers[2])


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
        with pytest.raises(UnreadableVerdict, match="is not a number in"):
            human_share(quick(server.url, attempts=2))
        assert len(server.requests) == 2


def test_a_service_that_stumbles_is_asked_again() -> None:
    replies = [(503, "busy"), (200, {}), (429, "slow down"), (200, {"fraction_human": 0.5})]
    with DetectorServer(replies) as server:
        assert human_share(quick(server.url)) == 0.5
        assert len(server.requests) == 4


def test_a_refusal_is_final_and_shows_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", DETECTOR_KEY)
    with DetectorServer([(401, f"bad key {in_json(DETECTOR_KEY)}")]) as server:
        with pytest.raises(UnreadableVerdict, match="HTTP 401") as caught:
            human_share(quick(server.url, key_env="MY_KEY"))
        assert len(server.requests) == 1 and "[key]" in caught.value.detail
        assert not holds_key(caught.value.detail)


def test_the_key_does_not_follow_a_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", DETECTOR_KEY)
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
    monkeypatch.setenv("MY_KEY", DETECTOR_KEY)
    path = tmp_path / "ledger.sqlite"
    body = f'{{"fraction_human": 0.75, "echo": "{in_json(DETECTOR_KEY)}"}}'
    with DetectorServer([(500, ""), (200, body)]) as server, Ledger(path) as ledger:
        human_share(quick(server.url, key_env="MY_KEY"), ledger)
        (row,) = ledger._query("SELECT reply, attempts FROM calls")
    assert json.loads(parse_reply(row[0]).text)["echo"] == "[key]" and row[1] == 2
    files = [file.read_bytes().decode("utf-8", "ignore") for file in tmp_path.iterdir()]
    assert not any(holds_key(text) or in_json(DETECTOR_KEY) in text for text in files)


def test_a_service_elsewhere_needs_its_key() -> None:
    with pytest.raises(ModelLoadError, match="'NO_SUCH_KEY' is not set"):
        human_share(Detector(url="https://detector.example/v3", key_env="NO_SUCH_KEY"))
    with pytest.raises(ModelLoadError, match="not an http or https"):
        human_share(Detector(url="detector"))
