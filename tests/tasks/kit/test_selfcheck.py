"""The check of a task's gold against its own scorer: what it names, and what it lets through.

`soul tasks check` renders every prompt, and says what a task promises and does not have.

Original files against the scorers and the audit: $SOULKIT_TEST_DATA names the folder.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import RawRow
from soulkit.errors import ConfigError, DataError
from soulkit.judge.coach import LEAST_DISTINCT
from soulkit.models.players.settings import RoleSettings
from soulkit.tasks.kit.loading import examples_to_inspect, to_examples
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.row_checks import audit_rows
from soulkit.tasks.kit.selfcheck import (
    NO_COACH,
    NO_LEAK_CHECK,
    NO_SYMBOLIC,
    check_task,
    silent_cast,
)
from soulkit.train.config import TrainConfig
from soulkit.train.setup.data import load_training_data
from tests.support.evaluation import soul
from tests.support.road import makeable, original, synth_examples, task_of

FLAWED = """\
from soulkit.tasks.tom.task import ToMi
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
    config = load_training_data(TrainConfig.load(env={}, flags=settings)).config
    return config.named("coach", name)


@pytest.mark.parametrize("name", COACHED_BY_RULES)
def test_rules_that_hardly_answer_to_the_draft_are_no_default_coach(name: str) -> None:
    task = task_of(name)
    rows = 10 if task.spec.players.judge else 50  # a judge's model coaches whatever rules say
    report = check_task(task, examples_to_inspect(task, f"synth:{rows}"))
    assert report.feedback_drafts >= report.feedback_texts > 0
    if report.feedback_texts < LEAST_DISTINCT * report.feedback_drafts:
        assert isinstance(default_coach(name), RoleSettings), report.feedback_texts
    assert not any("fewer than 1 in 10" in warning for warning in report.warnings)


