"""What a run records of its conditions: a resumed run keeps them, or is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import RunError
from soulkit.eval.run.provenance import (
    in_start_folder,
    note_calls,
    read_provenance,
    rescored_provenance,
    start_folder,
    write_provenance,
)
from soulkit.eval.run.resume import check_engine
from soulkit.runs.folder import Run

JUDGE = {"kind": "endpoint", "model": "j", "address": "http://127.0.0.1:1/v1", "temperature": 0.0,
         "max_tokens": 300}  # fmt: skip
SCRIPT = {"kind": "scripted", "model": "p.yaml", "sha256": "1" * 16}
CHECKPOINT = {"kind": "local", "model": "/m", "path": "/m", "weights": "2" * 16}
RECORD: dict[str, Any] = {
    "actor": {"model": "m", "weights": "3" * 16},
    "engine": {"kind": "vllm", "version": "0.1"},
    "players": {"judge": [JUDGE], "partner": [SCRIPT], "environment": [CHECKPOINT]},
    "panel": {"samples": 1, "combine": "mean", "orders": "both"},
    "tasks": {
        "essay": {
            "roles": ["judge"], "players": {"judge": [JUDGE]}, "samples": {},
            "sampling": {"temperature": 1.0, "max_tokens": 60},
            "budgets": {}, "options": {"metric": "4" * 16, "scorer": "5" * 16},
            "rows": {"a": "6" * 16, "b": "7" * 16},
        }
    },
}  # fmt: skip
EPISODE = '{"key": "0/a/0/draft"}\n'


def opened(folder: Path, *, played: bool = True) -> Run:
    run = Run.open(folder, "eval api", {"model": "m"})
    if played:
        run.episodes.write_text(EPISODE)
    return run


def changed(place: tuple[Any, ...], value: Any, record: dict[str, Any] = RECORD) -> dict[str, Any]:
    """A record with another value at one place; None takes the member away."""
    made = copy.deepcopy(record)
    inner: Any = made
    for part in place[:-1]:
        inner = inner[part]
    if value is None:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return made


ESSAY = ("tasks", "essay")
REFUSED = {
    "address": (("players", "judge", 0, "address"), "http://x/v1", "address of the judge 'j'"),
    "script": (("players", "partner", 0, "sha256"), "9", "content of the partner 'p.yaml'"),
    "weights": (("players", "environment", 0, "weights"), "9", "weights of the environment '/m'"),
    "revision": (("players", "judge", 0, "revision"), "9", "revision of the judge 'j'"),
    "limit": (("players", "judge", 0, "max_tokens"), 9, "another reply limit of the judge 'j'"),
    "in one task": ((*ESSAY, "players", "judge", 0, "address"), "http://x", "address of the judge"),
    "actor's limit": (
        (*ESSAY, "sampling", "max_tokens"),
        9,
        "another reply limit of the actor in essay",
    ),
    "row": ((*ESSAY, "rows", "b"), "9", "other content in 1 rows of essay"),
    "option": ((*ESSAY, "options", "scorer"), "9", "another scorer of the task essay"),
    "new option": ((*ESSAY, "options", "code"), "9", "another code of the task essay"),
    "scale": ((*ESSAY, "options", "metric"), "9", "another metric of the task essay"),
}
"""What is another now, at its place in the record → what the refusal says."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_setting_shows_is_refused_by_name(case: str, tmp_path: Path) -> None:
    place, value, words = REFUSED[case]
    before = RECORD
    if case == "revision":
        before = changed(("players", "judge", 0, "revision"), "8")
    write_provenance(run := opened(tmp_path / "run"), before)
    written = (run.path / "provenance.json").read_bytes()
    with pytest.raises(RunError, match=words.replace("(", r"\(")):
        write_provenance(run, changed(place, value, before))
    assert (run.path / "provenance.json").read_bytes() == written
    write_provenance(run, before)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((*ESSAY, "rows", "c"), "9"),
        ((*ESSAY, "rows", "b"), None),
        ((*ESSAY, "sampling", "temperature"), 0.5),
        (("players", "judge", 0, "temperature"), 0.5),
        (("actor", "weights"), "9"),
        (("panel", "samples"), 2),
    ],
    ids=lambda value: str(value),
)
def test_what_the_settings_compare_is_left_to_them(
    place: tuple[Any, ...], value: Any, tmp_path: Path
) -> None:
    """Settings, weights of the actor and new rows are compared elsewhere; here they are noted."""
    write_provenance(run := opened(tmp_path / "run"), RECORD)
    now = changed(place, value)
    write_provenance(run, now)
    record = read_provenance(run.path)
    assert {name: record[name] for name in now} == now


