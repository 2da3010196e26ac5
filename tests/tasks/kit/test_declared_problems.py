"""Broken tasks files: seeded mutations of good ones, told with file, line and key in our words.

The good ones also fit the JSON Schema that editors use, and the schema refuses most mutants.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.errors import BrokenFile, ConfigError
from soulkit.parse import ParseError, parse_yaml
from soulkit.runs.jsonl import TASKS_SCHEMA, schema_file
from soulkit.tasks.kit.declared.problems import SHOWN
from soulkit.tasks.kit.registry import builtin_file, load_registry, read_file
from soulkit.tasks.scaffold import TEMPLATES, YAML_TEMPLATES, template_files
from tests.support.evaluation import soul

CHOICE = """\
suites:
  mine: [hints, tomi]
tasks:
  hints:
    kind: choice
    title: Hints
    rows: rows.jsonl
    system: You listen well.
    prompt: |
      {{ situation }} {{ speaker }} says: "{{ words }}"
      {% if feedback %}Advice: {{ feedback }}{% endif %}
    options: {columns: [meant, literal, other]}
    gold: meant
    orders: 2
    cluster: situation
    tags: {setting: place}
    macro: setting
    metric: {name: accuracy, binary: true}
    limits: {words: 40}
    columns:
      place: {required: false}
      speaker: Who speaks
    sampling: {temperature: 0.5}
    feedback:
      coach: "Help with {{ attempt }}."
      rules:
        - when: {outcome: wrong}
          say: Read it again.
"""
TEXT = """\
tasks:
  capital:
    kind: text
    prompt: "What is the capital of {{ country }}?"
    gold: city
    answer: reply
    scorer:
      - kind: normalised
        weight: 2
      - token_f1
    tags: [continent]
    person: asker
    metric: closeness
    licence: CC0
"""
JUDGED = """\
tasks:
  postcard:
    kind: judged
    prompt: |
      Write a postcard about {{ topic }}.
    judge:
      rubric: Is it a postcard?
      samples: 2
      dimensions:
        warmth: {rubric: "Is it warm?", low: 1, high: 5}
        detail: {rubric: "Does it have details?"}
    feedback:
      critique: true
      below: 0.5
"""
DIALOGUE = """\
tasks:
  kitchen:
    kind: dialogue
    prompt: You are {{ name }}. Say what you want.
    dialogue:
      partner: You cook for {{ name }}, who likes {{ dish }}.
      begins: actor
      turns: 3
      ends: [Goodbye]
    judge:
      rubric: Did the person get the dish?
    players:
      judge: {model: some-judge, effort: low}
"""
PYTHON = "".join(template_files("choice")["tasks.yaml"])
GOOD = {"choice": CHOICE, "text": TEXT, "judged": JUDGED, "dialogue": DIALOGUE, "python": PYTHON}
FREE = ("temperature", "outcome", "words", "place", "speaker", "setting", "situation", "said",
        "warmth", "detail", "options", "meant", "kind", "listener", "mine", "hints", "capital",
        "postcard", "kitchen", "my_task", "my_task_and_tomi")  # fmt: skip
"""Keys that are names of the user's own, so that other names are as good."""
PYDANTIC = re.compile(
    r"[Ii]nput should|Field required|Extra inputs|validation error|Value error|pydantic|errors\.py"
)

Mutant = tuple[str, int, str]
"""A broken text, the line that was changed, and its key."""


def keyed(text: str) -> list[tuple[int, str]]:
    """(line, key) of the keys that begin a line, names of the user's own left out."""
    keys = [(n, re.match(r"\s*(?:- )?(\w+):", line)) for n, line in enumerate(text.splitlines(), 1)]
    return [(n, match[1]) for n, match in keys if match and match[1] not in FREE]


def with_line(text: str, number: int, change: Callable[[str], str]) -> str:
    lines = text.splitlines(keepends=True)
    lines[number - 1] = change(lines[number - 1])
    return "".join(lines)


def misspelt(rng: random.Random, text: str) -> Mutant:
    number, key = rng.choice(keyed(text))
    place = rng.randrange(len(key))
    other = key[:place] + rng.choice("xyz") + key[place + rng.randint(0, 1) :]
    return with_line(text, number, lambda line: line.replace(key, other, 1)), number, other


