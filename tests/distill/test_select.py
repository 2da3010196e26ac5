"""Which samples are learned from: the rules alone, without files.

From episodes to rows: every reply once, in the context that it had, with its exact ids.

Samples and what is selected of them, over real servers on loopback: any engine will do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.distill.config import DistillConfig
from soulkit.distill.experts import Expert, find_experts
from soulkit.distill.generalist import generalist_config, generalist_folder
from soulkit.distill.sample import (
    budget_left,
    find_overlaps,
    sample,
    sample_config,
    samples_folder,
    training_work,
)
from soulkit.distill.select import (
    SampleChoice,
    SampleFacts,
    SampleSelection,
    SelectionRules,
    choose_samples,
    lesson_conversations,
    lesson_lines,
    passing_samples,
    read_selection,
    sample_facts,
    select_samples,
)
from soulkit.errors import ConfigError, DataError, RunError
from soulkit.runs.folder import read_config
from soulkit.runs.jsonl import read_jsonl
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.kit.made_rows import made_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.types import Completion, Episode, Feedback, Record, Score, Segment, Trace, Turn
from tests.support.distilling import distillation
from tests.support.evaluation import Body, keeper, last_message, paid, records, summary, visitor
from tests.support.reporting import Heard
from tests.support.servers.openai_server import ScriptedServer

YES_NO = SelectionRules(high=1.0, low=0.0, binary=True)
GRADED = SelectionRules(high=1.0, low=0.0, binary=False)


def one(row: str, rollout: int, reward: float | None = 1.0, **facts: Any) -> SampleFacts:
    """A sample; unless told otherwise its reply is like no other's."""
    plain: dict[str, Any] = {"replies": (f"{row}", f"{rollout}"), "tokens": 5}
    return SampleFacts(f"0/{row}/{rollout}/draft", row, reward, **(plain | facts))


def keys(choice: SampleChoice) -> list[str]:
    return [sample.key for sample in choice.taken]


def test_full_reward_where_a_score_is_yes_or_no() -> None:
    samples = [one("a", 0, 0.0), one("a", 1, 1.0), one("b", 0, 0.5)]
    assert [s.key for s in passing_samples(samples, YES_NO)] == ["0/a/1/draft"]


def test_rules_have_the_defaults_of_the_settings() -> None:
    rules, fields = SelectionRules(high=1.0, low=0.0, binary=True), DistillConfig.model_fields
    for name in ("min_reward", "keep_top", "quota", "near"):
        assert getattr(rules, name) == fields[name].default, name


def test_graded_rewards_must_rise_above_their_prompt() -> None:
    samples = [
        one("hard", 0, 0.1), one("hard", 1, 0.3),
        one("easy", 0, 0.8), one("easy", 1, 0.9), one("easy", 2, 1.0),
        one("flat", 0, 0.2), one("flat", 1, 0.2), one("high", 0, 0.7), one("low", 0, 0.0),
    ]  # fmt: skip
    passed = {s.key for s in passing_samples(samples, GRADED)}
    assert passed == {"0/hard/1/draft", "0/easy/2/draft", "0/high/0/draft"}
    assert len(passing_samples(samples, replace(GRADED, min_reward=0.2))) == 7
    nothing = [one("a", 0, 0.0), one("b", 0, 0.0)]
    assert passing_samples(nothing, GRADED) == []  # all alike, and the least there is


def test_the_best_of_a_prompt_in_the_order_that_is_written_down() -> None:
    samples = [
        one("a", 0, 0.9, tokens=9), one("a", 1, 0.9, tokens=3), one("a", 2, 0.8, tokens=1),
        one("a", 3, 0.9, tokens=3), one("a", 4, 0.9, tokens=1, salvaged=True),
    ]  # fmt: skip
    rules = replace(GRADED, min_reward=0.5, keep_top=3)
    assert keys(choose_samples(samples, rules)) == ["0/a/1/draft", "0/a/3/draft", "0/a/0/draft"]


def test_a_quota_is_spread_over_prompts() -> None:
    samples = [one(row, n) for row in "abcdef" for n in range(3)]
    rules = replace(YES_NO, keep_top=3, quota=4)
    choice = choose_samples(samples, rules)
    assert len(choice.taken) == 4 and len({s.example_id for s in choice.taken}) == 4
    others = choose_samples(samples, replace(rules, seed=1))
    assert {s.example_id for s in others.taken} != {s.example_id for s in choice.taken}
    assert len(choose_samples(samples, replace(rules, quota=None)).taken) == 18


