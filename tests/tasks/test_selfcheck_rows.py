"""The check of a task's gold against its own scorer: what it names, and what it lets through."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import RawRow
from soulkit.errors import ConfigError, DataError
from soulkit.judge.coach import LEAST_DISTINCT
from soulkit.models.roles.settings import RoleSettings
from soulkit.tasks.loading import examples_from, to_examples
from soulkit.tasks.registry import load_registry
from soulkit.tasks.selfcheck import check_task, nobody
from soulkit.train.config import TrainConfig
from soulkit.train.material.assemble import gather_material
from tests.support.road import makeable, synth_examples, task_of

FLAWED = """\
from soulkit.tasks.tom.tomi import ToMi
from soulkit.errors import CallError
from soulkit.types import Failure, unscored


class Flawed(ToMi):
    def grade(self, example, answer):
        if example.fields["question"] == "broken":
            raise KeyError("no such column")
        if example.fields["question"] == "generous":
            return 1.0
        return super().grade(example, answer.replace("jar", "can"))

    def gold(self, example, feedback=None):
        return None if example.fields["question"] == "goldless" else super().gold(example)


class Judged(ToMi):
    async def score(self, example, episode, cast):
        player = cast.player("judge")
        await player.complete((), self.call(example))
        raise AssertionError("no model takes part")

    def call(self, example):
        from soulkit.types import Call

        return Call(role="judge", example_id=example.id)
"""
DECLARED = """\
tasks:
  flawed: &entry
    title: Flawed
    summary: A scorer with faults.
    module: flawed:Flawed
    seats: {reader: actor}
    columns:
      story: {audience: [reader]}
      question: {audience: [reader]}
      answer: {audience: [gold]}
      cands: {type: any, required: false, audience: [coach]}
      question_type: {required: false, audience: []}
  judged: {<<: *entry, module: "flawed:Judged"}
"""


@pytest.fixture
def registry(tmp_path: Path) -> Any:
    (tmp_path / "flawed.py").write_text(FLAWED)
    (tmp_path / "prompts").mkdir()
    for name in ("flawed", "judged"):
        folder = tmp_path / "prompts" / name
        folder.mkdir()
        (folder / "user.md").write_text("{{ story }} {{ question }}{% if feedback %}!{% endif %}")
    path = tmp_path / "own.yaml"
    path.write_text(DECLARED)
    return load_registry(path)


def row(question: str, answer: str = "box") -> RawRow:
    fields = {"story": "Ada came.", "question": question, "answer": answer,
              "cands": ["box", "bag"]}  # fmt: skip
    return RawRow(fields, f"rows.jsonl:{question}")


def check(task: Any, *rows: RawRow) -> Any:
    return check_task(task, to_examples(task, rows))


OUT_OF_REACH = {("sim_math", "reference"), ("sim_doc", "reference")}
"""Some rows lack a part of the score, which counts 0 there: nobody could have the maximum."""


@pytest.mark.parametrize("protocol", ["paper", "reference"])
@pytest.mark.parametrize("name", makeable())
def test_every_row_made_here_passes(name: str, protocol: str) -> None:
    task = task_of(name, protocol)
    report = check_task(task, examples_from(task, "synth:15", 5))
    assert report.rows > 0
    assert (report.gold_fails, report.wrong_passes, report.wrong_unread) == ((),) * 3
    assert bool(report.no_gold) == ((name, protocol) in OUT_OF_REACH)


def test_a_gold_that_its_scorer_refuses_is_named_with_its_row(registry: Any) -> None:
    report = check(registry.task("flawed"), row("fine"), row("odd", "jar"))
    (finding,) = report.gold_fails
    assert finding.source == "rows.jsonl:odd" and "<answer>jar</answer>" in finding.played
    assert "scored 0 of 1" in finding.why and "'jar'" in finding.why
    assert report.wrong_passes == () and report.rows == 2


def test_a_wrong_answer_that_passes_is_named(registry: Any) -> None:
    report = check(registry.task("flawed"), row("generous"))
    (finding,) = report.wrong_passes
    assert "bag" in finding.played and report.gold_fails == ()


def test_a_row_that_breaks_the_task_is_a_finding_and_ends_nothing(registry: Any) -> None:
    report = check(registry.task("flawed"), row("broken"), row("fine"))
    (finding,) = report.gold_fails
    assert finding.source == "rows.jsonl:broken" and "KeyError" in finding.why
    assert [f.source for f in report.no_wrong] == ["rows.jsonl:broken"]


def test_rows_without_gold_are_counted(registry: Any) -> None:
    report = check(registry.task("flawed"), row("goldless"))
    assert [f.source for f in report.no_gold] == ["rows.jsonl:goldless"] and not report.gold_fails


def test_what_needs_a_judge_is_unscored_and_no_failure(registry: Any) -> None:
    report = check(registry.task("judged"), row("fine"))
    assert len(report.unscored) == 1 and not report.gold_fails and not report.wrong_passes


COACHED_BY_RULES = [
    name for name in makeable() if "symbolic" in task_of(name).spec.feedback.coaches
]


def default_coach(name: str) -> Any:
    """Who coaches a training with Ditto in which nobody names a coach."""
    settings = {"method": "ditto", "model": "tiny", "tasks": {name: 1.0},
                "data": {name: "synth:4"}, "worked_examples": True}  # fmt: skip
    config = gather_material(TrainConfig.load(env={}, flags=settings)).config
    return config.named("coach", name)


@pytest.mark.parametrize("name", COACHED_BY_RULES)
def test_rules_that_hardly_answer_to_the_draft_are_no_default_coach(name: str) -> None:
    task = task_of(name)
    rows = 20 if task.spec.players.judge else 100  # a judge's model coaches whatever rules say
    report = check_task(task, examples_from(task, f"synth:{rows}"))
    assert report.feedback_drafts >= report.feedback_texts > 0
    if report.feedback_texts < LEAST_DISTINCT * report.feedback_drafts:
        assert isinstance(default_coach(name), RoleSettings), report.feedback_texts
    assert not any("fewer than 1 in 10" in warning for warning in report.warnings)


ALIKE = """
from soulkit.tasks.tom.tomi import ToMi


