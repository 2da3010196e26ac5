"""What a run records of its conditions: a resumed run keeps them, or is refused by name.

Who judged, on which rows, by which model: in the head of a run, and whole on its page.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Live
from typing import Any

import pytest

from soulkit.errors import DataError, RunError
from soulkit.eval.comparison.provenance_text import provenance_facts, revision_text, role_text
from soulkit.eval.config import EvalConfig
from soulkit.eval.run.provenance import (
    actor_facts,
    in_start_folder,
    model_facts,
    note_calls,
    played_conditions,
    player_facts,
    rescored_conditions,
    row_hash,
    row_origin,
    start_folder,
    with_rows,
    with_teachers,
    write_conditions,
)
from soulkit.eval.run.resume import check_engine
from soulkit.models.players.players import Players
from soulkit.play.plan import Work
from soulkit.report.load import load_runs
from soulkit.runs.conditions import (
    Conditions,
    PlayerFacts,
    provenance_of,
    rows_hash,
    with_provenance,
)
from soulkit.runs.folder import Run
from soulkit.runs.jsonl import read_value
from soulkit.tasks.kit.registry import load_registry
from tests.support.evaluation import api, oracle, soul, summary
from tests.support.judged import EXAMPLE
from tests.support.road import synth
from tests.support.servers.openai_server import ScriptedServer

URL = "http://127.0.0.1:1/v1"

JUDGE = {"kind": "endpoint", "model": "j", "address": "http://127.0.0.1:1/v1",
         "sampling": {"temperature": 0.0, "max_tokens": 300}}  # fmt: skip
SCRIPT = {"kind": "scripted", "model": "p.yaml", "sha256": "1" * 16}
CHECKPOINT = {"kind": "local", "model": "/m", "path": "/m", "weights": "2" * 16}
RECORD: dict[str, Any] = {
    "actor": {"model": "m", "weights": "3" * 16},
    "engine": {"kind": "vllm", "version": "0.1"},
    "players": {"judge": [JUDGE], "partner": [SCRIPT], "environment": [CHECKPOINT]},
    "panel": {"samples": 1, "combine": "mean", "orders": "both"},
    "tasks": {
        "essay": {
            "roles": ["judge"], "players": {"judge": [JUDGE]},
            "sampling": {"temperature": 1.0, "max_tokens": 60},
            "options": {"metric": "4" * 16, "scorer": "5" * 16},
            "rows": {"a": "6" * 16, "b": "7" * 16},
        }
    },
}  # fmt: skip
EPISODE = '{"key": "0/a/0/draft"}\n'


def conditions(record: dict[str, Any]) -> Conditions:
    return read_value(Conditions, record, "it")


def written(run: Run) -> dict[str, Any]:
    """What the run has recorded, as JSON has it."""
    read = Conditions.read(run.path)
    assert read is not None
    return read.as_dict()


def opened(folder: Path) -> Run:
    return Run.open(folder, "eval api", {"model": "m"})


def played(folder: Path, record: Conditions) -> Run:
    """A run that was begun under these conditions, with an episode."""
    write_conditions(run := opened(folder), record)
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
    "address": (
        ("players", "judge", 0, "address"),
        "http://x/v1",
        "a different address for the judge 'j'",
    ),
    "script": (
        ("players", "partner", 0, "sha256"),
        "9",
        "with different content for the partner 'p.yaml'",
    ),
    "weights": (
        ("players", "environment", 0, "weights"),
        "9",
        "with different weights for the environment '/m'",
    ),
    "revision": (
        ("players", "judge", 0, "revision"),
        "9",
        "a different revision for the judge 'j'",
    ),
    "limit": (
        ("players", "judge", 0, "sampling", "max_tokens"),
        9,
        "a different reply limit for the judge 'j'",
    ),
    "in one task": (
        (*ESSAY, "players", "judge", 0, "address"),
        "http://x",
        "address for the judge",
    ),
    "actor's limit": (
        (*ESSAY, "sampling", "max_tokens"),
        9,
        "a different reply limit for the actor in essay",
    ),
    "row": ((*ESSAY, "rows", "b"), "9", "different content in 1 rows of essay"),
    "option": ((*ESSAY, "options", "scorer"), "9", "a different 'scorer' for the task essay"),
    "new option": ((*ESSAY, "options", "code"), "9", "a different 'code' for the task essay"),
    "scale": ((*ESSAY, "options", "metric"), "9", "a different 'metric' for the task essay"),
}
"""What is another now, at its place in the record → what the refusal says."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_setting_shows_is_refused_by_name(case: str, tmp_path: Path) -> None:
    place, value, words = REFUSED[case]
    before = RECORD
    if case == "revision":
        before = changed(("players", "judge", 0, "revision"), "8")
    run = played(tmp_path / "run", conditions(before))
    content = (run.path / "conditions.json").read_bytes()
    with pytest.raises(RunError, match=words.replace("(", r"\(")):
        write_conditions(run, conditions(changed(place, value, before)))
    assert (run.path / "conditions.json").read_bytes() == content
    write_conditions(run, conditions(before))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((*ESSAY, "rows", "c"), "9"),
        ((*ESSAY, "rows", "b"), None),
        ((*ESSAY, "sampling", "temperature"), 0.5),
        (("players", "judge", 0, "sampling", "temperature"), 0.5),
        (("actor", "weights"), "9"),
        (("panel", "samples"), 2),
    ],
    ids=lambda value: str(value),
)
def test_what_the_settings_compare_is_left_to_them(
    place: tuple[Any, ...], value: Any, tmp_path: Path
) -> None:
    """Settings, weights of the actor and new rows are compared elsewhere; here they are noted."""
    run = played(tmp_path / "run", conditions(RECORD))
    now = changed(place, value)
    write_conditions(run, conditions(now))
    record = written(run)
    assert {name: record[name] for name in now} == now


