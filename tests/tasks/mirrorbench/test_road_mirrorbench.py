"""MirrorBench through the commands: the published examples, the real files, training."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import write_rows
from soulkit.models.local.tiny import build_tiny
from soulkit.runs.folder import read_jsonl
from soulkit.runs.records import load_records
from soulkit.tasks.loading import load_examples
from soulkit.types import Record
from tests.support.evaluation import FAST, examples, soul, summary, three_lines
from tests.support.mirrorbench import (
    Body,
    answers,
    asked_of,
    conversations,
    kind_of,
    mirrorbench,
    prompt_of,
)
from tests.support.road import import_rows, synth
from tests.support.servers.openai_server import ScriptedServer

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
    assert "has anything to do with assistant" in three_lines(capsys.readouterr().err)[0]


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
    for example in load_examples(mirrorbench(), list(files.values())).examples:
        texts |= {segment.text for segment in mirrorbench().preview(example)}
        texts |= {turn["content"] for turn in example.fields["turns"]}
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


@pytest.mark.slow
@pytest.mark.parametrize("assistant", ["replay", "live"])
def test_three_steps_of_ditto_train_what_the_user_wrote_and_nothing_else(
    tmp_path: Path, model: Path, files: dict[str, Path], assistant: str
) -> None:
    out = tmp_path / "run"

    def say(body: Body) -> str:
        if body["model"] == "partner":
            return "It depends."
        if body["model"] == "coach":
            return "Write shorter."
        return answers(len(prompt_of(body)) % 10 / 10)(body)

    with ScriptedServer(answer=say) as server:
        who = f"@{server.base_url}"
        done = soul(
            "train", "ditto", "--model", model, "--task", "mirrorbench", "--data", files["made"],
            "--judge", f"endpoint:judge{who}", "--partner", f"endpoint:partner{who}",
            "--coach", f"endpoint:coach{who}", "--assistant", assistant, "--steps", 3,
            "--prompts", 2, "--group-size", 3, "--max-tokens", 10, "--lora-r", 4, "--lr", 1e-3,
            "--out", out,
        )  # fmt: skip
    assert done == 0
    records, lines = load_records(out / "episodes.jsonl"), read_jsonl(out / "metrics.jsonl")
    assert len(lines) == 3 and all(line["rollouts/unscored"] == 0 for line in lines)
    assert any(r.kind == "refined" and len(r.episode.traces[0].turns) > 1 for r in records)
    for line in lines:
        batch = [r for r in records if r.step == line["step"]]
        tokens = {kind: emitted(batch, kind) for kind in ("draft", "refined")}
        assert line["trained/draft"] == tokens["draft"] > 0
        assert line["trained/refined"] == line["trained/copy"] == tokens["refined"] > 0


def emitted(records: list[Record], kind: str) -> int:
    turns = [turn for r in records if r.kind == kind for trace in r.episode.traces
             for turn in trace.turns]  # fmt: skip
    return sum(len(turn.completion.token_ids) for turn in turns)


def test_replies_at_their_limit_are_named_and_end_the_command_with_1(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer="on and on") as actor, ScriptedServer(answer=answers(0.4)) as judge:
        code = soul(
            "eval", "api", "--model", "m", "--base-url", actor.base_url, "--out", out,
            "--task", "mirrorbench", "--data", "synth:4", "--max-tokens", 2,
            "--judge", f"endpoint:j@{judge.base_url}", *FAST,
        )  # fmt: skip
    assert code == 1
    statuses = [r.score.status for r in load_records(out / "episodes.jsonl")]
    assert statuses == ["truncated"] * 4
    cell = summary(out)["tasks"]["mirrorbench"]["value"]
    assert cell["best"] > cell["mean"] >= cell["worst"], json.dumps(cell)
