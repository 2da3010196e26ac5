"""Customers before an agent with tools: played, surveyed, scored and compared, through the command.

The runtime, the agent and the customer are real servers on loopback; the agent and the customer
follow the scripts of tests/support/desk.py.

The user's files: of the right shape they are read, of another they are refused in three lines.

Every file here is made; those of people are not in this repository.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.tasks.kit.importing import import_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.tau_usi.index import LISTED, SURVEY, simulation_index
from soulkit.tasks.tau_usi.people import (
    missing_files,
    read_difficulty,
    read_human_data,
    read_lexicons,
)
from tests.support.desk import LISTS, answering, call, clerk, customer, write_people
from tests.support.evaluation import records, soul, summary, three_lines
from tests.support.road import synth, task_of
from tests.support.servers.openai_server import ScriptedServer
from tests.support.servers.runtime_server import DeskRuntime

Body = dict[str, Any]
Answer = Callable[[Body], str]
REST = ("--backoff", 0, "--seed", 1)


def write_rows(path: Path, n: int, domain: str = "retail") -> Path:
    rows = [{"env_name": domain, "task_index": i} for i in range(n)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


@contextmanager
def table(
    actor: Answer = customer, agent: Answer = clerk, **servers: Any
) -> Iterator[tuple[list[Any], ScriptedServer, ScriptedServer]]:
    """(the players' options, the actor's server, the agent's)."""
    with (
        ScriptedServer(answer=actor, **servers) as one,
        ScriptedServer(answer=agent, **servers) as two,
    ):
        players = ["--model", "m", "--base-url", one.base_url, "--task", "tau_usi",
                   "--partner", f"endpoint:a@{two.base_url}", *REST]  # fmt: skip
        yield players, one, two


def evaluated(out: Path, data: object, *options: Any, **players: Any) -> int:
    with table(**players) as (arguments, _, _):
        data_option = ("--data", f"tau_usi={data}")
        return soul("eval", "api", *arguments, *data_option, "--out", out, *options)


# --- the built-in domain --------------------------------------------------------------------------


def test_customers_of_the_made_desk_are_helped_and_answer(tmp_path: Path) -> None:
    assert evaluated(tmp_path / "run", "synth:8") == 0
    played = records(tmp_path / "run")
    assert [record.score.value for record in played] == [1.0] * 8
    for record in played:
        episode, metrics = record.episode, record.score.metrics
        assert episode.stop == "stop" and record.score.status == "ok"
        assert episode.notes["answers"].keys() == SURVEY.keys()
        assert episode.transcript[0].seat == "agent" and episode.transcript[-1].seat == "survey"
        assert metrics["survey/answered"] == 1 and metrics["survey/overall_score"] == 0
        assert metrics["turns"] == len(episode.traces[0].turns) - 1
        assert (metrics["tool_calls"] or 0) >= 2 and metrics["format_errors"] == 0
        assert all(metrics[name] is None for name in LISTED)
        assert metrics["opening_words"] == 6
    assert {r.score.metrics["tool_calls"] for r in played} == {2, 3, 4}
    cells = summary(tmp_path / "run")["tasks"]["tau_usi"]
    assert cells["opening_words"]["mean"] == 6
    assert cells["usi"]["mean"] is None and "D1_conv" not in cells


def test_the_agent_sees_no_instruction_and_the_customer_no_tools(tmp_path: Path) -> None:
    with table() as (arguments, actor, agent):
        data = ("--data", "tau_usi=synth:4", "--out", tmp_path / "run")
        assert soul("eval", "api", *arguments, *data) == 0
        texts = [json.dumps(body["messages"]) for body in actor.requests]
        assert not any("find_member" in text or "Rules of the desk" in text for text in texts)
        for body in agent.requests:
            assert "You do not know the numbers" not in json.dumps(body["messages"])
            roles = [message["role"] for message in body["messages"]]
            assert roles[:3] == ["system", "assistant", "user"]


def test_what_is_missing_for_the_index_is_said(tmp_path: Path, capfd: Any) -> None:
    assert evaluated(tmp_path / "run", "synth:2") == 0
    remarks = capfd.readouterr().err
    assert "no USI" in remarks and "human_file" in remarks and "cmu-lti/tau-usi" in remarks


def test_an_agent_may_mend_a_call_and_is_told_how(tmp_path: Path) -> None:
    def clumsy(body: Body) -> str:
        line = clerk(body)
        corrected = any("call that can be made" in m["content"] for m in body["messages"])
        return line if corrected else line.replace("</function>", "")

    assert evaluated(tmp_path / "run", "synth:2", agent=clumsy) == 0
    for record in records(tmp_path / "run"):
        assert record.score.value == 1 and record.score.metrics["format_errors"] == 1


@pytest.mark.parametrize(
    ("agent", "why"),
    [(lambda body: "", "said nothing"), (lambda body: call("list_loans"), "called tools 5 times")],
)
def test_an_agent_that_never_speaks_is_not_the_customers_fault(
    tmp_path: Path, agent: Answer, why: str
) -> None:
    options = ("--option", "tool_rounds=5", "--max-unscored", 0)
    assert evaluated(tmp_path / "run", "synth:1", *options, agent=agent) == 1
    (record,) = records(tmp_path / "run")
    assert record.score.value is None and record.score.reason == "partner_error"
    assert why in record.score.words
    assert record.episode.usage.calls == 1 + (2 if why == "said nothing" else 6)


def test_a_customer_who_says_nothing_fails_by_itself(tmp_path: Path) -> None:
    assert evaluated(tmp_path / "run", "synth:2", actor=lambda body: "") == 1, "it stayed silent"
    for record in records(tmp_path / "run"):
        assert (record.score.value, record.score.status) == (0, "empty")
        assert "answers" not in record.episode.notes


def test_a_customer_without_an_end_stops_at_the_limit(tmp_path: Path) -> None:
    options = ("--option", "max_turns=3")
    endless = answering("no object")
    assert evaluated(
        tmp_path / "run", "synth:1", *options,
        actor=lambda b: endless(b).replace("###STOP###", "and more"), agent=lambda b: "Well.",
    ) == 0  # fmt: skip
    (record,) = records(tmp_path / "run")
    assert record.episode.stop == "max_turns" and record.score.metrics["turns"] == 3
    # Neither the first answers nor those to the second question could be read.
    assert record.episode.notes["answers"] == {} and record.score.metrics["survey/answered"] == 0
    assert [line.seat for line in record.episode.transcript][-2:] == ["survey", "survey"]
    assert record.score.metrics["survey/reuse"] is None


# --- a runtime ------------------------------------------------------------------------------------


def test_rows_of_a_runtime_are_played_there(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 4)
    with DeskRuntime({("/step", 3): "hang up"}) as runtime:
        url = ("--option", f"runtime_url={runtime.url}")
        assert evaluated(tmp_path / "run", rows, *url) == 0
        assert runtime.paths().count("/reward") == 4
    played = records(tmp_path / "run")
    assert [record.score.value for record in played] == [1.0] * 4
    assert {r.episode.notes["instance_id"] for r in played} == {f"retail_{i}" for i in range(4)}


def test_a_runtime_that_is_not_there_is_named_before_anything_is_asked(
    tmp_path: Path, capfd: Any
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 2)
    with table() as (arguments, actor, _):
        data = ("--data", f"tau_usi={rows}", "--out", tmp_path / "run")
        assert (
            soul("eval", "api", *arguments, *data, "--option", "runtime_url=http://127.0.0.1:9")
            == 2
        )
        assert actor.requests == []
    what, _, fix = three_lines(capfd.readouterr().err)
    assert "http://127.0.0.1:9" in what and "runtime_url" in fix
    assert not (tmp_path / "run").exists()


def test_a_runtime_that_breaks_leaves_episodes_unscored(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 3)
    with DeskRuntime({("/reward", 0): 500}) as runtime:
        url = ("--option", f"runtime_url={runtime.url}")
        assert evaluated(tmp_path / "run", rows, *url, "--concurrency", 1) == 1
    scores = [record.score for record in records(tmp_path / "run")]
    assert [score.value for score in scores].count(None) == 1
    assert {score.reason for score in scores if score.value is None} == {"partner_error"}


# --- the index ------------------------------------------------------------------------------------


def file_options(folder: Path, n: int) -> list[str]:
    folder.mkdir()
    files = write_people(folder, range(30_000, 30_000 + n))
    return [part for name, path in files.items() for part in ("--option", f"{name}={path}")]


def test_with_the_users_files_there_is_an_index(tmp_path: Path) -> None:
    options = file_options(tmp_path / "files", 12)
    assert evaluated(tmp_path / "run", "synth:8", *options) == 0
    cells = summary(tmp_path / "run")["tasks"]["tau_usi"]
    usi = cells["usi"]
    assert usi["headline"] and (usi["n_scored"], usi["n"]) == (8, 12)
    parts = [cells[name]["mean"] for name in ("D1_conv", "D2_info", "D3_clarif", "D4_react")]
    # The index of one batch is the mean of its terms; so is their mean over the batches.
    assert usi["mean"] == pytest.approx((sum(parts) + 100 * (1 - cells["ece"]["mean"])) / 5)
    assert cells["ece"]["mean"] == pytest.approx(0.5, abs=0.05)  # all helped, of people one in two
    assert 0 < usi["ci_low"] <= usi["mean"] <= usi["ci_high"] <= 100
    assert all(r.score.metrics["politeness_rate"] is not None for r in records(tmp_path / "run"))


def test_two_runs_are_compared_by_the_index_on_its_own_scale(tmp_path: Path, capfd: Any) -> None:
    def polite(body: Body) -> str:
        return customer(body).replace("Hi,", "Please, hi,")

    options = file_options(tmp_path / "files", 6)
    assert evaluated(tmp_path / "a", "synth:6", *options) == 0
    assert evaluated(tmp_path / "b", "synth:6", *options, actor=polite) == 0
    capfd.readouterr()
    assert soul("compare", tmp_path / "a", tmp_path / "b", "--force-mixed", "--json") == 0
    (line,) = json.loads(capfd.readouterr().out)["tasks"]
    means = [summary(tmp_path / name)["tasks"]["tau_usi"]["usi"]["mean"] for name in "ab"]
    assert line["metric"] == "usi" and [line["mean_a"], line["mean_b"]] == pytest.approx(means)
    assert line["difference"] == pytest.approx(means[1] - means[0]) != 0


@pytest.mark.parametrize("option", ["human_file", "lexicons", "difficulty", "survey_file"])
def test_a_file_that_is_not_there_stops_the_run_also_where_others_are_missing(
    tmp_path: Path, capfd: Any, option: str
) -> None:
    wrong = ("--option", f"{option}={tmp_path / 'nowhere.json'}")
    assert evaluated(tmp_path / "run", "synth:1", *wrong) == 2
    what, _, _ = three_lines(capfd.readouterr().err)
    assert option in what and "nowhere.json" in what and not (tmp_path / "run").exists()


def test_people_of_other_tasks_are_refused_and_so_are_unknown_difficulties(
    tmp_path: Path, capfd: Any
) -> None:
    def chosen(folder: Path, numbers: range) -> list[str]:
        folder.mkdir()
        files = write_people(folder, numbers)
        return [word for name, path in files.items() for word in ("--option", f"{name}={path}")]

    options = chosen(tmp_path / "others", range(3))
    assert evaluated(tmp_path / "run", "synth:2", *options) == 2
    what, why, fix = three_lines(capfd.readouterr().err)
    assert "human_file" in what and "tool_library_" in why and "soul data import" in fix
    options = chosen(tmp_path / "same", range(30_000, 30_003))
    (tmp_path / "same" / "difficulty.json").write_text('{"retail_1": 0.5}', encoding="utf-8")
    assert evaluated(tmp_path / "run", "synth:2", *options) == 2
    assert "difficulty" in three_lines(capfd.readouterr().err)[0]


@pytest.mark.parametrize("option", ["max_turns=0", "tool_rounds=-1", "runtime_wait_s=-1"])
def test_options_that_nobody_could_play_by_are_refused(
    tmp_path: Path, capfd: Any, option: str
) -> None:
    assert evaluated(tmp_path / "run", "synth:1", "--option", option) == 2
    assert option.partition("=")[0] in three_lines(capfd.readouterr().err)[0]


def test_the_services_success_does_not_stand_in_for_an_index_that_a_run_lacks(
    tmp_path: Path, capfd: Any
) -> None:
    options = file_options(tmp_path / "files", 2)
    with table() as (arguments, _, _):
        for name, more in (("a", []), ("b", options)):
            data = ("--data", "tau_usi=synth:2", "--out", tmp_path / name)
            assert soul("eval", "api", *arguments, *data, *more) == 0
    for other, lone in (("b", "A"), ("a", "A and B")):
        capfd.readouterr()
        assert soul("compare", tmp_path / "a", tmp_path / other) == 2
        what, _, fix = three_lines(capfd.readouterr().err)
        assert (
            "'usi'" in what and what.endswith(f"undefined in {lone}.") and "service_success" in fix
        )
    assert soul("compare", tmp_path / "a", tmp_path / "b", "--metric", "service_success") == 0


def test_runs_with_other_word_lists_are_not_compared(tmp_path: Path, capfd: Any) -> None:
    with table() as (arguments, _, _):
        for name in "ab":
            options = file_options(tmp_path / f"files_{name}", 3)
            if name == "b":
                lists = {**LISTS, "pivot_rate": "instead|rather"}
                (tmp_path / "files_b" / "lexicons.json").write_text(json.dumps(lists))
            out = ("--out", tmp_path / name, "--data", "tau_usi=synth:3")
            assert soul("eval", "api", *arguments, *options, *out) == 0
    capfd.readouterr()
    assert soul("compare", tmp_path / "a", tmp_path / "b") == 2
    assert "lexicons" in " ".join(three_lines(capfd.readouterr().err))


def test_a_plan_says_what_is_likely_beside_what_is_possible(capfd: Any) -> None:
    players = ("--model", "gpt-4.1-mini", "--partner", "endpoint:gpt-4.1-mini@https://h.example/v1")
    prices = ("--price-in", 1, "--price-out", 1)
    command = ("plan", "eval", "api", *players, *prices, "--task", "tau_usi", "--json")
    assert soul(*command, "--data", "tau_usi=synth:3") == 0
    (plan,) = json.loads(capfd.readouterr().out)["tasks"]
    loads = {load["role"]: load for load in plan["asked"]}
    assert loads["actor"]["calls"] == 3 * 82 and loads["partner"]["calls"] == 3 * 80 * 65
    assert loads["actor"]["reply_tokens"] == 3 * 10 * 120  # nine turns and the survey
    assert loads["partner"]["reply_tokens"] == 3 * 18 * 120
    assert loads["actor"]["cost"] * 100 < loads["actor"]["cost_limit"]


def test_a_finished_run_is_replayed_without_any_server(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 3)
    with DeskRuntime() as runtime, table() as (arguments, _, _):
        options = ["--data", f"tau_usi={rows}", "--option", f"runtime_url={runtime.url}"]
        assert soul("eval", "api", *arguments, *options, "--out", tmp_path / "run") == 0
    replay = ("--ledger", "replay", "--ledger-file", tmp_path / "run" / "ledger.sqlite")
    assert soul("eval", "api", *arguments, *options, *replay, "--out", tmp_path / "again") == 0
    assert summary(tmp_path / "again")["tasks"] == summary(tmp_path / "run")["tasks"]


# --- rows and scripts -----------------------------------------------------------------------------


def test_made_rows_are_numbers_and_those_of_the_published_domains_end() -> None:
    task = task_of("tau_usi")
    assert synth("tau_usi", 3, 1) == [
        {"env_name": "tool_library", "task_index": 10_000 + i,
         "instance_id": f"tool_library_{10_000 + i}"} for i in range(3)
    ]  # fmt: skip
    rows = task.spec.hook("tau_usi", "synth")(n=900, seed=3, options={"--domain": "airline"})
    assert len(rows) == 50 and rows[-1]["instance_id"] == "airline_49"
    example = task.example(rows[-1])
    assert task.gold(example) is None and task.wrong(example) is None
    assert "instruction" not in {k for k, v in example.fields.items() if v is not None}
    assert len({task.example(row).id for row in rows}) == 50


def test_gold_is_right_and_wrong_is_wrong_of_every_kind_of_wish() -> None:
    task = task_of("tau_usi")
    for row in synth("tau_usi", 8, 0):
        example = task.example(row)
        gold, wrong = task.gold(example), task.wrong(example)
        assert (gold.notes["service_reward"], wrong.notes["service_reward"]) == (1, 0)
        assert bool(task.gold_text(example) != "no change") == (gold.notes["tool_calls"] > 0)


def test_it_stands_beside_the_axes_and_in_no_other_suite() -> None:
    registry = load_registry()
    named = [name for name, suite in registry.suites.items() if "tau_usi" in suite.tasks]
    assert named == ["soul-agent"]
    assert registry.suites["soul-agent"].average == ""


def options(folder: Path, **more: str) -> dict[str, str]:
    return {**write_people(folder, range(4)), **more}


def test_people_come_in_batches_without_what_was_thrown_out(tmp_path: Path) -> None:
    people = read_human_data(options(tmp_path))
    assert people is not None and people.survey is None
    # One entry of the second batch has keep: false.
    assert [len(batch) for batch in people.batches] == [4, 3, 4]
    talk = people.batches[0]["tool_library_0"]
    assert talk.features["user_words_per_turn"] == 4  # commands of the study's page are no turns
    assert talk.features["politeness_rate"] == 0.5
    assert talk.success and talk.answers["reuse"] == "Maybe"
    assert people.difficulty["tool_library_1"] == 0.3


def test_what_is_missing_is_named_and_nothing_is_read(tmp_path: Path) -> None:
    chosen = options(tmp_path, lexicons="")
    assert missing_files(chosen) == ["lexicons"]
    assert read_human_data(chosen) is None
    assert missing_files({}) == ["human_file", "lexicons", "difficulty"]


def test_the_models_answers_about_peoples_conversations(tmp_path: Path) -> None:
    file = tmp_path / "survey.json"
    file.write_text(json.dumps({"tool_library_0_ann3": {"survey": {"reuse": {"answer": "Maybe"}}}}))
    people = read_human_data(options(tmp_path, survey_file=str(file)))
    assert people is not None and people.survey == 100


def test_lists_may_be_words(tmp_path: Path) -> None:
    file = tmp_path / "lists.yaml"
    file.write_text(json.dumps({**LISTS, "emotion_rate": ["Cross", "fed up"]}))
    pattern = read_lexicons(str(file))["emotion_rate"]
    assert (
        pattern.search("i am fed up.") and pattern.search("cross") and not pattern.search("across")
    )


def test_difficulties_of_few_samples_say_nothing(tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    shares = {
        "a_1": 0.5,
        "a_2": {"success": 0.1, "samples": 9},
        "a_3": {"success": 1, "samples": 10},
    }
    file.write_text(json.dumps(shares))
    assert read_difficulty(str(file)) == {"a_1": 0.5, "a_3": 1.0}


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("lexicons", json.dumps({LISTED[0]: "a"}), "lack"),
        ("lexicons", json.dumps({**LISTS, "pivot_rate": "(("}), "pivot_rate"),
        ("lexicons", json.dumps({**LISTS, "pivot_rate": 3}), "pivot_rate"),
        ("difficulty", json.dumps({"a_1": 62}), "is not a share"),
        ("difficulty", "[0.5]", "has the wrong format"),
        ("human_file", "{}", "has the wrong format"),
        ("human_file", json.dumps({"retail_1": [1]}), "has the wrong format"),
        ("human_file", "no JSON", "cannot be read"),
    ],
)
def test_files_of_another_shape_are_refused(
    tmp_path: Path, option: str, content: str, words: str
) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(DataError) as caught:
        read_human_data(options(tmp_path, **{option: str(file)}))
    assert words in caught.value.what and all(caught.value.lines())