def test_duplicates_of_a_prompt_and_of_its_like() -> None:
    words = ("the", "cat", "sat", "on", "the", "mat", "and", "then", "it", "slept", "for", "hours")
    near = (*words[:-1], "days")
    samples = [
        one("a", 0, replies=words), one("a", 1, replies=words), one("a", 2, replies=near),
        one("a", 3, replies=("no",)), one("b", 0, replies=words), one("c", 0, replies=words),
    ]  # fmt: skip
    choice = choose_samples(samples, replace(YES_NO, keep_top=4), alike={"a": ["b"], "b": ["a"]})
    rows = sorted(s.example_id for s in choice.taken)
    assert choice.duplicates == 3 and rows.count("c") == 1
    assert rows.count("a") + rows.count("b") == 2  # the words once, and "no"
    exact = choose_samples(samples, replace(YES_NO, keep_top=4, near=1.0), alike={"a": ["b"]})
    assert any(s.replies == near for s in exact.taken)


def test_overlapping_rows_are_never_taken() -> None:
    choice = choose_samples([one("a", 0), one("b", 0), one("b", 1)], YES_NO, overlapping={"b"})
    assert keys(choice) == ["0/a/0/draft"] and choice.overlaps == 2 and choice.passed == 1


@given(st.integers(0, 10_000))
def test_the_order_of_samples_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    samples = [
        one(row, n, rng.choice([None, 0.0, 0.4, 1.0]), replies=(rng.choice("xyz"),) * 2)
        for row in "abcd" for n in range(4)
    ]  # fmt: skip
    rules = replace(GRADED, keep_top=rng.choice([1, 2]), quota=rng.choice([None, 3]))
    alike = {"a": ["b"], "b": ["a"]}
    first = choose_samples(samples, rules, alike=alike)
    rng.shuffle(samples)
    assert choose_samples([*samples, samples[0]], rules, alike=alike) == first


# -- what is known of a record --------------------------------------------------------------------


def record(score: Score, *texts: str, stop: str = "stop", **facts: Any) -> Record:
    turns = tuple(Turn((), Completion(text=t, token_ids=(1, 2), stop_reason=stop)) for t in texts)
    episode = Episode(example_id="a", task="t", traces=(Trace("reader", turns),))
    return Record(
        key="0/a/0/draft", task="t", example_id="a", rollout=0, kind="draft", episode=episode,
        score=score, **facts,
    )  # fmt: skip


FULL = Score(value=1.0, reward=1.0)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (record(FULL, "yes"), ""),
        (record(replace(FULL, status="salvaged"), "yes"), ""),
        (record(replace(FULL, value=None, reward=None, status="unscored"), "yes"), "unscored"),
        (record(replace(FULL, reward=None), "yes"), "unscored"),
        (record(replace(FULL, reward=float("nan")), "yes"), "unscored"),
        (record(replace(FULL, status="forged"), "yes"), "forged"),
        (record(replace(FULL, status="hacked"), "yes"), "hacked"),
        (record(replace(FULL, metrics={"hacked": 1.0}), "yes"), "hacked"),
        (record(replace(FULL, status="truncated"), "yes"), "truncated"),
        (record(FULL, "yes", stop="length"), "truncated"),
        (record(replace(FULL, status="refusal"), "yes"), "refusal"),
        (record(FULL), "empty"),
        (record(FULL, "yes", given=Feedback(text="try again", author="symbolic")), "conditioned"),
    ],
)
def test_what_is_never_learned_from(line: Record, fault: str) -> None:
    known_facts = sample_facts(line)
    assert known_facts.fault == fault
    assert (known_facts.reward is None) == bool(fault)
    assert choose_samples([known_facts], YES_NO).passed == (not fault)


def test_replies_of_signs_alone_differ() -> None:
    assert sample_facts(record(FULL, "?!")).replies != sample_facts(record(FULL, "...")).replies
    assert sample_facts(record(FULL, "Yes, sir.", "No")).replies == ("yes", "sir", "no")
    assert sample_facts(record(FULL, "a", "b")).tokens == 4


RULES, HELLO = Segment("system", "Be brief."), Segment("user", "Hello.")


def reply(text: str, *ids: int) -> Segment:
    return Segment("assistant", text, token_ids=ids)


def turn(text: str, *context: Segment, ids: tuple[int, ...] = ()) -> Turn:
    return Turn(context, Completion(text=text, token_ids=ids))


def shape(trace: Trace) -> list[list[tuple[str, bool]]]:
    return [[(one.text, trained) for one, trained in part] for part in lesson_conversations(trace)]


