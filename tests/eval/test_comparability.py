"""In what the conditions of two runs differ: every condition, one at a time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from soulkit.eval.comparison.comparability import differences, read_measured, shared_rows
from soulkit.runs.folder import Run
from soulkit.runs.jsonl import write_json
from soulkit.types import Episode, Record, Score

JUDGE = {"kind": "endpoint", "model": "j", "address": "http://127.0.0.1:1/v1",
         "sampling": {"temperature": 0.0}}  # fmt: skip
PARTNER = {"kind": "scripted", "model": "p.yaml", "sha256": "1"}
PROVEN = ("weights", "revision", "adapter", "adapter_weights", "adapter_revision", "args", "path")
"""What a record may know of a player beside its name."""
PARTNER |= dict.fromkeys(PROVEN, "x")
PLAYERS = {"judge": [JUDGE], "partner": [PARTNER]}
EVALUATION: dict[str, Any] = {
    "settings": {"kind": "api", "seed": 0, "repeats": 1, "max_context": None, "protocol": "paper"},
    "record": {
        "actor": {"model": "m"},
        "engine": {"kind": "local"},
        "players": PLAYERS,
        "panel": {"samples": 1, "combine": "mean", "orders": "both"},
        "tasks": {
            "essay": {
                "roles": ["judge", "partner"], "players": PLAYERS, "samples": {},
                "sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 60, "thinking": None},
                "dropped_settings": {"actor": {}, "judge": {}, "partner": {}},
                "budgets": {"topic": 100}, "options": {"metric": "4", "detector": "5", "code": "6"},
                "rows": {"a": "7", "b": "8"},
            }
        },
    },
    "summary": {"protocol": "paper", "prompts": {"essay": {"judge": ["9"]}}},
}  # fmt: skip
TRAINING: dict[str, Any] = {
    **EVALUATION,
    "settings": {"method": "ditto", "seed": 0, "kind": "local", "protocol": "paper"},
    "record": {
        **EVALUATION["record"],
        "tasks": {"essay": {**EVALUATION["record"]["tasks"]["essay"], "prompts": "1",
                            "dev_rows": {"c": "9"}, "dev_prompts": "2"}},
        "material": {},
    },
}  # fmt: skip
ESSAY = ("record", "tasks", "essay")


def run(folder: Path, parts: dict[str, Any]) -> Path:
    """The folder of a run of these conditions."""
    Run.open(folder, "eval api", parts["settings"])
    write_json(folder / "summary.json", parts["summary"])
    write_json(folder / "conditions.json", parts["record"])
    return folder


def changed(parts: dict[str, Any], *changes: tuple[tuple[Any, ...], Any]) -> dict[str, Any]:
    """The parts of a run with other values at some places; None takes the member away."""
    made = copy.deepcopy(parts)
    for place, value in changes:
        inner: Any = made
        for part in place[:-1]:
            inner = inner[part]
        if value is None:
            inner.pop(place[-1])
        else:
            inner[place[-1]] = copy.deepcopy(value)
    return made


def differing(folder: Path, a: dict[str, Any], b: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(why the two may not be compared, what is said beside a difference)."""
    sides = [read_measured(run(folder / name, one)) for name, one in (("a", a), ("b", b))]
    found = differences(*sides, ["essay"])
    assert {task for pairs in found for task, _ in pairs} <= {"essay"}
    return [line for _, line in found.blocking], [line for _, line in found.remarks]


def judge(**other: Any) -> tuple[tuple[tuple[Any, ...], Any], ...]:
    """Another judge, in the whole run and in the task."""
    players = {**PLAYERS, "judge": [{**JUDGE, **other}]}
    return ((("record", "players"), players), ((*ESSAY, "players"), players))


