"""AlignX: both orders of a row, what is shown of a person, answers, and imports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import RawRow, write_rows
from soulkit.errors import ConfigError, DataError
from soulkit.tasks.kit.loading import load_examples, to_examples
from soulkit.tasks.kit.registry import load_registry
from soulkit.types import Episode, Example, Failure, Feedback, Record, Score, unscored
from tests.support.evaluation import api
from tests.support.evaluation import summary as totals
from tests.support.road import (
    batch_values,
    import_rows,
    importable,
    score_text,
    synth,
    task_of,
)
from tests.support.servers import openai_server as scripted

SPLITS = tuple(f"alignx_{s}" for s in ("demo", "pair", "ugc", "arbitrary", "history16"))
PAIR = {"prompt": "Cold soup?", "chosen": "Yes, at once.", "rejected": "It depends on the soup."}
ROW: dict[str, Any] = {
    "raw_prompt": "My flatmate borrows my bike. What do I say?",
    "chosen": "Ask first, every time.",
    "rejected": "Perhaps leave a gentle note.",
    "demographic": "Blunt and in a hurry.",
    "index": 3,
}


def score(text: str, stop: str = "stop", **changes: Any) -> Score:
    task = task_of("alignx_demo")
    return score_text(task, task.example({**ROW, "flip": True, **changes}), text, stop)


# -- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inside", "status"), [("b", "ok"), ("(B)", "salvaged"), ("Reply B", "salvaged"),
                           ("**Response (B)**", "salvaged")],
)  # fmt: skip
def test_the_reply_may_be_named(inside: str, status: str) -> None:
    grade = score(f"I think so. <answer>{inside}</answer>")
    assert (grade.value, grade.status, grade.words) == (1.0, status, "B")


@pytest.mark.parametrize(
    ("text", "stop", "status"),
    [
        ("It is B.", "stop", "no_tag"),
        ("<answer>C</answer>", "stop", "malformed"),
        ("<answer>Reply A or B</answer>", "stop", "malformed"),
        ("", "stop", "empty"),
        ("They want", "length", "truncated"),
    ],
)
def test_the_actors_own_failures_score_the_minimum(text: str, stop: str, status: str) -> None:
    grade = score(text, stop)
    assert (grade.value, grade.status, grade.words) == (0.0, status, "")
    assert grade.metrics == {"picked_a": None}


def test_the_place_that_was_picked_is_a_metric() -> None:
    assert score("<answer>A</answer>").metrics == {"picked_a": 1.0}
    assert score("<answer>B</answer>").metrics == {"picked_a": 0.0}


# -- orders --------------------------------------------------------------------------------------


def test_a_row_is_two_examples_that_differ_in_order_alone() -> None:
    task = task_of("alignx_demo")
    one, two = task.examples(ROW)
    assert (task.gold_letter(one), task.gold_letter(two)) == ("A", "B")
    assert one.fields["response_a"] == two.fields["response_b"] == ROW["chosen"]
    assert one.fields["response_b"] == two.fields["response_a"] == ROW["rejected"]
    assert one.cluster == two.cluster and one.id[:-3] == two.id[:-3] and one.id != two.id
    assert (one.tags["gold"], two.tags["gold"]) == ("A", "B")
    first, second = (task.preview(e)[0].text for e in (one, two))
    assert first != second and sorted(first.split()) == sorted(second.split())


def test_a_row_that_says_its_order_keeps_it() -> None:
    task = task_of("alignx_demo")
    (only,) = task.examples({**ROW, "flip": "true"})
    assert only.id == task.examples(ROW)[1].id


def test_the_reference_draws_one_order_from_the_index() -> None:
    task = task_of("alignx_pair", "reference")
    golds = "".join(task.gold_letter(task.examples({**ROW, "index": i})[0]) for i in range(20))
    assert golds == "ABABBAABBBABBBBABABA"
    assert all(len(task.examples({**ROW, "index": i})) == 1 for i in range(3))
    assert task.example({**ROW, "index": "12"}).fields["flip"] is True
    assert task.example({k: v for k, v in ROW.items() if k != "index"}).fields["flip"] is False


@pytest.mark.parametrize("index", [" ", "third", [1], {"a": 1}])
def test_under_the_reference_an_index_that_is_no_number_is_a_bad_row(index: Any) -> None:
    with pytest.raises(DataError, match="The row's index is"):
        task_of("alignx_pair", "reference").example({**ROW, "index": index})
    assert task_of("alignx_pair").example({**ROW, "index": index})


def test_in_the_paper_protocol_the_order_of_a_single_example_comes_from_its_content() -> None:
    task = task_of("alignx_demo")
    assert len({task.example({**ROW, "index": i}).id for i in (0, 1, 2, None)}) == 1
    rows = synth("alignx_demo", 200, 1)
    share = sum(task.example(row).fields["flip"] for row in rows) / len(rows)
    assert 0.4 < share < 0.6


def test_a_limit_counts_rows_and_keeps_both_orders_of_each(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, synth("alignx_demo", 30, 0), data_source="alignx_demo")
    loaded = load_examples(task_of("alignx_demo"), [path], limit=10)
    assert len({e.id[:-3] for e in loaded.examples}) == 10 and len(loaded.examples) == 20
    single = load_examples(task_of("alignx_demo", "reference"), [path], limit=10)
    assert len({e.id[:-3] for e in single.examples}) == 10


def test_rows_marked_with_the_name_of_the_whole_benchmark_belong_to_the_first_split() -> None:
    marked = [RawRow({**ROW, "data_source": "alignx"}, "x:1")]
    assert len(to_examples(task_of("alignx_demo"), marked).examples) == 2
    assert to_examples(task_of("alignx_pair"), marked).skipped == {"alignx": 1}


# -- the summary over both orders ----------------------------------------------------------------


def records(answer: Any, n: int = 10) -> list[Record]:
    """A record of every example of `n` rows; `answer` gives the reply to (example, gold letter)."""
    task = task_of("alignx_demo")
    played = []
    for row in synth("alignx_demo", n, 2):
        for example in task.examples(row):
            text = answer(example, task.gold_letter(example))
            score = score_text(task, example, text) if text else unscored(Failure("x"))
            played.append(record(example, score))
    return played


def record(example: Example, score: Score) -> Record:
    episode = Episode(example_id=example.id, task="alignx_demo")
    return Record(
        key=example.id, task="alignx_demo", example_id=example.id, rollout=0, kind="draft",
        episode=episode, score=score, cluster=example.cluster,
    )  # fmt: skip


def summary(answer: Any) -> dict[str, float]:
    means: dict[str, float] = batch_values(task_of("alignx_demo"), records(answer))
    return means


def test_an_actor_with_a_favourite_place_is_found_out() -> None:
    always = summary(lambda example, gold: "<answer>A</answer>")
    assert always == {
        "row_accuracy": 0.5,
        "consistency": 0.0,
        "right_in_both": 0.0,
        "position_bias": 1.0,
    }
    never = summary(lambda example, gold: "<answer>B</answer>")
    assert never["position_bias"] == -1.0


def test_an_actor_that_reads_the_replies_is_consistent() -> None:
    right = summary(lambda example, gold: f"<answer>{gold}</answer>")
    assert right == {
        "row_accuracy": 1.0,
        "consistency": 1.0,
        "right_in_both": 1.0,
        "position_bias": 0.0,
    }
    wrong = summary(lambda example, gold: f"<answer>{'AB'[gold == 'A']}</answer>")
    assert wrong == {
        "row_accuracy": 0.0,
        "consistency": 1.0,
        "right_in_both": 0.0,
        "position_bias": 0.0,
    }


def test_unread_and_unscored_answers_in_the_summary() -> None:
    mute = summary(lambda example, gold: "no idea")
    nothing = {"row_accuracy": 0.0, "consistency": 0.0, "right_in_both": 0.0}
    assert mute == nothing, "no pick, so no lean"
    half = summary(lambda example, gold: "<answer>A</answer>" if gold == "A" else "")
    assert half == {}, "only whole pairs count"
    assert batch_values(task_of("alignx_demo"), []) == {}


def test_plays_of_one_row_are_paired_with_their_own_kind() -> None:
    base = records(lambda example, gold: "<answer>A</answer>", 1)
    refined = [replace(r, kind="refined", rollout=1) for r in base]
    mixed = batch_values(task_of("alignx_demo"), [base[0], refined[1]])
    assert "consistency" not in mixed
    assert batch_values(task_of("alignx_demo"), [*base, *refined])["position_bias"] == 1.0


def test_the_whole_road_reports_the_lean(tmp_path: Path) -> None:
    with scripted.ScriptedServer(answer="<answer>A</answer>") as server:
        assert api(server.base_url, tmp_path / "run", task="alignx_demo", n=3) == 0
    cells = totals(tmp_path / "run")["tasks"]["alignx_demo"]
    means = {name: cell["mean"] for name, cell in cells.items()}
    assert (means["value"], means["picked_a"], cells["value"]["n"]) == (0.5, 1.0, 6)
    assert (means["value/gold=A"], means["value/gold=B"]) == (1.0, 0.0)
    assert (means["consistency"], means["position_bias"]) == (0.0, 1.0)


# -- what is shown -------------------------------------------------------------------------------


def prompt(**row: Any) -> str:
    task = task_of("alignx_arbitrary")
    text: str = task.preview(task.example({**ROW, "demographic": None, **row}))[0].text
    return text


def test_every_kind_of_evidence_reaches_the_prompt_and_absent_ones_leave_no_trace() -> None:
    comment = {"prompt": "Rain?", "comment": "Bring it on."}
    text = prompt(demographic="Blunt.", icl_pairs=[PAIR], ugc=[comment])
    assert all(evidence in text for evidence in ("Blunt.", *PAIR.values(), *comment.values()))
    assert not any(word in prompt() for word in ("The person", "liked better before", "themselves"))
    assert "An old hand." in prompt(profile="An old hand.")
    assert "An old hand." not in prompt(profile="An old hand.", demographic="Young.")
    assert "age: 40; likes: tea, rain" in prompt(demographic={"age": 40, "likes": ["tea", "rain"]})


def test_only_so_many_items_are_shown_and_blank_ones_are_not_replaced() -> None:
    pairs = [{**PAIR, "prompt": f"post {i}", "chosen": "" if i == 1 else "x"} for i in range(5)]
    assert "post 0" in prompt(icl_pairs=pairs) and "post 2" not in prompt(icl_pairs=pairs)
    assert "post 1" not in prompt(icl_pairs=pairs), "two by default, one of them blank"
    assert "post 4" in prompt(icl_pairs=pairs, n_icl=5)
    assert "post 0" not in prompt(icl_pairs=pairs, n_icl=0)


def test_an_item_that_is_the_very_question_is_not_shown() -> None:
    question_pair = [
        {"prompt": ROW["raw_prompt"], "chosen": ROW["chosen"], "rejected": "Sing."},
        {"prompt": f" {ROW['raw_prompt']}", "chosen": "Sing.", "rejected": ROW["rejected"]},
    ]
    comments = [{"prompt": ROW["raw_prompt"], "comment": ROW["chosen"]},
            {"prompt": ROW["raw_prompt"], "comment": "Bikes!"}]  # fmt: skip
    row = {**ROW, "icl_pairs": [*question_pair, PAIR], "n_icl": 3, "ugc": comments}
    fields = task_of("alignx_pair").example(row).fields
    assert fields["icl_pairs"] == (PAIR,) and fields["ugc"] == (comments[1],)
    published = task_of("alignx_pair", "reference").example(row).fields
    assert len(published["icl_pairs"]) == 3 and len(published["ugc"]) == 2


@pytest.mark.parametrize("bad", ["a text", [1, 2], {"prompt": "x"}, ["x"]])
def test_evidence_that_is_no_list_of_objects_is_a_bad_row(bad: Any) -> None:
    with pytest.raises(DataError, match="not a list of objects"):
        prompt(icl_pairs=bad)


@pytest.mark.parametrize("blank", ["raw_prompt", "chosen", "rejected"])
def test_a_row_without_post_or_reply_is_a_bad_row(blank: str) -> None:
    for value in ("  ", None):
        with pytest.raises(DataError):
            prompt(**{blank: value})


def test_equal_replies_are_a_bad_row() -> None:
    with pytest.raises(DataError, match="are equal"):
        prompt(rejected=ROW["chosen"])


def test_long_evidence_is_cut_fairly_and_instructions_never() -> None:
    task = task_of("alignx_pair")
    long = {**PAIR, "chosen": "word " * 9000}
    row = {**ROW, "icl_pairs": [long, PAIR], "chosen": "so " * 5000, "demographic": "old " * 2000}
    example = task.example(row)
    episode = task.gold(example)
    text = episode.traces[0].turns[0].context[0].text
    assert len(text.split()) < 6000 and PAIR["rejected"] in text
    assert text.endswith("between <answer> and </answer>.")
    assert set(episode.notes["cut_words"]) == {
        "icl_pairs",
        "persona",
        f"response_{side(task, example)}",
    }


def side(task: Any, example: Example) -> str:
    return str(task.gold_letter(example)).lower()


# -- forms of a row, feedback --------------------------------------------------------------------


@pytest.mark.parametrize("name", SPLITS)
def test_json_strings_and_gaps_of_joined_files_change_nothing(name: str) -> None:
    task = task_of(name)
    joined = dict.fromkeys(("story", "history", "candidates", "flip", "prompt"))
    for row in synth(name, 12, 4):
        plain = [e.id for e in task.examples(row)]
        texts = {k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()}
        gaps = {**dict.fromkeys(task.spec.columns), **joined, **row}
        nested = {
            **row,
            **{k: [json.dumps(i) for i in v] for k, v in row.items() if type(v) is list},
        }
        for form in (texts, gaps, nested):
            assert [e.id for e in task.examples(form)] == plain
            assert [e.fields for e in task.examples(form)] == [e.fields for e in task.examples(row)]


def test_feedback_tells_right_from_wrong_and_unread() -> None:
    task = task_of("alignx_arbitrary")
    example = task.example({**ROW, "icl_pairs": [PAIR]})
    drafts = (task.gold_completion(example), task.wrong_completion(example), "mute")
    texts = [task.explain(example, None, score_text(task, example, d)) for d in drafts]
    assert len(set(texts)) == 3 and "tags" in texts[2]
    assert all("description of the person" in t and "passed over, write" in t for t in texts)


def test_feedback_stands_after_everything_else() -> None:
    task = task_of("alignx_ugc")
    segment = task.context(task.example(ROW), Feedback(text="Mind the tone.", author="x"))[0]
    assert segment.bare and segment.text.startswith(segment.bare)
    assert segment.text.endswith("Mind the tone.")


IMPORTED_PAIR = {"prompt": "p", "chosen": "c", "rejected": "r", "Preference Direction": [0, 1]}
RECORD: dict[str, Any] = {
    "prompt": "Shorten this.",
    "chosen": "Short.",
    "rejected": "Rather long.",
    "profile": "Young, likes science",
    "ground_truth_persona": "Write tersely.",
    "Pair-wise Comparative Feedback": [IMPORTED_PAIR, IMPORTED_PAIR, IMPORTED_PAIR, IMPORTED_PAIR],
}


def written(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def test_a_split_keeps_its_evidence_and_all_of_it(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", RECORD)
    (demo,) = import_rows("alignx_demo", path).rows
    (pair,) = import_rows("alignx_pair", path).rows
    (both,) = import_rows("alignx_arbitrary", path).rows
    assert "icl_pairs" not in demo and demo["profile"] == RECORD["profile"]
    assert "profile" not in pair and pair["n_icl"] == len(pair["icl_pairs"]) == 4
    assert both["profile"] and both["icl_pairs"] == pair["icl_pairs"]
    assert set(pair["icl_pairs"][0]) == {"prompt", "chosen", "rejected"}
    assert (both["index"], both["provenance"]) == (0, "x.jsonl:1") and "none" in both["licence"]


def test_alignx_proper_has_descriptions_and_comments(tmp_path: Path) -> None:
    comments = [{"prompt": "p", "comment": "c", "Preference Direction": [0.5]}]
    full = {**RECORD, "Demographic Information": "A cook.", "User-Generated Content": comments}
    path = written(tmp_path / "x.jsonl", full)
    (row,) = import_rows("alignx_ugc", path).rows
    assert row["ugc"] == [{"prompt": "p", "comment": "c"}] and row["n_ugc"] == 1
    live = load_registry().task("alignx_demo")
    (demo,) = import_rows("alignx_demo", path).rows
    assert live.example(demo).fields["persona"] == "A cook."


def test_a_compared_pair_that_is_the_question_is_left_out(tmp_path: Path) -> None:
    question_pair = {k: RECORD[k] for k in ("prompt", "chosen", "rejected")}
    other = {**RECORD, "Pair-wise Comparative Feedback": json.dumps([IMPORTED_PAIR, question_pair])}
    imports = import_rows("alignx_pair", written(tmp_path / "x.jsonl", RECORD, other))
    assert [len(row["icl_pairs"]) for row in imports.rows] == [4, 1]
    assert imports.rows[1]["n_icl"] == 1 and "1 rows had their own answer" in imports.notes[1]
    only = {**RECORD, "Pair-wise Comparative Feedback": [question_pair]}
    nothing_left = import_rows("alignx_pair", written(tmp_path / "y.jsonl", only))
    assert not nothing_left.rows and "none of Pair-wise" in nothing_left.bad[0].why


def test_records_that_are_no_rows_are_named(tmp_path: Path) -> None:
    same = {**RECORD, "rejected": " Short. "}
    bare = {k: RECORD[k] for k in ("prompt", "chosen", "rejected")}
    path = written(tmp_path / "x.jsonl", RECORD, same, bare, {**RECORD, "chosen": ""})
    imports = import_rows("alignx_pair", path)
    assert len(imports.rows) == 1 and [b.source for b in imports.bad] == [
        f"x.jsonl:{n}" for n in (2, 3, 4)
    ]
    assert "are equal" in imports.bad[0].why and "Pair-wise" in imports.bad[1].why
    assert "licence" in imports.notes[0]
    with pytest.raises(DataError, match="original format"):
        import_rows("alignx_pair", written(tmp_path / "y.jsonl", {"story": "x"}))
    with pytest.raises(ConfigError):
        import_rows("alignx_history16", path)
    assert "alignx_history16" not in importable()
