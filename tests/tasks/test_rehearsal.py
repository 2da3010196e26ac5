"""`soul tasks check` renders every prompt, and says what a task promises and does not have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from soulkit.tasks.loading import examples_from
from soulkit.tasks.registry import load_registry
from soulkit.tasks.selfcheck import NO_COACH, NO_LEAK_CHECK, NO_SYMBOLIC, SelfCheck, check_task
from tests.support.evaluation import soul

PROMPTS = {
    "choice": ("user", "coach"),
    "judged": ("user", "coach", "judge"),
    "dialogue": ("caller", "coach", "friend"),
}


class Lab:
    """A new task that tests spoil, and what the check then says."""

    def __init__(self, folder: Path, kind: str, capfd: Any) -> None:
        self.folder, self.capfd = folder, capfd
        assert soul("tasks", "new", "lab", "--kind", kind, "--out", folder) == 0
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
        tasks, rows = self.folder / "tasks.yaml", "lab=synth:6"
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
    assert "audience, or take the value out of the template" in one.lines()


@pytest.mark.parametrize(("kind", "prompt"), [(k, ps[0]) for k, ps in PROMPTS.items()])
def test_the_slot_is_rendered_with_feedback(kind: str, prompt: str, lab: Any) -> None:
    one = lab(kind)
    one.edit(f"prompts/{prompt}.md", lambda text: text.replace("{{ feedback }}", "{{ feedbak }}"))
    code, checked = one.check()
    assert code == 1 and "'feedbak' is undefined" in checked["breaks"][0]["why"]


@pytest.mark.parametrize(("spoiled", "why"), [
    ("{{ said | shout }}", "No filter named 'shout'"), ("{% if %}", "no valid template"),
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
    wrong = "def wrong_completion(self, example):\n        return '<answer>Z</answer>'\n\n"
    one.edit("task.py", lambda text: text.replace("def leak_view", f"{wrong}    def unused"))
    warned(one, NO_LEAK_CHECK)
    one.edit("tasks.yaml", lambda text: text.replace("coaches: [symbolic, model]", "coaches: []"))
    code, checked = one.check()
    assert code == 0 and NO_LEAK_CHECK not in checked["warnings"]


def test_nothing_to_give_away_needs_no_leak_check() -> None:
    """The actor of the secret keeper sees all that its gold is made of."""
    checked = check_built_in("secret_keeper")
    assert checked.warnings == () and checked.breaks == ()


@pytest.mark.parametrize("kind", PROMPTS)
def test_symbolic_feedback_that_is_missing(kind: str, lab: Any) -> None:
    one = lab(kind)
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


# --- the built-in tasks ---------------------------------------------------------------------------


def check_built_in(name: str) -> SelfCheck:
    task = load_registry().task(name)
    return check_task(task, examples_from(task, "synth:25"))


BUILT_IN = [name for name, spec in load_registry().specs.items() if not spec.rows_only]


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_tasks_have_what_they_declare(name: str) -> None:
    checked = check_built_in(name)
    assert (checked.breaks, checked.warnings, checked.unrendered) == ((), (), ())