def renamed(rng: random.Random, text: str) -> Mutant:
    number, key = rng.choice(keyed(text))
    other = rng.choice(["prompts", "turns", "judges", "golds", "rubric", "evaluator"])
    return with_line(text, number, lambda line: line.replace(key, other, 1)), number, other


def of_other_type(rng: random.Random, text: str) -> Mutant:
    found = [
        (n, key) for n, key in keyed(text) if not re.search(r":\s*[|]?$", text.splitlines()[n - 1])
    ]
    number, key = rng.choice([(n, key) for n, key in found if key not in ("scorer", "say")])
    value = rng.choice(["[[1]]", "{a: {b: 1}}", "2001-02-03", "", "[{}]"])
    change = re.compile(rf"({key}:).*")
    return (
        with_line(text, number, lambda line: change.sub(rf"\1 {value}", line, count=1)),
        number,
        key,
    )


def bad_jinja(rng: random.Random, text: str) -> Mutant:
    prompts = [n for n, line in enumerate(text.splitlines(), 1) if re.search("{{|Write a", line)]
    if not prompts:
        return misspelt(rng, text)
    flaw = rng.choice(["{% if x %", "{% nothing %}", "{{ a b }}", "{{ &x }}", "{{ x | nofilter }}"])
    number = rng.choice(prompts)
    broken = with_line(text, number, lambda line: re.sub(r'("?)$', rf"{flaw}\1", line, count=1))
    return broken, number, ""


def badly_indented(rng: random.Random, text: str) -> Mutant:
    number, key = rng.choice([(n, key) for n, key in keyed(text) if n > 3])
    return with_line(text, number, lambda line: " " * rng.choice([1, 3]) + line), number, key


def repeated(rng: random.Random, text: str) -> Mutant:
    lines = dict(enumerate(text.splitlines(), 1))
    simple = [(n, key) for n, key in keyed(text) if re.search(r"^[^-]*: *[^| ]", lines[n])]
    number, key = rng.choice(simple)
    return with_line(text, number, lambda line: line + line), number + 1, key


def dropped(rng: random.Random, text: str) -> Mutant:
    """Without a key that its place needs."""
    keys = ("prompt", "partner", "title", "summary", "seats", "gold", "say")
    lines = dict(enumerate(text.splitlines(), 1))
    needed = [(n, key) for n, key in keyed(text) if key in keys and not lines[n].endswith("|")]
    if not needed:
        return misspelt(rng, text)
    number, key = rng.choice(needed)
    return with_line(text, number, lambda line: ""), number, key


def open_bracket(rng: random.Random, text: str) -> Mutant:
    number, key = rng.choice(keyed(text))
    return with_line(text, number, lambda line: line.rstrip() + " [\n"), number, key


MUTATIONS = (misspelt, renamed, of_other_type, bad_jinja, badly_indented, repeated, dropped,
             open_bracket)  # fmt: skip
MOVED = ("dropped", "open_bracket", "badly_indented")
"""Mutations whose problem is told in another line: where the key is missing, or YAML stops."""
MUTANTS = 200


