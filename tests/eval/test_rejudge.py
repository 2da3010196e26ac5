"""Recorded episodes are judged again: by an edited prompt, by another judge, and only once.

One judgement of one recorded episode: who is asked, who is not, and what is paid for.

Labels of pairs, held against what the judge scored.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import write_rows
from soulkit.eval.judges.correction import Correction, PersonLabel
from soulkit.eval.judges.questions import RecordedEpisode, ask_judge
from soulkit.eval.judges.rating import GradedEpisode
from soulkit.models.base import Player
from soulkit.models.ledger.ledger import Ledger
from soulkit.runs.folder import read_config, read_environment
from soulkit.tasks.kit.registry import builtin_file, load_registry
from soulkit.tasks.userllm.fields import PRISM
from soulkit.tasks.userllm.task import UserLLM
from soulkit.types import Completion, Episode, Record, Score, record_key
from tests.support.evaluation import Body, records, soul, summary, three_lines, value
from tests.support.letters import released
from tests.support.road import episode_of, synth
from tests.support.servers.answers import answer
from tests.support.servers.detector_server import DetectorServer
from tests.support.servers.openai_server import Fault, ScriptedServer

JUDGE = builtin_file().parent / "soulkit" / "tasks" / "sotopia" / "prompts" / "judge.md"
EPISODES = 30
STERN = "Be stern about believability."


def judged(body: Body) -> str:
    """As the shared server says; but a stern prompt takes believability away, and so does `k`."""
    prompt = str(body["messages"][0]["content"])
    plain = {**body, "messages": [{"role": "user", "content": prompt.replace(STERN, "")}]}
    verdict = answer(plain if STERN in prompt else body)
    if '"believability"' not in verdict or not (STERN in prompt or body["model"] == "k"):
        return verdict
    ratings = json.loads(verdict)
    ratings["believability"]["score"] = 0
    return json.dumps(ratings)


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer=judged) as running:
        yield running


@pytest.fixture(scope="module")
def played(server: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty dialogues, evaluated from a folder of their own with relative paths."""
    home = tmp_path_factory.mktemp("home")
    at = f"@{server.base_url}"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        write_rows(Path("rows.jsonl"), synth("sotopia", EPISODES, 1))
        assert soul(
            "eval", "api", "--task", "sotopia", "--model", "m", "--base-url", server.base_url,
            "--data", "rows.jsonl", "--partner", f"endpoint:p{at}", "--judge", f"endpoint:j{at}",
            "--backoff", 0, "--max-attempts", 1, "--out", "runs/plain",
        ) == 0  # fmt: skip
    return home / "runs" / "plain"


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    """A folder with the judge's prompt in other words."""
    folder = tmp_path / "edited"
    folder.mkdir()
    (folder / "judge.md").write_text(STERN + JUDGE.read_text())
    return folder


def requests(server: ScriptedServer, *words: object) -> int:
    """How many requests a command sends that has to succeed."""
    before = len(server.requests)
    assert soul(*words) == 0
    return len(server.requests) - before


def test_an_edited_prompt_costs_as_many_verdicts_as_there_are_episodes(
    server: ScriptedServer, played: Path, edited: Path, tmp_path: Path, capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_bytes() for path in played.iterdir() if path.is_file()}
    command = ("rescore", played, "--ask", "--prompts", "edited")
    capfd.readouterr()
    assert requests(server, *command, "--dry-run", "--json") == 0
    assert json.loads(capfd.readouterr().out)["calls"] == EPISODES
    assert not (tmp_path / "runs").exists()
    assert requests(server, *command, "--json") == EPISODES
    report = json.loads(capfd.readouterr().out)
    new = Path(report["path"])
    assert new.parent == tmp_path / "runs" and report["episodes"] == EPISODES
    assert value(new, "sotopia")["mean"] < value(played, "sotopia")["mean"]
    assert {p.name: p.read_bytes() for p in played.iterdir() if p.is_file()} == before
    assert requests(server, *command) == 0
    assert requests(server, "rescore", new, "--out", tmp_path / "again") == 0
    assert value(tmp_path / "again", "sotopia") == value(new, "sotopia")
    assert soul("ledger", "verify", new) == 0


def test_what_was_judged_by_other_words_is_no_pair_of_its_origin(
    server: ScriptedServer, played: Path, edited: Path, tmp_path: Path, capfd: Any
) -> None:
    out = tmp_path / "stern"
    assert requests(server, "rescore", played, "--ask", "--prompts", edited, "--out", out) == 30
    assert read_environment(out)["command"] == "rescore eval api"
    assert (out / "prompts" / "judge.md").read_text().startswith(STERN)
    capfd.readouterr()
    assert soul("compare", played, out) == 2
    assert "sotopia: prompt 'judge' differs" in three_lines(capfd.readouterr().err)[0]
    assert soul("compare", played, out, "--force-mixed", "--json") == 0
    assert json.loads(capfd.readouterr().out)["tasks"][0]["difference"] < 0