def test_a_dialogue_is_one_conversation() -> None:
    second = (RULES, HELLO, reply("Hi.", 5, 2), Segment("user", "Well?"))
    trace = Trace("a", (turn("Hi.", RULES, HELLO, ids=(5, 2)), turn("Yes.", *second, ids=(6, 2))))
    assert shape(trace) == [
        [("Be brief.", False), ("Hello.", False), ("Hi.", True), ("Well?", False), ("Yes.", True)]
    ]


def test_another_context_begins_another_conversation() -> None:
    other = (Segment("system", "A memory."), HELLO, reply("Hi.", 5, 2), Segment("user", "Well?"))
    trace = Trace("a", (turn("Hi.", RULES, HELLO, ids=(5, 2)), turn("Yes.", *other, ids=(6, 2))))
    first, second = shape(trace)
    assert first[-1] == ("Hi.", True) and len(first) == 3
    assert second[2] == ("Hi.", False) and second[-1] == ("Yes.", True)
    # The same words with other ids are other words.
    again = (RULES, HELLO, reply("Hi.", 7, 2), Segment("user", "Well?"))
    apart = Trace("a", (turn("Hi.", RULES, HELLO, ids=(5, 2)), turn("Yes.", *again, ids=(6, 2))))
    assert len(lesson_conversations(apart)) == 2
    assert sum(trained for part in lesson_conversations(apart) for _, trained in part) == 2


def test_rows_of_every_seat_without_feedback() -> None:
    slot = Segment("user", "Hello. Hint: tea.", bare="Hello. ")
    traces = (
        Trace("a", (turn("Hi.", RULES, slot, ids=(5, 2)),)),
        Trace("b", (turn("Ho.", RULES, reply("Ha."), HELLO),)),
    )
    episode = Episode(example_id="x", task="t", rollout=3, traces=traces)
    record = Record(
        key="0/x/3/draft", task="t", example_id="x", rollout=3, kind="draft", episode=episode,
        score=Score(value=0.5, reward=0.75),
    )  # fmt: skip
    expert = Expert(task="t", tokenizer_print="abc", weights="w1")
    first, second = lesson_lines(record, expert)
    assert first == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello. "},
            {"role": "assistant", "content": "Hi.", "token_ids": [5, 2]},
        ],
        "data_source": "t", "tokenizer": "abc", "task": "t", "example_id": "x", "rollout": 3,
        "seat": "a", "value": 0.5, "reward": 0.75, "expert": "w1",
    }  # fmt: skip
    assert second["seat"] == "b" and "tokenizer" not in second
    assert second["messages"][1] == {"role": "assistant", "content": "Ha.", "trained": False}
    assert second["messages"][3] == {"role": "assistant", "content": "Ho."}


ROWS = {"tomi": "synth:4", "secret_keeper": "synth:3"}


def expert(task: str = "tomi", n: int = 12) -> Callable[[Body], str]:
    """Plays the keeper, and answers each training question, but every fourth one wrongly."""
    live = load_registry().task(task)
    assert isinstance(live, ChoiceTask)
    rows = to_examples(live, made_rows(live, f"synth:{n}", 0, "train")).examples
    answers = {
        live.preview(row)[0].text: live.gold_completion(row) if place % 4 else "I cannot say."
        for place, row in enumerate(rows)
    }

    def answer(body: Body) -> str:
        talk = body["messages"][0]["role"] == "system"
        return keeper(body) if talk else answers[last_message(body)]

    return answer


@pytest.fixture
def url() -> Iterator[str]:
    with visitor() as url:
        yield url


def served(actor: ScriptedServer, partner: str, **settings: Any) -> DistillConfig:
    where = f"endpoint:expert@{actor.base_url}"
    plain: dict[str, Any] = {
        "data": ROWS, "samples": 2, "partner": f"endpoint:visitor@{partner}", "backoff_s": 0,
    }  # fmt: skip
    return distillation(dict.fromkeys(settings.pop("of", ROWS), where), **(plain | settings))


def gathered(config: DistillConfig, out: Path) -> tuple[SampleSelection, list[str]]:
    remarks: list[str] = []
    experts = find_experts(config)
    sample(config, experts, out, reporter=Heard(remarks))
    return select_samples(config, experts, out, reporter=Heard(remarks)), remarks


def lines(out: Path) -> list[dict[str, Any]]:
    return read_jsonl(out / "selected.jsonl")


