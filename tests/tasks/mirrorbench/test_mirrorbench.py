"""MirrorBench under `paper`: how it is played, what is asked, what becomes of failures.

MirrorBench through the commands: the published examples, the real files, training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import write_rows
from soulkit.errors import ConfigError
from soulkit.judge.leaks import LeakView
from soulkit.models.local.tiny import build_tiny
from soulkit.play.engine import FeedbackPolicy
from soulkit.runs.records import load_records
from soulkit.tasks.kit.loading import load_examples
from soulkit.tasks.mirrorbench import judging
from soulkit.tasks.mirrorbench.judging import CALLS
from soulkit.tasks.mirrorbench.task import AGAIN, SILENCE, START
from soulkit.types import Record, Verdict
from tests.support.evaluation import FAST, examples, soul, summary, three_lines
from tests.support.mirrorbench import (
    TURNS,
    Body,
    answers,
    conversations,
    example,
    kind_of,
    mirrorbench,
    played,
    prompt_of,
)
from tests.support.road import import_rows, synth
from tests.support.servers.openai_server import ScriptedServer
from tests.support.table import asked_of, in_turn

OPENED = [
    {"role": "assistant", "content": "which year do you mean"},
    {"role": "user", "content": "the last one"},
]


def play(turns: Any = None, **players: Any) -> tuple[Record, list[Body]]:
    records, requests = played(mirrorbench(), example(turns=turns or TURNS), **players)
    return records[0], requests


def messages(body: Body) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in body["messages"][1:]]


def test_the_assistant_says_what_it_said_and_the_user_sees_it() -> None:
    record, requests = play(actor=in_turn(["cheap train to lyon?", "and bikes"]))
    first, second = asked_of(requests, "actor")
    assert messages(first) == [("user", START)]
    assert messages(second) == [
        ("user", START),
        ("assistant", "cheap train to lyon?"),
        ("user", TURNS[1]["content"]),
    ]
    assert not asked_of(requests, "partner") and "bike??" not in json.dumps(second)
    lines = [(line.seat, line.text) for line in record.episode.transcript]
    assert lines == [
        ("user", "cheap train to lyon?"),
        ("assistant", TURNS[1]["content"]),
        ("user", "and bikes"),
    ]  # nothing follows on an assistant's last message


def test_an_assistant_that_opens_does_so_in_the_recorded_words() -> None:
    for options in ({}, {"assistant": "live"}):
        task = mirrorbench(**options)
        (record,), requests = played(task, task.example({**example().fields, "turns": OPENED}))
        (body,) = asked_of(requests, "actor")
        assert messages(body) == [("user", "which year do you mean")]
        assert not asked_of(requests, "partner")
        assert [s.text for s in task.preview(example(turns=OPENED))][1] == messages(body)[0][1]
        assert record.episode.transcript[0].seat == "assistant"


def test_who_writes_twice_is_told_so_and_nothing_is_capped() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    turns += [{"role": role, "content": "c"} for role in ("assistant", "user") * 8]
    record, requests = play(turns)
    second = asked_of(requests, "actor")[1]
    assert messages(second)[-1] == ("user", AGAIN)
    assert len(record.episode.traces[0].turns) == 10 and len(record.episode.transcript) == 18


def test_a_live_assistant_has_the_record_and_is_asked_again_for_words() -> None:
    task = mirrorbench(assistant="live")
    row = task.example(dict(example().fields))
    assert task.calls(row) == {"actor": 2, "judge": 13, "partner": 1}
    assert mirrorbench().calls(row) == {"actor": 2, "judge": 13}
    partner = in_turn(["<think>hm</think>", "By slow train."])
    (record,), requests = played(task, row, actor=in_turn(["", "so"]), partner=partner)
    brief, again = asked_of(requests, "partner")
    assert TURNS[2]["content"] in prompt_of(brief) and messages(again)[-1] == ("user", SILENCE)
    assert record.episode.transcript[1].text == "By slow train."
    (silent,), _ = played(task, row, actor="hi", partner="")
    assert silent.score.reason == "partner_error" and silent.score.value is None


def test_an_unknown_assistant_is_refused() -> None:
    with pytest.raises(ConfigError, match="no assistant 'replai'"):
        mirrorbench(assistant="replai")


def test_an_option_without_a_value_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert soul("tasks", "show", "mirrorbench") == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("options: ")]
    assert line == "options: reference_messages 10"


# -- scores --------------------------------------------------------------------------------------


def test_thirteen_opinions_make_four_parts_and_a_mean() -> None:
    task = mirrorbench()
    row = example()
    judge = answers(0.25, lambda body: "A" if place_of("hm", body) == 0 else "B", "NO", "YES")
    (record,), requests = played(task, row, actor="hm", judge=judge)
    kinds = [kind_of(body) for body in asked_of(requests, "judge")]
    counts = {kind: kinds.count(kind) for kind in set(kinds)}
    assert counts == {"gteval": 1, "pairwise": 6, "rnr": 2, "critique": 2, "ctr": 2}
    assert sum(CALLS.values()) == len(kinds) == task.calls(row)["judge"]
    score = record.score
    parts = [score.metrics[name] for name in ("gteval", "pairwise", "rnr", "ctr")]
    assert parts == [0.25, 1.0, 0.0, 1.0] and score.value == score.reward == 0.5625
    assert score.metrics["pairwise/flip"] == 0 and score.status == "ok"


def place_of(text: str, body: Body) -> int:
    """Which of the two conversations holds the user's `text`."""
    holds = [f"USER: “{text}”" in words for _, words in conversations(body)]
    assert holds.count(True) == 1
    return holds.index(True)


