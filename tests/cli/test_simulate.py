"""`soul simulate`: agents that work, forget, raise and vanish, and what a run says about them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.errors import ConfigError, DataError
from soulkit.models.players.players import base_and_adapter
from soulkit.people.simulation import agent_settings, conversation_rows, user_player
from soulkit.tasks.kit.person.brief import read_briefs
from soulkit.trust import reach_of
from tests.support.evaluation import ROOT, records, replaced, soul, summary
from tests.support.servers.openai_server import ScriptedServer

AGENT = """
import asyncio

seen = {}

def helpful(messages):
    assert all(one["role"] in ("user", "assistant") for one in messages)
    return f"reply {len(messages)}"

async def stateful(messages, conversation):
    await asyncio.sleep(0)
    seen.setdefault(conversation, []).append(len(messages))
    return f"{conversation}: {seen[conversation]}"

def broken(messages):
    if "77" in messages[0]["content"]:
        raise KeyError("order")
    return "" if len(messages) > 2 else "fine"

def wordless(messages):
    return None

def polite(messages, row):
    return {"score": len(messages) > 3, "reason": f"{row['persona_id']} wrote first"}

def unsure(messages, row):
    return 7
"""
USER = {"replies": ["my order is A-77", "what about the second one?", "bye then ###STOP###"]}
AGAIN = ["please tell me where my order of last week is now"] * 2
PARROT = {"replies": ["my order", *AGAIN, "bye"]}
VERDICT = '{"reasoning": "It helped.", "score": 8}'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    for name, script in {"user": USER, "parrot": PARROT}.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(script))
    for kind in ("persona", "scenario"):
        lines = [json.dumps({"id": f"{kind[0]}{n}", kind: f"{kind} number {n}"}) for n in range(3)]
        (tmp_path / f"{kind}s.jsonl").write_text("\n".join(lines))
    return tmp_path


def simulate(agent: str, *options: object, user: str = "scripted:user.yaml") -> int:
    usual = ("--personas", "personas.jsonl", "--scenarios", "scenarios.jsonl", "--out", "run")
    return soul("simulate", "--agent", agent, "--user", user, *replaced(usual, options))


def cells(run: str = "run") -> dict[str, Any]:
    return dict(summary(Path(run))["tasks"]["agent_chat"])


def test_every_persona_meets_every_scenario_and_writes_first(capsys: Any) -> None:
    assert simulate("agent.py:helpful", "--verdict", "agent.py:polite") == 0
    played = records(Path("run"))
    assert len({(r.tags["persona"], r.tags["scenario"]) for r in played}) == 9
    for record in played:
        lines = record.episode.transcript
        assert [line.seat for line in lines] == ["person", "agent"] * 2 + ["person"]
        assert lines[-1].text == "bye then" and record.episode.stop == "person_ended"
        assert record.score.value == 1 and record.score.words.endswith("wrote first")
    assert cells()["ends/person_ended"]["mean"] == 1 and cells()["turns"]["mean"] == 2
    out = capsys.readouterr().out
    assert re.search(r"score +1\.000 \[0\.\d+, 1\.000\] \(n 9\)", out)
    assert max(map(len, out.splitlines())) <= 80


def test_a_stateful_agent_sees_one_id_in_a_conversation() -> None:
    assert simulate("agent.py:stateful") == 0
    replies = [[line.text for line in r.episode.transcript if line.seat == "agent"]
               for r in records(Path("run"))]  # fmt: skip
    assert all(re.fullmatch(r"\S+: \[1, 3\]", last) for _, last in replies)
    assert len({last for _, last in replies}) == 9


@pytest.mark.parametrize(("agent", "status", "stop", "words"), [
    ("broken", "agent_error", "agent_error", r"KeyError: 'order' \(agent\.py:\d+, in broken\)"),
    ("wordless", "agent_error", "agent_error", "returned NoneType instead of text"),
])  # fmt: skip
def test_an_agent_that_raises_has_failed(
    agent: str, status: str, stop: str, words: str, capsys: Any
) -> None:
    assert simulate(f"agent.py:{agent}", "--verdict", "agent.py:polite") == 0
    for record in records(Path("run")):
        assert (record.score.value, record.score.status) == (0, status)
        assert record.episode.stop == stop and re.search(words, record.score.words)
    assert re.search(words, " ".join(capsys.readouterr().out.split()))


def test_an_empty_reply_ends_the_conversation() -> None:
    Path("user.yaml").write_text(yaml.safe_dump({"replies": ["my order", "and then?", "ok"]}))
    assert simulate("agent.py:broken", "--verdict", "agent.py:polite") == 0
    assert {(r.episode.stop, r.score.value, r.score.status) for r in records(Path("run"))} == {
        ("agent_silent", 0, "empty")
    }


def test_a_server_that_breaks_is_no_failure_of_the_agent() -> None:
    judged, last = ("--judge", "scripted:judge.yaml"), ("--max-attempts", 1)
    with ScriptedServer(answer="How can I help?") as server:
        assert simulate(server.base_url, *judged) == 2  # no judge yet
        Path("judge.yaml").write_text(yaml.safe_dump({"replies": [VERDICT]}))
        assert simulate(server.base_url, *judged) == 0
        assert {r.score.value for r in records(Path("run"))} == {0.8}
    assert simulate(f"endpoint:m@{server.base_url}", *judged, "--out", "gone", *last) == 1
    reasons = {(r.score.value, r.score.reason) for r in records(Path("gone"))}
    assert reasons == {(None, "provider_error")}


def test_without_a_verdict_there_is_no_score(capsys: Any) -> None:
    assert simulate("agent.py:helpful", "-n", 2) == 0
    assert "none: neither --judge nor --verdict was given" in capsys.readouterr().out
    assert cells()["value"]["name"] == "answered"


def test_a_verdict_of_another_shape_leaves_the_conversation_unscored() -> None:
    assert simulate("agent.py:helpful", "-n", 2, "--verdict", "agent.py:unsure") == 1
    (record, _) = records(Path("run"))
    assert record.score.reason == "task_error" and "the verdict is 7" in record.score.words


def test_the_score_stands_with_and_without_the_simulators_faults(capsys: Any) -> None:
    options = ("--verdict", "agent.py:polite", "-n", 2, "--max-turns", 4)
    assert simulate("agent.py:helpful", *options, user="scripted:parrot.yaml") == 0
    assert cells()["faults/parroting"]["mean"] == cells()["faulty"]["mean"] == 1
    assert "without_faults" not in cells() or not cells()["without_faults"]["n_scored"]
    assert cells()["ends/max_turns"]["mean"] == 1
    assert "2 parroting" in capsys.readouterr().out
    notes = summary(Path("run"))["notes"]
    assert "2 parroting" in notes[0] and notes[-1].startswith("simulator: No certificate")


@pytest.mark.parametrize(("least", "code"), [(0.3, 0), (0.9, 1)])
def test_a_gate_looks_at_the_lower_end_of_the_interval(least: float, code: int) -> None:
    gate = ("--gate", f"agent_chat>={least}", "--junit", "j.xml")
    assert simulate("agent.py:helpful", "-n", 9, "--verdict", "agent.py:polite", *gate) == code
    assert ("undecided" in Path("j.xml").read_text()) is bool(code)


def test_more_conversations_contain_fewer_and_the_same_ones_resume(folder: Path) -> None:
    briefs = read_briefs(Path("personas.jsonl"), Path("scenarios.jsonl"))
    few, all_, many = (conversation_rows(briefs, n, 0, folder / "rows") for n in (4, None, 20))
    lines = many.read_text().splitlines()
    assert lines[:4] == few.read_text().splitlines() and lines[:9] == all_.read_text().splitlines()
    assert [json.loads(line)["repeat"] for line in lines] == [0] * 9 + [1] * 9 + [2] * 2
    assert conversation_rows(briefs, 4, 1, folder).read_text() != few.read_text()
    for _ in range(2):  # the same command resumes a run, another agent does not
        assert simulate("agent.py:helpful", "-n", 3) == 0
    assert simulate("agent.py:stateful", "-n", 3) == 2


def test_a_function_of_a_foreign_run_is_code() -> None:
    settings = {
        "kind": "api", "actor_kind": "function", "model": "agent.py:run",
        "option": {"verdict": "check.py:judge"}, "partner": "function:user.py:talk",
    }  # fmt: skip
    assert reach_of(settings).code == ["agent.py:run", "check.py:judge", "user.py:talk"]
    assert reach_of(settings).addresses == []


def test_what_stands_for_an_agent_and_for_a_user(folder: Path) -> None:
    assert agent_settings("pkg.mod:run") == {"model": "pkg.mod:run", "actor_kind": "function"}
    (folder / "names.yaml").write_text("endpoints: {mine: {model: m, base_url: http://x.org/v1}}")
    for read in (agent_settings, user_player):
        assert read("mine", "names.yaml")["base_url"] == "http://x.org/v1"
    (folder / "model").mkdir()
    assert user_player("model")["kind"] == "local"
    for agent in ("vllm:owner/name", "actor", "mine", "http://127.0.0.1:9/v1"):
        with pytest.raises(ConfigError):
            agent_settings(agent)
    with pytest.raises(ConfigError, match="The user cannot be 'actor'"):
        user_player("actor")


def test_more_pairs_or_conversations_than_memory_holds_are_refused(tmp_path: Path) -> None:
    for name in ("persona", "scenario"):
        rows = (json.dumps({"id": str(n), name: "x"}) + "\n" for n in range(500))
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    with pytest.raises(DataError, match="500 personas and 500 scenarios are too many"):
        read_briefs(tmp_path / "persona.jsonl", tmp_path / "scenario.jsonl")
    with pytest.raises(ConfigError, match="too many"):
        conversation_rows(read_briefs(tmp_path / "persona.jsonl"), 10**12, 0, tmp_path)


@pytest.mark.parametrize(("options", "what"), [
    (("--verdict", "agent.py:nothing"), "The function 'agent.py:nothing' cannot be used."),
    (("--verdict", "agent.py:polite", "--judge", "scripted:user.yaml"), "Both --judge and"),
    (("--criterion", "Is it kind?"), "--criterion has no effect without a judge."),
    (("--gate", "tomi>=0.5"), "The gate 'tomi>=0.5' is for 'tomi', which is not a task of this"),
    (("--user", "nobody.yaml:x"), "--user nobody.yaml:x cannot be used."),
])  # fmt: skip
def test_what_cannot_be_played_is_named(options: Any, what: str, capsys: Any) -> None:
    given = dict(zip(options[::2], options[1::2], strict=True))
    user = given.pop("--user", "scripted:user.yaml")
    rest = [part for pair in given.items() for part in pair]
    assert simulate("agent.py:helpful", *rest, user=user) == 2
    assert f"error: {what}" in capsys.readouterr().err
    assert not Path("run").exists()


def test_the_folder_of_an_adapter_stands_for_its_base_with_the_adapter(folder: Path) -> None:
    settings = {"base_model_name_or_path": "owner/base", "revision": "abc"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    assert base_and_adapter(str(folder)) == ("owner/base@abc", str(folder))
    assert base_and_adapter("owner/base") == ("owner/base", None)


@pytest.fixture
def shop(folder: Path) -> Iterator[Path]:
    for file in (ROOT / "examples" / "simulate").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    yield folder


@pytest.mark.slow
def test_fifty_conversations_find_a_planted_bug(shop: Path, capsys: Any) -> None:
    """The example: an agent that forgets the order number after six turns, and its repair."""
    for agent in ("forgetful", "fixed"):
        options = ("--verdict", "verdict.py:returned", "--out", agent)
        assert simulate(f"agent.py:{agent}", *options, user="function:user.py:customer") == 0
    worse, better = (cells(name)["value"] for name in ("forgetful", "fixed"))
    assert worse["n"] == 50 and worse["ci_high"] < better["ci_low"] and better["mean"] == 1
    for record in records(shop / "forgetful"):
        turns = sum(line.seat == "agent" for line in record.episode.transcript)
        assert record.score.value == (turns <= 6), "the order number is seven messages old"
    assert cells("forgetful")["without_faults"]["n_scored"] == 40
    capsys.readouterr()
    assert soul("compare", "forgetful", "fixed", "--gate", "agent_chat>=0.2") == 0
    assert soul("report", "forgetful", "fixed", "--format", "html", "--out", "page.html") == 0
    page = Path("page.html").read_text()
    assert "without_faults" in page and "10 swallowed last line" in page
