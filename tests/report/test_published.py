"""When a published figure may be compared with a run's: five things have to match, all stated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.eval.comparison.comparability import read_measured
from soulkit.report.published import (
    CAVEAT,
    Publication,
    Stated,
    context_doubts,
    doubts_text,
    prompts_digest,
    publications,
    published_footnote,
)
from soulkit.runs.conditions import rows_hash
from tests.support.evaluation import FAST, soul
from tests.support.servers.openai_server import ScriptedServer


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("context") / "run"
    with ScriptedServer(answer="<answer>A</answer>") as server:
        actor = ("--model", "m", "--base-url", server.base_url, "--temperature", 0.5)
        assert soul("eval", "api", *actor, "--task", "hitom", "--data", "synth:4", "--out", out,
                    *FAST) == 0  # fmt: skip
    return out


def doubts(folder: Path, **stated: Any) -> list[str]:
    paper = publications()[0]
    table = replace(paper, stated=Stated(**stated))
    return list(context_doubts(table, ["hitom"], read_measured(folder)))


def digest(folder: Path) -> str:
    rows = json.loads((folder / "conditions.json").read_text())["tasks"]["hitom"]["rows"]
    assert len(rows) == 4
    return rows_hash(rows)


def prompts(folder: Path) -> str:
    hashes = json.loads((folder / "summary.json").read_text())["prompts"]["hitom"]
    assert set(hashes) == {"user"}
    return prompts_digest(hashes)


def alike(folder: Path) -> dict[str, Any]:
    """What a source would state that measured like the run."""
    return {"protocol": "paper", "temperature": 0.5, "rows": {"hitom": digest(folder)},
            "prompts": {"hitom": prompts(folder)}}  # fmt: skip


def test_a_figure_that_was_measured_alike_is_comparable(played: Path) -> None:
    """No judge is asked in this task, so none has to match."""
    assert doubts(played, **alike(played)) == []


@pytest.mark.parametrize(
    ("other", "doubt"),
    [
        ({"protocol": "reference"}, "protocol reference, this run: paper"),
        ({"temperature": 1.0}, "temperature 1, this run: 0.5"),
        ({"rows": {"hitom": "0" * 64}}, "other rows"),
        ({"rows": {}}, "rows unstated"),
        ({"temperature": None}, "temperature unstated"),
        ({"protocol": ""}, "protocol unstated"),
        ({"prompts": {}}, "soulkit's own prompts"),
        ({"prompts": {"tomi": "0" * 64}}, "soulkit's own prompts"),
        ({"prompts": {"hitom": "0" * 64}}, "other prompts"),
    ],
)
def test_one_difference_is_enough_for_doubt(
    other: dict[str, Any], doubt: str, played: Path
) -> None:
    assert doubts(played, **{**alike(played), **other}) == [doubt]


def test_a_judge_has_to_match_where_one_is_asked(played: Path, tmp_path: Path) -> None:
    folder = tmp_path / "judged"
    folder.mkdir()
    record = json.loads((played / "conditions.json").read_text())
    record["tasks"]["hitom"]["roles"] = ["judge"]
    record["tasks"]["hitom"]["players"] = {"judge": [{"kind": "endpoint", "model": "gpt-5-nano"}]}
    (folder / "conditions.json").write_text(json.dumps(record))
    (folder / "config.yaml").write_text((played / "config.yaml").read_text())
    (folder / "summary.json").write_text((played / "summary.json").read_text())
    stated = alike(played)
    assert doubts(folder, **stated, judges={"*": "gpt-5-nano"}) == []
    assert doubts(folder, **stated, judges={"*": "gpt-5-nano", "hitom": "gpt-5.4"}) == [
        "judge gpt-5.4, this run: gpt-5-nano"
    ]
    assert doubts(folder, **stated) == ["judge unstated"]


def judged(folder: Path, judges: dict[str, str]) -> Path:
    """A run of several judged tasks, `judges` naming each task's own."""
    folder.mkdir()
    players = {task: [{"kind": "endpoint", "model": who}] for task, who in judges.items()}
    entry = {"roles": ["judge"], "sampling": {"temperature": 1.0}, "rows": {"a": "1"}}
    tasks = {task: {**entry, "players": {"judge": players[task]}} for task in judges}
    union = [player for several in players.values() for player in several]
    (folder / "conditions.json").write_text(
        json.dumps({"players": {"judge": union}, "tasks": tasks})
    )
    (folder / "config.yaml").write_text("kind: api\nmodel: m\nprotocol: paper\n")
    hashes = {"prompts": {task: {"user": ["1"]} for task in judges}}
    (folder / "summary.json").write_text(json.dumps(hashes))
    return folder


