"""Humanual through the commands: replies at their limit, default players, three steps of Ditto."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from soulkit.models.local.render import Renderer
from soulkit.models.local.tiny import build_tiny
from soulkit.runs.folder import read_jsonl
from soulkit.runs.records import load_records
from soulkit.train.objectives.sequences import copied_spans, emitted_spans
from tests.support.evaluation import examples, soul, summary
from tests.support.humanual import DOMAINS, by_shared_words, fenced, sides, tagged
from tests.support.road import synth_examples, task_of
from tests.support.servers.openai_server import Body, ScriptedServer

LONG = "I will think about this for quite some time before I say anything at all "


def evaluated(out: Path, actor: Any, judge: Any, *arguments: object) -> tuple[int, list[Body]]:
    """`soul eval api` by servers, and what the judge was asked."""
    with ScriptedServer(answer=actor) as actors, ScriptedServer(answer=judge) as judges:
        code = soul(
            "eval", "api", "--model", "m", "--base-url", actors.base_url, "--out", out,
            "--judge", f"endpoint:j@{judges.base_url}", "--backoff", 0, *arguments,
        )  # fmt: skip
        return code, judges.requests


def test_replies_at_their_limit_are_truncated_with_bounds_and_a_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ("--task", "humanual_email", "--data", "humanual_email=synth:4")
    code, asked_for = evaluated(
        tmp_path / "run", tagged(LONG * 3), sides(1), *rows, "--max-tokens", 12
    )
    whole = summary(tmp_path / "run")
    cell = whole["tasks"]["humanual_email"]["value"]
    assert code == 1 and asked_for == []
    assert whole["statuses"] == {"humanual_email": {"truncated": 4}}
    assert (cell["mean"], cell["worst"], cell["best"]) == (0.0, 0.0, 1.0)
    assert "truncated" in capsys.readouterr().err


def test_the_suite_is_the_mean_of_six_domains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = dict(zip(DOMAINS, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), strict=True))
    by_text = {
        row.fields["prompt"]: score
        for domain, score in scores.items()
        for row in examples(f"humanual_{domain}", 3)
    }

    def judge(body: Body) -> str:
        return sides(by_text.get(fenced(body, "context"), 0.5))

    data = [part for d in DOMAINS for part in ("--data", f"humanual_{d}=synth:3")]
    code, _ = evaluated(tmp_path / "run", tagged(LONG), judge, "--suite", "humanual", *data)
    assert code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "humanual mean (6 of 6) 0.500" in shown and "18/18" in shown
    means = [summary(tmp_path / "run")["tasks"][f"humanual_{d}"]["value"]["mean"] for d in DOMAINS]
    assert means == pytest.approx(list(scores.values()))


@pytest.mark.slow
def test_three_steps_of_ditto_train_what_the_actor_wrote_and_nothing_else(tmp_path: Path) -> None:
    task, out = task_of("humanual_email"), tmp_path / "run"
    played = synth_examples("humanual_email", 24, seed=1)
    texts = [segment.text for one in played for segment in task.preview(one)]
    model = build_tiny(tmp_path / "tiny", texts, max_context=4000)
    with ScriptedServer(answer=by_shared_words) as judge, ScriptedServer(answer=advice) as coach:
        done = soul(
            "train", "ditto", "--model", model, "--task", "humanual_email",
            "--data", "humanual_email=synth:24", "--judge", f"endpoint:j@{judge.base_url}",
            "--coach", f"endpoint:c@{coach.base_url}", "--steps", 3, "--prompts", 2,
            "--group-size", 3, "--max-tokens", 40, "--lora-r", 4, "--lr", 1e-3, "--out", out,
        )  # fmt: skip
    assert done == 0
    records, lines = load_records(out / "episodes.jsonl"), read_jsonl(out / "metrics.jsonl")
    assert len(lines) == 3 and all(line["rollouts/unscored"] == 0 for line in lines)
    for line in lines:
        batch = [r for r in records if r.step == line["step"]]
        assert line.get("trained/draft", 0) == emitted(batch, "draft")
        refined = emitted(batch, "refined")
        assert line.get("trained/copy", 0) == line.get("trained/refined", 0) == refined
    again = [r for r in records if r.kind == "refined"]
    assert again and all(r.score.protocol == "paper" for r in records)
    same_but_for_the_prompt(model, again, [r for r in records if r.kind == "draft"])


def advice(body: Body) -> str:
    return "Think of what this person wants, and write it as briefly as they would."


def emitted(records: list[Any], kind: str) -> int:
    traces = [trace for r in records if r.kind == kind for trace in r.episode.traces]
    return sum(len(turn.completion.token_ids) for trace in traces for turn in trace.turns)


def same_but_for_the_prompt(model: Path, refined: list[Any], drafts: list[Any]) -> None:
    """A copy is what the refined reply emitted, under the very prompt of its draft."""
    from transformers import AutoTokenizer

    renderer = Renderer(AutoTokenizer.from_pretrained(model))
    prompts = {(r.example_id, r.step, r.rollout): r.episode.traces[0] for r in drafts}
    for record in refined:
        trace = record.episode.traces[0]
        (copy,), (whole,) = copied_spans(trace, renderer), emitted_spans(trace)
        ids = trace.turns[0].completion.token_ids
        assert copy.ids[-len(ids) :] == whole.ids[-len(ids) :] == ids
        assert sum(copy.trained) == sum(whole.trained) == len(ids)
        draft = prompts[record.example_id, record.step, record.rollout].turns[0].completion
        assert copy.ids[: -len(ids)] == draft.prompt_ids != whole.ids[: -len(ids)]