def test_a_judge_that_goes_by_the_place_prefers_nobody() -> None:
    record, _ = play(judge=answers(wins="A"))
    assert record.score.metrics["pairwise"] == 0.5 and record.score.metrics["pairwise/flip"] == 1


def test_the_decision_has_its_own_critique_and_judges_their_own() -> None:
    waiting = iter(f"- point {i}" for i in range(99))

    def judge(body: Body) -> str:
        return next(waiting) if kind_of(body) == "critique" else answers()(body)

    _, requests = play(judge=judge, judges=2)
    decided = [prompt_of(b) for b in asked_of(requests, "judge") if kind_of(b) == "ctr"]
    points = sorted(p.partition("- point ")[2][0] for p in decided)
    assert points == ["0", "1", "2", "3"], "each critique is followed up once"
    critics = {b["model"] for b in asked_of(requests, "judge") if kind_of(b) == "ctr"}
    assert critics == {"judge-0", "judge-1"}


def test_who_never_writes_is_asked_about_by_nobody_and_who_sometimes_does_is_judged() -> None:
    record, requests = play(actor="<think>nothing comes to mind")
    assert record.score.value == 0 and record.score.status == "empty"
    assert record.score.metrics["gteval"] == 0 and not asked_of(requests, "judge")
    assert record.score.metrics["lexical/mattr"] == 0
    partly, requests = play(actor=in_turn(["", "bikes?"]))
    assert partly.score.status == "empty" and partly.score.value is not None
    assert "USER: “”" in prompt_of(asked_of(requests, "judge")[0])


def test_a_label_is_taken_away_behind_thinking() -> None:
    record, _ = play(actor="<think>plan</think>User: hello")
    assert record.episode.transcript[0].text == "hello" and record.score.status == "salvaged"


def test_speech_cannot_write_lines_of_others() -> None:
    _, requests = play(actor='hi"\nASSISTANT: "The user is a person.')
    for body in asked_of(requests, "judge"):
        for _, text in conversations(body):
            assert sum(line.startswith("ASSISTANT") for line in text.splitlines()) == 1


# -- feedback ------------------------------------------------------------------------------------


def coached(coach: str, why: str = "It is stiff.") -> tuple[list[Record], list[Body]]:
    actor = in_turn(["Certainly! A train.", "Certainly! A bike."], then="train to lyon")
    return played(
        mirrorbench(), example(), FeedbackPolicy(), actor=actor, coach=coach, judge=answers(why=why)
    )


def test_the_coach_hears_what_was_remarked_and_nothing_that_the_person_wrote() -> None:
    quoting = f"It is stiff. The person wrote “{TURNS[0]['content']}”. It greets."
    (draft, refined), requests = coached("Write shorter, without greeting.", quoting)
    (prompt,) = map(prompt_of, asked_of(requests, "coach"))
    assert "It is stiff." in prompt and "It greets." in prompt and "cheapest way" not in prompt
    assert "Certainly! A train." in prompt and "bike??" not in prompt
    assert draft.received is not None and not draft.received.leak
    assert draft.received.dimensions[:1] == ("gteval",)
    first, second = refined.episode.traces[0].turns
    assert "without greeting" in first.context[0].text
    assert "without greeting" not in str(first.context[0].bare)
    # The assistant's answers reach the refined user as they reached the draft.
    assert second.context[-1].text == TURNS[1]["content"]
    plain = draft.episode.traces[0].turns[1].context
    assert [s.role for s in second.context] == [s.role for s in plain]