ALIKE = """
from soulkit.tasks.tom.task import ToMi


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
    assert any("1 different texts for 11" in one for one in report.warnings) is warned


def test_a_slip_of_the_secret_keeper_is_a_wrong_episode() -> None:
    task = task_of("secret_keeper")
    for example in synth_examples("secret_keeper", 5):
        assert asyncio.run(task.score(example, task.wrong(example), silent_cast())).value == 0


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
    made = examples_to_inspect(task, "synth:4", 3)
    assert [e.source for e in made.examples] == [f"synth:4:{i}" for i in range(1, 5)]
    write_rows(tmp_path / "paratomi_val.parquet", synth("paratomi", 4, 7))
    assert [e.id for e in examples_to_inspect(task, str(tmp_path)).examples] == [
        e.id for e in made.examples
    ]
    (tmp_path / "old.txt").write_text(
        "1 Ada entered the attic.\n2 The pen is in the box.\n3 Where is the pen really?\tbox\t1\n"
    )
    (original,) = examples_to_inspect(task_of("tomi"), str(tmp_path / "old.txt")).examples
    assert original.source == "old.txt, record 1"
    with pytest.raises(DataError):
        examples_to_inspect(task_of("hitom"), str(tmp_path))
    with pytest.raises(ConfigError):
        examples_to_inspect(task, "synth:none")


PROMPTS = {
    "choice": ("user", "coach"),
    "judged": ("user", "coach", "judge"),
    "dialogue": ("caller", "coach", "friend"),
}


class Lab:
    """A new task that tests spoil, and what the check then says."""

    def __init__(self, folder: Path, kind: str, capfd: Any) -> None:
        self.folder, self.capfd, self.rows = folder, capfd, 6
        assert soul("tasks", "new", "lab", "--python", "--kind", kind, "--out", folder) == 0
        capfd.readouterr()

    def edit(self, file: str, change: Callable[[str], str]) -> None:
        path = self.folder / file
        text = path.read_text()
        assert change(text) != text
        path.write_text(change(text))

    def check(self, *more: object) -> tuple[int, dict[str, Any]]:
        code = self.run(*more, "--json")
        return code, json.loads(self.capfd.readouterr().out)["tasks"][0]

    def lines(self) -> str:
        self.run()
        printed: str = self.capfd.readouterr().out
        return printed

    def run(self, *more: object) -> int:
        load_registry.cache_clear()  # the declaration may have been edited
        tasks, rows = self.folder / "tasks.yaml", f"lab=synth:{self.rows}"
        return soul("tasks", "check", "lab", "--tasks", tasks, "--data", rows, *more)


@pytest.fixture
def lab(tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Lab]:
    monkeypatch.setenv("COLUMNS", "200")
    return lambda kind: Lab(tmp_path / "lab", kind, capfd)


@pytest.mark.parametrize(("kind", "prompt"), [(k, p) for k, ps in PROMPTS.items() for p in ps])
def test_every_prompt_is_rendered(kind: str, prompt: str, lab: Any) -> None:
    """Whatever prompt is spoiled, the check fails and says which, why, and what to do."""
    one = lab(kind)
    one.edit(f"prompts/{prompt}.md", lambda text: text + "\n{{ weather }}\n")
    code, checked = one.check()
    (finding,) = checked["breaks"]
    assert code == 1 and checked["gold_fails"] == [] and checked["warnings"] == []
    assert f"The prompt '{prompt}.md' of task 'lab'" in finding["why"]
    assert "'weather' is undefined" in finding["why"] and "audience" in finding["why"]
    assert "6 rows" in finding["why"]
    assert "audience, or remove the value from the template" in one.lines()


@pytest.mark.parametrize(("kind", "prompt"), [(k, ps[0]) for k, ps in PROMPTS.items()])
def test_the_slot_is_rendered_with_feedback(kind: str, prompt: str, lab: Any) -> None:
    one = lab(kind)
    one.edit(f"prompts/{prompt}.md", lambda text: text.replace("{{ feedback }}", "{{ feedbak }}"))
    code, checked = one.check()
    assert code == 1 and "'feedbak' is undefined" in checked["breaks"][0]["why"]


@pytest.mark.parametrize(("spoiled", "why"), [
    ("{{ said | shout }}", "No filter named 'shout'"), ("{% if %}", "not a valid template"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"), ("{% include 'gone.md' %}", "does not exist"),
])  # fmt: skip
def test_other_mistakes_in_a_template(spoiled: str, why: str, lab: Any) -> None:
    one = lab("choice")
    one.edit("prompts/user.md", lambda text: text + spoiled)
    code, checked = one.check()
    assert code == 1 and len(checked["breaks"]) == 1 and why in checked["breaks"][0]["why"]


def test_one_row_that_breaks_is_named_and_the_others_are_played(lab: Any) -> None:
    one = lab("choice")
    one.edit(
        "prompts/user.md", lambda text: "{% if 'sings' in situation %}{{ no }}{% endif %}" + text
    )
    code, checked = one.check()
    assert code == 1 and "(1 row)" in checked["breaks"][0]["why"] and checked["gold_fails"] == []
    assert checked["breaks"][0]["source"] == "synth:6:2"


def test_feedback_by_rules_that_raises(lab: Any) -> None:
    one = lab("choice")
    one.edit(
        "task.py", lambda text: text.replace("example.fields['speaker']", "example.fields['x']")
    )
    code, checked = one.check()
    assert code == 1 and "KeyError: 'x'" in checked["breaks"][0]["why"]


# --- warnings -------------------------------------------------------------------------------------


def warned(one: Lab, warning: str) -> None:
    """The only warning, in the lines and as JSON; the check passes."""
    code, checked = one.check()
    assert code == 0 and checked["breaks"] == []
    (text,) = checked["warnings"]
    assert warning in text and f"lab: warning: {text}" in one.lines()


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_coach_without_a_prompt(kind: str, lab: Any) -> None:
    one = lab(kind)
    (one.folder / "prompts" / "coach.md").unlink()
    warned(one, NO_COACH)
    one.edit("tasks.yaml", lambda text: text.replace("[symbolic, model]", "[symbolic]"))
    assert one.check()[1]["warnings"] == []


@pytest.mark.parametrize("kind", ["choice", "dialogue"])
def test_a_leak_check_that_is_off(kind: str, lab: Any) -> None:
    one = lab(kind)
    one.rows = 1  # a single row shows it
    wrong = "def wrong_completion(self, example):\n        return '<answer>Z</answer>'\n\n"
    one.edit("task.py", lambda text: text.replace("def leak_view", f"{wrong}    def unused"))
    warned(one, NO_LEAK_CHECK)
    one.edit("tasks.yaml", lambda text: text.replace("coaches: [symbolic, model]", "coaches: []"))
    code, checked = one.check()
    assert code == 0 and NO_LEAK_CHECK not in checked["warnings"]


@pytest.mark.parametrize("kind", PROMPTS)
def test_symbolic_feedback_that_is_missing(kind: str, lab: Any) -> None:
    one = lab(kind)
    one.rows = 1
    one.edit("task.py", lambda text: text.replace("def explain", "def no_explain"))
    warned(one, NO_SYMBOLIC)
    one.edit("tasks.yaml", lambda text: text.replace("[symbolic, model]", "[model]"))
    assert one.check()[1]["warnings"] == []


def test_a_prompt_that_nobody_renders(lab: Any) -> None:
    one = lab("choice")
    (one.folder / "prompts" / "hint.md").write_text("Think.")
    warned(one, "'hint.md' was never rendered")
    one.edit("prompts/user.md", lambda text: text + '{% include "hint.md" %}')
    assert one.check()[1]["warnings"] == []
    (one.folder / "prompts" / "pairwise.md").write_text("{{ a }} or {{ b }}? {{ setting }}")
    assert one.check()[1]["warnings"] == []


def test_a_prompt_of_another_task_of_the_folder_is_not_counted(lab: Any) -> None:
    one = lab("choice")
    again = (one.folder / "tasks.yaml").read_text().partition("  lab:")[2]
    with (one.folder / "tasks.yaml").open("a") as file:
        file.write(f"\n  other:{again}")
    (one.folder / "prompts" / "hint.md").write_text("Think.")
    assert one.check()[1]["warnings"] == []  # who knows what the other task needs
    code, checked = one.check("other", "--data", "other=synth:6")
    assert code == 0 and "'hint.md'" in checked["warnings"][0]
    (one.folder / "prompts" / "other").mkdir()
    (one.folder / "prompts" / "hint.md").rename(one.folder / "prompts" / "other" / "hint.md")
    assert one.check("other", "--data", "other=synth:6")[1]["warnings"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "name", "alike"),
    [
        ("hitom", "hitom/sample_cotp_200.jsonl", False),
        ("paratomi", "tomi/Percept-ToMi.csv", False),
        ("tomi", "tomi/fixedtomi_test_balanced.jsonl", False),
        ("twinvoice", "twinvoice/dimension_3_choices.jsonl", True),
        ("mistakes", "mistakes/sample_train_200.jsonl", True),
        ("socsci210", "socsci210/test_1pct.sample_200.jsonl", True),
        ("alignx_demo", "alignx/P-Soups_student_phd.sample_150.jsonl", True),
        ("tombench", "tombench/False Belief Task.jsonl", True),
    ],
)
def test_rules_answer_to_the_draft_where_they_are_the_default_coach(
    task: str, name: str, alike: bool
) -> None:
    live = task_of(task)
    loaded = examples_to_inspect(live, str(original(name)))
    report = check_task(live, replace(loaded, examples=loaded.examples[:200]))
    assert (report.gold_fails, report.wrong_passes) == ((), ())
    assert report.feedback_drafts >= 150
    assert (report.feedback_texts < LEAST_DISTINCT * report.feedback_drafts) is alike
    assert (live.spec.players.under("paper", "coach") == "symbolic") is not alike


def test_some_rows_of_hitom_name_one_container_only() -> None:
    task = task_of("hitom")
    audit = audit_rows(task, examples_to_inspect(task, str(original("hitom/Hi-ToM_data.json"))))
    assert audit.rows == 600 and audit.count("leak") == 10, "the half that an import keeps"
    assert audit.favourite == "L" and audit.position is not None and audit.position.hits == 93


def test_the_letters_of_tombench_are_not_balanced() -> None:
    task = task_of("tombench")
    file = str(original("tombench/Ambiguous Story Task.jsonl"))
    audit = audit_rows(task, examples_to_inspect(task, file, forms=False))
    assert audit.positions == {"A": 92, "B": 128, "C": 136, "D": 44}
    assert audit.position is not None and audit.position.notable
