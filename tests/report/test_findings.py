"""The findings of a report: real evaluations of scripted models, and trainings as they leave files.

A difference is called clear only if its interval excludes zero; runs that were measured differently
get a reason and no difference.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from markupsafe import escape

from soulkit.eval.comparison.compare import TaskDifference
from soulkit.metrics.comparisons import PairedDifference
from soulkit.report import findings as report
from soulkit.report import pages
from soulkit.report.findings import Finding, findings
from soulkit.report.grid import parts_text
from soulkit.report.load import RunData, find_runs, load_runs
from soulkit.runs.records import RecordWriter, load_records
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.registry import load_registry
from soulkit.types import Example, Failure, unscored
from tests.report.test_report import EVIL, Page
from tests.support import judged
from tests.support.evaluation import FAST, api, examples, last_message, soul
from tests.support.servers.openai_server import Body, ScriptedServer

RECORDED = Path(__file__).parents[1] / "recorded"
N = 60
FACTS = ("What improved", "By how much", "How certain", "Why", "What got worse", "Who judged",
         "On which rows")  # fmt: skip


def player(right: Callable[[Example], bool], task: str = "tomi") -> Callable[[Body], str]:
    """Answers with the gold where `right` holds for the row, else without an answer."""
    live = load_registry().task(task)
    assert isinstance(live, ChoiceTask)
    rows = examples(task, N)
    said = {live.preview(e)[0].text: live.gold_completion(e) if right(e) else "?" for e in rows}
    return lambda body: said[last_message(body)]


def nth(every: int) -> Callable[[Example], bool]:
    """Rows that are not among these: every so many by id, so that all tags have some."""
    return lambda example: int(example.id, 16) % every != 0


MODELS: dict[str, Callable[[Example], bool]] = {
    "none": lambda _: False,
    "most": nth(7),
    "nearly": nth(8),
    "all": lambda _: True,
    "reality": lambda e: e.tags["order"] == "0",
    "minds": lambda e: e.tags["order"] != "0",
}
"""Model → the rows that it answers."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One evaluation of each model on the same rows."""
    folder = tmp_path_factory.mktemp("played")
    for name, right in MODELS.items():
        with ScriptedServer(answer=player(right)) as server:
            assert api(server.base_url, folder / name, "--model", name, n=N) == 0
    return folder


@pytest.fixture
def models(played: Path, tmp_path: Path) -> Path:
    """A copy of the evaluations, to change."""
    return Path(shutil.copytree(played, tmp_path / "models"))


def found(folder: Path, *names: str) -> list[Finding]:
    return findings(load_runs([folder / name for name in names]))


def edit(run: Path, **provenance: Any) -> None:
    summary = json.loads((run / "summary.json").read_text())
    summary["provenance"] |= provenance
    (run / "summary.json").write_text(json.dumps(summary))


