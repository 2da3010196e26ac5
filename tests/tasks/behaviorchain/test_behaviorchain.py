"""BehaviorChain under the paper protocol: forms of rows, nodes, and what whole chains earn."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from soulkit.data.files import RawRow
from soulkit.errors import DataError
from soulkit.tasks.behaviorchain.task import (
    NODES,
    consecutive_accuracy,
    longest_run,
    runs,
    whole_chains,
)
from soulkit.tasks.kit.loading import to_examples
from soulkit.types import Record
from tests.support.letters import (
    record,
    released,
)
from tests.support.road import batch_values, score_text, synth, synth_examples, task_of

ROW: dict[str, Any] = {
    "persona_name": "Ilka",
    "profile_text": "Ilka counts before she speaks.",
    "history_truncated": [{"chapter_num": 3, "chapter_content": "It rained."}, "Then it stopped."],
    "prior_chain": [{"context": "A knock.", "behavior": "She counts to ten."}],
    "current_context": "A shout.",
    "options_dict": {"A": "She runs.", "B": "She counts.", "C": "She sings.", "D": "She sleeps."},
    "right_option_letter": "B",
}


def packed(row: dict[str, Any], index: int = 0) -> dict[str, Any]:
    """A row as it is released: JSON text under `raw`."""
    return released({"raw": json.dumps(row), "index": index, "story": None, "options": None})


def test_every_made_row_has_one_id_in_every_form() -> None:
    task = task_of("behaviorchain")
    for i, row in enumerate(synth("behaviorchain", 20, 5)):
        listed = {**row, "options": [*row["options_dict"].values()], "options_dict": None}
        texts = {k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()}
        forms = (row, packed(row, i), released(row), packed(listed), released(texts))
        assert len({task.example(form).id for form in forms}) == 1


def test_released_rows_are_known_by_their_source() -> None:
    rows = [RawRow({**packed(r, i), "data_source": "behavior_chain"}, str(i))
            for i, r in enumerate(synth("behaviorchain", 10, 5))]  # fmt: skip
    loaded = to_examples(task_of("behaviorchain"), rows)
    assert (len(loaded.examples), loaded.bad, loaded.skipped) == (10, (), {})
    assert len({e.cluster for e in loaded.examples}) == 2


def test_the_prompt_tells_all_there_is_and_says_where_there_is_nothing() -> None:
    task = task_of("behaviorchain")
    text = task.preview(task.example(ROW))[0].text
    for part in (
        "Chapter 3\nIt rained.",
        "Then it stopped.",
        "She counts to ten.",
        "B. She counts.",
    ):
        assert part in text
    bare = {k: v for k, v in ROW.items() if k in ("current_context", "options_dict")}
    text = task.preview(task.example({**bare, "right_option_letter": "b"}))[0].text
    assert text.count("(none)") == 3 and "the persona" in text


def test_profiles_may_be_mappings_and_chains_may_be_text() -> None:
    task = task_of("behaviorchain")
    profile = {"Name": "Ilka", "Relationships": {"Bram": "brother"}, "Age": None, "Likes": ["tea"]}
    row = {**ROW, "profile_text": None, "profile": profile, "prior_chain": None,
           "prior_chain_text": "Step 0:\nA knock.\nStep 1:\nA bell."}  # fmt: skip
    example = task.example(row)
    assert example.fields["profile_text"] == "Name: Ilka\nRelationships: Bram: brother\nLikes: tea"
    assert example.tags == {"node": "2"}
    assert task.example(ROW).tags == {"node": "1"}


@pytest.mark.parametrize(
    "change",
    [{"options_dict": {}}, {"options_dict": "none"}, {"right_option_letter": "E"},
     {"right_option_letter": None}, {"prior_chain": "once"}, {"prior_chain": [1]}],
)  # fmt: skip
def test_rows_that_cannot_be_asked_are_bad(change: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        task_of("behaviorchain").example({**ROW, **change})


def test_an_answer_inside_thinking_is_none() -> None:
    text = "<think><answer>B</answer></think>"
    values = {}
    for protocol in ("paper", "reference"):
        task = task_of("behaviorchain", protocol)
        values[protocol] = score_text(task, task.example(ROW), text).value
    assert values == {"paper": 0.0, "reference": 1.0}


@pytest.mark.parametrize(
    ("chain", "lengths", "longest", "accuracy"),
    [((1, 1, 1), [1, 2, 3], 3, 1.0), ((0, 0), [0, 0], 0, 0.0), ((1, 0, 1), [1, 0, 1], 1, 2 / 6),
     ((1, 1, 0, 1), [1, 2, 0, 1], 2, 4 / 10), ((0, 1, 1, 1), [0, 1, 2, 3], 3, 6 / 10)],
)  # fmt: skip
def test_runs_of_right_answers(
    chain: tuple[float, ...], lengths: list[int], longest: int, accuracy: float
) -> None:
    assert (runs(chain), longest_run(chain)) == (lengths, longest)
    assert consecutive_accuracy(chain) == pytest.approx(accuracy)


def test_an_empty_chain_has_no_accuracy() -> None:
    with pytest.raises(ValueError, match="without nodes"):
        consecutive_accuracy(())


def chain(persona: str, *values: float | None, skip: int = -1, kind: str = "draft") -> list[Record]:
    return [record(f"{persona}{i}", v, cluster=persona, kind=kind, node=str(i))
            for i, v in enumerate(values) if i != skip]  # fmt: skip


def test_a_summary_is_over_whole_chains_of_drafts() -> None:
    summarise = partial(batch_values, task_of("behaviorchain"))
    whole = [*chain("p", 1, 1), *chain("q", 1, 0, 1, 1)]
    left_out = [*chain("r", 1, 1, 1, skip=1), *chain("s", 1, None), *chain("t", 1),
                *chain("p", 0, 0, kind="refined"), record("x", 0.0)]  # fmt: skip
    assert summarise([*whole, *left_out]) == {
        "longest_run": (1 + 2 / 4) / 2,
        "consecutive_accuracy": (1 + 4 / 10) / 2,
        "whole_chain": 0.5,
    }
    assert summarise(left_out[:3]) == {}
    twice = [*chain("p", 1, 1), record("again", 0.0, cluster="p", node="1")]
    assert whole_chains(twice) == [(1, 0)]


def test_made_chains_stay_together_and_number_their_nodes() -> None:
    examples = synth_examples("behaviorchain", 3 * NODES)
    assert [e.tags["node"] for e in examples] == [str(i % NODES) for i in range(3 * NODES)]
    assert len({e.cluster for e in examples}) == 3
