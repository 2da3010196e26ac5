"""Tasks files: what is refused and how it is said, and how classes beside a file are found.

Tasks without a class: their rows are read, and nothing starts when one is to be played.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.cli import app as cli
from soulkit.data.files import RawRow
from soulkit.errors import ConfigError
from soulkit.eval.config import EvalConfig
from soulkit.parse import parse_yaml
from soulkit.play.settings import configured_tasks
from soulkit.tasks.kit.loading import RowsOnly, to_examples
from soulkit.tasks.kit.registry import builtin_file, load_registry, read_file
from soulkit.tasks.kit.row_checks import audit_rows
from soulkit.tasks.kit.selfcheck import check_task
from soulkit.tasks.kit.spec import READERS
from soulkit.types import Episode
from tests.support.evaluation import messages
from tests.support.road import EVERY, NO_ONE, ROLLOUT, task_of

TASK: dict[str, Any] = {
    "title": "Lights",
    "summary": "Is it red or green?",
    "module": "lights:Lights",
    "seats": {"driver": "actor"},
    "columns": {"scene": {"audience": ["driver"]}, "colour": {"audience": ["gold"]}},
}
CLASS = """
from soulkit.tasks.kit.choice import ChoiceTask
class Lights(ChoiceTask):
    mark = {mark!r}
    def parse(self, text): return text, "ok"
    def grade(self, example, answer): return float(answer == example.fields["colour"])
    def gold_completion(self, example): return example.fields["colour"]
class Half(ChoiceTask):
    def parse(self, text): return text, "ok"
