"""Run folders and their files, including a writer that is killed in the middle."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.errors import ConfigError, DataError, RunError
from soulkit.runs import jsonl
from soulkit.runs.folder import (
    Run,
    default_run_path,
    is_run,
    plain_config,
    read_config,
    read_environment,
    same_settings,
)
from soulkit.runs.jsonl import JsonlWriter, read_jsonl, write_json
from soulkit.text import one_line, sanitise

CONFIG: dict[str, Any] = {"model": "tiny", "seed": 1, "lr": 1e-5, "judge": {"model": "m", "n": 2}}


# --- whose folder ---------------------------------------------------------------------------------


def test_a_new_run_holds_its_configuration_and_environment(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "a" / "run", "eval local", CONFIG)
    assert run.resumed is False
    assert read_config(run.path) == CONFIG
    noted = read_environment(run.path)
    assert noted["command"] == "eval local"
    assert noted["packages"]["pydantic"]
    assert str(Path.home()) not in (run.path / "environment.json").read_text()
    assert run.episodes == run.path / "episodes.jsonl"
    assert run.metrics == run.path / "metrics.jsonl"
    assert run.ledger_path == run.path / "ledger.sqlite"
    assert run.checkpoints == run.path / "checkpoints"


def test_the_same_command_and_configuration_resume(tmp_path: Path) -> None:
    Run.open(tmp_path / "run", "eval local", CONFIG)
    again = Run.open(tmp_path / "run", "eval local", {**CONFIG})
    assert again.resumed is True
    assert len(read_environment(again.path)["resumed"]) == 1


def test_tuples_paths_and_odd_strings_resume_too(tmp_path: Path) -> None:
    config = {"tasks": ("a", "b"), "out": Path("x/y"), "name": "1e-5", "no": "no", "é": "ü\n"}
    Run.open(tmp_path / "run", "eval", config)
    assert Run.open(tmp_path / "run", "eval", config).resumed is True


def test_another_command_is_refused(tmp_path: Path) -> None:
    Run.open(tmp_path / "run", "eval local", CONFIG)
    with pytest.raises(RunError, match="belongs to another command: 'soul eval local'"):
        Run.open(tmp_path / "run", "train ditto", CONFIG)


@pytest.mark.parametrize(
    ("added", "same"),
    [({"quantize": "none"}, True), ({"quantize": "nf4"}, False),
     ({"again": "auto"}, True), ({"again": "off"}, True), ({"again": "on"}, False)],
)  # fmt: skip
def test_a_run_from_before_a_setting_is_resumed_with_the_value_that_it_had(
    added: dict[str, str], same: bool, tmp_path: Path
) -> None:
    before, now = {**CONFIG, "again": False}, {**CONFIG, "again": "auto", **added}
    Run.open(tmp_path / "run", "eval local", before)
    assert same_settings(before, now) is same
    with nullcontext() if same else pytest.raises(RunError, match="different settings"):
        assert Run.open(tmp_path / "run", "eval local", now).resumed
    assert read_config(tmp_path / "run")["again"] is False


def test_a_changed_configuration_names_the_keys(tmp_path: Path) -> None:
    Run.open(tmp_path / "run", "eval local", CONFIG)
    changed = {**CONFIG, "seed": 2, "judge": {"model": "other"}, "new": [1]}
    with pytest.raises(RunError) as caught:
        Run.open(tmp_path / "run", "eval local", changed)
    what, _, way_out = caught.value.lines()
    assert "seed: 1 -> 2" in what
    assert 'judge.model: "m" -> "other"' in what
    assert "judge.n: 2 -> (unset)" in what
    assert "new[0]: (unset) -> 1" in what
    assert "lr" not in what.split("different settings:")[1]
    assert "--out" in way_out
    assert read_config(tmp_path / "run") == CONFIG


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunError, match="cannot be used as a run folder"):
        Run.open(tmp_path, "eval", CONFIG)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(RunError, match="it is a file"):
        Run.open(tmp_path / "thesis.tex", "eval", CONFIG)


def test_a_start_killed_before_its_configuration_starts_anew(tmp_path: Path) -> None:
    Run.open(tmp_path / "run", "eval", CONFIG)
    (tmp_path / "run" / "config.yaml").unlink()
    assert not is_run(tmp_path / "run")
    assert Run.open(tmp_path / "run", "eval", CONFIG).resumed is False


@pytest.mark.parametrize(
    "config",
    [
        {"api_key": "anything"},
        {"judge": {"token": "abc"}},
        {"headers": ["Bearer abcdef"]},
        {"model": "sk-0123456789abcdef0123"},
        {"api_key_env": "sk-0123456789abcdef0123"},
        {"api_key_env": "not a name"},
        {"base_url": "https://user:word@host/v1"},
        {"base_url": "https://word@host/v1"},
        {"model": "m@https://user:word@host/v1"},
        {"api_key_env": "gsk_0123456789abcdef0123"},
    ],
)
def test_secrets_are_refused_and_never_repeated(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Run.open(tmp_path / "run", "eval", config)
    for value in ("anything", "abcdef", "not a name", "word@host"):
        assert value not in " ".join(caught.value.lines())
    assert not (tmp_path / "run").exists()


def test_harmless_settings_are_no_secrets(tmp_path: Path) -> None:
    config = {
        "api_key_env": "OPENAI_API_KEY",
        "judge": {"api_key_env": "my_openai_api_key_2024"},
        "max_tokens": 512,
        "tokenizer": "org/name",
        "api_key": None,
        "base_url": "http://localhost:8000/v1",
        "metric": "keyness",
    }
    assert Run.open(tmp_path / "run", "eval", config).path.exists()


def test_values_without_a_plain_form_are_named() -> None:
    with pytest.raises(ValueError, match=r"type: <class 'object'>"):
        plain_config({"a": {"b": [1, object()]}})


def test_default_names(tmp_path: Path) -> None:
    path = default_run_path("eval local", ["hitom", "fantom", "a", "b"], root=tmp_path)
    assert path.parent == tmp_path
    assert path.name.endswith("-eval-local-hitom+fantom+a+1")
    assert "/" not in default_run_path("eval", ["../x"], root=tmp_path).name


def test_the_summary_is_replaced_whole(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "run", "eval", CONFIG)
    run.write_summary({"n": 1})
    run.write_summary({"n": 2})
    assert json.loads(run.summary_path.read_text()) == {"n": 2}
    with pytest.raises(ValueError, match="JSON"):
        run.write_summary({"n": float("nan")})
    assert json.loads(run.summary_path.read_text()) == {"n": 2}
    assert not list(run.path.glob("*.tmp")) + list(run.path.glob(".*.tmp"))


# --- JSON lines -----------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(records=st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=4), cut=st.data())
def test_a_file_cut_at_any_byte_keeps_every_whole_line(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]], cut: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "f.jsonl"
    ends = []
    with JsonlWriter(path) as writer:
        for record in records:
            writer.write(record)
            ends.append(writer.offset)
    assert read_jsonl(path) == records
    size = cut.draw(st.integers(0, path.stat().st_size))
    os.truncate(path, size)
    # A line that only lost its line end is still whole.
    whole = records[: sum(end - 1 <= size for end in ends)]
    assert read_jsonl(path) == whole
    with JsonlWriter(path) as writer:
        writer.write({"after": 1})
    assert read_jsonl(path) == [*whole, {"after": 1}]


@pytest.mark.parametrize("torn", [b'{"b": ', b'{"b": "' + b"x" * 200_000], ids=["short", "long"])
def test_a_torn_line_is_kept_aside(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"a": 1}\n' + torn)
    assert read_jsonl(path) == [{"a": 1}]
    assert not (tmp_path / "f.jsonl.torn").exists()
    JsonlWriter(path).close()
    assert path.read_bytes() == b'{"a": 1}\n'
    assert (tmp_path / "f.jsonl.torn").read_bytes() == torn


@pytest.mark.parametrize("bad", [b"{oops}\n", b"[1]\n", b"\xff\xfe\n"])
def test_a_bad_line_in_the_middle_is_named(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"a": 1}\n' + bad + b'{"c": 3}\n')
    with pytest.raises(DataError, match=r"f\.jsonl:2 is not a JSON object"):
        read_jsonl(path)


def test_missing_means_empty_and_nan_is_refused(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "none.jsonl") == []
    with JsonlWriter(tmp_path / "f.jsonl") as writer, pytest.raises(ValueError, match="JSON"):
        writer.write({"loss": float("nan")})
    assert (tmp_path / "f.jsonl").read_bytes() == b""


def test_half_a_surrogate_pair_survives(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "f.jsonl") as writer:
        writer.write({"text": "a\ud83d"})
        writer.write({"text": "é"})
    assert read_jsonl(tmp_path / "f.jsonl") == [{"text": "a\ud83d"}, {"text": "é"}]


def test_cutting_back_to_a_checkpoint_keeps_the_tail(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        writer.write({"step": 1})
        offset = writer.offset
        writer.write({"step": 2})
        writer.cut_to(offset)
        writer.cut_to(offset)
        writer.write({"step": 3})
        with pytest.raises(DataError, match="middle of a line"):
            writer.cut_to(offset - 1)
        with pytest.raises(DataError, match="cannot be cut"):
            writer.cut_to(10_000)
    assert read_jsonl(path) == [{"step": 1}, {"step": 3}]
    assert read_jsonl(tmp_path / "metrics.jsonl.cut") == [{"step": 2}]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "f.jsonl", os.write

    def short(fd: int, data: bytes) -> int:
        if len(data) < 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:5])

    with JsonlWriter(path) as writer:
        writer.write({"a": 1})
        monkeypatch.setattr(jsonl.os, "write", short)
        with pytest.raises(OSError, match="No space"):
            writer.write({"b": "0123456789"})
        monkeypatch.undo()
        writer.write({"c": 3})
    assert read_jsonl(path) == [{"a": 1}, {"c": 3}]


def test_a_killed_writer_loses_nothing_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    code = (
        "import itertools, sys; from pathlib import Path\n"
        "from soulkit.runs.jsonl import JsonlWriter\n"
        "w = JsonlWriter(Path(sys.argv[1]))\n"
        "for i in itertools.count():\n"
        "    w.write({'i': i, 'pad': 'x' * 5000}); print(i, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    printed = process.stdout.read().split()
    assert process.wait(timeout=600) == -signal.SIGKILL
    confirmed = int(printed[-1]) if printed else 0
    numbers = [record["i"] for record in read_jsonl(path)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > confirmed
    with JsonlWriter(path) as writer:
        writer.write({"i": "resumed"})
    assert read_jsonl(path)[-1] == {"i": "resumed"}


def test_write_json_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    write_json(tmp_path / "sub" / "x.json", {"a": "é"})
    with pytest.raises(TypeError):
        write_json(tmp_path / "sub" / "x.json", {"a": object()})
    assert json.loads((tmp_path / "sub" / "x.json").read_text()) == {"a": "é"}
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["x.json"]


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("\x1b[31;1mred\x1b[0m", "red"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]0;title\x07a", "a"),
        ("a\rb\x08c\x00", "abc"),
        ("\x9b31mred", "red"),
        ("tab\tnew\nline\r\n", "tab\tnew\nline\n"),
        ("\u202eabc\u2066d\u2069\u200f", "abcd"),
        ("naïve — 😀 日本語", "naïve — 😀 日本語"),
        ("👩\u200d👧", "👩\u200d👧"),
        ("cut \x1b", "cut "),
    ],
)
def test_sanitise(raw: str, clean: str) -> None:
    assert sanitise(raw) == clean


@given(st.text())
def test_sanitised_text_is_stable_and_without_controls(text: str) -> None:
    clean = sanitise(text)
    assert sanitise(clean) == clean
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in clean)


def test_one_line() -> None:
    assert one_line(" a\n\tb  c ") == "a b c"
    assert one_line("abcdef", 4) == "abc…"