def test_calls_are_added_and_outlive_the_next_start(tmp_path: Path) -> None:
    run = played(tmp_path / "run", conditions(RECORD))
    sent = [{"temperature": 0.0, "calls": 2}]
    calls: Any = {"essay": {"judge": {"j": {"sent": sent, "dropped": {"seed": 0.5}}},
                            "actor": {"m": {"sent": [], "dropped": {}}}}}  # fmt: skip
    note_calls(run.path, calls, {"essay": {"judge": {"j": {"seed": 0.5}}}})
    write_conditions(run, conditions(RECORD))
    entry = written(run)["tasks"]["essay"]
    assert entry["sent"] == {"judge": {"j": sent}, "actor": {"m": []}}
    assert entry["dropped_settings"] == {"judge": {"j": {"seed": 0.5}}, "actor": {}}
    note_calls(run.path, {"essay": {"judge": {}}}, {})
    entry = written(run)["tasks"]["essay"]
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
    def record(basis: str | None) -> Conditions:
        place = (*where, "weights_basis")
        return conditions(RECORD if basis is None else changed(place, basis))

    def noted(run: Run) -> Any:
        inner: Any = written(run)
        for part in where:
            inner = inner[part]
        return inner.get("weights_basis")

    run = played(tmp_path / "run", record(before))
    write_conditions(run, record(now))
    assert noted(run) == expected
    write_conditions(run, record("verified"), proven=True)
    assert noted(run) == "verified"
    unplayed = opened(tmp_path / "unplayed")
    write_conditions(unplayed, record("declared"))
    write_conditions(unplayed, record("verified"))
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
    write_conditions(run, conditions(RECORD))
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
    (tmp_path / "conditions.json").write_text(text)
    with pytest.raises((RunError, DataError), match=r"conditions\.json"):
        Conditions.read(tmp_path)


@pytest.mark.parametrize("name", ["provenance.json", "material.json"])
def test_a_run_of_an_earlier_version_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(RunError, match=f"an earlier version of soulkit: it has {name} instead of"):
        Conditions.read(tmp_path)


