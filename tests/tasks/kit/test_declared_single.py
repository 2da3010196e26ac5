"""Choices and texts that are declared without code: options, golds, answers, orders, scorers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from soulkit.data.files import RawRow
from soulkit.errors import ConfigError, DataError, RowError, TaskError
from soulkit.metrics.text import rouge_l, token_f1
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.declared.keys import Scorer
from soulkit.tasks.kit.declared.scorers import json_validator, last_number, score_of
from soulkit.tasks.kit.declared.single import Listed
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.selfcheck import check_task
from soulkit.types import Failure, Record, unscored
from tests.support.letters import draft_of
from tests.support.road import batch_values, score_text
from tests.support.servers.loopback import Asked, JsonServer, Reply


def declared(folder: Path, **keys: Any) -> Task:
    entry = {"kind": "choice", "prompt": "{{ q }}", "gold": "gold", **keys}
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"tasks": {"mine": entry}}, allow_unicode=True))
    load_registry.cache_clear()
    return load_registry(path).task("mine")


# -- options and golds -----------------------------------------------------------------------------

COLUMNS = {"columns": ["x", "y"]}


@pytest.mark.parametrize(
    ("options", "row", "gold"),
    [
        (["yes", "no"], {"gold": "No"}, "no"),
        (["yes", "no"], {"gold": 0}, "yes"),
        ("o", {"o": ["p", "q"], "gold": "b"}, "q"),
        ("o", {"o": '["p", "q"]', "gold": "(B)"}, "q"),
        ("o", {"o": {"A": "p", "B": "q"}, "gold": "B. q"}, "q"),
        ("o", {"o": {"A": "p", "B": None, "C": "r"}, "gold": "C"}, "r"),
        ("o", {"o": {"text": ["2", "3"], "label": ["3", "4"]}, "gold": "3"}, "2"),
        ("o", {"o": ["2", "1", "0"], "gold": "0"}, "0"),
        ("o", {"o": ["2", "1", "0"], "gold": 1.0}, "1"),
        ("o", {"o": ["A. Smith", "B. Lee"], "gold": "A. Smith"}, "A. Smith"),
        ("o", {"o": ["<", ">"], "gold": ">"}, ">"),
        ("o", {"o": ["这里", "那里"], "gold": "\uff22"}, "那里"),
        ("o", {"o": [f"w{i}" for i in range(26)], "gold": "z"}, "w25"),
        (COLUMNS, {"x": "p", "y": "q", "gold": "y"}, "q"),
        (COLUMNS, {"x": "p", "y": 7, "gold": 7}, "7"),
    ],
)
def test_where_options_and_golds_come_from(
    tmp_path: Path, options: Any, row: dict[str, Any], gold: str
) -> None:
    task = declared(tmp_path, options=options)
    example = task.example({"q": "Which?", **row})
    assert task.gold_text(example) == gold
    assert f"{task.gold_letter(example)}. {gold}" in task.preview(example)[0].text
    assert score_text(task, example, task.gold_completion(example)).value == 1
    assert score_text(task, example, task.wrong_completion(example)).value == 0


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"o": ["p", "p"], "gold": "p"}, "'p' occurs twice"),
        ({"o": ["p", " "], "gold": "p"}, "blank"),
        ({"o": ["p"], "gold": "p"}, "there are 1"),
        ({"o": [str(i) for i in range(27)], "gold": "p"}, "there are 27"),
        ({"o": ["p", ["q"]], "gold": "p"}, "list"),
        ({"o": "p or q", "gold": "p"}, "neither a mapping of letters nor a list"),
        ({"o": ["p", "q"], "gold": "r"}, "matches none"),
        ({"o": ["p", "q"], "gold": True}, "matches none"),
        ({"o": ["p", "q"], "gold": -1}, "matches none"),
        ({"o": ["p", "q"], "gold": 3}, "matches none"),
        ({"o": ["p", "q"], "gold": "A. q"}, "matches none"),
    ],
)
def test_rows_without_a_right_option(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    with pytest.raises(RowError) as caught:
        declared(tmp_path, options="o").example({"q": "Which?", **row})
    assert why in " ".join(caught.value.lines())


def test_positions_from_one_are_refused_for_the_whole_file(tmp_path: Path) -> None:
    task = declared(tmp_path, options="o")
    rows = [{"q": str(i), "o": ["p", "q", "r"], "gold": i} for i in (1, 2, 3)]
    with pytest.raises(DataError, match="seems to count the options from 1") as caught:
        to_examples(task, [RawRow(row, f"r:{i}") for i, row in enumerate(rows)])
    assert caught.value.why.startswith("r:2: it is 3, of 3 options")


def test_the_gold_of_columns_is_in_every_place(tmp_path: Path) -> None:
    task = declared(tmp_path, options=COLUMNS, gold="x")
    examples = [
        task.example({"q": str(i), "x": f"right {i}", "y": f"wrong {i}"}) for i in range(40)
    ]
    letters = [task.gold_letter(e) for e in examples]
    assert 10 < letters.count("A") < 30
    same = task.example({"q": "other", "x": "right 0", "y": "wrong 0"})
    assert task.gold_letter(same) == letters[0]


# -- prompts and answers ---------------------------------------------------------------------------


def test_a_prompt_gets_only_what_it_lacks(tmp_path: Path) -> None:
    row = {"q": "谁?", "甲": "小明", "乙": "小红", "gold": "小红"}
    chinese = "{{ q }}\nA. {{ 甲 }}\nB. {{ 乙 }}\n请写在 <answer> 和 </answer> 之间。"
    task = declared(tmp_path, prompt=chinese, options={"columns": ["甲", "乙"]})
    example = task.example(row)
    assert task.preview(example)[0].text == (
        "谁?\nA. 小明\nB. 小红\n请写在 <answer> 和 </answer> 之间。"
    )
    assert task.gold_letter(example) == "B" and task.leak_view(example).question == "谁?"
    loop = "{% for o in options %}({{ o }}) {% endfor %} <answer>"
    letters = declared(tmp_path, options=["A", "B"], prompt="{{ q }} A. p B. q <answer>")
    assert letters.preview(letters.example({"q": "?", "gold": "B"}))[0].text.endswith("q <answer>")
    shown = declared(tmp_path, prompt=loop, options=["p", "q"]).example({"gold": "p"})
    assert declared(tmp_path, prompt=loop, options=["p", "q"]).preview(shown)[0].text == (
        "(p) (q)  <answer>"
    )
    assert str(Listed(["p", "q"])) == "A. p\nB. q"


@pytest.mark.parametrize(
    ("answer", "reply", "read"),
    [
        ("tag", "So <answer>B</answer>", ("B", "ok")),
        ("tag", "<answer>\uff22\u3002</answer>", ("B", "salvaged")),
        ("tag", "<answer>(b) A. Smith</answer>", ("B", "salvaged")),
        ("tag", "<answer>A. Smith</answer>", ("B", "salvaged")),
        ("tag", "<answer>the mayor</answer>", ("C", "salvaged")),
        ("tag", "<answer>D</answer>", ("", "malformed")),
        ("tag", "B", ("", "no_tag")),
        ("reply", "b", ("B", "ok")),
        ("reply", "It is B, I think", ("", "malformed")),
        (r"Answer: \(?(\w)", "Answer: A, no. Answer: (B)", ("B", "ok")),
        (r"Answer: \(?(\w)", "I say B", ("", "no_tag")),
    ],
)
def test_where_the_answer_is(
    tmp_path: Path, answer: str, reply: str, read: tuple[str, str]
) -> None:
    task = declared(tmp_path, options="o", answer=answer)
    example = task.example({"q": "?", "o": ["Lee", "A. Smith", "The Mayor"], "gold": "B"})
    assert task.read(example, reply) == read
    assert score_text(task, example, task.gold_completion(example)).value == 1


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"answer": "Answer: ("}, "answer: not a valid pattern"),
        ({"answer": "Answer: .+"}, "answer: expected tag, reply, or a pattern with one group"),
        ({"gold": ""}, "the key 'gold' is missing"),
        ({"gold": "", "scorer": ["exact", {"kind": "regex", "pattern": "a"}]}, "'gold' is missing"),
        ({"scorer": [{"kind": "regex", "pattern": "["}]}, "not a valid pattern"),
        ({"scorer": {"kind": "exact", "pattern": "a"}}, "this key needs the scorer 'regex'"),
        ({"scorer": "json_schema"}, "the key 'json_schema' is missing"),
        ({"kind": "choice", "options": "o", "orders": 2, "prompt": "{{ o }}"}, "write {{ options"),
    ],
)
def test_keys_that_do_not_fit(tmp_path: Path, keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        declared(tmp_path, **{"kind": "text", **keys})
    assert line in caught.value.why and "mine.yaml:" in caught.value.why


# -- orders ----------------------------------------------------------------------------------------


def records(task: Task, choices: str, **changes: Any) -> list[Record]:
    """Records of one row in its orders; a choice is an option's text, `-` an unreadable reply."""
    row = {"q": "?", "o": ["p", "q", "r"], "gold": "p"}
    ballots = []
    for example, text in zip(task.examples(row), choices, strict=True):
        letter = next((k for k, v in task.options(example).items() if v == text), "none")
        episode = draft_of(task, example, letter)
        score = score_text(task, example, episode.final.text)
        fields = {"key": example.id, "task": "mine", "example_id": example.id, "rollout": 0,
                  "kind": "draft", "episode": episode, "score": score}  # fmt: skip
        ballots.append(Record(**{**fields, **changes}))
    return ballots


