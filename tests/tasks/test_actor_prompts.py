"""An actor's prompt holds the scene, the role, the goal and the form of the reply.

It holds nothing that a judge scores: else the prompt teaches what feedback is to teach. What is
judged is taken from the judges themselves: the lines of their prompts that state a dimension, the
declarations behind them, and what the rules advise before anything was played.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from soulkit.tasks.coser.judging import ASPECTS
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.made_rows import make_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.sotopia.judging import DIMENSIONS
from soulkit.tasks.sotopia.judging import TEXTS as SOTOPIA
from soulkit.tasks.tau_usi.index import DIMENSIONS as FEATURES
from tests.support.road import (
    TASKS,
    makeable,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = {"judged_task": ("judge",), "scene_task": ("voices", "knowing")}
"""Examples with judges → their judges' templates. `soul tasks new` writes them."""
RULED = ("dialogue_task", "my_task")
MADE = sorted(set(makeable()) & set(TASKS))

DECLARED: Mapping[str, Iterable[object]] = {
    "sotopia": [*DIMENSIONS, *SOTOPIA["titles"].values()],
    "coser": [(aspect.title, *aspect.kinds) for aspect in ASPECTS.values()],
    "tau_usi": [name.removesuffix("_rate") for names in FEATURES.values() for name in names],
}
"""Task → dimensions that it declares in code; those of SimulatorArena are `looks_at`."""

_HUMANUAL = {"emoti": "emotions", "value": "slowly changing values"}
STATED: Mapping[str, Mapping[str, str]] = {
    "sotopia": {"reach": "leaving is allowed (goal reached / uncomfortable / …)"},
    "coser": {"words": "at most 60 words"},
    "userllm": {"punct": "imperfect punctuation"},
    "mirrorbench": {"lengt": "match length", "tone": "match tone"},
    "person_chat": {"assis": "you are not an assistant", "help": "you help nobody"},
    "sim_math": {"learn": "wants to learn"},
    "sim_doc": {"words": "a document of 100 to 500 words"},
    "tau_usi": {"words": "paraphrase"},
    **{name: _HUMANUAL for name in MADE if name.startswith("humanual_")},
}
"""Task → stems that a judge looks at and the published prompt has, too, with what it says."""

_FEEDBACK = re.compile(r"\{% if feedback %\}.*?\{% endif %\}", re.DOTALL)
_JINJA = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
_STATES = re.compile(r"\s*(?:- |\d+\. |[A-Z]{3,}: |Signs of|Look at|How |Does )")
"""How a line of a judge's prompt begins that says what is judged."""
_JUDGING = re.compile(
    r"\b(?:judg|rat(?:e|ed|er|ing)\b|scor(?:e|ed|ing)|grad(?:e|ed|er)\b|rubric|criteri|dimension"
    r"|evaluat|benchmark)", re.IGNORECASE,
)  # fmt: skip
_PLAIN_WORDS = """
a about after again all alone along always am an and another any anybody are around as at be
because been before below between both but by can could did do does each either else end ends
every everybody everything exactly far few first for from further had has have he her here his
how i if in into is it its itself just least less like many may might more most much must never
no nobody none nor not nothing of off on once one only or other others our out over own part per
same shall she should so some somebody something somewhere still such than that the their them
themselves then there these they thing things this those time times to together too towards
under until up upon very was way we well were what whatever when where whether which while who
whoever whom whose why will with within without would yet you your yours yourself

answer begin form get happen happens json keep know knows line message messages now object
person play plays read reason said say says see show shows speak speaks stand stands turn turns
type types want wanted wants write writes written word
"""
"""Function words; then words for the scene, its people and the form of a reply."""
_PLAIN = frozenset(_PLAIN_WORDS.split())


def stems(text: str) -> set[str]:
    """The beginnings of a text's telling words: `decent` and `decency` are one."""
    words = re.findall(r"[a-z]+", text.casefold().replace("_", " "))
    return {word[:5] for word in words if len(word) > 2 and word not in _PLAIN}