def training(folder: Path, gaps: list[float] | None, *, shuffled: bool = False) -> Path:
    """A training run with these leave-one-out gaps, and the adapter that it saved."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "adapter_model.safetensors").write_bytes(folder.name.encode())
    settings = {"method": "ditto", "shuffle_feedback": shuffled, "data": {}, "tasks": {}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    lines: list[dict[str, object]] = [
        {"step": step, "reward/draft": 0.25, "optimizer/lr": 0.1} for step in range(3)
    ]
    for line, gap in zip(lines, gaps or [], strict=False):
        line |= {"gap/loo": gap, "gap/loo_low": gap - 0.1, "gap/loo_high": gap + 0.1}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    summary = {"command": "train ditto", "model": "base", "steps": 3, "tasks": {}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


# -- two runs --------------------------------------------------------------------------------------


def test_a_gain_has_seven_facts(models: Path) -> None:
    (gain,) = found(models, "reality", "all")
    shares = [json.loads((models / name / "summary.json").read_text())["tasks"]["tomi"]["value"]
              for name in ("reality", "all")]  # fmt: skip
    assert gain.outcome == "better"
    low = f"{shares[0]['mean']:.3f}"
    assert gain.claim == f"'all' scores 1.000 on tomi (accuracy), up from {low} in 'reality'."
    facts = dict(gain.facts)
    assert tuple(facts) == FACTS
    assert facts["By how much"].endswith(f", from {low} to 1.000")
    assert "[+" in facts["By how much"] and "p < 0.0001" in facts["How certain"]
    assert f"{N} episodes, {shares[1]['n_clusters']} clusters" in facts["How certain"]
    assert facts["Why"].startswith(
        "Another model: 'all' instead of 'reality'. The metric that moved most: accuracy/"
    )
    assert facts["What got worse"].startswith("Nothing got clearly worse; ")
    assert facts["Who judged"] == "Rules; no judge model was asked"
    assert facts["On which rows"] == (
        f"The same in both runs: {N} of {N} episodes of tomi scored in both"
    )
    assert {part.metric for part in gain.moved} >= {"accuracy/order=1"}
    assert all(part.metric != "accuracy/order=0" for part in gain.moved)


@pytest.mark.parametrize(("a", "b"), [("nearly", "most"), ("most", "nearly"), ("all", "all")])
def test_an_interval_around_zero_is_no_gain(a: str, b: str, models: Path) -> None:
    shutil.copytree(models / b, models / "again")
    (one,) = found(models, a, "again")
    assert one.outcome == "unclear"
    assert one.claim.startswith("No clear difference on tomi (accuracy): 'again' scores ")
    assert dict(one.facts)["What changed"].startswith("Nothing clearly: ")
    assert not {"up from", "improved"} & set(one.sentence.split())


def test_a_loss_in_a_part_is_named_although_the_whole_rose(models: Path) -> None:
    (rise,) = found(models, "reality", "minds")
    facts = dict(rise.facts)
    assert rise.outcome == "better"
    assert facts["What got worse"].startswith("tomi (accuracy/order=0) −1.000 [−1.000, ")
    assert [part.paired.difference for part in rise.moved[:1]] != [None]
    assert {report.change_of(part) for part in rise.moved} == {"better", "worse"}


def test_a_fall_leads_with_what_fell(models: Path) -> None:
    (fall,) = found(models, "all", "none")
    assert fall.claim == "'none' scores 0.000 on tomi (accuracy), down from 1.000 in 'all'."
    assert dict(fall.facts)["What got worse"].startswith("tomi (accuracy) −1.000 [")


def test_the_most_certain_difference_leads_and_the_first_run_is_the_baseline(models: Path) -> None:
    several = found(models, "nearly", "most", "none", "all")
    assert [one.baseline for one in several] == ["nearly"] * 3
    assert [one.run for one in several] == ["none", "all", "most"]


@pytest.mark.parametrize("change", ["protocol", "prompt", "rows", "nothing recorded"])
def test_runs_that_were_measured_differently_get_a_reason_and_no_difference(
    change: str, models: Path
) -> None:
    run = models / "all"
    if change == "protocol":
        text = (run / "config.yaml").read_text().replace("protocol: paper", "protocol: reference")
        (run / "config.yaml").write_text(text)
    elif change == "prompt":
        lines = (run / "episodes.jsonl").read_text()
        (prompt,) = set(load_runs([run])[0].records[0].score.prompts.values())
        (run / "episodes.jsonl").write_text(lines.replace(prompt, "0" * len(prompt)))
    elif change == "rows":
        conditions = json.loads((run / "conditions.json").read_text())
        conditions["tasks"]["tomi"]["rows"].popitem()
        (run / "conditions.json").write_text(json.dumps(conditions))
    else:
        (run / "conditions.json").unlink()
    whys = {"protocol": "protocol paper vs reference", "prompt": "prompt 'user' differs",
            "rows": f"rows {N} vs {N - 1}", "nothing recorded": "B did not record"}  # fmt: skip
    (one,) = found(models, "none", "all")
    assert one.outcome == "not comparable" and one.facts == ()
    assert (
        one.claim.startswith("'all' cannot be compared with 'none' on tomi: ")
        and whys[change] in one.claim
    )
    assert not any(sign in one.sentence for sign in ("+1.000", "p <", "["))
    assert "cannot be compared" in pages.render(load_runs([models / "none", models / "all"]))


def test_a_run_without_episodes_is_not_compared(models: Path) -> None:
    (models / "all" / "episodes.jsonl").unlink()
    (one,) = found(models, "none", "all")
    assert "There are no episodes at" in one.claim


def test_a_run_without_a_finished_episode_has_none(models: Path) -> None:
    (models / "all" / "episodes.jsonl").write_bytes(b"")
    (one,) = found(models, "none", "all")
    assert one.claim.endswith("all' has no episodes.") and "task in common" not in one.claim


def test_runs_of_which_one_is_unscored_say_so(models: Path) -> None:
    unscore(models / "all", N)
    (one,) = found(models, "none", "all")
    assert ": No episode is scored in both " in one.claim and "headline" not in one.claim


@pytest.mark.parametrize(("a", "b"), [("reality", "all"), ("most", "nearly")])
def test_a_part_of_the_episodes_is_named_in_the_claim(a: str, b: str, models: Path) -> None:
    """The means of such a claim differ from those in the table."""
    (whole,) = found(models, a, b)
    assert "scored in both" not in whole.claim
    unscore(models / b, 10)
    (one,) = found(models, a, b)
    assert f", on the {N - 10} of {N} episodes scored in both" in one.claim


def test_a_metric_of_which_less_is_better_says_so() -> None:
    pair = PairedDifference(mean_a=0.1, mean_b=0.4, difference=0.3, ci_low=0.2, ci_high=0.4,
                            p=0.001, n_shared=60, n_only_a=0, n_only_b=0,
                            n_clusters=60)  # fmt: skip
    one = TaskDifference(task="t", metric="hacked", paired=pair, p_holm=None, n_a=60, n_b=60,
                         less_is_better=True)  # fmt: skip
    assert report._worse([one]).startswith("t (hacked) +0.300 [+0.200, +0.400], less is better; ")


def test_means_on_another_scale_have_no_axis_from_zero_to_one(models: Path) -> None:
    axis = "<span>0</span><span>1</span>"
    whole = pages.render(load_runs([models / "all"]))
    summary = json.loads((models / "all" / "summary.json").read_text())
    summary["tasks"]["tomi"]["value"] |= {"mean": -3.0, "ci_low": -4.0, "ci_high": -2.0}
    (models / "all" / "summary.json").write_text(json.dumps(summary))
    other = pages.render(load_runs([models / "all"]))
    assert axis in whole and axis not in other and "\N{MINUS SIGN}3.000" in other


def unscore(run: Path, n: int) -> None:
    """Make the first episodes unscored."""
    records = load_records(run / "episodes.jsonl")
    broken = unscored(Failure("provider_error", "gone"))
    (run / "episodes.jsonl").unlink()
    writer = RecordWriter(run / "episodes.jsonl")
    writer.write(*(replace(one, score=broken) if i < n else one for i, one in enumerate(records)))
    writer.close()


def test_scores_read_again_from_disk_give_the_same_findings(models: Path) -> None:
    paths = [models / "reality", models / "minds"]
    assert findings(load_runs(paths)) == findings(load_runs(paths, episodes=False))


def test_several_tasks_have_holm_and_each_its_own_finding(tmp_path: Path) -> None:
    tasks = ("tomi", "hitom")
    rows = [word for t in tasks for word in ("--task", t, "--data", f"{t}=synth:{N}")]
    for name in ("none", "most"):
        said = [player(MODELS[name], task) for task in tasks]
        with ScriptedServer(answer=lambda body, said=said: either(said, body)) as server:
            assert soul("eval", "api", "--model", name, "--base-url", server.base_url,
                        "--out", tmp_path / name, *FAST,
                        *rows) == 0  # fmt: skip
    both = found(tmp_path, "none", "most")
    assert {one.task for one in both} == set(tasks)
    assert all(re.search(r"p (<|=) 0.\d+ \(Holm (< )?0.\d+\)", one.sentence) for one in both)


def either(players: list[Callable[[Body], str]], body: Body) -> str:
    """The answer of the player that knows the row."""
    for one in players:
        with contextlib.suppress(KeyError):
            return one(body)
    raise KeyError(last_message(body))


# -- why -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["path", "hash", "neither"])
def test_the_training_stands_beside_its_control(by: str, models: Path) -> None:
    made = training(models / "ditto", [0.3, 0.2, 0.1])
    training(models / "swapped", [0.05, 0.0, -0.05], shuffled=True)
    digest = hashlib.sha256(b"ditto").hexdigest()[:16]
    actor = {"path": {"adapter": str(made / "model")},
             "hash": {"adapter": "/gone/model", "adapter_weights": digest},
             "neither": {"adapter": "/gone/model", "adapter_weights": "0" * 16}}[by]  # fmt: skip
    edit(models / "all", actor=actor)
    (gain,) = found(models, "none", "ditto", "swapped", "all")
    why = dict(gain.facts)["Why"]
    helped = (
        "Feedback helped in 'ditto': replies that saw it scored +0.300 [+0.200, +0.400] compared "
        "with the other drafts of their row at the first step, +0.200 on average over 3 steps"
    )
    control = (
        "Control: shuffled feedback did not clearly help in 'swapped': replies that saw it scored "
    )
    assert (helped in why) == (control in why) == (by != "neither")
    assert "control's model" not in why
    edit(models / "most", actor={"adapter": str(models / "swapped" / "model")})
    (*_, gain) = (f for f in found(models, "none", "ditto", "swapped", "all", "most")
                  if f.run == "all")  # fmt: skip
    mean = json.loads((models / "most" / "summary.json").read_text())["tasks"]["tomi"]["value"]
    beside = f"The control's model scores {mean['mean']:.3f} ["
    assert (beside in dict(gain.facts)["Why"]) == (by != "neither")


def test_a_control_is_called_one_and_a_reward_alone_has_no_feedback(models: Path) -> None:
    edit(models / "nearly", actor={"adapter": str(training(models / "grpo", None) / "model")})
    control = training(models / "swapped", [-0.3, 0.0, 0.0], shuffled=True)
    edit(models / "most", actor={"adapter": str(control / "model")})
    texts = {one.run: one for one in found(models, "none", "grpo", "swapped", "nearly", "most")}
    assert texts["most"].claim.startswith("'most' (control: shuffled feedback) scores ")
    assert "shuffled feedback hurt in 'swapped'" in dict(texts["most"].facts)["Why"]
    assert "'grpo' trained 3 steps without feedback" in dict(texts["nearly"].facts)["Why"]


def test_a_training_says_whether_and_when_feedback_was_measured(models: Path) -> None:
    made = training(models / "ditto", None)
    lines = [{"step": step, "reward/draft": 0.25, "rollouts/refined": 8} for step in range(3)]
    (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (one,) = found(models, "ditto")
    assert "3 steps with feedback, whose effect was not measured" in one.claim
    lines[2]["gap/loo"] = 0.5
    (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (one,) = found(models, "ditto")
    assert "of their row at step 2, +0.500 on average over 1 step" in one.claim


def test_two_trainings_are_explained_by_both_gaps(models: Path) -> None:
    for name, gap, shuffled in (("ditto", 0.3, False), ("swapped", 0.0, True)):
        run = training(models / name, [gap], shuffled=shuffled)
        for file in ("episodes.jsonl", "conditions.json"):
            shutil.copy(models / ("all" if shuffled else "most") / file, run / file)
        summary = json.loads((run / "summary.json").read_text())
        summary["tasks"] = json.loads((models / "all" / "summary.json").read_text())["tasks"]
        (run / "summary.json").write_text(json.dumps(summary))
    (one,) = found(models, "ditto", "swapped")
    why = dict(one.facts)["Why"]
    assert "Control: shuffled feedback did not clearly help in 'swapped'" in why
    assert "Feedback helped in 'ditto': replies that saw it scored +0.300" in why


def test_rows_that_were_trained_on_are_counted(models: Path) -> None:
    made = training(models / "ditto", [0.3])
    rows = json.loads((models / "all" / "conditions.json").read_text())["tasks"]["tomi"]["rows"]
    some = dict(list(rows.items())[:7])
    conditions = {"players": {}, "tasks": {"tomi": {"rows": some}}, "material": {}}
    (made / "conditions.json").write_text(json.dumps(conditions))
    (gain,) = found(models, "none", "ditto", "all")
    assert dict(gain.facts)["On which rows"].endswith(
        f"; 7 of {N} rows used in training by the runs shown"
    )


def test_a_judge_is_named_with_its_check_and_its_verdicts(tmp_path: Path) -> None:
    rows = judged.write_rows(tmp_path / "rows.jsonl", 12)
    said = judged.judge(2)

    def answer(body: Body) -> str:
        """Every third essay is unreadable at first."""
        broken = judged.topic(body) % 3 == 0 and len(body["messages"]) < 3
        return "no verdict" if broken else said(body)

    with ScriptedServer(answer=answer) as server:
        run = judged.evaluated(tmp_path / "run", rows, server.base_url, "--judge-samples", "2")
        page = pages.render(load_runs([run]))
        (before,) = findings(load_runs([run]))
        assert soul("judge", "check", run, "--out", tmp_path / "check", "--no-pairs") == 0
    (after,) = findings(load_runs([run]))
    who = dict(before.facts)["Who judged"]
    assert re.fullmatch(r"Judge model j@http://127.0.0.1:\d+/v1, 2 opinions each", who)
    assert re.search(
        rf"^{re.escape(who)}; j again: alpha [01].\d\d", dict(after.facts)["Who judged"]
    )
    assert "24 verdicts, 8 asked again" in page


# -- one run, suites, folders ----------------------------------------------------------------------


def test_one_run_is_described(models: Path) -> None:
    (one,) = found(models, "reality")
    facts = dict(one.facts)
    assert one.outcome == "one run" and len(facts) == 7
    assert one.claim.startswith("'reality' scores 0.") and f"({N}/{N}, " in one.evidence
    assert "Lowest: accuracy/order=1 0.000 [" in facts["Why"]
    assert re.search(r"Highest: accuracy/\w+=\w+ 1.000 \[", facts["Why"])
    assert facts["What got worse"].startswith("Unknown")


def test_a_mean_over_training_drafts_says_so() -> None:
    (one,) = findings(load_runs([RECORDED / "ditto"]))
    assert one.claim == "'ditto' scores 0.250 on kind in the drafts of the last 4 steps."
    assert dict(one.facts)["Why"].startswith("Feedback ")
    (sft,) = findings(load_runs([RECORDED / "sft"]))
    assert sft.claim == "'sft' trained 60 steps without feedback, loss 6.208 to 0.274."


def test_a_suite_leads_with_its_mean(tmp_path: Path) -> None:
    """Of a suite that cannot be played in full there is no mean, only its tasks."""
    for name, answer in (("a", "?"), ("b", "<answer>A</answer>")):
        with ScriptedServer(answer=answer) as server:
            rows = [word for task in ("tomi", "hitom", "paratomi")
                    for word in ("--data", f"{task}=synth:30")]  # fmt: skip
            assert soul("eval", "api", "--model", "m", "--base-url", server.base_url, "--suite",
                        "tom", "--playable", "--out", tmp_path / name, *rows) == 0  # fmt: skip
    runs = load_runs([tmp_path / "a", tmp_path / "b"])
    mean, *tasks = findings(runs)
    assert mean.task == "tom" and "of 3 tasks higher" in mean.claim
    assert "90 of 90 episodes" in dict(mean.facts)["On which rows"]
    assert all(one.outcome != "unclear" for one in tasks)
    unscore(tmp_path / "a", 12)
    mean, *_ = findings(load_runs([tmp_path / "a", tmp_path / "b"]))
    assert ", on the 78 of 90 episodes scored in both" in mean.claim
    assert "78 of 90 episodes" in dict(mean.facts)["On which rows"]
    (single,) = findings(runs[1:])
    assert single.claim.startswith("'b' scores 0.") and "tom (mean)" in single.claim


def test_a_folder_of_runs_is_read_oldest_first(models: Path) -> None:
    for hour, name in enumerate(("minds", "all", "none")):
        edit(models / name, dates={"started": f"2020-01-01T0{hour}:00:00+00:00"})
    assert [run.name for run in find_runs(models)][:3] == ["minds", "all", "none"]
    assert {one.baseline for one in findings(load_runs([models]))} == {"minds"}


def test_a_demonstration_inside_a_folder_is_read_as_its_runs(models: Path, tmp_path: Path) -> None:
    (models / "summary.json").write_text('{"command": "demo", "tasks": {}}')
    shutil.copytree(models / "all", tmp_path / "alone")
    names = {path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path)}
    assert names == {"alone", *(f"models/{name}" for name in MODELS)}


def test_without_a_result_there_is_no_finding() -> None:
    assert findings([]) == []
    assert "There is no result yet." in pages.render([])


# -- where findings are shown ----------------------------------------------------------------------


def test_every_format_begins_with_the_finding(
    models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = [models / "none", models / "all"]
    claim = "'all' scores 1.000 on tomi (accuracy), up from 0.000 in 'none'."
    assert soul("report", *names) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == claim
    assert [line.split("  ")[0] for line in lines[1:] if line[:1].isupper()][:7] == list(FACTS)
    assert soul("report", *names, "--format", "md") == 0
    assert capfd.readouterr().out.splitlines()[2] == f"**{claim}**".replace("_", "\\_")
    assert soul("report", *names, "--json") == 0
    (said,) = json.loads(capfd.readouterr().out)["findings"]
    assert said["sentence"].startswith(claim) and tuple(said["facts"]) == FACTS
    assert {"metric", "difference", "ci_low", "p"} <= said["moved"][0].keys()
    page = tmp_path / "page.html"
    assert soul("report", *names, "--format", "html", "--out", page) == 0
    assert f"<h1>{escape(claim)}</h1>" in page.read_text()


@pytest.mark.parametrize(
    ("out", "written", "begins"),
    [("page.HTML", "page.HTML", "<!doctype html>"), ("folder", "folder/index.html", "<!doctype"),
     ("there.d", "there.d/index.html", "<!doctype"), ("notes.md", "notes.md", "# Results"),
     ("values.json", "values.json", "{"), ("plain.txt", "plain.txt", "'all' scores ")],
)  # fmt: skip
def test_without_a_format_the_name_of_the_file_decides(
    models: Path, tmp_path: Path, out: str, written: str, begins: str
) -> None:
    (tmp_path / "there.d").mkdir()
    assert soul("report", models / "none", models / "all", "--out", tmp_path / out) == 0
    assert (tmp_path / written).read_text().startswith(begins)


def test_a_folder_of_folders_of_runs_names_the_next_level(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (models.parent / "file.json").write_text("{}")
    assert soul("report", models.parent) == 2
    assert f"Give these: {models.parent}/*/" in capsys.readouterr().err


def test_many_findings_are_counted(models: Path) -> None:
    for i in range(10):
        shutil.copytree(models / "all", models / f"copy{i}")
    several = found(models, "none", *(f"copy{i}" for i in range(10)))
    assert "2 more: soul report --json" in parts_text(report.finding_parts(several))


def test_hostile_names_are_text(models: Path) -> None:
    runs = load_runs([models / "none", models / "all"])
    evil: list[RunData] = [replace(run, name=f"{EVIL} {i}") for i, run in enumerate(runs)]
    page = pages.render(evil)
    assert [*Counter(Page(page).tags)] == [*Counter(Page(pages.render(runs)).tags)]
    assert Page(page).tags.count("script") == Page(pages.render(runs)).tags.count("script")
    head = page[page.index("<header>") : page.index("<h2>How certain")]
    assert not {"\x1b", "\x07", "\u202e", "\u2066"} & set(head)
    text = parts_text(report.finding_parts(findings(evil)))
    assert "\x1b" not in text and "\u202e" not in text