def test_a_row_in_several_orders(tmp_path: Path) -> None:
    task = declared(tmp_path, options="o", orders=6)
    forms = task.examples({"q": "?", "o": ["p", "q", "r"], "gold": "p"})
    assert [form.id.partition("-")[2] for form in forms] == list("012345")
    assert len({form.cluster for form in forms}) == 1
    assert sorted(task.gold_letter(form) for form in forms) == list("AABBCC")
    assert all(task.gold_text(form) == "p" for form in forms)
    assert task.spec.metric.headline == "row_accuracy"


@pytest.mark.parametrize(
    ("choices", "right", "alike"),
    [("ppp", 1, 1), ("qqq", 0, 1), ("ppq", 2 / 3, 0), ("pp-", 2 / 3, 0), ("---", 0, 0)],
)
def test_consistency_over_orders(tmp_path: Path, choices: str, right: float, alike: int) -> None:
    task = declared(tmp_path, options="o", orders=3)
    values = batch_values(task, records(task, choices))
    assert (values["row_accuracy"], values["consistency"]) == (pytest.approx(right), alike)
    if choices == "ppp":
        assert values["first_option"] == pytest.approx(1 / 3)
        lost = replace(records(task, choices)[0], score=unscored(Failure("provider_error")))
        assert "consistency" not in batch_values(task, [lost, *records(task, choices)[1:]])