def test_from_experts_to_rows_and_again(url: str, tmp_path: Path) -> None:
    with ScriptedServer(answer=expert()) as actor:
        config = served(actor, url)
        selection, _ = gathered(config, tmp_path)
        questions = len(actor.requests)
        assert {name: part.sampled for name, part in selection.tasks.items()} == {
            "secret_keeper": 6, "tomi": 8,
        }  # fmt: skip
        again, remarks = gathered(config, tmp_path)
        assert len(actor.requests) == questions, "nothing is asked twice"
    assert again.tasks == selection.tasks == read_selection(tmp_path).tasks and again.reused
    assert remarks[0].startswith("samples: the selection is already made")
    talks = [line for line in lines(tmp_path) if line["task"] == "secret_keeper"]
    assert len(talks) == 3 and {line["seat"] for line in talks} == {"keeper"}
    spoken = [m["content"] for m in talks[0]["messages"] if m["role"] == "assistant"]
    assert 4 <= len(spoken) <= 6 and "tokenizer" not in talks[0]
    roles = [m["role"] for m in talks[0]["messages"]]
    assert roles == ["system", *["user", "assistant"] * len(spoken)]
    stories = [line for line in lines(tmp_path) if line["task"] == "tomi"]
    assert all(line["reward"] == 1.0 == line["value"] for line in stories)
    # Both samples of a row are the same words: one is learned.
    part = selection.tasks["tomi"]
    assert part.taken == part.lines == len(stories) == part.passed // 2 == part.prompts_taken
    assert part.acceptance == part.passed / 8 and part.scored == 8
    assert selection.tasks["secret_keeper"].tokens > 0
    content = (tmp_path / "selected.jsonl").read_bytes()
    for task in ROWS:  # in whatever order episodes came
        file = tmp_path / "samples" / task / "episodes.jsonl"
        file.write_bytes(b"".join(reversed(file.read_bytes().splitlines(keepends=True))))
    (tmp_path / "selection.json").unlink()
    select_samples(config, find_experts(config), tmp_path)
    assert (tmp_path / "selected.jsonl").read_bytes() == content


def test_samples_are_an_evaluation_of_training_rows(url: str, tmp_path: Path) -> None:
    """And --max-cost is one sum for all experts: what one run has paid the next may not."""
    prices = {"price_in": 100.0, "price_out": 100.0}
    with ScriptedServer(answer=expert()) as actor:
        config = served(
            actor, url, of=("tomi",), data={"*": "synth:3"}, max_cost=5.0, yes=True
        )  # fmt: skip
        plain = find_experts(config)[0]
        assert plain.endpoint is not None
        priced = plain.endpoint.model_copy(update=prices)
        experts = [replace(plain, endpoint=priced), Expert(task="secret_keeper", endpoint=priced)]
        sample(config, experts[:1], tmp_path)
    run = tmp_path / "samples" / "tomi"
    settings = read_config(run)
    assert (settings["split"], settings["repeats"], settings["temperature"]) == ("train", 2, 1.0)
    task = load_registry().task("tomi")
    ids = {task.example(row.fields).id for row in made_rows(task, "synth:3", 0, "train")}
    assert {record.example_id for record in records(run)} == ids
    assert summary(run)["n"] == 6 == len(paid(run))
    spent = summary(run)["cost"]
    later = budget_left(config, tmp_path, samples_folder(tmp_path, experts[1].task))
    assert spent > 0 and later == pytest.approx(5.0 - spent)
    # The later stages have the rest; a run that is taken up counts its own calls itself.
    assert budget_left(config, tmp_path, generalist_folder(tmp_path)) == pytest.approx(5.0 - spent)
    assert budget_left(config, tmp_path, run) == 5.0
    poor = config.model_copy(update={"max_cost": spent / 2})
    assert budget_left(poor, tmp_path, generalist_folder(tmp_path)) == pytest.approx(0, abs=1e-5)


def test_options_and_players_of_one_task_stay_with_it(tmp_path: Path) -> None:
    config = distillation(
        {"tomi": "endpoint:m@http://127.0.0.1:1/v1", "secret_keeper": "endpoint:n@http://127.0.0.1:1/v1"},
        data=ROWS, option={"max_turns": "7"},
        task_players={"secret_keeper": {"partner": "scripted:nobody.jsonl"}},
    )  # fmt: skip
    first, second = (sample_config(config, one) for one in find_experts(config))
    assert first.option == {"max_turns": "7"} and not second.option
    assert first.task_players and not second.task_players
    assert second.data == {"tomi": "synth:4"} and second.model == "m" and second.kind == "api"
    wrong = config.model_copy(update={"option": {"max_turn": "7"}})
    with pytest.raises(ConfigError, match="max_turn"):
        training_work(wrong, find_experts(config))


def test_nothing_good_enough_is_an_error_with_figures(url: str, tmp_path: Path) -> None:
    with ScriptedServer(answer="I cannot say.") as actor:
        config = served(actor, url, of=("tomi",), data={"tomi": "synth:3"})
        with pytest.raises(DataError, match="None of 6 samples of 'tomi'") as caught:
            gathered(config, tmp_path)
    assert "no_tag: 6" in caught.value.why and "--min-reward" in caught.value.way_out
    assert not (tmp_path / "selected.jsonl").exists()


