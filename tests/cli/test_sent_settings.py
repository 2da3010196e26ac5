"""How calls were sent, through `soul eval`: settings that were refused, neutral values, servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.evaluation import api, oracle, soul, summary, value
from tests.support.servers.openai_server import Body, Fault, ScriptedServer

WHOLE = {"actor": {"m": {"temperature": 1.0}}}


def no_temperature(index: int, body: Body) -> Fault | None:
    if "temperature" not in body:
        return None
    text = "Unsupported parameter: 'temperature' is not supported with this model."
    return Fault.status_error(400, text, code="unsupported_parameter", param="temperature")


def record(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "provenance.json").read_text())
    return loaded


@pytest.mark.parametrize("ledger", ["record", "off"])
def test_a_refused_setting_is_recorded_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ledger: str
) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer=oracle("tomi", 6), script=no_temperature) as server:
        assert api(server.base_url, out, "--temperature", 0.7, "--ledger", ledger) == 0
    shown = capsys.readouterr()
    assert shown.err.count("tomi actor temperature (100 % of calls)") == 1
    assert "refused by servers tomi actor temperature" in " ".join(shown.out.split())
    entry = record(out)["tasks"]["tomi"]
    assert summary(out)["dropped_settings"] == {"tomi": WHOLE}
    assert entry["dropped_settings"] == WHOLE
    (sent,) = entry["sent"]["actor"]["m"]
    assert sent["calls"] == 6 and sent["top_p"] == 1.0 and "temperature" not in sent
    assert entry["sampling"]["temperature"] == 0.7, "what was asked for stays"
    assert summary(out)["provenance"]["tasks"]["tomi"]["dropped_settings"] == WHOLE
    assert soul("report", out, "--format", "html", "--out", tmp_path / "page.html") == 0
    assert "tomi actor temperature (100 % of calls)" in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    assert soul("show", out, "--worst", 1) == 0
    assert "settings that the server refused: temperature" in capsys.readouterr().out


def test_the_share_is_of_calls_and_survives_a_resume(tmp_path: Path) -> None:
    """The server takes the setting at first; the second start plays the rows that failed."""
    out = tmp_path / "run"

    def script(index: int, body: Body) -> Fault | None:
        return Fault.status_error(400, "no") if index >= 3 else None

    one_by_one = ("--concurrency", 1, "--temperature", 0.7, "--max-unscored", 1)
    answer = oracle("tomi", 6)
    with ScriptedServer(answer=answer, script=script) as server:
        port = int(server.base_url.split(":")[2].removesuffix("/v1"))
        assert api(server.base_url, out, *one_by_one) == 0
    assert "dropped_settings" not in summary(out)
    with ScriptedServer(answer=answer, script=no_temperature, port=port) as server:
        assert api(server.base_url, out, *one_by_one) == 0
        assert api(server.base_url, out, *one_by_one) == 0, "nothing is left, nothing is lost"
    half = {"actor": {"m": {"temperature": 0.5}}}
    assert summary(out)["dropped_settings"] == {"tomi": half}
    entry = record(out)["tasks"]["tomi"]
    assert entry["dropped_settings"] == half
    sent = [("temperature" in one, one["calls"]) for one in entry["sent"]["actor"]["m"]]
    assert sorted(sent) == [(False, 3), (True, 3)]


@pytest.mark.parametrize(
    ("owner", "extra", "server_is", "values"),
    [
        ("vllm", {}, {"engine": "vllm", "defaults": "not used"},
         {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}),
        ("llamacpp", {"/props": {"default_generation_settings": {"n_ctx": 4096}}},
         {"engine": "llamacpp", "defaults": "not used", "context": 4096},
         {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}),
        ("library", {}, {"defaults": "unknown"}, {}),
    ],
)  # fmt: skip
def test_the_record_holds_what_was_sent_and_to_which_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], owner: str, extra: dict[str, Any],
    server_is: dict[str, Any], values: dict[str, Any],
) -> None:  # fmt: skip
    out = tmp_path / "run"
    with ScriptedServer(answer=oracle("tomi", 6), owner=owner, extra=extra) as server:
        assert api(server.base_url, out, "--temperature", 0.7) == 0
    (sent,) = record(out)["tasks"]["tomi"]["sent"]["actor"]["m"]
    basic = {"temperature": 0.7, "top_p": 1.0, "max_tokens": 256, "seed": "one per call"}
    assert sent == {**basic, **values, "calls": 6}
    assert record(out)["servers"] == {f"m@{server.base_url}": server_is}
    assert summary(out)["provenance"]["servers"] == record(out)["servers"]
    shown = capsys.readouterr()
    unknown = server_is["defaults"] == "unknown"
    assert shown.err.count("unknown server: m at ") == unknown
    assert ("unknown defaults m@" in " ".join(shown.out.split())) == unknown


def test_rows_that_the_server_cut_are_unscored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp ends a reply without an error when its slot is full."""
    out = tmp_path / "run"
    message = {"content": "Let me think about <answer>box</answer>"}
    full = Fault.reply({
        "choices": [{"message": message, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 28},
    })  # fmt: skip
    props = {"/props": {"default_generation_settings": {"n_ctx": 128}}}
    with ScriptedServer(
        answer=oracle("tomi", 6), owner="llamacpp", extra=props, script={1: full}
    ) as server:
        assert api(server.base_url, out, "--concurrency", 1) == 1
    assert summary(out)["statuses"] == {"tomi": {"ok": 5, "unscored": 1}}
    assert value(out)["unscored"] == {"context_overflow": 1} and value(out)["mean"] == 1.0
    error = capsys.readouterr().err
    assert "cut the reply after 28 of the 256 tokens" in error and "holds 128 tokens" in error
    assert "--max-tokens" not in error