# -- scorers ---------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "required": ["mood"], "properties": {"mood": {"enum": ["sad", "glad"]}}}


@pytest.mark.parametrize(
    ("kind", "gold", "reply", "value"),
    [
        ("exact", "Lyon", " Lyon\n", 1),
        ("exact", "Lyon", "lyon", 0),
        ("normalised", "The Café", "café.", 1),
        ("normalised", "A", "a", 1),
        ("normalised", "-5", "5", 0),
        ("normalised", "3.5", "35", 0),
        ("normalised", "1,000", "1000", 1),
        ("normalised", "?", "!", 0),
        ("normalised", "北京", "北京。", 1),
        ("contains", "New York", "I love new york!", 1),
        ("contains", "art", "a party", 0),
        ("contains", "京都", "我在京都住", 1),
        ("contains", "5", "It is -5", 0),
        ("number", "1234.5", "First 7, in the end $1,234.50.", 1),
        ("number", "18", "18 apples and 3 pears", 0),
        ("number", "-3", "x = \u22123", 1),
        ("number", "3,5", "3.5", 1),
        ("number", "3", "none", 0),
        ("regex", r"^\d{4}$", "1999", 1),
        ("regex", r"^\d{4}$", "in 1999", 0),
        ("token_f1", "the red box", "a red jar", 0.5),
        ("token_f1", "红盒子", "红罐子", 2 / 3),
        ("rouge_l", "a red box", "red box", 0.8),
        ("rouge_l", "红盒子", "红罐子", 2 / 3),
        ("json_schema", "", '```json\n{"mood": "sad"}\n```', 1),
        ("json_schema", "", '{"mood": "odd"}', 0),
        ("json_schema", "", "sad", 0),
    ],
)
def test_scorers(kind: Any, gold: str, reply: str, value: float) -> None:
    scorer = Scorer(kind=kind, **({"json_schema": SCHEMA} if kind == "json_schema" else {}))
    assert score_of(scorer, reply, gold) == pytest.approx(value)


def test_numbers_within_a_tolerance() -> None:
    near = Scorer(kind="number", tolerance=0.1)
    assert [score_of(near, reply, "2") for reply in ("2.1", "1.9", "2.2")] == [1, 1, 0]
    assert last_number("v2.0") is None and last_number("10-5") == 5


