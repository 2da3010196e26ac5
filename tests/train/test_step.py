"""A step is a page, and a run makes its method once."""

from __future__ import annotations

from pathlib import Path

TRAIN = Path(__file__).parents[2] / "soulkit" / "train"


def test_a_step_is_a_page() -> None:
    assert (TRAIN / "step.py").read_text(encoding="utf-8").count("\n") <= 150


def test_the_method_is_made_with_the_material_and_handed_on() -> None:
    calls = [
        path.relative_to(TRAIN).as_posix()
        for path in TRAIN.rglob("*.py")
        if "make_objective(" in path.read_text(encoding="utf-8")
        and path.parent.name != "objectives"
    ]
    assert calls == ["material/assemble.py"]


def test_only_one_file_knows_the_names_of_earlier_lines() -> None:
    from soulkit.train.state.lines import OLD_NAMES

    telling = {name for name in OLD_NAMES if "_" in name} - {"blind_reader", "coach_failures"}
    fields = {"draft_reward", "refined_reward", "loo_gap", "seconds_sample", "canary_alarm"}
    assert fields <= telling
    report = TRAIN.parent / "report"
    readers = [
        path.name
        for path in [*TRAIN.rglob("*.py"), *report.rglob("*.py")]
        if any(f'"{name}"' in path.read_text(encoding="utf-8") for name in fields)
    ]
    assert readers == ["lines.py"]
