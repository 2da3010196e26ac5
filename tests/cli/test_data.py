"""`soul data`: the commands run as a user runs them, in process.

`soul data pull` as a user runs it, and the commands that find the files afterwards.
"""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from soulkit.cli import app as cli
from soulkit.cli import console
from soulkit.data.files import data_folder, released_files
from soulkit.errors import DataError
from soulkit.eval.config import EvalConfig, load_work
from soulkit.tasks.kit.registry import load_registry
from soulkit.text import byte_size
from soulkit.train.config import TrainConfig
from soulkit.train.setup.data import training_rows
from tests.support.hub import EVAL, EVALS, HITOM, HITOM_TRAIN, TRAIN, alone_with_the_hub, names_in
from tests.support.servers.hub_server import HubServer, commit_of

ROW = {
    "story": "1 Ada entered the loft.\n2 The pen is in the jar.",
    "question": "Where is the pen really?",
    "answer": "jar",
    "data_source": "tomi",
}


@pytest.fixture
def soul(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["data", *arguments])
        streams = capfd.readouterr()
        return code, streams.out, streams.err

    return run


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return str(path)


@pytest.mark.parametrize("task", ["tomi", "paratomi", "hitom", "secret_keeper"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_made_rows_pass_the_check(soul, task: str, suffix: str):
    name = f"rows.{suffix}"
    assert soul("synth", task, "-n", "11", "--seed", "2", "-o", name)[0] == 0
    code, out, _ = soul("check", name, "--json")
    report = json.loads(out)["tasks"][0]
    assert (code, report["task"], report["rows"], report["bad"]) == (0, task, 11, [])
    code, out, _ = soul("show", name, "--row", "11", "--json")
    shown = json.loads(out)
    assert (code, shown["task"], shown["source"]) == (0, task, f"{name}:11")
    assert shown["prompt"] and shown["fields"]


def test_equal_seeds_make_equal_files(soul, tmp_path: Path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        soul("synth", "tomi", "-n", "9", "--seed", seed, "-o", f"{name}.jsonl")
    a, b, c = (Path(f"{name}.jsonl").read_bytes() for name in "abc")
    assert a == b != c
    assert soul("synth", "tomi", "-n", "3")[0] == 0
    assert Path("tomi_synth_3_s0.jsonl").exists()


def test_the_check_names_bad_rows_and_counts_the_good(soul, tmp_path: Path):
    longer = ROW | {"story": ROW["story"] + "\n3 Ada left.", "stranger": 1, "order": 2}
    path = jsonl(tmp_path / "rows.jsonl", ROW, ROW, "{", ROW | {"answer": 4}, longer)
    code, out, err = soul("check", path)
    assert code == 2
    assert "2 usable rows of tomi" in out and "1 duplicates" in out
    assert "ignored columns: stranger" in out and "order: 2 (1)" in out
    assert "rows.jsonl:3" in err and "rows.jsonl:4" in err and "'answer' must be text" in err


def test_the_check_finds_each_task_of_a_mixed_file(soul, tmp_path: Path):
    soul("synth", "hitom", "-n", "2", "-o", "hitom.jsonl")
    lines = Path("hitom.jsonl").read_text().splitlines()
    code, out, _ = soul("check", jsonl(tmp_path / "mix.jsonl", ROW, *lines), "--json")
    assert (code, [t["task"] for t in json.loads(out)["tasks"]]) == (0, ["tomi", "hitom"])
    stray = jsonl(tmp_path / "stray.jsonl", ROW, ROW | {"data_source": "tommi"})
    code, _, err = soul("check", stray)
    assert code == 2 and "stray.jsonl:2" in err and "'tomi'" in err


def test_the_check_asks_for_the_task_when_no_row_tells(soul, tmp_path: Path):
    bare = {k: v for k, v in ROW.items() if k != "data_source"}
    path = jsonl(tmp_path / "bare.jsonl", bare)
    code, _, err = soul("check", path)
    assert code == 2 and "--task" in err
    assert soul("check", path, "--task", "tomi")[0] == 0
    code, _, err = soul("check", path, "--task", "hitom")
    assert code == 2 and "aliases" in err and "choices" in err
    assert soul("check", path, "--task", "tommi")[0] == 2


def test_show_prints_audiences_and_the_prompt_without_escape_codes(soul, tmp_path: Path):
    path = jsonl(tmp_path / "rows.jsonl", ROW | {"question": "Where is \x1b[31m[bold]it[/bold]?"})
    code, out, _ = soul("show", path)
    assert code == 0
    assert "\x1b" not in out and "[bold]it[/bold]" in out
    assert "gold, coach" in out and "prompt: user" in out and "rows.jsonl:1" in out
    code, _, err = soul("show", path, "--row", "7")
    assert code == 2 and "no row 7" in err


@pytest.mark.parametrize("number", ["1", "2", "4"])
def test_show_takes_what_messages_print(soul, tmp_path: Path, number: str):
    rows = [ROW | {"question": f"Where is {n}?"} for n in range(1, 5)]
    path = jsonl(tmp_path / "rows.jsonl", *rows[:2], "{", rows[3])
    for words in ((path, "--row", number), (f"{path}:{number}",)):
        code, out, _ = soul("show", *words, "--json")
        shown = json.loads(out)
        assert code == 0 and shown["source"] == f"rows.jsonl:{number}"
        assert shown["fields"]["question"]["value"] == f"Where is {number}?"
    assert json.loads(soul("show", path, "--json")[1])["source"] == "rows.jsonl:1"


def test_show_of_a_row_that_messages_name_and_nobody_can_read(soul, tmp_path: Path):
    path = jsonl(tmp_path / "rows.jsonl", ROW, "{", ROW)
    code, _, err = soul("show", f"{path}:2")
    assert code == 2 and "rows.jsonl:2 cannot be read" in err and "not JSON" in err
    code, _, err = soul("show", path, "--row", "0")
    assert code == 2 and "no row 0" in err and "counted from 1" in err and "1 to 3" in err
    code, _, err = soul("show", f"{path}:1", "--row", "1")
    assert code == 2 and "given twice" in err


def test_rows_of_a_table_are_named_by_their_lines(soul, tmp_path: Path):
    (tmp_path / "t.csv").write_text("story,question,answer\nA lamp.,Where?,box\nB lamp.,Who?,bag\n")
    code, out, _ = soul("show", "t.csv", "--task", "tomi", "--row", "3", "--json")
    assert code == 0 and json.loads(out)["source"] == "t.csv:3"
    code, _, err = soul("show", "t.csv", "--task", "tomi", "--row", "1")
    assert code == 2 and "including the header line" in err and "2 to 3" in err


def test_a_file_whose_name_ends_like_a_row_is_that_file(soul, tmp_path: Path):
    place = tmp_path / "odd:3"
    place.mkdir()
    path = jsonl(place / "rows.jsonl", ROW)
    assert json.loads(soul("show", path, "--json")[1])["source"] == "rows.jsonl:1"


def test_import_writes_the_good_rows_and_names_the_bad(soul, tmp_path: Path):
    (tmp_path / "toy.txt").write_text(
        "1 Ada entered the attic.\n2 The pen is in the box.\n3 Where is the pen really?\tbox\t1\n"
        "1 Ada entered the attic.\n7 The pen is in the box.\n3 Where is the pen really?\tbox\t1\n"
    )
    code, out, err = soul("import", "tomi", "toy.txt", "-o", "out.jsonl")
    assert code == 2
    assert "1 rows of tomi" in out and "toy.txt:4" in err and "numbered 7" in err
    row = json.loads(Path("out.jsonl").read_text())
    assert row["data_source"] == "tomi" and row["answer"] == "box"
    code, out, _ = soul("import", "tomi", "toy.txt", "-o", "again.parquet", "--json")
    assert json.loads(out)["bad"][0]["source"] == "toy.txt:4"
    assert soul("check", "again.parquet")[0] == 0


def test_import_never_replaces_its_source(soul, tmp_path: Path):
    path = jsonl(tmp_path / "rows.jsonl", ROW)
    before = Path(path).read_bytes()
    code, _, err = soul("import", "tomi", path, "-o", path)
    assert code == 2 and "is also the input file" in err and Path(path).read_bytes() == before


def test_audit_lists_both_sides_of_a_dispute(soul, tmp_path: Path):
    story = "1 Ada and Ben entered the attic.\n2 The pen is in the red_box."
    row = {"prompting_type": "CoTP", "deception": False, "story_length": 1, "question_order": 0,
           "sample_id": 0, "story": story, "question": "Where is the pen really?",
           "choices": "A. red_box, B. blue_bag", "answer": "red_box"}  # fmt: skip
    path = jsonl(tmp_path / "h.jsonl", row, row | {"sample_id": 1, "answer": "blue_bag"})
    code, out, _ = soul("audit", "hitom", path, "-o", "disputed.jsonl")
    assert code == 0 and "50.0 %" in out and "deception" in out
    (disputed,) = map(json.loads, Path("disputed.jsonl").read_text().splitlines())
    assert (disputed["gold"], disputed["tracker"]) == ("blue_bag", "red_box")
    code, out, _ = soul("audit", "hitom", path, "--json")
    assert json.loads(out)["overall"] == {"agreed": 1, "total": 2}
    assert soul("audit", "coser", path)[0] == 2


def test_audit_says_of_any_task_where_the_gold_stands(soul, tmp_path: Path):
    code, out, _ = soul("audit", "hitom", "synth:40")
    assert code == 0 and "letter of the gold answer" in out and "belief tracker" in out
    story = "1 Ada entered the loft.\n2 The pen is in the jar."
    row = {"story": story, "question": "Where is the pen really?", "choices": "A. jar, B. box",
           "correct_answer": "jar", "data_source": "hitom"}  # fmt: skip
    path = jsonl(tmp_path / "rows.jsonl", row, row | {"correct_answer": "box"}, row)
    report = json.loads(soul("audit", "hitom", path, "--json")[1])
    assert (report["rows"]["rows"], report["rows"]["duplicates"]) == (2, 1)
    assert [r["what"] for r in report["rows"]["remarks"]] == ["leak"] + 2 * ["contradiction"]
    assert report["overall"] == {"agreed": 1, "total": 2}
    code, out, _ = soul("audit", "secret_keeper", "synth:5", "-o", "remarks.jsonl")
    assert code == 0 and "belief tracker" not in out and Path("remarks.jsonl").read_text() == ""


def test_the_tracker_reads_rows_in_every_format(soul, tmp_path: Path):
    for task in ("tomi", "paratomi", "hitom"):
        soul("synth", task, "-n", "12", "-o", f"{task}.parquet")
        report = json.loads(soul("audit", task, f"{task}.parquet", "--json")[1])
        assert report["overall"] == {"agreed": 12, "total": 12}


def test_contamination_counts_overlaps_and_writes_what_is_clean(soul, tmp_path: Path):
    soul("synth", "tomi", "-n", "30", "--seed", "4", "-o", "train.jsonl")
    lines = Path("train.jsonl").read_text().splitlines()
    soul("synth", "tomi", "-n", "9", "--seed", "5", "-o", "eval.jsonl")
    with Path("eval.jsonl").open("a") as file:
        file.write(lines[3].replace("entered", "ENTERED") + "\n")
    code, out, _ = soul("contamination", "train.jsonl", "eval.jsonl", "--exclude", "clean.jsonl",
                        "--drop", "exact")  # fmt: skip
    assert code == 0 and "exact train.jsonl:4 = eval.jsonl:10 (1.00)" in out
    assert Path("clean.jsonl").read_text().splitlines() == lines[:3] + lines[4:]
    report = json.loads(soul("contamination", "train.jsonl", "eval.jsonl", "--json")[1])
    assert report["by_kind"]["exact"] == {"training_rows": 1, "evaluation_rows": 1}
    assert (report["train_rows"], report["evaluation_rows"], report["written"]) == (30, 10, None)
    assert soul("contamination", "clean.jsonl", "train.jsonl", "--exclude", "train.jsonl")[0] == 2
    assert Path("train.jsonl").read_text().splitlines() == lines


def test_contamination_names_rows_that_cannot_be_compared(soul, tmp_path: Path):
    bare = {k: v for k, v in ROW.items() if k != "data_source"}
    train = jsonl(tmp_path / "train.jsonl", ROW, ROW | {"data_source": "tommi"}, {"story": "x"})
    bare_file = jsonl(tmp_path / "eval.jsonl", bare)
    code, out, err = soul(
        "contamination", train, bare_file, "--task", "tomi", "--exclude", "c.jsonl"
    )
    assert code == 2 and "train.jsonl:2" in err and "train.jsonl:3" in err
    assert "exact" in out and not Path("c.jsonl").exists(), "the only usable row is not clean"
    code, _, err = soul("contamination", train, bare_file)
    assert code == 2 and "--task" in err
    assert soul("contamination", train, bare_file, "--task", "tommi")[0] == 2
    assert soul("contamination", train, train, "--drop", "exakt")[0] == 2


@pytest.mark.parametrize("arguments", [
    ("check", "nowhere.jsonl"), ("synth", "nothing"), ("synth", "tomi", "-n", "0"),
    ("import", "hitom", "."), ("show", "nowhere.jsonl"), ("audit", "hitom", "nowhere.json"),
])  # fmt: skip
def test_mistakes_are_three_lines(soul, arguments: tuple[str, ...]):
    code, out, err = soul(*arguments)
    assert (code, out) == (2, "")
    assert [line.split(":")[0] for line in err.splitlines()] == ["error", "why", "fix"]


TRAINS = {"hitom_rl_train.parquet": HITOM_TRAIN}


@pytest.fixture
def hub_soul(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    alone_with_the_hub(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(list(arguments))
        streams = capfd.readouterr()
        return code, streams.out, streams.err

    return run


def test_what_was_pulled_is_found_without_data(hub_soul, monkeypatch) -> None:
    with HubServer({EVAL: EVALS, TRAIN: TRAINS}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url + "/")
        code, out, err = hub_soul("data", "pull", "--task", "hitom")
    assert code == 0
    assert f"{EVAL} at {commit_of(EVALS)[:12]}: 1 file to download" in err
    assert "pull: 36.2 kB/36.2 kB (" in err
    assert "hitom_val.parquet" in out
    assert "in data; source: data/soul-data.lock.json" in out
    assert "21.6 kB" in out
    work = load_work(EvalConfig(kind="api", model="m", tasks=("hitom",)))
    assert len(work[0].examples) == 40
    task = load_registry().task("hitom")
    config = TrainConfig(method="grpo", model="tiny", tasks={"hitom": 1.0})
    rows = training_rows(task, config)
    assert {row.split for row in rows} == {"train"}
    assert len(rows) == 12
    code, out, _ = hub_soul("eval", "api", "--model", "m", "--task", "hitom", "--dry-run", "--json")
    assert (code, json.loads(out)["episodes"]) == (0, 40)


def test_a_folder_of_its_own_and_json(hub_soul, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOULKIT_DATA", str(tmp_path / "rows"))
    command = ("data", "pull", "--suite", "tom", "--split", "eval", "--json")
    with HubServer({EVAL: EVALS}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        first, again = hub_soul(*command), hub_soul(*command)
        other = hub_soul(*command[:-1], "--out", "elsewhere", "--revision", commit_of(EVALS))
    files = json.loads(first[1])["files"]
    assert [f["state"] for f in files] == ["downloaded", "downloaded"]
    assert files[0]["name"] == "hitom_val.parquet"
    assert files[0]["file"] == str(tmp_path / "rows" / "hitom_val.parquet")
    assert (files[0]["repo"], files[0]["bytes"]) == (EVAL, len(HITOM))
    assert [f["state"] for f in json.loads(again[1])["files"]] == ["kept", "kept"]
    # Files whose structs have other keys are not joined into one table.
    work = load_work(EvalConfig(kind="api", model="m", tasks=("hitom", "paratomi")))
    assert [(len(part.examples), part.bad) for part in work] == [(40, ()), (9, ())]
    assert other[0] == 0
    assert "hitom_val.parquet" in names_in(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (("--split", "evl"), "no split 'evl'", "'eval'"),
        (("--task", "hitmo"), "no task named 'hitmo'", "'hitom'"),
        (("--suite", "tm"), "no suite named 'tm'", "'tom'"),
        (("--task", "tomi"), "'tomi' has no released file", "soul data import"),
        (
            ("--task", "hitom", "--suite", "tom"),
            "--task and --suite cannot be combined",
            "Keep one",
        ),
        (("--corpus", "mid-training", "--split", "eval"), "cannot be combined", "Keep one"),
        (("--corpus", "mid"), "no corpus named 'mid'", "mid-training"),
    ],
)
def test_slips(hub_soul, arguments: tuple[str, ...], what: str, fix: str) -> None:
    code, out, err = hub_soul("data", "pull", *arguments)
    lines = err.splitlines()
    assert (code, out, len(lines)) == (2, "", 3)
    assert what in lines[0]
    assert fix in lines[2]


def test_where_nothing_was_pulled_the_command_is_told(hub_soul, tmp_path: Path) -> None:
    assert data_folder() == Path("data")
    code, _, err = hub_soul("eval", "api", "--model", "m", "--task", "hitom")
    assert code == 2
    assert "the folder 'data' (the default, because SOULKIT_DATA is not set)" in err
    assert "soul data pull --task hitom --split eval" in err
    config = TrainConfig(method="grpo", model="tiny", tasks={"hitom": 1.0})
    with pytest.raises(DataError, match="no training data") as error:
        training_rows(load_registry().task("hitom"), config)
    assert "soul data pull --task hitom --split train" in error.value.way_out


def test_a_part_of_the_files_is_not_taken_for_all(tmp_path: Path) -> None:
    (tmp_path / "one.parquet").write_bytes(HITOM)
    assert released_files("t", ["none.parquet"], str(tmp_path)) == []
    assert released_files("t", ["one.parquet"], str(tmp_path)) == [tmp_path / "one.parquet"]
    with pytest.raises(DataError, match="only 1 of the 2 files") as error:
        released_files("t", ["one.parquet", "two.parquet"], str(tmp_path))
    assert "two.parquet" in error.value.why
    assert "soul data pull --task t" in error.value.way_out


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_340_000, "2.3 MB"), (7.7e12, "7700.0 GB")],
)
def test_sizes(count: float, words: str) -> None:
    assert byte_size(count) == words


def test_a_terminal_shows_bytes_rate_and_rest(monkeypatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=shown, force_terminal=True, width=120))
    with console.ConsoleReporter("pull").progress(4_000_000, byte_size) as bar:
        bar.advance(1_000_000, "hitom_val.parquet")
        time.sleep(0.01)
        bar.advance(1_000_000)
    assert "2.0 MB/4.0 MB" in shown.getvalue()
    assert re.search(r"[0-9.]+ [MG]B/s, \d+ s left, hitom_val.parquet", shown.getvalue())