class Alike(ToMi):
    def explain(self, example, episode, score):
        return "Look again."
"""


@pytest.mark.parametrize(
    ("players", "rows", "warned"),
    [("", 11, True), ("", 10, False), ("players: {coach: symbolic}", 11, True),
     ("players: {coach: {model: m}}", 11, False), ("players: {coach: none}", 11, False)],
)  # fmt: skip
def test_rules_of_ones_own_that_say_one_thing_are_warned_of(
    tmp_path: Path, players: str, rows: int, warned: bool
) -> None:
    (tmp_path / "alike.py").write_text(ALIKE)
    path = tmp_path / "own.yaml"
    entry = DECLARED.split("  judged:")[0].replace("flawed:Flawed", "alike:Alike")
    declared = f"    {players}\n    feedback: {{coaches: [symbolic]}}\n    columns:"
    path.write_text(entry.replace("    columns:", declared))
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "user.md").write_text("{{ story }} {{ question }} {{ feedback }}")
    report = check(load_registry(path).task("flawed"), *(row(f"q{i}") for i in range(rows)))
    assert (report.feedback_texts, report.feedback_drafts) == (1, rows)
    assert any("1 different texts on 11" in one for one in report.warnings) is warned


def test_a_slip_of_the_secret_keeper_is_a_wrong_episode() -> None:
    task = task_of("secret_keeper")
    for example in synth_examples("secret_keeper", 5):
        assert asyncio.run(task.score(example, task.wrong(example), nobody())).value == 0


def test_a_wrong_completion_is_the_same_at_every_call_and_never_the_gold() -> None:
    task = task_of("hitom")
    for example in synth_examples("hitom", 30):
        completion = task.wrong_completion(example)
        assert completion == task.wrong_completion(example) != task.gold_completion(example)


def test_twins_of_the_gold_are_no_wrong_answer() -> None:
    task = task_of("hitom")
    twins = {"story": "1 Ada came.", "question": "Where?", "correct_answer": "red_box",
             "choices": "A. red_box, B. Red Box"}  # fmt: skip
    assert task.wrong_completion(task.example(twins)) is None


def test_rows_come_from_makers_files_folders_and_originals(tmp_path: Path) -> None:
    from soulkit.data.files import write_rows
    from tests.support.road import synth

    task = task_of("paratomi")
    made = examples_from(task, "synth:4", 3)
    assert [e.source for e in made.examples] == [f"synth:4:{i}" for i in range(1, 5)]
    write_rows(tmp_path / "paratomi_val.parquet", synth("paratomi", 4, 7))
    assert [e.id for e in examples_from(task, str(tmp_path)).examples] == [
        e.id for e in made.examples
    ]
    (tmp_path / "old.txt").write_text(
        "1 Ada entered the attic.\n2 The pen is in the box.\n3 Where is the pen really?\tbox\t1\n"
    )
    (original,) = examples_from(task_of("tomi"), str(tmp_path / "old.txt")).examples
    assert original.source == "old.txt, record 1"
    with pytest.raises(DataError):
        examples_from(task_of("hitom"), str(tmp_path))
    with pytest.raises(ConfigError):
        examples_from(task, "synth:none")