def test_episodes_without_a_record_are_not_mixed_with_others(tmp_path: Path) -> None:
    run = played(tmp_path / "run", conditions(RECORD))
    (run.path / "conditions.json").unlink()
    with pytest.raises(RunError, match=r"contains episodes but no conditions\.json"):
        write_conditions(run, conditions(RECORD))
    assert not (run.path / "conditions.json").exists()


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert Conditions.read(tmp_path) is None
    conditions(RECORD).write(tmp_path)
    assert Conditions.read(tmp_path) == conditions(RECORD)
    assert json.loads((tmp_path / "conditions.json").read_text()) == RECORD


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
    run = played(tmp_path / "run", conditions(RECORD))
    check_engine(opened(tmp_path / "new"), now)
    if not words:
        return check_engine(run, now)
    with pytest.raises(RunError, match=words):
        check_engine(run, now)


def test_a_rescored_run_has_the_scorers_of_now(tmp_path: Path) -> None:
    task = load_registry().task("tomi")
    example = task.example(synth("tomi", 1, 1)[0])
    record = copy.deepcopy(RECORD)
    record["tasks"] = {"tomi": {"options": {"old": "1"}, "rows": {example.id: "1", "gone": "2"}}}
    run = played(tmp_path / "run", conditions(record))
    facts = rescored_conditions(run.path, {example.id: (task, example)}).of_task("tomi")
    assert "old" not in facts.options and "metric" in facts.options
    assert facts.rows["gone"] == "2" and len(facts.rows[example.id]) == 16
    assert json.loads((run.path / "conditions.json").read_text())["tasks"] == record["tasks"]


# -- who and what is recorded ----------------------------------------------------------------------


def judged(**other: Any) -> EvalConfig:
    """Settings with a judge and a partner behind one server."""
    named = {"judge": [{"model": "j", "base_url": URL}], "partner": {"model": "p", "base_url": URL}}
    return EvalConfig.load(
        None, env={},
        flags={"kind": "api", "model": "m", "base_url": URL, "tasks": ("sotopia",), **named,
               **other},
    )  # fmt: skip


def test_players_are_recorded_by_role_and_judges_audit_without_being_listed_twice() -> None:
    players = player_facts(judged(), PlayerFacts(), task="sotopia")
    assert {role: [one.model for one in named] for role, named in players.items()} == {
        "judge": ["j"], "partner": ["p"], "environment": []
    }  # fmt: skip
    assert {one.address for named in players.values() for one in named} == {URL}
    audited = judged(auditor=[{"model": "w", "base_url": URL}])
    for task in ("sotopia", ""):
        assert [a.model for a in player_facts(audited, PlayerFacts(), task=task)["auditor"]] == [
            "w"
        ]


def test_the_actor_as_a_player_is_recorded_as_it_is_sampled_there() -> None:
    config = judged(partner="actor", judge_samples=2)
    players = player_facts(config, actor_facts(config.model_dump()), task="sotopia")
    assert players["partner"][0].kind == "actor" and players["partner"][0].address == URL
    assert players["judge"][0].sampling["temperature"] == 1.0  # two opinions of one judge


@pytest.mark.parametrize(
    ("settings", "live", "expected"),
    [
        ({"kind": "api", "model": "m", "base_url": "http://h/v1/"}, None,
         {"model": "m", "address": "http://h/v1"}),
        ({"kind": "local", "model": "o/n"},
         Live(model=Live(config=Live(_commit_hash="c0ffee"))),
         {"model": "o/n", "revision": "c0ffee"}),
        ({"kind": "local", "model": "o/n"},
         Live(codec=Live(commit="c0ffee"), weights_basis="declared"),
         {"model": "o/n", "revision": "c0ffee", "weights_basis": "declared"}),
        ({"kind": "local", "model": "o/n", "adapter": "a"}, Live(policy_version="12"),
         {"model": "o/n", "adapter": "a", "adapter_weights": "12"}),
    ],
    ids=["api", "hub", "attached", "adapter"],
)  # fmt: skip
def test_the_measured_model(
    settings: dict[str, Any], live: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    if "adapter" in settings:
        settings = {**settings, "adapter": str(tmp_path)}
        expected = {**expected, "adapter": str(tmp_path)}
    assert model_facts(settings, live) == PlayerFacts(**expected)


def test_teachers_are_recorded_by_task(tmp_path: Path) -> None:
    bare = Conditions(players={}, tasks={})
    assert with_teachers(bare, {"model": "m"}, None) == bare
    settings = {"kind": "local", "model": "o/base", "teacher_model": "o/teacher"}
    assert with_teachers(bare, settings, Live()).teacher == PlayerFacts(model="o/teacher")
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode())
    by_task = {task: str(tmp_path / task) for task in ("one", "other")}
    teachers = with_teachers(bare, {**settings, "teacher_adapters": by_task}, Live()).teachers
    assert {task: one.adapter for task, one in teachers.items()} == by_task
    assert len({one.adapter_weights for one in teachers.values()}) == 2