def test_a_file_that_is_not_there_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_human_data(options(tmp_path, human_file=str(tmp_path / "nowhere.json")))
    assert "human_file" in caught.value.what and "terms" in caught.value.way_out


@pytest.mark.parametrize("samples", ["many", None, True, [93]])
def test_samples_that_are_no_number_are_refused(tmp_path: Path, samples: Any) -> None:
    file = tmp_path / "difficulty.json"
    file.write_text(json.dumps({"retail_1": {"success": 0.5, "samples": samples}}))
    with pytest.raises(DataError, match="retail_1"):
        read_difficulty(str(file))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [({"conversation": "hello", "reward": 1}, "conversation"), ({"reward": 1}, "conversation"),
     ({"conversation": 7}, "conversation"),
     ({"conversation": [{"role": "user", "content": "hello"}]}, "reward")],
)  # fmt: skip
def test_people_of_whom_nothing_can_be_read_are_refused(
    tmp_path: Path, entry: dict[str, Any], expected: str
) -> None:
    chosen = options(tmp_path)
    Path(chosen["human_file"]).write_text(json.dumps({"tool_library_1": entry}))
    with pytest.raises(DataError) as caught:
        read_human_data(chosen)
    assert expected in caught.value.why


def test_a_person_without_a_reward_did_not_fail(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    file = Path(chosen["human_file"])
    entries = json.loads(file.read_text())
    entries["tool_library_0"]["reward"] = None
    file.write_text(json.dumps(entries))
    people = read_human_data(chosen)
    assert people is not None
    batch = people.batches[0]
    assert batch["tool_library_0"].success is None
    # Of the others 1 and 3 failed and 2 succeeded, as its customer did.
    alone = simulation_index(
        [{"tool_library_2": batch["tool_library_2"]}], [batch], people.difficulty
    )
    without = {"tool_library_0": batch["tool_library_0"]}
    assert alone is not None and alone.ece == 0
    assert simulation_index([without], [batch], people.difficulty) is None


def test_rows_come_of_the_ids_alone_and_are_marked(tmp_path: Path) -> None:
    file = tmp_path / "unified.json"
    secret: dict[str, Any] = {"conversation": [{"role": "user", "content": "private words"}]}
    ids = ("retail_12", "retail_12_ann2", "airline_3_ann3", "odd")
    file.write_text(json.dumps(dict.fromkeys(ids, secret)))
    imported = import_rows(task_of("tau_usi"), file)
    assert [(row["env_name"], row["task_index"]) for row in imported.rows] == [
        ("retail", 12), ("airline", 3),
    ]  # fmt: skip
    assert all(row["evaluation_only"] is True for row in imported.rows)
    assert "private" not in json.dumps(imported.rows) and len(imported.bad) == 1
    file.write_text('{"odd": {}}')
    with pytest.raises(DataError):
        import_rows(task_of("tau_usi"), file)