def mutants() -> list[tuple[str, str, Mutant]]:
    made = []
    for seed in range(MUTANTS):
        rng, kind = random.Random(seed), [*GOOD][seed % len(GOOD)]
        mutation = MUTATIONS[seed // len(GOOD) % len(MUTATIONS)]
        made.append((kind, mutation.__name__, mutation(rng, GOOD[kind])))
    return made


@pytest.mark.parametrize("kind", GOOD)
def test_the_good_files_are_good(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.yaml"
    path.write_text(GOOD[kind], encoding="utf-8")
    assert load_registry(path)


def test_mutants_are_told_with_file_line_and_key(tmp_path: Path) -> None:
    path, harmless = tmp_path / "tasks.yaml", Counter[str]()
    for kind, mutation, (text, number, key) in mutants():
        path.write_text(text, encoding="utf-8")
        try:
            read_file(path)
        except BrokenFile as error:
            lines = error.why.splitlines()
            shown = f"{kind} {mutation} {key}\n{text}\n" + "\n".join(error.lines())
            places = [re.fullmatch(rf"{re.escape(str(path))}:(\d+): (.+)", line) for line in lines]
            assert all(places), shown
            assert not PYDANTIC.search(error.why) and len(lines) <= SHOWN + 1, shown
            near = [abs(int(place[1]) - number) for place in places if place]
            assert mutation in MOVED or 0 in near, shown
            assert key in error.why or mutation in MOVED[1:], shown
        else:
            harmless[mutation] += 1
    assert sum(harmless.values()) < 0.1 * MUTANTS, harmless


def test_a_long_list_of_problems_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line each on the screen, without anything but the three parts."""
    path = tmp_path / "tasks.yaml"
    path.write_text("tasks:\n" + "".join(f"  t{n}: {{titel: x}}\n" for n in range(9)))
    assert soul("tasks", "list", "--tasks", path) == 2
    error, why, *more, fix = capfd.readouterr().err.splitlines()
    assert error.startswith("error: ") and "45 problems" in error and fix.startswith("fix: ")
    assert why.startswith(f"why: {path}:2: tasks.t0") and len(more) == SHOWN
    assert more[-1] == f"     and {45 - SHOWN} more"


HINTS = {
    ("{{ speaker }} says", "{{ meant }} says"): "10: tasks.hints.prompt: the prompt names 'meant'",
    ("You listen well.", "prompts/none.md"): "8: tasks.hints.system: prompts/none.md: this prompt",
    ("gold: meant", "gold: meant\n    judge: {}"): "14: tasks.hints.judge: this key needs another ",
    ("orders: 2", "turns: 2"): "14: tasks.hints.turns: there is no such key here. It belongs under",
    ("gold: meant", "gold: {% x"): "13: not YAML: 'gold: {% x'",
    (
        "[meant, literal, other]",
        "[yes, no]",
    ): "12: tasks.hints.options.columns.0: true does not fit",
    ("attempt }}.", "attempt."): "25: tasks.hints.feedback.coach: not valid Jinja in line 1",
    ("{% if feedback %}", "{% if feedback"): "11: tasks.hints.prompt: not valid Jinja in line 2",
}
"""Change of the choice → the problem."""


@pytest.mark.parametrize("change", HINTS)
def test_places_and_words(tmp_path: Path, change: tuple[str, str]) -> None:
    path = tmp_path / "tasks.yaml"
    assert change[0] in CHOICE
    path.write_text(CHOICE.replace(*change), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert f"{path}:{HINTS[change]}" in caught.value.why


def test_a_prompt_may_be_a_file_and_its_lines_are_told(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    prompt = tmp_path / "prompts" / "user.md"
    path = tmp_path / "tasks.yaml"
    path.write_text(TEXT.replace('"What is the capital of {{ country }}?"', "prompts/user.md"))
    prompt.write_text("The capital of {{ country }}?", encoding="utf-8")
    assert load_registry(path).task("capital").prompts.render("prompt", country="x", feedback="")
    prompt.write_text("A\n\n{% if %}", encoding="utf-8")
    with pytest.raises(BrokenFile, match="1 problem") as caught:
        read_file(path)
    assert "4: tasks.capital.prompt: prompts/user.md: not valid Jinja in line 3" in caught.value.why


# -- the schema ------------------------------------------------------------------------------------


def schema_errors() -> Callable[[Any], bool]:
    jsonschema = pytest.importorskip("jsonschema")
    loaded = json.loads(schema_file(TASKS_SCHEMA).read_text(encoding="utf-8"))
    checker = jsonschema.Draft202012Validator(loaded)
    return lambda value: not checker.is_valid(value)


def test_the_schema_accepts_good_files() -> None:
    wrong = schema_errors()
    texts = [builtin_file().read_text(encoding="utf-8"), *GOOD.values()]
    for python, templates in ((True, TEMPLATES), (False, YAML_TEMPLATES)):
        texts += [template_files(kind, python=python)["tasks.yaml"] for kind in templates]
    assert [text for text in texts if wrong(yaml.safe_load(text))] == []


def test_the_schema_refuses_most_mutants() -> None:
    wrong, refused, all_read = schema_errors(), 0, 0
    for _, mutation, (text, _, _) in mutants():
        try:
            value = parse_yaml(text)
        except ParseError:
            continue
        if mutation != "bad_jinja":
            refused, all_read = refused + wrong(value), all_read + 1
    assert refused > 0.75 * all_read > 50, (refused, all_read)