TWO = [JUDGE, {**JUDGE, "model": "k"}]
REFUSED: dict[str, tuple[tuple[tuple[tuple[Any, ...], Any], ...], str]] = {
    "protocol": (
        ((("settings", "protocol"), "reference"),), "protocol paper vs reference"
    ),
    "prompt": (
        ((("summary", "prompts"), {"essay": {"judge": ["0"]}}),), "prompt 'judge' differs"
    ),
    "judge": (
        judge(model="k"),
        "judge endpoint:j@http://127.0.0.1:1/v1 vs endpoint:k@http://127.0.0.1:1/v1",
    ),
    "address": (
        judge(address="http://b"),
        "judge endpoint:j@http://127.0.0.1:1/v1 vs endpoint:j@http://b",
    ),
    "sampling of the judge": (
        judge(sampling={"temperature": 0.5}),
        "judge endpoint:j@http://127.0.0.1:1/v1 (temperature 0.0) vs "
        "endpoint:j@http://127.0.0.1:1/v1 (temperature 0.5)",
    ),
    "script": (
        (((*ESSAY, "players", "partner", 0, "sha256"), "2"),),
        "partner scripted:p.yaml (sha256 1) vs scripted:p.yaml (sha256 2)",
    ),
    **{
        f"{name} of the partner": (
            (((*ESSAY, "players", "partner"), [{**PARTNER, name: "y"}]),),
            f"partner scripted:p.yaml ({name} x) vs scripted:p.yaml ({name} y)",
        )
        for name in PROVEN
    },
    "nobody": (
        (((*ESSAY, "players", "partner"), []),), "partner scripted:p.yaml vs none"
    ),
    "auditor": (
        (((*ESSAY, "players", "auditor"), [{**JUDGE, "model": "w"}]),
         ((*ESSAY, "roles"), ["auditor", "judge", "partner"])),
        "auditor endpoint:j@http://127.0.0.1:1/v1 vs endpoint:w@http://127.0.0.1:1/v1",
    ),
    "samples": (((("record", "panel", "samples"), 3),), "judge samples 1 vs 3"),
    "order": (((("record", "panel", "orders"), "seeded"),), "judge order both vs seeded"),
    "dropped": (
        (((*ESSAY, "dropped_settings", "judge"), {"j": {"temperature": 1.0}}),),
        "judge sampled with all settings vs without temperature (100 % of calls)",
    ),
    "scale": ((((*ESSAY, "options", "metric"), "0"),), "the task's metric differs"),
    "detector": ((((*ESSAY, "options", "detector"), "0"),), "the task's detector differs"),
    "fewer rows": ((((*ESSAY, "rows", "b"), None),), "rows 2 vs 1, 1 in both"),
    "other rows": ((((*ESSAY, "rows"), {"a": "7", "c": "0"}),), "rows 2 vs 2, 1 in both"),
    "other content": (
        (((*ESSAY, "rows", "b"), "0"),),
        "rows 2 vs 2, 2 in both, 1 of these with different content",
    ),
}  # fmt: skip
"""What is another in B → why no difference may be put between the two."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_score_depends_on_is_refused(case: str, tmp_path: Path) -> None:
    changes, words = REFUSED[case]
    assert differing(tmp_path, EVALUATION, changed(EVALUATION, *changes)) == ([words], [])


NAMED: dict[str, tuple[tuple[tuple[tuple[Any, ...], Any], ...], str]] = {
    "temperature": (
        (((*ESSAY, "sampling", "temperature"), 0.5),), "temperature 1.0 vs 0.5"
    ),
    "top_p": ((((*ESSAY, "sampling", "top_p"), 0.5),), "top_p 1.0 vs 0.5"),
    "max_tokens": ((((*ESSAY, "sampling", "max_tokens"), 9),), "max_tokens 60 vs 9"),
    "thinking": (
        (((*ESSAY, "sampling", "thinking"), True),), "thinking default vs True"
    ),
    "seed": (((("settings", "seed"), 7),), "seed 0 vs 7"),
    "repeats": (((("settings", "repeats"), 2),), "repeats 1 vs 2"),
    "max_context": (
        ((("settings", "max_context"), 512),), "max_context default vs 512"
    ),
    "flags": (
        ((("settings", "vllm_arg"), {"quantization": "fp8"}),),
        "vLLM with no flags vs --quantization=fp8",
    ),
    "dropped": (
        (((*ESSAY, "dropped_settings", "actor"), {"m": {"seed": 0.25}}),),
        "actor sampled with all settings vs without seed (25 % of calls)",
    ),
    "budget": ((((*ESSAY, "budgets"), {}),), "word budget of 'topic' 100 vs none"),
    "code": ((((*ESSAY, "options", "code"), "0"),), "the task's code differs"),
    "declared": (
        ((("record", "actor", "weights_basis"), "declared"),),
        "the weights of B's actor are declared, not verified",
    ),
}  # fmt: skip
"""What is another in B → what is said beside a difference."""


@pytest.mark.parametrize("case", NAMED)
def test_what_is_compared_is_named(case: str, tmp_path: Path) -> None:
    changes, words = NAMED[case]
    assert differing(tmp_path, EVALUATION, changed(EVALUATION, *changes)) == ([], [words])


def test_engines_are_named_except_those_of_endpoints(tmp_path: Path) -> None:
    served = changed(EVALUATION, (("record", "engine"), {"kind": "vllm", "version": "0.9"}))
    endpoint = changed(EVALUATION, (("record", "engine"), None))
    words = ["sampled by local vs vllm 0.9"]
    assert differing(tmp_path / "local", EVALUATION, served) == ([], words)
    assert differing(tmp_path / "api", endpoint, served) == ([], [])


def test_players_and_panels_that_come_to_the_same(tmp_path: Path) -> None:
    """Order, names of this machine, and how one opinion becomes one."""
    both, turned = (
        changed(EVALUATION, ((*ESSAY, "players", "judge"), judges)) for judges in (TWO, TWO[::-1])
    )
    assert differing(tmp_path / "order", both, turned) == ([], [])
    local = changed(EVALUATION, *judge(address="http://localhost:1/v1"))
    assert differing(tmp_path / "name", EVALUATION, local) == ([], [])
    vote = changed(EVALUATION, (("record", "panel", "combine"), "vote"))
    assert differing(tmp_path / "single", EVALUATION, vote) == ([], [])
    many = changed(both, (("record", "panel", "combine"), "vote"))
    assert differing(tmp_path / "many", both, many)[0] == ["judge combination mean vs vote"]
    by_question = changed(EVALUATION, ((*ESSAY, "samples"), {"quality": 3}),
                          (("record", "panel", "samples"), None))  # fmt: skip
    by_question["record"]["panel"]["samples"] = None
    assert differing(tmp_path / "question", EVALUATION, by_question)[0] == [
        "judge samples 1 vs {'quality': 3}"
    ]


def test_roles_that_no_episode_asks_do_not_count(tmp_path: Path) -> None:
    a, b = (
        changed(EVALUATION, ((*ESSAY, "roles"), []), *changes) for changes in ((), judge(model="k"))
    )
    assert differing(tmp_path, a, b) == ([], [])


TRAINED: dict[str, tuple[str, Any, str]] = {
    "rows": ("rows", {"a": "7", "b": "8", "c": "0"}, "training rows 2 vs 3, 2 in both"),
    "others": ("rows", {"a": "7", "c": "0"}, "training rows 2 vs 2, 1 in both"),
    "content": (
        "rows",
        {"a": "7", "b": "0"},
        "training rows 2 vs 2, 2 in both, 1 of these with different content",
    ),
    "order": ("rows", {"b": "8", "a": "7"}, "rows in a different order"),
    "prompts": ("prompts", "0", "rows grouped into different prompts"),
    "dev": ("dev_rows", {}, "dev rows 1 vs 0, 0 in both"),
    "dev prompts": ("dev_prompts", "0", "rows grouped into different prompts"),
}
"""What is another in B → why no difference may be put between two trainings."""


@pytest.mark.parametrize("case", TRAINED)
def test_rows_of_trainings_are_told_by_content_order_and_prompts(case: str, tmp_path: Path) -> None:
    member, value, words = TRAINED[case]
    other = changed(TRAINING, ((*ESSAY, member), value))
    assert differing(tmp_path / "other", TRAINING, other)[0] == [words]
    assert differing(tmp_path / "same", TRAINING, TRAINING) == ([], [])


def test_an_evaluation_of_some_rows_is_unfinished_and_a_training_is_not(tmp_path: Path) -> None:
    played = Record(
        key="0/a/0/draft", task="essay", example_id="a", rollout=0, kind="draft",
        score=Score(value=1.0, reward=1.0), episode=Episode(example_id="a", task="essay"),
    )  # fmt: skip
    for name, parts, lines in (
        ("evaluation", EVALUATION, ["A is unfinished: 1 of 2 rows played"]),
        ("training", TRAINING, []),
    ):
        folder = run(tmp_path / name, parts)
        sides = read_measured(folder, [played]), read_measured(folder, [])
        assert differences(*sides, ["essay"]).remarks == [("essay", line) for line in lines]


def test_an_evaluation_is_never_compared_with_a_training(tmp_path: Path) -> None:
    expected = ["evaluation rows vs training rows"]
    assert differing(tmp_path / "one", EVALUATION, TRAINING)[0] == expected
    assert differing(tmp_path / "other", TRAINING, EVALUATION)[0] == expected


def test_another_judge_of_both_leaves_the_rest_to_be_compared(tmp_path: Path) -> None:
    changes = (*judge(model="k"), ((*ESSAY, "players", "partner", 0, "sha256"), "2"))
    a, b = (
        read_measured(run(tmp_path / name, parts))
        for name, parts in (("a", EVALUATION), ("b", changed(EVALUATION, *changes)))
    )
    ((_, line),) = differences(a, b, ["essay"], judges=False).blocking
    assert line.startswith("partner scripted:")


def test_a_run_without_a_record_is_compared_with_none(tmp_path: Path) -> None:
    bare = run(tmp_path / "bare", EVALUATION)
    (bare / "conditions.json").unlink()
    sides = read_measured(bare), read_measured(run(tmp_path / "other", EVALUATION))
    expected = ("essay, tomi: one did not record its conditions",)
    assert differences(*sides, ["essay", "tomi"], ("one", "other")).lines() == (expected, ())


def test_shared_rows_are_those_of_equal_content(tmp_path: Path) -> None:
    other = changed(EVALUATION, ((*ESSAY, "rows"), {"a": "7", "b": "0", "c": "1"}))
    a, b = (
        read_measured(run(tmp_path / name, parts))
        for name, parts in (("a", EVALUATION), ("b", other))
    )
    shared = shared_rows(a, b, ["essay"])["essay"]
    assert (shared.ids, shared.a, shared.b) == ({"a"}, 2, 3)
    assert shared.words() == "1 of 2 in A and 3 in B"
    a, b = (one.within({"essay": shared.ids}, []) for one in (a, b))
    assert differences(a, b, ["essay"]) == ([], [])  # fmt: skip


def test_rows_that_a_training_takes_more_often_are_another_training(tmp_path: Path) -> None:
    once, twice = TRAINING, changed(TRAINING, ((*ESSAY, "taken"), 4))
    assert differing(tmp_path / "other", once, twice)[0] == ["training rows used 2 vs 4 times"]
    assert differing(tmp_path / "same", twice, twice) == ([], [])


DRAWING: dict[str, tuple[Any, Any]] = {
    "limit": (None, 2), "where": ({}, {"x": "y"}), "example": ([], ["a"]), "dev_share": (0.2, 0.5),
    "dev_limit": (None, 3), "dev_by": ([], ["x"]), "eval_every": (1, None),
    "data": ({"essay": "a.jsonl"}, {"essay": "b.jsonl"}), "tasks": ({"essay": 1.0}, {"essay": 2.0}),
}  # fmt: skip
"""Setting of a training that decides which rows it draws → its value in A, and another one."""


@pytest.mark.parametrize("name", DRAWING)
def test_trainings_that_were_not_begun_are_told_by_their_settings(
    name: str, tmp_path: Path
) -> None:
    a, b = (changed(TRAINING, (("record", "material"), None)) for _ in range(2))
    for parts in (a, b):
        parts["settings"] |= {one: first for one, (first, _) in DRAWING.items()}
    b["settings"][name] = DRAWING[name][1]
    assert len(differing(tmp_path / "other", a, b)[0]) == 1
    assert differing(tmp_path / "same", a, a) == ([], [])