def test_missing_samples_and_a_torn_selection(url: str, tmp_path: Path) -> None:
    with ScriptedServer(answer=expert()) as actor:
        config = served(actor, url, of=("tomi",), data={"tomi": "synth:4"})
        experts = find_experts(config)
        with pytest.raises(RunError, match="lacks 8 of 8 samples"):
            select_samples(config, experts, tmp_path)
        with pytest.raises(RunError, match="No samples have been selected"):
            read_selection(tmp_path)
        first, _ = gathered(config, tmp_path)
        content = (tmp_path / "selected.jsonl").read_bytes()
        (tmp_path / "selected.jsonl").write_bytes(content[:-9])  # not what selection.json knows
        second = select_samples(config, experts, tmp_path)
        assert not second.reused and second.sha256 == first.sha256
        assert (tmp_path / "selected.jsonl").read_bytes() == content
        loose = config.model_copy(update={"keep_top": 2, "near": 1.0})
        assert not select_samples(loose, experts, tmp_path).reused


# -- evaluation rows -------------------------------------------------------------------------------


def rows_file(path: Path, *parts: tuple[str, int]) -> Path:
    """Rows of tomi of several (split, count)."""
    task = load_registry().task("tomi")
    rows = [dict(r.fields) for split, n in parts for r in made_rows(task, f"synth:{n}", 0, split)]  # type: ignore[arg-type]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_that_are_evaluated_are_never_learned(url: str, tmp_path: Path) -> None:
    held_out = rows_file(tmp_path / "held.jsonl", ("train", 2), ("test", 3))
    with ScriptedServer(answer=expert()) as actor:
        config = served(
            actor, url, of=("tomi",), data={"tomi": "synth:12"}, held_out={"tomi": str(held_out)}
        )  # fmt: skip
        with pytest.raises(DataError, match="6 of 12 of 'tomi'") as caught:
            gathered(config, tmp_path / "out")
        assert not actor.requests and "--exclude-overlap" in caught.value.way_out
        assert "held.jsonl:1" in caught.value.what
        config = config.model_copy(update={"exclude_overlap": True})
        selection, remarks = gathered(config, tmp_path / "out")
    part = selection.tasks["tomi"]
    assert part.overlaps == 12 and part.sampled == 24
    assert any("overlap evaluation rows: 6" in remark for remark in remarks)
    learned = {line["example_id"] for line in lines(tmp_path / "out")}
    task = load_registry().task("tomi")
    refused = {task.example(row.fields).id for row in made_rows(task, "synth:2", 0, "train")}
    assert learned and not learned & refused


def test_nor_do_experts_teach_them_on_policy(tmp_path: Path) -> None:
    held_out = rows_file(tmp_path / "held.jsonl", ("train", 2))
    expert = Expert(task="tomi", adapter=tmp_path, base="owner/base")
    config = distillation(
        {"tomi": str(tmp_path)}, by="opd", data={"tomi": "synth:12"}, held_out={"*": str(held_out)}
    )
    with pytest.raises(DataError, match="6 of 12"):
        generalist_config(config, [expert], tmp_path)
    excluding = config.model_copy(update={"exclude_overlap": True})
    rows = set(generalist_config(excluding, [expert], tmp_path).example)
    work = training_work(config, [expert])
    learned = {row.id for row in work[0].examples if row.id in rows}
    assert len(rows) == len(learned) == 6
    assert not learned & find_overlaps(excluding, work)["tomi"].keys()


def test_pulled_evaluation_files_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = load_registry().task("tomi")
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("SOULKIT_DATA", str(folder))
    named = task.spec.files.eval
    config = distillation({"tomi": "endpoint:m@http://127.0.0.1:1/v1"}, data={"tomi": "synth:3"})
    work = training_work(config, find_experts(config))
    assert not any(find_overlaps(config, work).values())
    if named:
        rows_file(folder / Path(named[0]).with_suffix(".jsonl").name, ("train", 1))
    near = rows_file(tmp_path / "near.jsonl", ("train", 3))
    text = near.read_text().replace("1 ", "1 yes ", 1)
    near.write_text(text)
    config = config.model_copy(update={"held_out": {"*": str(near)}})
    with pytest.raises(DataError, match="3 of 3"):
        find_overlaps(config, work)
    with pytest.raises(DataError, match="All 3 training rows"):
        find_overlaps(config.model_copy(update={"exclude_overlap": True}), work)