def test_two_runs_that_one_judge_scored_again_compare(
    server: ScriptedServer, played: Path, tmp_path: Path, capfd: Any
) -> None:
    twin = played.parent / "twin"
    shutil.copytree(played, twin)
    judge = ("--ask", "--judge", f"endpoint:k@{server.base_url}")
    runs = [tmp_path / "a", tmp_path / "b"]
    for source, out in zip((played, twin), runs, strict=True):
        home = () if source == played else ("--trust",)
        assert requests(server, "rescore", source, *judge, "--out", out, *home) == 2 * EPISODES
        assert read_config(out)["judge"][0]["model"] == "k"
        names = {verdict.judge for record in records(out) for verdict in record.score.verdicts}
        assert names == {"k"}
    capfd.readouterr()
    assert soul("compare", *runs, "--json") == 0
    comparison = json.loads(capfd.readouterr().out)
    assert comparison["mixed"] == [] and comparison["tasks"][0]["difference"] == 0
    assert soul("compare", played, runs[0]) == 2
    assert "judge endpoint:j@" in three_lines(capfd.readouterr().err)[0]


def test_what_new_verdicts_cost_stands_by_task_and_role(
    server: ScriptedServer, played: Path, tmp_path: Path
) -> None:
    judge = ("--ask", "--judge", f"endpoint:k@{server.base_url}", "--out", tmp_path / "new")
    for _ in range(2):  # what is taken up again is not counted twice
        assert soul("rescore", played, *judge) == 0
        old, new = (summary(run)["costs"]["sotopia"] for run in (played, tmp_path / "new"))
        assert new["actor"] == old["actor"] and new["partner"] == old["partner"]
        asked = {role: new[role]["calls"] - old.get(role, {"calls": 0})["calls"] for role in new}
        assert sum(asked.values()) == 2 * EPISODES and asked["judge"] >= EPISODES
    calls = sum(one["calls"] for one in new.values())
    assert summary(tmp_path / "new")["unpriced_calls"] == calls


def test_a_judge_that_was_silent_is_asked_again_and_nobody_else(
    server: ScriptedServer, played: Path, edited: Path, tmp_path: Path
) -> None:
    broken = {"left": 0}

    def script(index: int, body: Body) -> Fault | None:
        broken["left"] += 1
        return Fault.status_error(400, "no") if broken["left"] > 20 else None

    with ScriptedServer(answer=judged, script=script) as flaky:
        judge = ("--ask", "--judge", f"endpoint:k@{flaky.base_url}", "--out", tmp_path / "new")
        assert soul("rescore", played, *judge) == 0
        lost = sum(not record.score.scored for record in records(tmp_path / "new"))
        assert 0 < lost < EPISODES
        broken["left"] = -1000
        before = len(flaky.requests)
        assert soul("rescore", played, *judge) == 0
        assert len(flaky.requests) - before == 2 * EPISODES - 20
        assert value(tmp_path / "new", "sotopia")["n_scored"] == EPISODES


def test_asking_that_would_change_nothing_or_is_not_meant_is_refused(
    played: Path, edited: Path, tmp_path: Path, capfd: Any
) -> None:
    def refused(*words: object) -> tuple[str, str, str]:
        capfd.readouterr()
        assert soul("rescore", played, "--out", tmp_path / "new", *words) == 2
        return three_lines("\n".join(capfd.readouterr().err.splitlines()[-3:]))

    assert "--prompts needs --ask" in refused("--prompts", edited)[0]
    assert "--max-context needs --ask" in refused("--max-context", 4096)[0]
    assert "no edited prompt" in refused("--ask", "--prompts", tmp_path / "nowhere")[0]
    (edited / "character.md").write_text("You are somebody else.")
    what, why, _ = refused("--ask", "--prompts", edited)
    assert "character.md" in what and "the actor is not asked again" in why
    far = ("--ask", "--judge", "endpoint:j@http://192.0.2.1/v1")
    what, _, fix = refused(*far)
    assert "cost money" in what and "--yes" in fix
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("words", [(), ("--judge", "endpoint:j@http://127.0.0.1:9/v1")])
def test_asking_about_tasks_that_rules_score_is_refused(
    words: tuple[str, ...], tmp_path: Path, capfd: Any
) -> None:
    with ScriptedServer(answer="<answer>box</answer>") as server:
        model = ("--model", "m", "--base-url", server.base_url, "--task", "tomi")
        assert soul("eval", "api", *model, "--data", "synth:2", "--out", tmp_path / "run") == 0
    capfd.readouterr()
    new = tmp_path / "new"
    assert soul("rescore", tmp_path / "run", "--ask", *words, "--out", new) == 2
    what, why, fix = three_lines(capfd.readouterr().err)
    assert "No task of this run asks a judge" in what and "(tomi)" in why
    assert "without --ask" in fix and not new.exists()
    assert soul("rescore", tmp_path / "run", "--out", new) == 0, "as the way out says"