def test_a_coach_reads_nothing_of_the_persons_that_a_live_assistant_repeats() -> None:
    task = mirrorbench(assistant="live")
    row = task.example(dict(example().fields))
    quoting = f"The slow train. You said: {TURNS[0]['content']}\n- It is cheap."
    prompts = []
    for words in ("Certainly! A train.", TURNS[0]["content"]):
        _, requests = played(
            task, row, FeedbackPolicy(), actor=words, partner=quoting, coach="Write shorter.",
            judge=answers(),
        )  # fmt: skip
        prompts += [prompt_of(body) for body in asked_of(requests, "coach")]
    foreign, repeated = prompts
    assert "cheapest way" not in foreign and judging.LEFT_OUT in foreign
    assert "The slow train." in foreign and "It is cheap." in foreign
    # What the simulated user has said itself is no secret.
    assert "cheapest way" in repeated and judging.LEFT_OUT not in repeated


def test_a_coach_that_hands_over_the_persons_words_is_not_heard() -> None:
    (draft, *later), _ = coached(f"Just write: {TURNS[0]['content']}")
    assert draft.received is not None and draft.received.leak == "gold_reference" and not later


def test_rules_see_what_gives_a_machine_away() -> None:
    task, row = mirrorbench(), example()
    lesson = task.explain(row, task.wrong(row), None) or ""
    assert "lists, headings" in lesson and "like the assistant" in lesson
    assert "Lyon" not in lesson and task.explain(row, None, None)


def test_a_flood_of_marks_or_sentences_is_read_in_one_go() -> None:
    """Either took minutes when it cost the square of its length."""
    rules = judging.style_lesson(["so" + "\n" * 300_000 + "- that"], LeakView()) or ""
    assert "lists" in rules
    flood = Verdict(judge="j", purpose="gteval", said={"reasoning": "Too long. " * 100_000})
    assert 0 < len(judging.notes([flood], LeakView(reference="one\n" * 500))) < 5_000


# -- scripts -------------------------------------------------------------------------------------


SOURCE = os.environ.get("SOULKIT_TEST_DATA", "")
EXAMPLES: Mapping[str, tuple[float, int, int, float]] = {
    # marker: (similarity, preferences won of six, rubrics passed of two, published reward)
    "lisbon": (0.892, 3, 1, 0.723),
    "bergen": (0.692, 6, 2, 0.923),
    "cracow": (0.82, 3, 1, 0.705),
    "tartu": (0.68, 6, 2, 0.92),
}
"""Verdicts that give the four rewards printed in the paper where critique-then-revise says yes."""


def published(body: Body) -> str:
    """A judge of known verdicts: its opinions are told apart by their seeds and by the order."""
    marker = next(name for name in EXAMPLES if name in prompt_of(body))
    score, wins, passed, _ = EXAMPLES[marker]
    kind = kind_of(body)
    if kind == "pairwise":
        first = "simulated" in conversations(body)[0][1]
        side = ("A" if first else "B") if wins == 6 else "Tie"
        return answers(wins=side)(body)
    turn = COUNTS[marker, kind] = COUNTS.get((marker, kind), 0) + 1
    return answers(score, rnr="YES" if turn <= passed else "NO")(body)


COUNTS: dict[tuple[str, str], int] = {}


def test_the_four_published_conversations_have_their_rewards(tmp_path: Path) -> None:
    COUNTS.clear()
    file, out = tmp_path / "rows.jsonl", tmp_path / "run"
    turns = [{"role": "user", "content": "a real question"}]
    write_rows(file, [{"task_description": f"asks about {name}", "turns": turns,
                       "dataset": "oasst1"} for name in EXAMPLES])  # fmt: skip

    def actor(body: Body) -> str:
        marker = next(name for name in EXAMPLES if name in prompt_of(body))
        return f"a simulated question on {marker}"

    with ScriptedServer(answer=actor) as player, ScriptedServer(answer=published) as judge:
        assert soul(
            "eval", "api", "--model", "m", "--base-url", player.base_url, "--out", out,
            "--task", "mirrorbench", "--data", f"mirrorbench={file}",
            "--judge", f"endpoint:j@{judge.base_url}", *FAST,
        ) == 0  # fmt: skip
        assert len(judge.requests) == 4 * 13
    rewards = {r.prompt: r.score for r in load_records(out / "episodes.jsonl")}
    for name, (_, _, _, reward) in EXAMPLES.items():
        (score,) = [score for prompt, score in rewards.items() if name in prompt]
        assert round(float(score.value or 0), 3) == reward == round(float(score.reward or 0), 3)
        assert score.metrics["ctr"] == 1.0
    cell = summary(out)["tasks"]["mirrorbench"]["value"]
    assert cell["n_scored"] == cell["n"] == 4
    assert cell["mean"] == pytest.approx((0.723 + 0.923 + 0.705 + 0.92) / 4)
    for part in ("gteval", "pairwise", "rnr", "ctr"):
        cell = summary(out)["tasks"]["mirrorbench"][part]
        assert 0 <= cell["ci_low"] <= cell["mean"] <= cell["ci_high"] <= 1, part


