"""Tasks files: what is refused and how it is said, and how classes beside a file are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.errors import ConfigError
from soulkit.eval.config import EvalConfig
from soulkit.play.settings import configured_tasks
from soulkit.tasks.registry import builtin_file, load_registry, read_file
from soulkit.tasks.spec import READERS

TASK: dict[str, Any] = {
    "title": "Lights",
    "summary": "Is it red or green?",
    "module": "lights:Lights",
    "seats": {"driver": "actor"},
    "columns": {"scene": {"audience": ["driver"]}, "colour": {"audience": ["gold"]}},
}
CLASS = """
from soulkit.tasks.choice import ChoiceTask
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
        ({"task": {}}, ["'task'", "Did you mean 'tasks'?"]),
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
        (lights(columns={"scene": {"audience": ["diver"]}}), ["'scene'", "'driver'"]),
        (lights(cluster=["scen"]), ["'cluster'", "Did you mean 'scene'?"]),
        (lights(tags={"hue": "color"}), ["'tags'", "Did you mean 'colour'?"]),
        (lights(seats={"driver": "partner"}), ["actor"]),
        (lights(columns={"scene": {}}), ["columns.scene.audience", "Field required"]),
        (lights(columns={"scene": {**COLUMN, "max_words": 0}}), ["max_words", "greater than 0"]),
        ({"tasks": {"lights": {}}}, ["Field required", "more like it"]),
        ({"suites": {"s": ["tomy"]}}, ["suite 's'", "Did you mean 'tomi'?"]),
        ({"suites": {"small": ["tomi"]}}, ["suite 'small'", "twice"]),
        ({"tasks": {"tomi": TASK}}, ["task 'tomi'", "twice"]),
        (["tasks"], ["no tasks file"]),
        ("just words", ["no tasks file"]),
        ("tasks: [", ["cannot be read as YAML"]),
        ("tasks: {}\ntasks: {}\n", ["'tasks' stands here twice"]),
        ("x: !!python/object/apply:os.getcwd []", ["cannot be read as YAML"]),
    ],
)
def test_what_is_refused(tmp_path: Path, raw: Any, words: list[str]) -> None:
    refusal = error_of(write(tmp_path, raw))
    assert all(word in refusal for word in words), refusal
    assert not any(flaw in refusal for flaw in ("Value error", "?.", "..")), refusal


def test_a_task_written_twice_in_one_file(tmp_path: Path) -> None:
    once = yaml.safe_dump(lights())
    twice = once + "\n".join(once.splitlines()[1:]) + "\n"
    assert "'lights' stands here twice" in error_of(write(tmp_path, twice))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "does not exist" in error_of(tmp_path / "no.yaml")
    assert "cannot be read" in error_of(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in error_of(tmp_path / "bytes.yaml")


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
        ConfigError, match="None of tomi has anything to do with hack_penalty"
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
        ("lights:Other", ["no class derived from Task"]),
        ("lights:Half", ["gold_completion, grade"]),
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


@pytest.mark.parametrize("module", ["soulkit.tasks.userllm.task", "soulkit.tasks.userllm"])
def test_a_declaration_of_ones_own_may_name_a_built_in_class(tmp_path: Path, module: str) -> None:
    """Where the class stood before each benchmark had a folder, too; the protocols stay apart."""
    raw = yaml.safe_load(builtin_file().read_text(encoding="utf-8"))["tasks"]["userllm"]
    entry = {key: raw[key] for key in ("title", "summary", "seats", "columns", "metric")}
    entry["module"] = f"{module}:UserLLM"
    registry = load_registry(write(tmp_path, {"tasks": {"my_users": entry}}))
    for protocol in ("paper", "reference"):
        live = registry.task("my_users", protocol)
        assert type(live) is type(registry.task("userllm", protocol))


def test_declarations_from_before_keys_were_renamed(tmp_path: Path) -> None:
    raw = lights(module="", rows="soulkit.tasks.sim_arena:SimArenaRows", synth=True)
    registry = load_registry(write(tmp_path, raw))
    assert not registry.spec("lights").synth
    assert type(registry.task("lights")).__name__ == "SimArenaRows"


def test_a_class_without_a_file_has_no_prompts_beside_it(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "typed_in"}
    exec(CLASS.format(mark=1), names)
    spec = load_registry(write(tmp_path, lights())).spec("lights")
    assert names["Lights"]("lights", spec).prompts.folders[0] == tmp_path / "prompts"