def test_what_a_summary_says_of_its_origin(played: Path, server: ScriptedServer) -> None:
    origin = summary(played)["provenance"]
    rows = origin["tasks"]["sotopia"]["rows"]
    assert rows["n"] == EPISODES and len(rows["sha256"]) == 64
    (judge,) = origin["players"]["judge"]
    assert (judge["model"], judge["address"]) == ("j", server.base_url)
    assert origin["actor"]["model"] == "m" and origin["actor"]["address"] == server.base_url
    assert origin["tasks"]["sotopia"]["sampling"]["max_tokens"]
    assert origin["panel"]["combine"] == "mean"
    assert origin["prompts"]["sotopia"]["judge"] and origin["protocol"] == "paper"
    assert (
        origin["versions"]["soulkit"] and origin["dates"]["finished"] >= origin["dates"]["started"]
    )


def test_a_judge_of_one_task_is_refused_in_words(
    played: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    who = "essay=endpoint:j@http://127.0.0.1:9/v1"
    assert soul("rescore", played, "--ask", "--judge", who) == 2
    assert "judge for a single task" in three_lines(capsys.readouterr().err)[0]


ROW = {
    "source": PRISM, "intent": "get advice about moving to another city for a new job",
    "conversation_history": "", "is_last_turn": False, "opening_prompt": "shd i move 4 a job",
}  # fmt: skip


class Unasked:
    """A judge that must not be asked."""

    name = "unasked"

    async def complete(self, *_: Any) -> Completion:
        raise AssertionError("nobody should ask")

    async def close(self) -> None:
        """Nothing is open."""


def test_a_service_of_the_task_is_paid_once_and_is_no_opinion_of_the_judge(tmp_path: Path) -> None:
    with DetectorServer([(200, {"fraction_human": 0.25})]) as server:
        options = {"detector": "url", "detector_url": server.url}
        spec = load_registry().spec("userllm").model_copy(update={"options": options})
        seen = _seen(UserLLM("userllm", spec))
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            for _ in range(2):
                opinion = asyncio.run(ask_judge(seen, "j", Player(Unasked()), 0, ledger))
                assert not opinion.problem and opinion.asked == 0 and not opinion.said
        assert len(server.requests) == 1


def _seen(task: UserLLM) -> RecordedEpisode:
    example = task.example(released(ROW))
    record = Record(
        key=f"0/{example.id}/0/draft", task=task.name, example_id=example.id, rollout=0,
        kind="draft", episode=episode_of(task, example, "hey, new job, new town?"),
        score=Score(value=1.0, reward=1.0),
    )  # fmt: skip
    return RecordedEpisode(task, example, record)


def graded(example: str, rollout: int, value: float) -> GradedEpisode:
    record = Record(
        key=record_key(0, example, rollout, "draft"), task="essay", example_id=example,
        rollout=rollout, kind="draft", step=0,
        episode=Episode(example_id=example, task="essay", traces=()),
        score=Score(value=value, reward=value),
    )  # fmt: skip
    return GradedEpisode(record, {"quality": (value,)})


def test_rows_may_have_any_sign_in_their_ids() -> None:
    episodes = [graded(f"2+{i}+x", side, float(side)) for i in range(6) for side in (0, 1)]
    labels = [
        PersonLabel((one.record.example_id, 0), "preference", label, "ann", one.record.key,
                    two.record.key, "A")
        for one, two, label in zip(episodes[::2], episodes[1::2], "BBBBBA", strict=True)
    ]  # fmt: skip
    pairs = Correction(episodes, labels, {}).report()["pairs"]
    assert pairs["n"] == 6 and pairs["judge_and_people"]["exact"]["value"] == 5 / 6


def test_what_several_people_say_of_an_episode_is_averaged() -> None:
    episodes = [graded(f"e{i}", 0, float(i)) for i in range(4)]
    labels = [
        PersonLabel((one.record.example_id, 0), "quality", str(i + more), who)
        for i, one in enumerate(episodes)
        for who, more in (("ann", 1), ("bob", 2))
    ]
    quality = Correction(episodes, labels, {}).report()["dimensions"]["quality"]
    assert (quality["judged"]["value"], quality["labelled"]["value"]) == (1.5, 3.0)