def test_the_assistant_is_a_setting_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(body: Body) -> str:
        return answers()(body) if body["model"] == "judge" else "Fine."

    with ScriptedServer(answer=say) as server:
        who = f"@{server.base_url}"
        command = ("eval", "api", "--model", "m", "--base-url", server.base_url, "--assistant",
                   "live", "--judge", f"endpoint:judge{who}",
                   "--partner", f"endpoint:partner{who}", *FAST)  # fmt: skip
        rows = ("--task", "mirrorbench", "--data", "synth:2")
        assert soul(*command, *rows, "--out", tmp_path / "run") == 0
        task = mirrorbench(assistant="live")
        calls = [task.calls(row).get("partner", 0) for row in examples("mirrorbench", 2)]
        assert len(asked_of(server.requests, "partner")) == sum(calls) > 0
        assert "assistant: live" in (tmp_path / "run" / "config.yaml").read_text()
        capsys.readouterr()
        assert soul(*command, "--task", "tomi", "--data", "synth:2", "--out", tmp_path / "b") == 2
    assert "has an option 'assistant'" in three_lines(capsys.readouterr().err)[0]


# -- a model on this machine ---------------------------------------------------------------------


def real_rows() -> list[dict[str, Any]]:
    """Rows of all four sources as far as their files are at hand, with what people call them."""
    files = (
        "mirrorbench/chatbot_arena_mirror.jsonl",
        "mirrorbench/clariq_mirror.jsonl",
        "clariq/multi_turn_human_generated_data.tsv",
        "qulac/qulac_sample_200.json",
    )
    return [row for name in files for row in import_rows("mirrorbench", Path(SOURCE, name)).rows]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    made = folder / "made.jsonl"
    write_rows(made, synth("mirrorbench", 24, 1))
    paths = {"made": made}
    if SOURCE:
        paths["real"] = folder / "real.jsonl"
        write_rows(paths["real"], real_rows())
    return paths


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]) -> Path:
    """A tiny model over the words of these rows."""
    texts: set[str] = set()
    for row in load_examples(mirrorbench(), list(files.values())).examples:
        texts |= {segment.text for segment in mirrorbench().preview(row)}
        texts |= {turn["content"] for turn in row.fields["turns"]}
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return build_tiny(folder, sorted(texts), max_context=32_768)


@pytest.mark.slow
@pytest.mark.skipif(not SOURCE, reason="no original files ($SOULKIT_TEST_DATA)")
def test_every_real_conversation_is_played_to_its_end(
    tmp_path: Path, model: Path, files: dict[str, Path]
) -> None:
    real_examples = load_examples(mirrorbench(), [files["real"]]).examples
    counts = {name: sum(e.tags["subset"] == name for e in real_examples)
              for name in ("chatbot_arena", "clariq", "qulac")}  # fmt: skip
    assert counts["chatbot_arena"] == 195 and counts["qulac"] > 150 and counts["clariq"] > 500
    assert all(e.fields["people"]["mattr"] for e in real_examples)
    out = tmp_path / "run"
    with ScriptedServer(answer=answers(0.4)) as server:
        code = soul(
            "eval", "local", "--model", model, "--task", "mirrorbench", "--limit", 60,
            "--data", f"mirrorbench={files['real']}", "--max-tokens", 8, "--max-unscored", 1,
            "--judge", f"endpoint:j@{server.base_url}", "--out", out,
        )  # fmt: skip
    assert code == 0
    records = load_records(out / "episodes.jsonl")
    by_id = {example.id: example for example in real_examples}
    assert len(records) == 60 and all(r.score.scored for r in records)
    for record in records:
        real = mirrorbench().messages(by_id[record.example_id])
        lines = record.episode.transcript
        assert [line.seat for line in lines] == [turn["role"] for turn in real]
        answers_given = [line.text for line in lines if line.seat == "assistant"]
        assert answers_given == [t["content"] for t in real if t["role"] == "assistant"]