class Other: pass
"""


def write(folder: Path, raw: Any, name: str = "mine.yaml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(raw if isinstance(raw, str) else yaml.safe_dump(raw), encoding="utf-8")
    return path


def lights(**changes: Any) -> dict[str, Any]:
    return {"tasks": {"lights": {**TASK, **changes}}}


def error_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_registry(path)
    assert all(line.strip() and line.strip()[0] for line in caught.value.lines())
    return "\n".join(caught.value.lines())


COLUMN = {"audience": ["driver"]}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"task": {}}, ["1: task: there is no such key", "Did you mean 'tasks'?"]),
        (lights(titel="x"), ["tasks.lights.titel", "Did you mean 'title'?"]),
        (lights(metric={"nam": "x"}), ["metric.nam", "Did you mean 'name'?"]),
        (lights(files={"evals": []}), ["files.evals", "Did you mean 'eval'?"]),
        (lights(feedback={"coach": []}), ["feedback.coach", "Did you mean 'coaches'?"]),
        (
            lights(columns={"scene": {"audience": [], "alias": []}}),
            ["columns.scene.alias", "Did you mean 'aliases'?"],
        ),
        (
            lights(columns={"metric": {"audience": [], "max_word": 1}}),
            ["columns.metric.max_word", "Did you mean 'max_words'?"],
        ),
        (
            lights(columns={"scene": {"audience": [], "type": "txt"}}),
            ["columns.scene.type", "Did you mean 'text'?"],
        ),
        (lights(seats={"driver": "acter"}), ["seats.driver", "Did you mean 'actor'?"]),
        (lights(feedback={"coaches": ["models"]}), ["Did you mean 'model'?"]),
        (
            lights(columns={"scene": {"audience": ["diver"]}}),
            ["columns.scene.audience", "'diver'", "'driver'"],
        ),
        (lights(cluster=["scen"]), ["lights.cluster", "Did you mean 'scene'?"]),
        (lights(tags={"hue": "color"}), ["lights.tags", "Did you mean 'colour'?"]),
        (lights(seats={"driver": "partner"}), ["actor"]),
        (lights(columns={"scene": {}}), ["columns.scene: the key 'audience' is missing"]),
        (
            lights(columns={"scene": {**COLUMN, "max_words": 0}}),
            ["max_words: 0 does not fit; expected a number > 0"],
        ),
        ({"tasks": {"lights": {}}}, ["4 problems", "'columns' is missing", "'title' is missing"]),
        ({"suites": {"s": ["tomy"]}}, ["suite 's'", "Did you mean 'tomi'?"]),
        ({"suites": {"small": ["tomi"]}}, ["suite 'small'", "twice"]),
        ({"tasks": {"tomi": TASK}}, ["task 'tomi'", "twice"]),
        (["tasks"], ["1: the file: ['tasks'] does not fit; expected keys with values"]),
        ("just words", ["expected keys with values"]),
        ("tasks: [", ["1: not YAML"]),
        ("tasks: {}\ntasks: {}\n", ["'tasks' appears twice"]),
        ("x: !!python/object/apply:os.getcwd []", ["1: not YAML", "a tag"]),
    ],
)
def test_what_is_refused(tmp_path: Path, raw: Any, words: list[str]) -> None:
    refusal = error_of(write(tmp_path, raw))
    assert all(word in refusal for word in words), refusal
    assert not any(flaw in refusal for flaw in ("Value error", "?.", "..")), refusal


def test_a_task_written_twice_in_one_file(tmp_path: Path) -> None:
    once = yaml.safe_dump(lights())
    twice = once + "\n".join(once.splitlines()[1:]) + "\n"
    assert "'lights' appears twice" in error_of(write(tmp_path, twice))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "does not exist" in error_of(tmp_path / "no.yaml")
    assert "cannot be read" in error_of(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in error_of(tmp_path / "bytes.yaml")


def test_a_nested_file_of_a_user_is_refused(tmp_path: Path) -> None:
    """The fast loader of the built-in file would end the process here."""
    assert "not YAML" in error_of(write(tmp_path, "[" * 100_000))


def test_both_loaders_read_the_same() -> None:
    text = builtin_file().read_text(encoding="utf-8")
    assert parse_yaml(text) == parse_yaml(text, ours=True)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing yet\n"])
def test_an_empty_file_declares_nothing(tmp_path: Path, text: str) -> None:
    assert "is empty" in error_of(write(tmp_path, text))
    assert load_registry(write(tmp_path, "tasks: {}\n")).specs == load_registry().specs


def test_a_run_may_set_an_option_that_a_task_has() -> None:
    registry = load_registry()
    task = registry.task("sotopia", options={"hack_penalty": "off", "shuffles": 3})
    assert task.spec.options["hack_penalty"] == "off" and "shuffles" not in task.spec.options
    assert registry.task("sotopia", options={"hack_penalty": None}).spec == registry.spec("sotopia")


def test_an_option_that_no_task_has_is_refused() -> None:
    config = EvalConfig(kind="api", model="m", tasks=("tomi",), hack_penalty="off")
    with pytest.raises(
        ConfigError, match=r"No selected task \(tomi\) has an option 'hack_penalty'"
    ) as caught:
        configured_tasks(load_registry(), ("tomi",), config)
    assert "--hack-penalty" in str(caught.value.way_out)


def test_unknown_names_are_hinted_at() -> None:
    with pytest.raises(ConfigError, match="hitum") as caught:
        load_registry().task("hitum")
    assert "'hitom'" in caught.value.way_out
    with pytest.raises(ConfigError) as caught:
        load_registry().suite("smal")
    assert "'small'" in caught.value.way_out


def test_the_built_in_file_is_whole() -> None:
    registry = load_registry()
    assert registry.specs.keys() == read_file(builtin_file()).tasks.keys()
    for name, spec in registry.specs.items():
        assert registry.task(name).name == name and spec.licence and spec.citation
        readers = {r for column in spec.columns.values() for r in column.audience}
        assert readers <= {*spec.seats, *READERS}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("nowhere:Lights", ["No module named 'nowhere'"]),
        ("lights:Lihgts", ["Lihgts"]),
        ("lights", ["lights"]),
        ("lights:Other", ["not a class derived from Task"]),
        ("lights:Half", ["does not define: grade"]),
        ("broken:Lights", ["broken.py, line 1"]),
    ],
)
def test_modules_that_cannot_be_used(tmp_path: Path, module: str, words: list[str]) -> None:
    (tmp_path / "lights.py").write_text(CLASS.format(mark=1))
    (tmp_path / "broken.py").write_text("class Lights\n")
    registry = load_registry(write(tmp_path, lights(module=module)))
    with pytest.raises(ConfigError) as caught:
        registry.task("lights")
    refusal = "\n".join(caught.value.lines())
    assert all(word in refusal for word in (*words, module, "file:Class")), refusal


def test_two_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    marks = []
    for mark in ("one", "two"):
        folder = tmp_path / mark
        path = write(folder, lights())
        (folder / "lights.py").write_text(CLASS.format(mark=mark))
        marks.append(load_registry(path).task("lights").mark)
    assert marks == ["one", "two"]


def test_a_file_imports_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "lamp_words.py").write_text("MARK = 'from beside'\n")
    path = write(tmp_path, lights())
    code = CLASS.format(mark=1).replace("mark = 1", "from lamp_words import MARK as mark")
    (tmp_path / "lights.py").write_text(code)
    assert load_registry(path).task("lights").mark == "from beside"


def test_a_file_may_be_called_like_a_standard_module(tmp_path: Path) -> None:
    path = write(tmp_path, lights(module="random:Lights"))
    (tmp_path / "random.py").write_text(CLASS.format(mark="mine"))
    assert load_registry(path).task("lights").mark == "mine"
    import random

    assert hasattr(random, "Random"), "and the standard one is still itself"


def test_a_suite_of_own_and_built_in_tasks(tmp_path: Path) -> None:
    raw = {**lights(), "suites": {"mine": ["lights", "tomi"]}}
    assert load_registry(write(tmp_path, raw)).suite("mine") == ("lights", "tomi")


def test_the_reference_protocol_may_have_a_class_of_its_own(tmp_path: Path) -> None:
    text = CLASS.format(mark="paper") + "class Strict(Lights):\n    mark = 'reference'\n"
    tasks = lights(reference="lights:Strict")
    tasks["tasks"]["plain"] = lights()["tasks"]["lights"]
    path = write(tmp_path, tasks)
    (tmp_path / "lights.py").write_text(text, encoding="utf-8")
    registry = load_registry(path)

    def marks(name: str) -> list[str]:
        return [registry.task(name, "paper").mark, registry.task(name, "reference").mark]  # type: ignore[attr-defined]

    assert marks("lights") == ["paper", "reference"] and marks("plain") == ["paper", "paper"]


def test_every_built_in_reference_class_stands_in_for_its_task() -> None:
    registry = load_registry()
    names = [name for name, spec in registry.specs.items() if spec.reference]
    assert names
    for name in names:
        paper, reference = registry.task(name), registry.task(name, "reference")
        assert isinstance(reference, type(paper)) and type(reference) is not type(paper)


def test_a_declaration_of_ones_own_may_name_a_built_in_class(tmp_path: Path) -> None:
    """The protocols stay apart."""
    raw = yaml.safe_load(builtin_file().read_text(encoding="utf-8"))["tasks"]["userllm"]
    entry = {key: raw[key] for key in ("title", "summary", "seats", "columns", "metric")}
    entry["module"] = "soulkit.tasks.userllm.task:UserLLM"
    registry = load_registry(write(tmp_path, {"tasks": {"my_users": entry}}))
    for protocol in ("paper", "reference"):
        live = registry.task("my_users", protocol)
        assert type(live) is type(registry.task("userllm", protocol))


def test_a_class_without_a_file_has_no_prompts_beside_it(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "typed_in"}
    exec(CLASS.format(mark=1), names)
    spec = load_registry(write(tmp_path, lights())).spec("lights")
    assert names["Lights"]("lights", spec).prompts.folders[0] == tmp_path / "prompts"


LIGHTS: dict[str, Any] = {
    "title": "Lights",
    "summary": "Is it red or green?",
    "seats": {"driver": "actor"},
    "unpack": ["scene"],
    "columns": {
        "street": {"audience": ["driver"]},
        "cars": {"type": "any", "audience": ["driver"]},
        "hour": {"type": "int", "required": False, "audience": [], "identity": False},
        "said": {"audience": ["gold"]},
    },
    "cluster": ["street"],
    "tags": {"hour": "hour"},
}
ROW = {"street": "Long Lane", "cars": [{"seats": 2}], "said": "Go!"}
RUN = ("--model", "m", "--base-url", "http://127.0.0.1:9/v1")


@pytest.fixture
def tasks_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump({"tasks": {"lights": LIGHTS}, "suites": {"mine": ["tomi", "lights"]}})
    )
    return path


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: object) -> list[str]:
        capsys.readouterr()
        assert cli.main([str(argument) for argument in arguments]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        lines = messages(output.err)
        assert [line.partition(":")[0] for line in lines] == ["error", "why", "fix"]
        return lines

    return run


def examples_of(task: Any, *rows: dict[str, Any]) -> Any:
    return to_examples(task, [RawRow(row, f"f:{i}") for i, row in enumerate(rows, 1)])


# -- reading -------------------------------------------------------------------------------------


def test_a_task_without_a_class_binds_rows(tasks_file: Path) -> None:
    task = load_registry(tasks_file).task("lights")
    assert isinstance(task, RowsOnly) and task.spec.rows_only
    example = task.example({**ROW, "hour": 7})
    assert example.visible("driver") == {"street": "Long Lane", "cars": [{"seats": 2}]}
    assert example.tags == {"hour": "7"} and example.cluster
    assert task.preview(example) == () and task.gold_text(example) == "Go!"


def test_objects_and_their_json_text_are_one_row(tasks_file: Path) -> None:
    task = load_registry(tasks_file).task("lights")
    inner = {"street": "Long Lane", "cars": [{"seats": 2, "of": "Zoë 😀"}]}
    shapes: list[dict[str, Any]] = [
        inner,
        {"scene": inner},
        {"scene": {**inner, "hour": None}, "hour": 7},
        {"scene": json.dumps(inner)},
        {"scene": json.dumps({**inner, "cars": json.dumps(inner["cars"])})},
        {**inner, "cars": repr(inner["cars"]), "scene": None},
    ]
    examples = [task.example({**shape, "said": "Go!"}) for shape in shapes]
    assert len({example.id for example in examples}) == 1
    assert examples[2].tags == {"hour": "7"}, "an absent value hides nothing"


def test_what_is_checked_without_playing(tasks_file: Path) -> None:
    task = load_registry(tasks_file).task("lights")
    loaded = examples_of(task, ROW, ROW, {**ROW, "said": "Stop!"}, {"scene": "red"})
    checked = check_task(task, loaded)
    assert checked.rows_only and (checked.rows, checked.duplicates, len(checked.bad)) == (2, 1, 1)
    assert not checked.no_gold + checked.no_wrong + checked.gold_fails
    audited = audit_rows(task, loaded)
    assert {r.what for r in audited.remarks} == {"contradiction"}, "equal views, different golds"
    assert "prompt" not in audited.words and "gold answer" in audited.words
    other = examples_of(task, ROW, {**ROW, "street": "Short Lane", "said": "Stop!"})
    assert audit_rows(task, other).remarks == ()


# -- refusing ------------------------------------------------------------------------------------


def test_playing_and_scoring_are_refused(tasks_file: Path) -> None:
    task = load_registry(tasks_file).task("lights")
    example = task.example(ROW)
    episode = Episode(example_id=example.id, task="lights")
    for attempt in (task.play(example, NO_ONE, ROLLOUT), task.score(example, episode, NO_ONE)):
        with pytest.raises(ConfigError, match="'lights' cannot be played"):
            asyncio.run(attempt)


def test_eval_refuses_before_anything_starts(tasks_file: Path, lines, tmp_path: Path) -> None:
    out = tmp_path / "run"
    where = ("--tasks", tasks_file, "--out", out, *RUN)
    error, why, fix = lines("eval", "api", "--task", "lights", *where)
    assert "The task 'lights' cannot be played" in error and "soul data" in why
    assert "tomi" in fix and "lights" not in fix
    error, _, fix = lines("eval", "api", "--suite", "mine", *where)
    assert "no code to play lights; no rows for tomi" in error and "--playable" in fix
    rows = ("--data", "tomi=synth:2")
    error, _, fix = lines("eval", "api", "--suite", "mine", *where, *rows)
    assert "Suite 'mine': the task 'lights'" in error
    assert "--playable" in fix and fix.endswith("--task tomi")
    error, _, _ = lines("eval", "local", "--task", "lights", "--tasks", tasks_file, "--out", out,
                        "--model", tmp_path / "no_such_model")  # fmt: skip
    assert "no code to play lights; no model" in error, "all that is missing is named"
    assert not out.exists()


@pytest.mark.torch
@pytest.mark.parametrize("method", ["sft", "grpo", "ditto"])
def test_training_refuses_before_anything_starts(
    tasks_file: Path, lines, tmp_path: Path, method: str
) -> None:
    out = tmp_path / "run"
    error, _, fix = lines(
        "train", method, "--task", "lights", "--tasks", tasks_file, "--out", out,
        "--model", tmp_path / "no_such_model",
    )  # fmt: skip
    assert "'lights' cannot be played" in error and "tomi" in fix
    assert not out.exists()


@pytest.mark.torch
def test_a_comparison_of_methods_refuses_before_its_first_run(
    tasks_file: Path, lines, tmp_path: Path
) -> None:
    out = tmp_path / "comparison"
    error, _, _ = lines(
        "train", "ablate", "--methods", "grpo,ditto", "--task", "lights", "--tasks", tasks_file,
        "--model", tmp_path / "no_such_model", "--out", out,
    )  # fmt: skip
    assert "'lights' cannot be played" in error and not out.exists()


# -- telling -------------------------------------------------------------------------------------


def test_lists_say_rows_only(tasks_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tasks", "list", "--tasks", str(tasks_file), "--json"]) == 0
    listed = {t["name"]: t["rows_only"] for t in json.loads(capsys.readouterr().out)["tasks"]}
    assert listed["lights"] and not listed["tomi"]
    assert cli.main(["tasks", "show", "lights", "--tasks", str(tasks_file)]) == 0
    assert "rows only: this version can read and check the rows" in capsys.readouterr().out
    assert cli.main(["tasks", "show", "tomi"]) == 0
    assert "rows only" not in capsys.readouterr().out


def test_the_check_says_what_it_did_not_play(capsys: pytest.CaptureFixture[str]) -> None:
    rows_only = [name for name in EVERY if load_registry().spec(name).rows_only]
    if not rows_only:
        pytest.skip("every built-in task can be played")
    assert cli.main(["tasks", "check", rows_only[0], "--data", "synth:4"]) == 0
    assert "rows only; this version cannot score" in capsys.readouterr().out
    assert check_task(task_of("tomi"), examples_of(task_of("tomi"))).rows_only is False