def instructions(path: Path) -> str:
    """A template without the row and without feedback."""
    return _JINJA.sub(" ", _FEEDBACK.sub("", path.read_text()))


@cache
def task_of(name: str) -> Task:
    return fresh_task(name)


def fresh_task(name: str) -> Task:
    files = [EXAMPLES / name / "tasks.yaml"] if (EXAMPLES / name).is_dir() else []
    return load_registry(*files).task(name)


@cache
def rows_of(name: str) -> tuple[Any, ...]:
    task = task_of(name)
    return tuple(task.example(row) for row in make_rows(task, 12, 5))


@cache
def actor_templates(name: str) -> list[Path]:
    """The templates that an actor's first prompts are made of, opened by rendering them."""
    rows, task = rows_of(name), fresh_task(name)
    for row in rows:
        task.previews(row)
    return sorted(task.prompts.opened)


def judged_words(name: str) -> set[str]:
    """What is judged in a task, as stems."""
    task = task_of(name)
    begins = OWN.get(name, ("judge", "critic"))
    lines = [
        line
        for folder in task.prompts.folders[:-1]
        for path in (*folder.glob("*.md"), *folder.joinpath(name).glob("*.md"))
        if path.stem.startswith(begins)
        for line in (path.stem, *instructions(path).splitlines())
        if line == path.stem or _STATES.match(line)
    ]
    declared = [*DECLARED.get(name, ()), *getattr(task, "looks_at", {}).values()]
    advice = [task.explain(row, None, None) or "" for row in rows_of(name)]
    row_words = stems(" ".join(str(v) for row in rows_of(name) for v in row.fields.values()))
    judged = stems(" ".join(map(str, [*lines, *declared])))
    judged |= stems(" ".join(advice)) - row_words
    spec = task.spec
    return judged - stems(" ".join([spec.title, spec.summary, *spec.columns, *spec.seats]))


def is_judged(name: str) -> bool:
    has_judge = any("judge" in task_of(name).calls(row) for row in rows_of(name))
    return has_judge or name in DECLARED


JUDGED = [name for name in (*MADE, *OWN) if is_judged(name)]


def test_the_tasks_with_judges_are_found() -> None:
    assert {"sotopia", "userllm", "mirrorbench", "coser", "sim_math", "sim_doc", "humanual_book",
            "tau_usi", *OWN} <= set(JUDGED)  # fmt: skip


@pytest.mark.parametrize("name", JUDGED)
def test_an_actors_prompt_names_nothing_that_a_judge_scores(name: str) -> None:
    prompted = stems(" ".join(map(instructions, actor_templates(name))))
    coached = prompted & judged_words(name)
    assert coached == set(STATED.get(name, {})), "see STATED for what the published prompt has"


@pytest.mark.parametrize("name", [*MADE, *OWN, *RULED])
def test_an_actors_prompt_does_not_speak_of_judging(name: str) -> None:
    templates = actor_templates(name)
    assert bool(templates) == (name != "agent_chat"), "previews render no template"
    for path in templates:
        match = _JUDGING.search(instructions(path))
        assert match is None, f"{path}: {match}"


@pytest.mark.parametrize(("name", "sentence"), [
    ("sotopia", "Weigh what {other} thinks of you afterwards, and what you gain or lose."),
    ("sotopia", "Do what is decent, and give nothing away that should stay hidden."),
    ("sotopia", "Bring something new into every turn."),
    ("userllm", "Use words of your own; details can wait for later messages."),
    ("mirrorbench", "Leave explaining and helping to the assistant."),
    ("coser", "Bring something new, and let the scene move."),
    ("coser", "Have this person's temper, knowledge and manner of speaking."),
    ("humanual_book", "Mind the tone and the length of what this person writes."),
    ("sim_math", "Choose a level of formality, and keep the spelling consistent."),
    ("tau_usi", "Be polite, and show some emotion."),
    ("scene_task", "Each of you has a voice."),
])  # fmt: skip
def test_coaching_is_found(name: str, sentence: str) -> None:
    assert (stems(sentence) & judged_words(name)) - set(STATED.get(name, {})), sentence