ORIGINS = {
    "released": ({"source": "hitom_val.parquet:3"}, "published"),
    "made": ({"source": "synth:9:3"}, "made here"),
    "own": ({"source": "mine.jsonl:3"}, "mine.jsonl"),
    "drafted of a file": ({"source": "mine.jsonl:3", "origin": "chats.jsonl"}, "chats.jsonl"),
    "none": ({"source": ""}, "rows without a file"),
}


@pytest.mark.parametrize("case", ORIGINS)
def test_where_a_row_is_from(case: str) -> None:
    task = load_registry().task("hitom")
    fields, expected = ORIGINS[case]
    example = replace(task.example(synth("hitom", 1, 1)[0]), **fields)
    assert row_origin(task, example) == expected


@pytest.mark.parametrize(
    ("provenance", "licence", "expected"),
    [
        ("Hi-ToM_data.json:1", "Apache-2.0", "published"),
        ("Hi-ToM_data.json:1", "", "mine.jsonl"),
        ("", "Apache-2.0", "mine.jsonl"),
        ("Hi-ToM_data.json:1; drafted by a, filtered by b", "Apache-2.0", "mine.jsonl"),
    ],
)
def test_imported_rows_are_published_unless_a_model_drafted_them(
    provenance: str, licence: str, expected: str
) -> None:
    task = load_registry().task("hitom")
    made = task.example(synth("hitom", 1, 1)[0])
    fields = {**made.fields, "provenance": provenance, "licence": licence}
    assert row_origin(task, replace(made, source="mine.jsonl:1", fields=fields)) == expected


def test_a_row_is_what_its_readers_see() -> None:
    made = load_registry().task("hitom").example(synth("hitom", 1, 1)[0])
    seen = next(name for name, readers in made.audience.items() if set(readers) - {"coach"})
    assert row_hash(made) == row_hash(replace(made, fields={**made.fields, "human_quality": 3}))
    assert row_hash(made) == row_hash(replace(made, fields={**made.fields, "note": "mine"}))
    assert row_hash(made) != row_hash(replace(made, fields={**made.fields, seen: "other"}))


def test_the_code_of_a_users_task_is_a_condition(tmp_path: Path) -> None:
    home = Path(shutil.copytree(EXAMPLE.parent, tmp_path / "task"))
    task = load_registry(home / "tasks.yaml").task("judged_task")
    config, work = judged(), [Work(task, ())]
    sampling = {"judged_task": config.sampling(task.spec)}
    played = played_conditions(config, Players(), work, PlayerFacts(), sampling)
    facts = with_rows(played, work).of_task("judged_task")
    assert set(facts.options) >= {"metric", "code"} and facts.rows == {}
    assert facts.sampling["max_tokens"] == sampling["judged_task"].max_tokens
    assert "code" not in _options_of("tomi")


def _options_of(name: str) -> dict[str, Any]:
    task, config = load_registry().task(name), judged()
    sampling = {name: config.sampling(task.spec)}
    played = played_conditions(config, Players(), [Work(task, ())], PlayerFacts(), sampling)
    return dict(played.of_task(name).options)


JUDGES_URL = "http://127.0.0.1:9/v1"
ORIGIN: dict[str, Any] = {
    "players": {"judge": [{"kind": "endpoint", "model": "j", "address": JUDGES_URL}]},
    "tasks": {
        "sotopia": {"roles": ["judge", "partner"], "rows": {"n": 450, "sha256": "3fa9c1d2" * 8}},
        "coser": {
            "roles": ["judge"],
            "players": {"judge": [{"model": "k", "address": JUDGES_URL}]},
        },
        "tomi": {"roles": [], "rows": {"n": 6, "sha256": ""}},
    },
    "actor": {"model": "m", "weights": "0123456789abcdef", "adapter_weights": "fedcba9876543210"},
}


