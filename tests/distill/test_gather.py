"""Samples and what is selected of them, over real servers on loopback: any engine will do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.distill.config import DistillConfig
from soulkit.distill.experts import Expert, find_experts
from soulkit.distill.generalist import generalist_config, generalist_folder
from soulkit.distill.overlap import find_overlaps
from soulkit.distill.run import _left
from soulkit.distill.sample import _within_budget, sample, sample_config, training_work
from soulkit.distill.select import SampleSelection, read_selection, select_samples
from soulkit.errors import ConfigError, DataError, RunError
from soulkit.runs.folder import read_config, read_jsonl
from soulkit.tasks.choice import ChoiceTask
from soulkit.tasks.loading import to_examples
from soulkit.tasks.made import made_rows
from soulkit.tasks.registry import load_registry
from tests.support.distilling import distillation
from tests.support.evaluation import Body, keeper, last_message, paid, records, summary, visitor
from tests.support.servers.openai_server import ScriptedServer

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
    sample(config, experts, out, say=remarks.append)
    return select_samples(config, experts, out, say=remarks.append), remarks


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
    assert remarks[0].startswith("samples: selected from already")
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
    later = _within_budget(sample_config(config, experts[1]), tmp_path, experts, experts[1])
    assert spent > 0 and later.max_cost == pytest.approx(5.0 - spent)
    # The later stages have the rest; a run that is taken up counts its own calls itself.
    assert _left(config, tmp_path, generalist_folder(tmp_path)) == pytest.approx(5.0 - spent)
    assert _left(config, tmp_path, run) == 5.0
    poor = config.model_copy(update={"max_cost": spent / 2})
    assert _left(poor, tmp_path, generalist_folder(tmp_path)) == pytest.approx(0, abs=1e-5)


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
    assert "no_tag 6" in caught.value.why and "--min-reward" in caught.value.way_out
    assert not (tmp_path / "selected.jsonl").exists()


def test_missing_samples_and_a_torn_selection(url: str, tmp_path: Path) -> None:
    with ScriptedServer(answer=expert()) as actor:
        config = served(actor, url, of=("tomi",), data={"tomi": "synth:4"})
        experts = find_experts(config)
        with pytest.raises(RunError, match="lacks 8 of 8 samples"):
            select_samples(config, experts, tmp_path)
        with pytest.raises(RunError, match="Nothing has been selected"):
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
    assert any("will not be learned: 6" in remark for remark in remarks)
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