def test_f1_and_rouge_agree_with_their_definitions() -> None:
    rng = random.Random(0)
    vocabulary = ["a", "the", "red", "Box", "box.", "it's", "well-known", "so,", "and"]
    for _ in range(200):
        gold, reply = (" ".join(rng.choices(vocabulary, k=rng.randint(1, 8))) for _ in range(2))
        if any(word not in ("a", "the") for word in f"{gold}".split()):
            assert score_of(Scorer(kind="token_f1"), reply, gold) == token_f1(gold, reply)
        assert score_of(Scorer(kind="rouge_l"), reply, gold) == rouge_l(gold, reply)


@pytest.mark.parametrize(
    ("scorer", "gold"),
    [
        ("exact", "Lyon"), ("normalised", "Lyon"), ("contains", "Lyon"), ("number", "12"),
        ("token_f1", "a red box"), ("rouge_l", "a red box"), ("regex", "red"),
        ([{"kind": "number", "weight": 2}, "token_f1"], '["12", "twelve 12"]'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("answer", ["reply", "tag", r"Answer:\s*(.+)"])
def test_the_check_proves_every_scorer(tmp_path: Path, scorer: Any, gold: str, answer: str) -> None:
    task = declared(tmp_path, kind="text", scorer=scorer, answer=answer)
    check = check_task(task, to_examples(task, [RawRow({"q": "?", "gold": gold}, "r:1")]))
    assert check.rows == 1 and check.passed
    assert not (check.wrong_passes or check.wrong_unread or check.no_gold or check.no_wrong)


def test_several_scorers_and_golds(tmp_path: Path) -> None:
    scorers = [{"kind": "contains", "weight": 3}, "exact", {"kind": "exact"}]
    task = declared(tmp_path, kind="text", scorer=scorers)
    example = task.example({"q": "?", "gold": {"text": ["Lyon", "Lyons"]}})
    score = score_text(task, example, "in Lyons")
    assert score.value == 0.6
    assert score.metrics == {"contains": 1, "exact": 0, "exact_2": 0}
    assert score_text(task, example, "").metrics == {"contains": 0, "exact": 0, "exact_2": 0}
    with pytest.raises(RowError, match="blank"):
        task.example({"q": "?", "gold": []})


def test_a_gold_may_be_a_whole_reply(tmp_path: Path) -> None:
    task = declared(tmp_path, kind="text", scorer="number", answer=r"#### (\-?[0-9\.\,]+)")
    example = task.example({"q": "?", "gold": "3 + 15 = 18\n#### 18"})
    assert task.gold_completion(example).endswith("#### 18")
    assert score_text(task, example, "So #### 18").value == 1


def test_a_schema_needs_no_gold(tmp_path: Path) -> None:
    schema = {"kind": "json_schema", "json_schema": SCHEMA}
    task = declared(tmp_path, kind="text", scorer=schema, gold="")
    example = task.example({"q": "?"})
    assert task.gold(example) is None and task.leak_view(example) is None
    assert score_text(task, example, '{"mood": "glad"}').value == 1
    assert score_text(task, example, task.wrong_completion(example)).value == 0
    with pytest.raises(ConfigError, match="not valid"):
        json_validator(Scorer(kind="json_schema", json_schema={"type": "objekt"}))


def test_a_schema_downloads_nothing() -> None:
    class Schemas(JsonServer):
        asked: ClassVar[list[str]] = []

        def answer(self, asked: Asked) -> Reply:
            self.asked.append(asked.target)
            return Reply(content={"type": "object"})

    with Schemas() as server:
        for place in (f"{server.url}/x.json", "file:///etc/hostname"):
            scorer = Scorer(kind="json_schema", json_schema={"$ref": place})
            with pytest.raises(TaskError, match="is not in it"):
                score_of(scorer, "{}", "")
        assert server.asked == []
    inside = {"$ref": "#/$defs/mood", "$defs": {"mood": {"type": "string"}}}
    assert score_of(Scorer(kind="json_schema", json_schema=inside), '"glad"', "") == 1


@pytest.mark.parametrize("pattern", ["(a|aa)+$", "[", "a{99999999999999999999}"])
def test_a_pattern_that_cannot_be_used_costs_its_row(pattern: str) -> None:
    with pytest.raises(TaskError, match="cannot be used"):  # the row's gold is the pattern
        score_of(Scorer(kind="regex"), "a" * 40 + "!", pattern)