def test_the_head_of_a_run_names_its_judges_rows_and_revision() -> None:
    facts = dict(provenance_facts(ORIGIN))
    assert facts["judge"] == f"j@{JUDGES_URL}, k@{JUDGES_URL} for coser"
    assert facts["rows"] == "sotopia 450 (3fa9c1d2); tomi 6"
    assert facts["revision"] == "0123456789ab + adapter fedcba987654"
    assert "partner" not in facts and role_text(ORIGIN, "partner") == ""
    assert provenance_facts({}) == [] and revision_text({"revision": "abc"}) == "abc"


def test_judges_of_single_tasks_are_not_named_for_all() -> None:
    """Two judges that each score one task are no panel of two."""
    one, two = ({"model": name, "address": JUDGES_URL} for name in "jk")
    split = {
        "players": {"judge": [one, two]},
        "tasks": {
            "sotopia": {"roles": ["judge"], "players": {"judge": [one]}},
            "coser": {"roles": ["judge"], "players": {"judge": [two]}},
            "tomi": {"roles": []},
        },
    }
    assert role_text(split, "judge") == f"j@{JUDGES_URL} for sotopia, k@{JUDGES_URL} for coser"
    split["tasks"]["coser"] = {"roles": ["judge"], "players": {"judge": [one, two]}}
    assert (
        role_text(split, "judge")
        == f"j@{JUDGES_URL} and k@{JUDGES_URL}, j@{JUDGES_URL} for sotopia"
    )
    split["tasks"] |= dict.fromkeys(("sim_doc", "userllm"), split["tasks"]["sotopia"])
    split["tasks"]["coser"] = {"roles": ["judge"], "players": {"judge": [two]}}
    many = f"k@{JUDGES_URL} for coser, j@{JUDGES_URL} for sotopia, sim_doc and userllm"
    assert role_text(split, "judge") == many


def test_a_judge_that_no_task_asks_is_not_named() -> None:
    rules = {**ORIGIN, "tasks": {"tomi": ORIGIN["tasks"]["tomi"]}}
    assert "judge" not in dict(provenance_facts(rules))


def test_rows_are_one_hash_in_whatever_order_they_come() -> None:
    rows = {"a": "1", "b": "2"}
    assert rows_hash(rows) == rows_hash(dict(reversed(rows.items())))
    assert len({rows_hash(one) for one in (rows, {**rows, "b": "3"}, {"a": "1"}, {"c": "1"})}) == 4


def test_every_form_of_a_report_shows_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(answer=oracle("tomi", 6)) as server:
        assert api(server.base_url, tmp_path / "run") == 0
    rows = summary(tmp_path / "run")["provenance"]["tasks"]["tomi"]["rows"]
    capfd.readouterr()
    assert soul("report", tmp_path / "run", "--json") == 0
    (shown,) = json.loads(capfd.readouterr().out)["runs"].values()
    assert shown["provenance"]["tasks"]["tomi"]["rows"] == rows
    for form in ("terminal", "md", "html"):
        out = tmp_path / f"report.{form}"
        assert soul("report", tmp_path / "run", "--format", form, "--out", out) == 0
        assert f"tomi 6 ({rows['sha256'][:8]})" in out.read_text().replace("\\", "")
    assert rows["sha256"] in (tmp_path / "report.html").read_text()


def test_an_older_run_is_gathered_by_its_files_and_a_bare_summary_by_nothing(
    tmp_path: Path,
) -> None:
    with ScriptedServer(answer=oracle("tomi", 6)) as server:
        assert api(server.base_url, tmp_path / "run") == 0
    line = summary(tmp_path / "run")
    written = line.pop("provenance")
    gathered = provenance_of(tmp_path / "run", line)
    assert {**written, "dates": None} == {**gathered, "dates": None}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(line))
    (run,) = load_runs([tmp_path / "run"])
    assert run.provenance["tasks"] == written["tasks"]
    bare = tmp_path / "bare"
    bare.mkdir()
    assert set(provenance_of(bare, {"protocol": "paper"})) <= {"protocol", "dates"}
    assert with_provenance(bare, {"n": 1})["provenance"]["dates"]["finished"]