PAPER = {"fantom": "gpt-5-nano", "coser": "gpt-5.4", "mirrorbench": "gpt-5.4"}


@pytest.mark.parametrize(
    ("played", "doubt"),
    [
        (PAPER, {}),
        ({"coser": "gpt-5.4"}, {}),
        ({**PAPER, "mirrorbench": "gpt-5-nano"},
         {"judge gpt-5.4, this run: gpt-5-nano": ["mirrorbench"]}),
        ({**PAPER, "fantom": "mine", "sotopia": "mine"},
         {"judge gpt-5-nano, this run: mine": ["fantom", "sotopia"]}),
    ],
)  # fmt: skip
def test_the_judge_of_a_task_is_compared_and_not_all_judges_of_the_run(
    played: dict[str, str], doubt: dict[str, list[str]], tmp_path: Path
) -> None:
    paper = next(table for table in publications() if table.stated.judges)
    run = read_measured(judged(tmp_path / "run", played))
    stated = replace(
        paper.stated, protocol="paper", temperature=1.0,
        rows={task: rows_hash({"a": "1"}) for task in played},
        prompts={task: prompts_digest({"user": ["1"]}) for task in played},
    )  # fmt: skip
    assert context_doubts(replace(paper, stated=stated), played, run) == doubt


def test_rows_that_a_run_did_not_record_match_nothing(played: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("kind: api\nmodel: m\n")
    named = doubts(tmp_path, **alike(played))
    assert {f"{what} not recorded by this run" for what in ("rows", "protocol", "prompts")} <= set(
        named
    )


def test_no_published_table_claims_to_be_comparable(played: Path) -> None:
    for table in publications():
        doubts = context_doubts(table, ["hitom"], read_measured(played))
        assert "soulkit's own prompts" in doubts, table.title
        assert isinstance(table, Publication) and not table.stated.rows
        assert not table.stated.prompts


def test_the_prompts_of_a_run_have_one_hash_in_any_order() -> None:
    one = prompts_digest({"user": ["a", "b"], "judge": ["c"]})
    assert one == prompts_digest({"judge": ["c"], "user": ["b", "a"]})
    assert one != prompts_digest({"user": ["a"], "judge": ["c"]})


def test_no_table_states_a_temperature_that_its_source_does_not() -> None:
    """Neither the paper nor a model card says at which temperature it evaluated."""
    assert all(table.stated.temperature is None for table in publications())


def test_a_known_difference_is_named_below_the_column(played: Path) -> None:
    paper = publications()[0]
    doubts = context_doubts(paper, ["hitom", "userllm"], read_measured(played))
    (why,) = (reason for reason in doubts if "Pangram" in reason)
    assert doubts[why] == ["userllm"] and "LLM judge" in why
    below = published_footnote([(paper.title, doubts_text(doubts, 2))])
    assert below.startswith(CAVEAT) and f"{why} (userllm)" in below
    assert "Pangram" not in doubts_text(context_doubts(paper, ["hitom"], read_measured(played)), 1)
    assert published_footnote([]) == ""


def test_doubts_in_words() -> None:
    words = doubts_text({"temperature 1, this run: 0": ["a"], "rows unstated": ["a", "b"],
                         "protocol unstated": ["a", "b"]}, 2)  # fmt: skip
    assert words == "temperature 1, this run: 0 (a); the source does not state rows, protocol"
    assert doubts_text({"other rows": list("abcd")}, 9) == "other rows (4 tasks)"
    assert doubts_text({}, 3) == ""
