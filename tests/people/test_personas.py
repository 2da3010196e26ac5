"""`soul people personas` and `scenarios`: what is drafted, what is rejected, kills and privacy."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from soulkit.people.personas import MESSAGES, WORDS, people_drafts, telling
from tests.support.chats import Row, jsonl
from tests.support.drafting import by_content, provenance, review, rows_in, text_of
from tests.support.evaluation import soul, start
from tests.support.servers.openai_server import Body, ScriptedServer

PERSONA = "Writes short lines without capitals, skips greetings, asks what comes next and thanks."
SCENARIO = "You want a noisy receiver to be quiet again and have switched it off more than once."


def persona(body: Body) -> str:
    return json.dumps({"persona": PERSONA})


def scenario(body: Body) -> str:
    return json.dumps({"scenario": SCENARIO, "about": "a noisy receiver"})


def talk(person: str, number: int, more: str = "") -> Row:
    texts = (f"hi radio {number} of {person[:3]}y hums {more}", "off and on?", "did that, no luck")
    roles = ("user", "assistant", "user")
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    return {"person": person, "messages": messages}


def chats(path: Path, people: int = 6) -> Path:
    return jsonl(path, [talk(f"amy{n % people}", n) for n in range(2 * people)])


def drafted(kind: str, source: Path, out: Path, drafter: ScriptedServer, *more: object) -> int:
    with ScriptedServer(answer=lambda body: review()) as judge:
        players = ("--drafter", f"endpoint:d@{drafter.base_url}",
                   "--filter", f"endpoint:f@{judge.base_url}")  # fmt: skip
        run = out.with_suffix(".run")
        return soul("people", kind, source, "-o", out, *players, "--folder", run, *more)


@pytest.mark.parametrize(("kind", "answer", "rows"), [("personas", persona, 6),
                                                      ("scenarios", scenario, 12)])  # fmt: skip
def test_one_persona_a_person_and_one_scenario_a_conversation(
    tmp_path: Path, kind: str, answer: Any, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = chats(tmp_path / "chats.jsonl"), tmp_path / f"{kind}.jsonl"
    with ScriptedServer(answer=answer) as drafter:
        assert drafted(kind, source, out, drafter) == 0
        sent = "\n".join(map(text_of, drafter.requests))
    written = rows_in(out)
    assert len(written) == rows == len({row["id"] for row in written})
    assert {row["person"] for row in written} == {f"amy{n}" for n in range(6)}
    texts = {"personas": {"persona": PERSONA},
             "scenarios": {"scenario": SCENARIO, "about": "a noisy receiver"}}[kind]  # fmt: skip
    assert all(texts.items() <= row.items() for row in written)
    assert all(re.fullmatch(r"chats\.jsonl:\d+", row["source"]) for row in written)
    assert not re.search(r"amy\d", sent), "who somebody is goes to no model"
    assert provenance(out)["counts"]["kept"] == rows
    assert f"{rows} rows of {kind}" in capsys.readouterr().out


def test_a_draft_that_says_who_somebody_is_is_rejected_before_the_filter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = chats(tmp_path / "chats.jsonl", 3), tmp_path / "personas.jsonl"
    mail = json.dumps({"persona": f"{PERSONA} Answers from jo.miller@corp.com only."})
    name = json.dumps({"persona": f"{PERSONA} Signs as AMY1."})
    with ScriptedServer(
        answer=by_content({"radio 0 ": mail, "radio 1 ": name}, persona)
    ) as drafter:
        assert drafted("personas", source, out, drafter) == 0
    assert [row["person"] for row in rows_in(out)] == ["amy2"]
    assert provenance(out)["counts"]["rejected"] == {"private": 2}
    shown = capsys.readouterr().err
    assert "chats.jsonl:1: rejected, drafter: it holds 1 e-mail" in shown
    assert "chats.jsonl:2: rejected, drafter: it holds the id or name of a speaker" in shown
    outcomes = (out.with_suffix(".run") / "outcomes.jsonl").read_text()
    assert "jo.miller" not in outcomes and "AMY1" not in outcomes


@pytest.mark.parametrize(
    ("text", "names", "tells"),
    [
        ("Thanks Ada Lovelace at once.", {"Ada Lovelace"}, True),
        ("Says what Lovelace would say.", {"Ada Lovelace"}, True),
        ("Writes what they will do.", {"Will"}, True),
        ("Writes what they will do.", {"Will Young"}, False),
        ("Writes a line or 12.", {"a", "12"}, False),
        ("Ends without a stop.", {"anna"}, False),
    ],
)
def test_names_are_found_as_words(text: str, names: set[str], tells: bool) -> None:
    assert bool(telling(text, names)) is tells


def test_an_excerpt_is_bounded_and_names_other_speakers_of_a_group(tmp_path: Path) -> None:
    long = [talk("amy0", n, "word " * 500) for n in range(80)]
    (sketch,) = people_drafts("personas", str(jsonl(tmp_path / "a.jsonl", long)), "human").sketches
    assert len(sketch.draft.prompt.split()) < MESSAGES * 2 * WORDS
    assert "radio 0 " in sketch.draft.prompt and "radio 7" in sketch.draft.prompt
    group = [{"speaker": who, "content": f"line {n} goes to all"}
             for n, who in enumerate(("Bo", "Kim Lee", "Ada", "Kim Lee", "Ada"))]  # fmt: skip
    talked = jsonl(tmp_path / "b.jsonl", [{"messages": group}])
    (sketch,) = people_drafts("scenarios", str(talked), "Ada").sketches
    shape = {"about": "lines", "scenario": "You want to hear from Kim what goes on in the group."}
    assert sketch.private(sketch.draft.read(json.dumps(shape)))


def test_private_chats_go_to_no_model_outside_unless_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = jsonl(tmp_path / "c.jsonl", [talk("amy0", 0, "write to jo.miller@corp.com please")])
    call = ("people", "personas", source, "-o", tmp_path / "p.jsonl", "--drafter",
            "endpoint:gpt-5-nano", "--filter", "endpoint:gpt-5-nano", "--dry-run")  # fmt: skip
    assert soul(*call) == 2
    assert "--allow-private" in capsys.readouterr().err
    assert soul(*call, "--allow-private") == 0
    with ScriptedServer(answer=persona) as drafter:  # on this machine
        assert drafted("personas", source, tmp_path / "q.jsonl", drafter) == 0


@pytest.mark.slow
def test_a_killed_command_resumes_without_paying_twice(tmp_path: Path) -> None:
    source, out = chats(tmp_path / "chats.jsonl", 12), tmp_path / "p.jsonl"
    with (
        ScriptedServer(answer=persona) as drafter,
        ScriptedServer(answer=lambda body: review()) as judge,
    ):
        command = ["people", "personas", str(source), "-o", str(out), "--concurrency", "1",
                   "--drafter", f"endpoint:d@{drafter.base_url}", "--folder", str(tmp_path / "run"),
                   "--filter", f"endpoint:f@{judge.base_url}"]  # fmt: skip
        process = start(*command)
        drafter.wait_for(5, timeout_s=120)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not out.exists()
        assert soul(*command) == 0
        # What was in flight at the kill is all that is sent twice.
        assert len(drafter.requests) + len(judge.requests) <= 24 + 1
        calls = len(drafter.requests)
        assert soul(*command) == 0 and len(drafter.requests) == calls
    assert len(rows_in(out)) == 12
