"""`soul data` about conversations: show, dedupe, contamination --chats."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import huggingface_hub.constants
import pytest

from soulkit.cli import app as cli
from tests.support.chats import chat, jsonl, said_by

STORY = "Ada entered the loft where the red pen lay in a jar beside the old lamp from Leeds"


@pytest.fixture
def soul(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["data", *arguments])
        streams = capfd.readouterr()
        return code, streams.out, streams.err

    return run


def test_show_prints_a_lesson_with_what_is_learned(soul, tmp_path: Path):
    hostile = "question \x1b[31mred\x1b]0;title\x07"
    rows = ["{broken", {"messages": said_by(f"user: {hostile}", "assistant: hm", "user: bye")}]
    jsonl(tmp_path / "a.jsonl", rows)
    code, out, err = soul("show", "a.jsonl", "--side", "human")
    assert code == 0 and "a.jsonl:2" in out
    assert out.index("person (learned) · 2 words") < out.index("question red") < out.index("hm")
    assert "\x1b" not in out and "1 × the line is not JSON" in err
    code, out, _ = soul("show", "a.jsonl", "--side", "human", "--json")
    shown = json.loads(out)
    assert [s["learned"] for s in shown["segments"]] == [False, True, False, True]
    assert shown["left_out"] == {"the line is not JSON": 1}


def test_show_asks_the_table(soul, tmp_path: Path):
    jsonl(tmp_path / "a.jsonl", [chat(1, data_source="human_llm"), chat(2, data_source="lmsyss")])
    code, out, _ = soul("show", "a.jsonl", "--side", "corpus", "--json")
    assert code == 2 and not out  # the name in the second row is told before the first is shown
    code, _, err = soul("show", "a.jsonl", "--side", "corpus")
    assert "Did you mean 'lmsys'?" in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("a.jsonl",), "a.jsonl --side human"),
        (("a.jsonl:2",), "a.jsonl:2 --side human"),
        (("a.jsonl", "--row", "2"), "a.jsonl --side human --row 2"),
    ],
)
def test_show_of_chats_without_a_side_names_the_command_that_shows_them(soul, words, named):
    jsonl(Path("a.jsonl"), [chat(1), chat(2)])
    code, _, err = soul("show", *words)
    assert code == 2 and "'a.jsonl' holds chats" in err
    command = err.partition("soul data ")[2].strip()
    assert command == f"show {named}"
    assert soul(*command.split())[0] == 0


def test_show_of_chats_between_people_names_the_speakers(soul):
    names = ("Mia Li", "Ben", "Mia Li")
    jsonl(Path("a.jsonl"), [{"messages": [{"speaker": n, "content": "hi"} for n in names]}])
    code, _, err = soul("show", "a.jsonl")
    assert code == 2 and "one of: Mia Li (2 messages), Ben (1)." in err
    assert "soul data show a.jsonl --side 'Mia Li'. Set" in err
    assert soul("show", "a.jsonl", "--side", "Mia Li")[0] == 0
    Path("chat.txt").write_text("05/01/2024, 10:00 - Mia: hi\n05/01/2024, 10:01 - Ben: ho\n")
    code, _, err = soul("show", "chat.txt")
    assert code == 2 and "one of: Mia (1 message), Ben (1)." in err
    assert soul("show", "chat.txt", "--side", "Ben")[0] == 0
    jsonl(Path("slack/users.json"), ['[{"id": "U1", "profile": {"display_name": "Zoe"}}]'])
    jsonl(Path("slack/tea/2024-01-05.json"),
          ['[{"type": "message", "user": "U1", "ts": "1704448801.1", "text": "hi"}]'])  # fmt: skip
    code, _, err = soul("show", "slack")
    assert code == 2 and "soul data show slack --side Zoe" in err


@pytest.mark.parametrize("row", ["-1", "0", "7"])
def test_show_of_a_row_that_is_not_there(soul, tmp_path: Path, row: str):
    jsonl(tmp_path / "a.jsonl", [chat(1)])
    code, _, err = soul("show", "a.jsonl", "--side", "human", "--row", row)
    assert code == 2 and f"no conversation {row}" in err


@pytest.mark.parametrize(
    ("side", "learned", "read"),
    [("human", "person", "assistant"), ("assistant", "assistant", "person")],
)
def test_show_says_whose_words_are_read_and_whose_are_learned(soul, side, learned, read):
    turns = said_by("system: be kind", "user: one", "assistant: two", "user: three")
    jsonl(Path("a.jsonl"), [{"messages": turns}])
    code, out, _ = soul("show", "a.jsonl", "--side", side)
    assert code == 0 and "system (read)" in out and "context" not in out
    assert f"{learned} (learned) · 1 words" in out and f"{read} (read)" in out
    assert f"{read} (learned)" not in out and f"{learned} (read)" not in out


def test_show_names_a_speaker_and_the_opening(soul):
    lines = [{"speaker": name, "text": text} for name, text in (("Ada", "one"), ("Bo", "two"))]
    jsonl(Path("a.jsonl"), [{"messages": lines}])
    _, out, _ = soul("show", "a.jsonl", "--side", "Bo", "--json")
    assert [s["who"] for s in json.loads(out)["segments"]] == ["others", "Bo"]
    jsonl(Path("b.jsonl"), [chat(1)])
    _, out, _ = soul("show", "b.jsonl", "--side", "human")
    assert "opening (read)" in out


ROWS = [chat(1), "", "{broken", chat(4), {"messages": said_by("assistant: alone")}, chat(6)]


@pytest.mark.parametrize(
    "words", [("a.jsonl", "--row", "4"), ("a.jsonl:4",), ("./a.jsonl:4",), ("a.jsonl", "-r4")]
)
def test_show_takes_the_number_that_messages_print(soul, words: tuple[str, ...]):
    jsonl(Path("a.jsonl"), ROWS)
    code, out, _ = soul("show", *words, "--side", "human", "--json")
    shown = json.loads(out)
    assert code == 0 and shown["row"] == "a.jsonl:4" and "question 4" in str(shown["segments"])


def test_show_says_why_a_numbered_row_is_no_conversation(soul):
    jsonl(Path("a.jsonl"), ROWS)
    for number, why in (("3", "the line is not JSON"), ("5", "says nothing"), ("2", "from 1")):
        code, _, err = soul("show", f"a.jsonl:{number}", "--side", "human")
        assert code == 2 and f"no conversation {number}" in err and why in err
    code, _, err = soul("show", "a.jsonl:4", "--row", "4", "--side", "human")
    assert code == 2 and "given twice" in err


def test_rows_of_several_files_go_on_counting(soul):
    jsonl(Path("d/a.jsonl"), [chat(1), "{broken"])
    jsonl(Path("d/b.jsonl"), [chat(3), chat(4)])
    for number, key in (("1", "a.jsonl:1"), ("3", "b.jsonl:1"), ("4", "b.jsonl:2")):
        _, out, _ = soul("show", "d", "--side", "human", "--row", number, "--json")
        assert json.loads(out)["row"] == key


@pytest.mark.parametrize(
    ("row", "near"),
    [
        ({"dialog": said_by("user: hi", "assistant: yo")}, "messages: {"),
        ({"log": [{"who": "ann", "msg": "hi"}]}, "has the keys log, who, msg"),
        ({"messages": [{"role": "user", "msg": "hi"}]}, "messages: {"),
        ({"prompt": "hi", "reply": "hello"}, "prompt and completion: {"),
        ({"text": "hi there"}, "has the keys text"),
    ],
)
def test_what_cannot_be_read_names_the_layouts_and_the_nearest(soul, row, near: str):
    jsonl(Path("a.jsonl"), [row])
    code, _, err = soul("show", "a.jsonl", "--side", "human")
    fix = err.splitlines()[-1]
    assert code == 2 and '"messages": [{"role": "user"' in fix and "a.jsonl:1 has " in fix
    assert near in fix and "soul data show" not in fix


def test_what_nobody_says_names_who_speaks(soul):
    jsonl(Path("a.jsonl"), [{"messages": said_by("assistant: alone")}])
    code, _, err = soul("show", "a.jsonl", "--side", "human")
    assert (
        code == 2
        and "--side to one of: assistant (1 message)." in err
        and "soul data show" not in err
    )


def test_what_is_neither_here_nor_on_the_hub_is_told_so(soul, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    code, _, err = soul("show", "nobody/nothing", "--side", "human")
    assert code == 2 and "The Hub dataset 'nobody/nothing' cannot be read" in err
    assert "If you meant a local path, check it" in err
    code, _, err = soul("dedupe", "nobody/nothing")
    assert code == 2 and "not a local file, folder or pattern" in err


def test_dedupe_writes_the_rows_that_stay(soul, tmp_path: Path):
    jsonl(tmp_path / "a.jsonl", [chat(1), chat(2), chat(1)])
    code, out, _ = soul("dedupe", "a.jsonl", "-o", "clean.jsonl")
    assert (
        code == 0 and "3 rows, 1 exact and 0 near" in out and "exact a.jsonl:3 = a.jsonl:1" in out
    )
    assert (tmp_path / "clean.jsonl").read_text().count("\n") == 2
    assert soul("dedupe", "a.jsonl", "-o", "a.jsonl")[0] == 2
    assert soul("dedupe", "a.jsonl", "-o", "clean.csv")[0] == 2
    code, out, _ = soul("dedupe", "clean.jsonl", "--json")
    assert (code, json.loads(out)["duplicates"]) == (0, [])


def test_a_row_that_cannot_be_read_is_named_and_left_out(soul, tmp_path: Path):
    jsonl(tmp_path / "a.jsonl", [chat(1), "{broken"])
    code, out, err = soul("dedupe", "a.jsonl", "-o", "clean.jsonl")
    assert code == 2 and "bad row a.jsonl:2" in err and "1 clean rows" in out


def test_contamination_of_a_folder_of_chats(soul, tmp_path: Path):
    row = {"story": STORY, "question": "Where is the pen?", "answer": "jar", "data_source": "tomi"}
    jsonl(tmp_path / "eval.jsonl", [row])
    turns = said_by("user: tell me a story", f"assistant: {STORY}. Where is the pen?", "user: nice")
    jsonl(tmp_path / "chats" / "a.jsonl", [chat(1), {"messages": turns}])
    command = ("contamination", "chats", "eval.jsonl", "--chats")
    code, out, _ = soul(*command, "--exclude", "clean.jsonl")
    assert code == 0 and "a.jsonl:2 holds eval.jsonl:1 (1.00)" in out
    assert "1 of 1 evaluation rows" in out and "1 clean rows → clean.jsonl" in out
    code, out, _ = soul("contamination", "clean.jsonl", "eval.jsonl", "--chats", "--json")
    report = json.loads(out)
    assert (code, report["matches"], report["chats"]) == (0, [], 1)
    assert soul(*command, "--exclude", "clean.parquet")[0] == 2


@pytest.mark.parametrize(
    "command",
    [
        ("data", "show", "chats", "--side", "human"),
        ("data", "dedupe", "chats"),
        ("data", "contamination", "chats", "chats/eval.jsonl", "--task", "tomi", "--chats"),
        ("plan", "train", "sft", "--model", "tiny", "--full", "--data", "chats", "--side", "human"),
    ],
)
def test_files_that_a_folder_sets_aside_are_named(
    soul, command, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    row = {"story": STORY, "question": "Where is the pen?", "answer": "jar"}
    jsonl(tmp_path / "chats" / "eval.jsonl", [row])
    jsonl(tmp_path / "chats" / "dev team.jsonl", [chat(1)])
    jsonl(tmp_path / "chats" / "ada.jsonl", [chat(n) for n in range(2, 6)])
    assert cli.main(list(command)) == 0
    said = " ".join("".join(capfd.readouterr()).split())
    assert "training files of 'chats' do not include dev team.jsonl, eval.jsonl;" in said
    assert "give the pattern 'chats/*.jsonl'" in said
    assert said.count("the training files") == 1


def test_the_chats_that_evaluation_rows_were_drafted_from_are_leaks(soul, tmp_path: Path):
    """The aim and the names of roles, which stand in no chat, do not hide what does."""
    turns = said_by("user: my radio from 1963 hums, what now?", "assistant: let it dry for a day")
    aim = "hear the news at home again before the week is over and without a new set"
    row = {"source": "prism", "intent": aim, "conversation_history": turns, "is_last_turn": False}
    opening = "um hello the radio that came from grandfather hums all night"
    first = {"source": "prism", "intent": aim, "opening_prompt": opening, "is_last_turn": False}
    jsonl(tmp_path / "eval.jsonl", [{"data_source": "userllm", **one} for one in (row, first)])
    chats = [turns, said_by(f"user: {opening}", "assistant: does it?"), said_by("user: hi")]
    jsonl(tmp_path / "chats.jsonl", [{"messages": one} for one in chats])
    code, out, _ = soul("contamination", "chats.jsonl", "eval.jsonl", "--chats", "--json")
    assert code == 0 and [m["train"] for m in json.loads(out)["matches"]] == [
        "chats.jsonl:1", "chats.jsonl:2"
    ]  # fmt: skip
