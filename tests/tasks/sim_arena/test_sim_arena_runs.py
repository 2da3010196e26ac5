"""SimulatorArena by the commands: replies at their limit, real files, a kill, a training run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import read_rows
from soulkit.models.local.sampler import LocalModel
from soulkit.train.objectives.sequences import copied_spans, emitted_spans
from soulkit.types import Record, Trace
from tests.support.arena import PHRASE, purpose, student, verdicts
from tests.support.evaluation import records, soul, summary
from tests.support.servers.openai_server import Body, ScriptedServer

DATA = Path(os.environ.get("SOULKIT_TEST_DATA") or "nowhere") / "simulatorarena"
LESSONS = DATA / "math_tutoring_annotations_redacted_for_benchmarking.json"
DOCUMENTS = DATA / "document_creation_annotations_for_benchmarking.json"
real = pytest.mark.skipif(
    not DOCUMENTS.is_file(), reason="no original files ($SOULKIT_TEST_DATA names their folder)"
)


def everybody(actor: Callable[[Body], str], judge: Callable[[Body], str] | None = None) -> Any:
    """Actor, assistant, judge and coach behind one address, told apart by their names."""
    score = judge or verdicts(writing=4, interaction=3)

    def answer(body: Body) -> str:
        match str(body["model"]):
            case "partner":
                return "Tell me more."
            case "coach":
                return "Write in small letters. Stop soon."
            case "judge":
                return score(body)
        return actor(body)

    return answer


def evaluated(out: Path, name: str, data: object, url: str, *arguments: object) -> int:
    players = [option for role in ("partner", "judge")
               for option in (f"--{role}", f"endpoint:{role}@{url}")]  # fmt: skip
    return soul(
        "eval", "api", "--model", "m", "--base-url", url, "--task", name, "--data",
        f"{name}={data}", "--out", out, "--backoff", "0", *players, *arguments,
    )  # fmt: skip


def likeness(prompt: str) -> float:
    """Which share of all words that the student or the program wrote both of them wrote."""
    real, program = (
        set(
            re.findall(
                r"\w+", " ".join(re.findall(r"^Student: (.*)", part, re.MULTILINE)).casefold()
            )
        )
        for part in re.findall(r"<(?:real|program) \w+>\n(.*?)\n</", prompt, re.DOTALL)
    )
    return len(real & program) / len(real | program)


def test_replies_at_their_limit_widen_the_bounds_and_fail_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(answer=everybody(lambda _: "Message: Query: " + "word " * 30)) as server:
        code = evaluated(tmp_path / "run", "sim_doc", "synth:4", server.base_url,
                         "--max-tokens", 8)  # fmt: skip
    assert code == 1 and "episodes are truncated" in capsys.readouterr().err
    told = summary(tmp_path / "run")
    assert told["statuses"] == {"sim_doc": {"truncated": 4}}
    value = told["tasks"]["sim_doc"]["value"]
    assert (value["worst"], value["best"]) == (0.0, 1.0) and 0 < value["mean"] < 1


@pytest.mark.slow
@real
def test_the_real_documents_are_played_and_resumed(tmp_path: Path) -> None:
    out, rows = tmp_path / "run", tmp_path / "doc.jsonl"
    assert soul("data", "import", "sim_doc", DOCUMENTS, "-o", rows) == 0
    broken = [True]

    def judge(body: Body) -> str:
        name = purpose(body)
        lost = broken[0] and name == "document" and "email" in str(body["messages"])
        return "" if lost else verdicts()(body)

    with ScriptedServer(answer=everybody(student(3), judge)) as server:
        assert evaluated(out, "sim_doc", rows, server.base_url) == 1
        lost = [r for r in records(out) if not r.score.scored]
        assert len(lost) >= 17 and {r.score.reason for r in lost} == {"judge_error"}
        assert all(r.episode.notes["final_document"] == "Tell me more." for r in lost)
        broken[0], before = False, len(server.requests)
        assert evaluated(out, "sim_doc", rows, server.base_url) == 0
        questions = [b for b in server.requests if b["model"] == "judge"]
        again = [b for b in server.requests[before:] if b["model"] != "judge"]
    assert not again, "what was said stays said, the document included"
    assert len({str(b["messages"][0]) for b in questions}) == 3 * 51, "no row has features"
    told = summary(out)["tasks"]["sim_doc"]
    assert told["value"]["mean"] == pytest.approx((0.8 + 4 / 5 + 3 / 5) / 3)
    assert told["similarity/some_parts"]["n"] == 51 and "similarity/all_parts" not in told
    similarity = told["similarity"]
    assert similarity["mean"] is None and "parts/features_writing" not in told
    assert set(similarity["missing"]) == {"writing features", "interaction features"}


@pytest.mark.slow
@real
def test_the_real_lessons_are_played_and_their_people_are_known_again(tmp_path: Path) -> None:
    """With stand-ins for the problems, which the release lacks; the judge counts words."""
    lessons = restored(tmp_path)
    rows = tmp_path / "math.jsonl"
    assert soul("data", "import", "sim_math", lessons, "-o", rows) == 2, "one begins blank"
    people = {r["problem"]: r["human_user_queries"] for r in map(json.loads, rows.open())}

    def itself(body: Body) -> str:
        opening = str(body["messages"][1]["content"])
        messages = next(m for problem, m in people.items() if problem in opening)
        spoken = sum(message["role"] == "assistant" for message in body["messages"])
        return f"Query: {messages[spoken]}" if spoken < len(messages) else PHRASE

    def judge(body: Body) -> str:
        grade = 1 + 4 * likeness(str(body["messages"][0]["content"]))
        return verdicts(writing=grade, interaction=grade)(body)

    means = {}
    for name, actor in (("itself", itself), ("other", student(3))):
        with ScriptedServer(answer=everybody(actor, judge)) as server:
            assert evaluated(tmp_path / name, "sim_math", rows, server.base_url) == 0
        assert len(records(tmp_path / name)) == 49
        means[name] = summary(tmp_path / name)["tasks"]["sim_math"]["value"]["mean"]
    assert means["itself"] > 0.9 > means["other"] + 0.1


def restored(folder: Path) -> Path:
    """The redacted lessons with a stand-in for each problem beside them."""
    fields = [record.fields for record in read_rows(LESSONS)[0]]
    for number, record in enumerate(fields):
        place = folder / "MATH" / str(record["question_location"])
        place.parent.mkdir(parents=True, exist_ok=True)
        stand_in = {"problem": f"Stand-in number {number}.", "solution": "Not known."}
        place.write_text(json.dumps(stand_in))
    path = folder / LESSONS.name
    path.write_text(json.dumps(fields))
    return path


# -- training --------------------------------------------------------------------------------------


def removed(long: Sequence[int], short: Sequence[int]) -> tuple[int, ...]:
    """The one run of ids that `short` lacks; fails when they differ otherwise."""
    gap = len(long) - len(short)
    place = next((i for i, (a, b) in enumerate(zip(long, short, strict=False)) if a != b), None)
    start = len(short) if place is None else place
    assert gap > 0 and (*long[:start], *long[start + gap :]) == tuple(short)
    return tuple(long[start : start + gap])


def trained_ids(trace: Trace) -> list[int]:
    return [i for span in emitted_spans(trace)
            for i, trained in zip(span.ids, span.trained, strict=True) if trained]  # fmt: skip


def of_kind(plays: Sequence[Record], kind: str) -> list[Record]:
    return [play for play in plays if play.kind == kind and play.score.scored]


@pytest.mark.slow
def test_three_steps_of_training_train_what_was_said(tmp_path: Path) -> None:
    warm, out = tmp_path / "warm", tmp_path / "run"
    rows = ("--task", "sim_math", "--data", "sim_math=synth:6")
    assert soul("train", "sft", "--full", "--model", "tiny", *rows, "--steps", 15, "--batch", 6,
                "--lr", 4e-3, "--out", warm, "--json") == 0  # fmt: skip
    judge = lambda body: verdicts(writing=1 + len(str(body["messages"])) % 5)(body)  # noqa: E731
    with ScriptedServer(answer=everybody(student(2), judge)) as server:
        who = [o for role in ("judge", "partner", "coach")
               for o in (f"--{role}", f"endpoint:{role}@{server.base_url}")]  # fmt: skip
        assert soul("train", "ditto", "--model", warm / "model", *rows, *who, "--steps", 3,
                    "--prompts", 2, "--group-size", 2, "--max-tokens", 24, "--lora-r", 4,
                    "--out", out, "--json") == 0  # fmt: skip
    plays, renderer = records(out), LocalModel.load(warm / "model").renderer()
    assert {play.step for play in plays} == {0, 1, 2}
    assert of_kind(plays, "draft") and of_kind(plays, "refined")
    for play in [*of_kind(plays, "draft"), *of_kind(plays, "refined")]:
        (trace,) = play.episode.traces
        assert trace.seat == "student"
        emitted = [i for turn in trace.turns for i in turn.completion.token_ids]
        assert trained_ids(trace) == emitted
    for play in of_kind(plays, "refined"):
        (trace,) = play.episode.traces
        pairs = zip(emitted_spans(trace), copied_spans(trace, renderer), strict=True)
        for refined, copy in pairs:
            hint = removed(refined.ids, copy.ids)
            assert copy.trained == refined.trained[len(hint) :] and copy.sampler == refined.sampler
        assert play.given is not None and play.given.author == "coach"