def test_calls_are_added_and_outlive_the_next_start(tmp_path: Path) -> None:
    write_provenance(run := opened(tmp_path / "run"), RECORD)
    sent = [{"temperature": 0.0, "calls": 2}]
    calls: Any = {"essay": {"judge": {"j": {"sent": sent, "dropped": {"seed": 0.5}}},
                            "actor": {"m": {"sent": [], "dropped": {}}}}}  # fmt: skip
    note_calls(run.path, calls, {"essay": {"judge": {"j": {"seed": 0.5}}}})
    write_provenance(run, RECORD)
    entry = read_provenance(run.path)["tasks"]["essay"]
    assert entry["sent"] == {"judge": {"j": sent}, "actor": {"m": []}}
    assert entry["dropped_settings"] == {"judge": {"j": {"seed": 0.5}}, "actor": {}}
    note_calls(run.path, {"essay": {"judge": {}}}, {})
    entry = read_provenance(run.path)["tasks"]["essay"]
    assert entry["sent"]["actor"] == {"m": []} and entry["dropped_settings"]["judge"] == {}


BASES = [
    ("declared", "declared", "declared"),
    ("declared", "verified", "declared"),
    ("verified", "declared", "declared"),
    ("verified", "verified", "verified"),
    (None, "verified", "verified"),
    ("verified", None, "verified"),
]


@pytest.mark.parametrize(("before", "now", "expected"), BASES)
@pytest.mark.parametrize("where", [("actor",), ("players", "judge", 0)], ids=["actor", "judge"])
def test_weights_are_known_no_better_than_for_the_first_episodes(
    before: str | None, now: str | None, expected: str, where: tuple[Any, ...], tmp_path: Path
) -> None:
    def record(basis: str | None) -> dict[str, Any]:
        return RECORD if basis is None else changed((*where, "weights_basis"), basis)

    def noted(run: Run) -> Any:
        inner: Any = read_provenance(run.path)
        for part in where:
            inner = inner[part]
        return inner.get("weights_basis")

    write_provenance(run := opened(tmp_path / "run"), record(before))
    write_provenance(run, record(now))
    assert noted(run) == expected
    write_provenance(run, record("verified"), proven=True)
    assert noted(run) == "verified"
    unplayed = opened(tmp_path / "unplayed", played=False)
    write_provenance(unplayed, record("declared"))
    write_provenance(unplayed, record("verified"))
    assert noted(unplayed) == "verified"


def test_relative_paths_begin_where_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(home)
    (home / "rows.jsonl").write_text("")
    run = Run.open(Path("runs/one"), "eval api", {"data": {"*": "rows.jsonl"}})
    write_provenance(run, RECORD)
    folder = run.path.resolve()
    monkeypatch.chdir(elsewhere)
    assert start_folder(folder) == home
    with in_start_folder(folder):
        assert Path.cwd() == home
    assert Path.cwd() == elsewhere
    (home / "rows.jsonl").unlink()
    with in_start_folder(folder):
        assert Path.cwd() == elsewhere


DAMAGED = [
    "",
    "[]",
    "{}",
    '{"players": [], "tasks": {}}',
    '{"players": {}, "tasks": []}',
    "[" * 99_999,
]


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:20] or "empty")
def test_a_damaged_record_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text(text)
    with pytest.raises(RunError, match=r"provenance\.json"):
        read_provenance(tmp_path)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"kind": "vllm", "version": "0.1"}, ""),
        ({"kind": "vllm"}, ""),
        ({"kind": "vllm", "version": "0.2"}, "vllm 0.1, not by vllm 0.2"),
        ({"kind": "local"}, "vllm 0.1"),
    ],
)
def test_another_engine_may_not_go_on(now: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_provenance(run := opened(tmp_path / "run"), RECORD)
    check_engine(opened(tmp_path / "new", played=False), now)
    if not words:
        return check_engine(run, now)
    with pytest.raises(RunError, match=words):
        check_engine(run, now)


def test_a_rescored_run_has_the_scorers_of_now(tmp_path: Path) -> None:
    from soulkit.tasks.kit.registry import load_registry
    from tests.support.road import synth

    task = load_registry().task("tomi")
    example = task.example(synth("tomi", 1, 1)[0])
    record = copy.deepcopy(RECORD)
    record["tasks"] = {"tomi": {"options": {"old": "1"}, "rows": {example.id: "1", "gone": "2"}}}
    write_provenance(run := opened(tmp_path / "run"), record)
    entry = rescored_provenance(run.path, {example.id: (task, example)})["tasks"]["tomi"]
    assert "old" not in entry["options"] and "metric" in entry["options"]
    assert entry["rows"]["gone"] == "2" and len(entry["rows"][example.id]) == 16
    assert json.loads((run.path / "provenance.json").read_text())["tasks"] == record["tasks"]
