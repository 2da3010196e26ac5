"""One actor in three seats, through the real engine and command line, with servers on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from soulkit.judge.leaks import LeakView, check_leak
from soulkit.models.base import Cast, Player
from soulkit.models.stand_ins import Script, ScriptedModel
from soulkit.play.engine import Engine, FeedbackPolicy, Job, with_draft
from soulkit.play.plan import Load, Work, plan_loads
from soulkit.report.explorer import pack_episodes
from soulkit.report.load import load_runs
from soulkit.tasks.kit.loading import LoadedExamples
from soulkit.tasks.kit.selfcheck import check_task
from soulkit.types import Feedback, Record
from tests.support.evaluation import FAST, records, soul, summary
from tests.support.pages import takes
from tests.support.road import player
from tests.support.scenes import (
    GUESTS,
    TASKS,
    Body,
    body_text,
    dinner,
    guest,
    guest_of,
    private_strings,
    room,
)
from tests.support.servers.openai_server import ScriptedServer

ROWS = 4


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[ScriptedServer, ScriptedServer]]:
    with ScriptedServer(answer=guest) as actor, ScriptedServer(answer=room()) as other:
        yield actor, other


def evaluate(out: Path, actor: ScriptedServer, other: ScriptedServer) -> int:
    return soul(
        "eval", "api", "--tasks", TASKS, "--task", "dinner", "--data", f"synth:{ROWS}", "--model",
        "m", "--base-url", actor.base_url, "--environment", f"endpoint:room@{other.base_url}",
        *FAST, "--out", out,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(
    servers: tuple[ScriptedServer, ScriptedServer], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("runs") / "dinner"
    assert evaluate(out, *servers) == 0
    return out


def words_by_key(records: list[Record]) -> dict[str, tuple[object, ...]]:
    """What was seen and said in every episode; not how long it took."""
    return {
        record.key: (
            [(t.seat, turn.context) for t in record.episode.traces for turn in t.turns],
            record.episode.transcript,
        )
        for record in records
    }


def walked(seed: int = 0) -> list[Record]:
    """Drafts and refined dinners of every row."""
    task, examples = dinner(ROWS)
    with ScriptedServer(answer=guest) as actor, ScriptedServer(answer=room()) as other:
        cast = Cast(actor=player(actor.base_url), environment=player(other.base_url))
        engine = Engine(cast, seed, feedback=FeedbackPolicy())
        jobs = [Job(task, example) for example in examples]
        return asyncio.run(engine.run(jobs, lambda record: None))


# -- the episode -----------------------------------------------------------------------------------


def test_every_seat_that_spoke_has_a_trace_and_no_other(run: Path) -> None:
    for record in records(run):
        episode = record.episode
        assert [(t.seat, len(t.turns)) for t in episode.traces] == [("ann", 2), ("bo", 3)]
        assert episode.stop == "max_turns" and record.score.value == 1.0
        assert episode.usage.calls == 15, "five turns, five events, five next speakers"
        assert episode.final is not None and "I am bo" in episode.final.text


def test_no_prompt_holds_what_is_private_to_another_seat(run: Path) -> None:
    _, examples = dinner(ROWS)
    by_id = {example.id: example for example in examples}
    for record in records(run):
        private = private_strings(by_id[record.example_id])
        for trace in record.episode.traces:
            seen = "\n".join(s.text for turn in trace.turns for s in turn.context)
            shown = {g for g, texts in private.items() if any(text in seen for text in texts)}
            assert shown == {trace.seat}
            assert f"plan-{trace.seat}-" in seen, "its own thoughts it remembers"


def test_the_environment_reads_nobodys_thoughts(
    run: Path, servers: tuple[ScriptedServer, ScriptedServer]
) -> None:
    bodies: list[Body] = list(servers[1].requests)
    assert len(bodies) == ROWS * 10
    assert not any("plan-" in body_text(body) or "hidden" in body_text(body) for body in bodies)


def test_a_turn_of_the_environment_has_a_seed_and_an_entry_for_each_purpose(run: Path) -> None:
    from soulkit.models.ledger.view import LedgerView

    with LedgerView(run / "ledger.sqlite") as view:
        calls = [stored.entry.call for stored in view.entries()]
        groups = {(group.role, group.purpose): group.calls for group in view.groups()}
    assert groups == {
        ("actor", ""): 5 * ROWS, ("environment", "next"): 5 * ROWS,
        ("environment", "room"): 5 * ROWS,
    }  # fmt: skip
    assert {call.seat for call in calls if call.role == "actor"} == {"ann", "bo"}


def test_a_run_that_lost_episodes_is_taken_up_without_asking_again(
    run: Path, servers: tuple[ScriptedServer, ScriptedServer]
) -> None:
    before, counts = records(run), [len(server.requests) for server in servers]
    lines = (run / "episodes.jsonl").read_text().splitlines(keepends=True)
    (run / "episodes.jsonl").write_text("".join(lines[:2]) + lines[2][:40])
    assert evaluate(run, *servers) == 0
    assert [len(server.requests) for server in servers] == counts
    assert words_by_key(records(run)) == words_by_key(before)
    assert summary(run)["tasks"]["dinner"]["value"]["mean"] == 1.0


# -- pages -----------------------------------------------------------------------------------------


def test_pages_show_what_every_seat_saw(run: Path, capfd) -> None:
    record = records(run)[0]
    assert [line for line in record.prompt.splitlines() if line.startswith("===")] == [
        "=== ann ===", "=== bo ===",
    ]  # fmt: skip
    assert soul("show", run, "--example", record.example_id, "--full") == 0
    page = capfd.readouterr().out
    assert "seen by ann" in page and "seen by bo" in page and "seen by cy" not in page
    said = json.dumps(takes(pack_episodes(load_runs([run], episodes=False))))
    assert all(f"I am {name}" in said for name in ("ann", "bo"))
    assert '"ann"' in said and '"bo"' in said


def test_a_row_is_shown_with_the_prompt_of_every_seat(tmp_path: Path, capfd) -> None:
    task, _ = dinner(1)
    from soulkit.tasks.kit.made_rows import make_rows

    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(make_rows(task, 1, 0)[0]))
    where = ("data", "show", file, "--task", "dinner", "--tasks", TASKS)
    assert soul(*where, "--json") == 0
    prompt = json.loads(capfd.readouterr().out)["prompt"]
    assert [message["seat"] for message in prompt if message["role"] == "system"] == list(GUESTS)
    assert soul(*where) == 0
    assert all(f"prompt: {g}, system" in capfd_out for capfd_out in [capfd.readouterr().out]
               for g in GUESTS)  # fmt: skip


# -- feedback --------------------------------------------------------------------------------------


def test_refined_dinners_have_the_feedback_at_every_table() -> None:
    refined = [record for record in walked() if record.kind == "refined"]
    assert len(refined) == ROWS
    for record in refined:
        assert [trace.seat for trace in record.episode.traces] == ["ann", "bo"]
        for trace in record.episode.traces:
            opening = trace.turns[0].context[0]
            assert "Speak aloud" in opening.text and "Speak aloud" not in (opening.bare or "")


def test_feedback_for_all_seats_tells_nothing_that_is_private_to_one() -> None:
    task, (example, *_) = dinner(1)
    view = task.leak_view(example)
    for seat in GUESTS:
        secret = str(example.fields[f"{seat}_secret"])
        feedback = Feedback(text=f"Mention that {secret}.", author="m")
        assert check_leak(feedback, view).leak == "private_text", seat
    assert check_leak(Feedback(text="Ask cy about the table.", author="m"), view).leak == ""


def test_private_texts_of_seats_are_read_as_they_look_too() -> None:
    secret = "The silver lantern stands behind the old mill wheel"
    view = LeakView(private_by_seat={"ann": (secret,), "bo": ()})
    spaced = Feedback(text=f"Say: {secret}.".replace("e", "\u0435"), author="m")
    assert check_leak(spaced, view).leak == "private_text"
    assert hash(view) == hash(replace(view, private_by_seat={}))
    assert view.secrets == (secret,)


def test_a_draft_that_is_shown_with_feedback_has_no_thoughts_in_it() -> None:
    task, examples = dinner(ROWS)
    draft = next(record for record in walked() if record.kind == "draft")
    example = next(e for e in examples if e.id == draft.example_id)
    shown = with_draft(Job(task, example), Feedback(text="Ask more.", author="m"), draft)
    assert "I am ann, line" in shown.text and "plan-" not in shown.text


# -- before a run ----------------------------------------------------------------------------------


def test_the_check_renders_and_plays_every_seat() -> None:
    task, examples = dinner(ROWS)
    report = check_task(task, LoadedExamples(examples=examples))
    assert report.passed and not report.breaks and not report.unrendered


def test_a_plan_counts_the_mean_prompt_and_names_the_longest() -> None:
    task, examples = dinner(2)
    contexts = [task.previews(example).values() for example in examples]
    words = [[sum(len(s.text.split()) for s in c) for c in several] for several in contexts]
    (part,) = plan_loads([Load([Work(task, examples)], lambda _: ())]).tasks
    assert part.longest_prompt == max(max(several) for several in words)
    assert part.prompt_words == sum(round(sum(several) / 3) for several in words)


def test_the_seat_that_spoke_last_has_the_final_reply() -> None:
    record = walked()[0]
    episode = record.episode
    assert episode.final is not None
    longer = replace(episode, transcript=episode.transcript[:-3])
    assert longer.final is not None and "I am ann" in longer.final.text
    assert replace(episode, transcript=()).final == episode.traces[0].turns[-1].completion
    assert replace(episode, traces=(), transcript=()).final is None


def test_a_scripted_room_may_answer_by_purpose() -> None:
    task, (example, *_) = dinner(1)
    rules = [{"purpose": "next", "say": ["cy", "ann"]}, {"purpose": "room", "say": "It rains."}]
    model = Player(ScriptedModel(Script.model_validate({"rules": rules})))
    with ScriptedServer(answer=guest) as actor:
        cast = Cast(actor=player(actor.base_url), environment=model)
        record = asyncio.run(Engine(cast).draft(Job(task, example)))
        assert [guest_of(request) for request in actor.requests] == [
            "bo", "cy", "ann", "cy", "ann",
        ]  # fmt: skip
    assert [trace.seat for trace in record.episode.traces] == list(GUESTS)
