"""The person of a conversation, from the file to splits, rows, losses, intervals and pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import soulkit as sk
from soulkit.data.files import read_rows
from soulkit.runs.jsonl import read_jsonl
from soulkit.tasks.kit.loading import load_examples
from soulkit.tasks.kit.registry import load_registry
from tests.support.chats import jsonl
from tests.support.drafting import built, description, intent, reactions, review, text_of
from tests.support.evaluation import soul
from tests.support.servers.openai_server import ScriptedServer


def talk(person: str | None, number: int, column: str = "user_id") -> dict[str, Any]:
    """A conversation about a thing that occurs in no other."""
    texts = (f"hi my radio {number} hums near the {number}th shelf of my shed", "turn it off",
             f"tried that with radio {number}, no luck at all", "let it dry")  # fmt: skip
    roles = ("user", "assistant") * 2
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    return {**({column: person} if person else {}), "messages": messages}


def people_of(path: Path) -> set[str]:
    return {str(row.fields.get("user_id")) for row in read_rows(path)[0]}


@pytest.mark.parametrize("by", [(), ("--by", "person")])
def test_a_person_is_on_one_side_whatever_the_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], by: Sequence[str]
) -> None:
    rows = [talk(f"p{n % 8}", n) for n in range(40)]
    nameless = [{"id": f"c{n // 2}", **talk(None, 100 + n)} for n in range(20)]
    chats = jsonl(tmp_path / "chats.jsonl", [*rows, *nameless])
    assert soul("data", "split", chats, *by, "--share", 0.3, "-o", tmp_path / "parts") == 0
    train, held_out = (tmp_path / "parts" / f"{name}.jsonl" for name in ("train", "held_out"))
    assert people_of(train) & people_of(held_out) <= {"None"}
    ids = [{row.fields.get("id") for row in read_rows(path)[0]} for path in (train, held_out)]
    assert ids[0] & ids[1] <= {None}  # rows without a person stay with their conversation
    assert len(read_rows(train)[0]) + len(read_rows(held_out)[0]) == 60
    shown = capsys.readouterr()
    assert " people → " in shown.out and "20 conversations name no person" in shown.err


def test_rows_that_are_no_conversations_need_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", [{"job": "baker"}, {"job": "miner"}])
    assert soul("data", "split", rows, "-o", tmp_path / "parts") == 2
    assert "--by NAME,NAME" in capsys.readouterr().err and not (tmp_path / "parts").exists()


def test_a_person_on_both_sides_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = jsonl(tmp_path / "chats.jsonl", [talk(f"p{n}", n) for n in range(6)])
    rows = [{"source": "prism", "intent": f"mend thing {n}", "conversation_history": "",
             "opening_prompt": "hm", "person": p} for n, p in enumerate(("p2", "p9"))]  # fmt: skip
    rows_file = jsonl(tmp_path / "rows.jsonl", rows)
    call = ("data", "contamination", chats, rows_file, "--chats", "--task", "userllm")
    assert soul(*call) == 0
    assert "in both the training data and the evaluation rows: 1 (p2)" in capsys.readouterr().out
    assert soul(*call, "--json") == 0
    assert json.loads(capsys.readouterr().out)["people"] == ["p2"]


DRAFTS = {"userllm": intent, "mirrorbench": description, "twinvoice": reactions}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Chats of eight people without duplicates, split by person; rows of the people held out."""
    folder = tmp_path_factory.mktemp("person")
    rows = [talk(f"p{n % 8}", n) for n in range(48)]
    chats = jsonl(folder / "chats.jsonl", [*rows, rows[3]])
    assert soul("data", "dedupe", chats, "-o", folder / "unique.jsonl") == 0
    assert soul("data", "split", folder / "unique.jsonl", "--share", 0.4, "-o", folder) == 0
    paths = {name: folder / f"{name}.jsonl" for name in ("train", "held_out", *DRAFTS)}
    with ScriptedServer(answer=lambda body: review()) as judge:
        for task, answer in DRAFTS.items():
            with ScriptedServer(answer=answer) as drafter:
                assert built(task, paths["held_out"], paths[task], drafter, judge) == 0
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("task", DRAFTS)
def test_rows_drafted_from_chats_belong_to_their_person(parts: dict[str, Path], task: str) -> None:
    live = load_registry().task(task)
    examples = load_examples(live, [parts[task]], split="test").examples
    owners = {(e.fields[live.spec.person], e.cluster) for e in examples}
    assert {str(person) for person, _ in owners} == people_of(parts["held_out"])
    assert len(owners) == len({cluster for _, cluster in owners}) < len(examples)
    assert {e.origin for e in examples} == {"held_out.jsonl"}


@pytest.mark.slow
def test_a_person_stays_a_person_from_import_to_the_page(
    parts: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    people = people_of(parts["held_out"])
    n = len(people)
    clean, run = tmp_path / "clean.jsonl", tmp_path / "run"
    leaks = ("data", "contamination", parts["train"], parts["userllm"], "--chats", "--exclude")
    assert soul(*leaks, clean) == 0 and not people_of(clean) & people
    train = ("train", "sft", "--model", "tiny", "--full", "--data", clean, "--side", "human",
             "--validation", parts["held_out"], "--steps", 2, "--eval-every", 2, "--batch", 4,
             "--set", "show_samples=2")  # fmt: skip
    capsys.readouterr()
    assert soul(*train, "--out", run) == 0
    shown = capsys.readouterr()
    assert f"conversations of {n} people)" in shown.out and "people in both" not in shown.err
    valid = json.loads((run / "summary.json").read_text())["validation"]
    assert valid["people"] == {"held_out": n}
    assert valid["low"]["held_out"] < valid["last"]["held_out"] < valid["high"]["held_out"]
    assert {line["cluster"] for line in read_jsonl(run / "samples.jsonl")} <= people

    played = ("--task", "userllm", "--data", parts["userllm"], "--judge")
    with ScriptedServer(answer=lambda b: "HUMAN" if "twice" in text_of(b) else "AI") as judge:
        for side, lines in (("a", "did that twice"), ("b", "no luck")):
            with ScriptedServer(answer=lambda body, lines=lines: lines) as actor:
                out = ("--out", tmp_path / side, "--base-url", actor.base_url, "--model", "m")
                assert soul("eval", "api", *played, f"endpoint:j@{judge.base_url}", *out) == 0
    runs = tmp_path / "a", tmp_path / "b"
    cell = sk.load_run(runs[0]).summary.tasks["userllm"]["human_share"]
    assert cell.n_clusters == n < cell.n
    capsys.readouterr()
    assert soul("compare", *runs, "--metric", "human_share", "--json") == 0
    assert f'"n_clusters": {n}' in capsys.readouterr().out
    assert soul("report", *runs, "--format", "html", "--out", tmp_path / "page.html") == 0
    assert f"from {n} people" in (tmp_path / "page.html").read_text()


def test_training_names_the_people_on_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = jsonl(tmp_path / "chats.jsonl", [talk(f"p{n}", n) for n in range(4)])
    mixed = jsonl(tmp_path / "mixed.jsonl", [talk("p2", 900), talk("p99", 901)])
    assert soul("train", "sft", "--model", "tiny", "--full", "--data", chats, "--side", "human",
                "--validation", mixed, "--steps", 1, "--dry-run") == 0  # fmt: skip
    shown = "".join(capsys.readouterr())
    assert "the training data and the validation conversations: 1 (p2)" in shown
