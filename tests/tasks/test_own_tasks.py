"""Own tasks: the four examples through the real commands, and `soul tasks new`, which copies them.

Each is a folder laid out like a built-in benchmark's, so whatever runs here runs for a task that
somebody writes by their pattern.
"""

from __future__ import annotations

import asyncio
import json
import re
import select
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from soulkit import tasks
from soulkit.cli import app as cli
from soulkit.models.base import Cast
from soulkit.models.local.tiny import build_tiny
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.runs.jsonl import TASKS_SCHEMA, schema_file
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.loading import load_examples
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.scaffold import SCHEMA_PATH, TEMPLATES, YAML_TEMPLATES, template_files
from soulkit.types import Example, Record
from tests.support.evaluation import FAST, ROOT, records, soul, start, summary, three_lines
from tests.support.road import played_by
from tests.support.servers.answers import answer as fitting
from tests.support.servers.openai_server import ScriptedServer

FOLDER = Path(__file__).parents[2] / "examples" / "my_task"
TASKS = FOLDER / "tasks.yaml"
RIGHT = {"Were you raised in a tent?": "B", "The frame is lovely.": "C"}


def task_and_examples():
    task = load_registry(TASKS).task("my_task")
    return task, load_examples(task, [FOLDER / "rows.jsonl"]).examples


def answer(body: dict) -> str:
    """Knows two rows, and listens to advice on the others."""
    prompt = body["messages"][-1]["content"]
    speech = re.findall(r'says: "(.*)"', prompt)[0]
    if "Advice" in prompt:
        return "I give up."
    return f"Hm. <answer>{RIGHT.get(speech, 'Z')}.</answer>"


def test_the_engine_plays_it_like_any_other_task() -> None:
    task, examples = task_and_examples()

    async def run() -> list[Record]:
        with played_by(answer) as actor:
            engine = Engine(Cast(actor=actor), feedback=FeedbackPolicy(when="imperfect"))
            jobs = [Job(task, example) for example in examples]
            try:
                return await engine.run(jobs, lambda record: None)
            finally:
                await actor.model.close()

    records = asyncio.run(run())
    drafts = [r for r in records if r.kind == "draft"]
    refined = [r for r in records if r.kind == "refined"]
    assert sum(r.score.value for r in drafts) == 2 and len(drafts) == 10
    assert len(refined) == 8 and {r.score.status for r in refined} == {"no_tag"}
    assert all(r.received.leak == "" for r in drafts if r.received)
    assert {r.tags["kind"] for r in drafts} == {"request", "criticism", "refusal", "praise"}


def test_it_is_listed_and_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["tasks", "list", "--tasks", str(TASKS)]) == 0
    listed = capfd.readouterr().out
    assert "my_task" in listed and "my_task, tomi" in listed
    assert cli.main(["tasks", "show", "my_task", "--tasks", str(TASKS)]) == 0
    shown = capfd.readouterr().out
    assert "What was meant" in shown and "listener (actor)" in shown and "utterance" in shown
    assert cli.main(["tasks", "show", "mytask", "--tasks", str(TASKS)]) == 2
    assert "'my_task'" in capfd.readouterr().err


REPOSITORY = Path(__file__).parents[2]
EXAMPLES_FOLDER = REPOSITORY / "examples"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


KINDS = [(kind, True) for kind in TEMPLATES] + [(kind, False) for kind in YAML_TEMPLATES]


@pytest.mark.parametrize(("kind", "python"), KINDS)
def test_the_templates_are_the_examples(kind: str, python: bool) -> None:
    task = (TEMPLATES if python else YAML_TEMPLATES)[kind].task
    example = EXAMPLES_FOLDER / task
    files = template_files(kind, python=python)
    code = {"task.py", "rows.py", "README.md"} if python else set()
    assert {"tasks.yaml", "rows.jsonl"} | code <= set(files)
    assert python or len(files) == 2
    for path, text in files.items():
        assert text == (example / path).read_text(encoding="utf-8")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    folder = f"soulkit/tasks/templates/{kind if python else task}"
    assert packaged[f"examples/{task}"] == folder


@pytest.mark.parametrize("kind", YAML_TEMPLATES)
def test_a_new_task_without_code(kind: str, tmp_path: Path, capfd: Any) -> None:
    """Two files; the schema that the first line names is there; every printed command runs."""
    assert soul("tasks", "new", "night_bus", "--kind", kind) == 0
    printed = capfd.readouterr().out
    load_registry.cache_clear()  # other tests have a file of this name
    assert sorted(path.name for path in Path("night_bus").iterdir()) == ["rows.jsonl", "tasks.yaml"]
    lines = Path("night_bus/tasks.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0].endswith(f"$schema={schema_file(TASKS_SCHEMA).as_uri()}")
    assert len(lines) <= 12 or kind not in ("choice", "text")
    with ScriptedServer(answer=fitting) as server:
        for step in printed.partition("next:\n")[2].splitlines():
            for name, value in {"MODEL|JUDGE|PARTNER": "m", "URL": server.base_url}.items():
                step = re.sub(rf"\b({name})\b", value, step)
            assert soul(*step.split()[1:], *(["--out", "run"] if " eval " in step else [])) == 0
    capfd.readouterr()
    assert soul("tasks", "check", "night_bus", "--tasks", "night_bus/tasks.yaml", "--json") == 0
    (checked,) = json.loads(capfd.readouterr().out)["tasks"]
    assert checked["breaks"] == [] and checked["bad"] == []


def test_the_examples_name_the_schema_of_the_checkout() -> None:
    for template in YAML_TEMPLATES.values():
        folder = EXAMPLES_FOLDER / template.task
        assert (folder / SCHEMA_PATH).resolve() == schema_file(TASKS_SCHEMA)
        assert SCHEMA_PATH in (folder / "tasks.yaml").read_text(encoding="utf-8").splitlines()[0]


def test_a_kind_that_needs_code_says_so(capfd: Any) -> None:
    assert soul("tasks", "new", "night_bus", "--kind", "scene") == 2
    assert three_lines(capfd.readouterr().err)[2] == "Add --python."
    assert soul("tasks", "new", "night_bus", "--kind", "text", "--python") == 2
    assert three_lines(capfd.readouterr().err)[2] == "Omit --python."


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_new_task_is_the_example_with_its_name(kind: str, capfd: Any) -> None:
    assert soul("tasks", "new", "night_bus", "--python", "--kind", kind) == 0
    example, printed = TEMPLATES[kind], capfd.readouterr().out
    for path, text in template_files(kind).items():
        words = text.replace(example.task, "night_bus").replace(example.cls, "NightBus")
        assert Path("night_bus", path).read_text(encoding="utf-8") == words
    next_steps = printed.partition("next:\n")[2].splitlines()
    assert [line.split()[:2] for line in next_steps] == [
        ["soul", "tasks"], ["soul", "data"], ["soul", "eval"],
    ]  # fmt: skip


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_new_task_passes_its_check_and_makes_rows(kind: str, tmp_path: Path, capfd: Any) -> None:
    lab = tmp_path / "lab"
    tasks = ("--tasks", lab / "tasks.yaml")
    assert soul("tasks", "new", "episode", "--python", "--kind", kind, "--out", lab) == 0
    capfd.readouterr()
    assert soul("tasks", "check", "episode", *tasks, "--json") == 0
    (checked,) = json.loads(capfd.readouterr().out)["tasks"]
    counts = {k: v for k, v in checked.items() if isinstance(v, list)}
    assert checked["rows"] > 90 and set(map(len, counts.values())) == {0}, counts
    assert soul("data", "synth", "episode", "-n", 5, "-o", "rows.jsonl", *tasks) == 0
    assert soul("tasks", "check", "episode", *tasks, "--data", "rows.jsonl") == 0
    assert soul("tasks", "check", "episode", *tasks, "--data", lab / "rows.jsonl") == 0


def test_two_new_tasks_stand_beside_each_other(tmp_path: Path) -> None:
    files: list[object] = []
    for name in ("one", "two"):
        assert soul("tasks", "new", name) == 0
        files += ["--tasks", tmp_path / name / "tasks.yaml"]
    assert soul("tasks", "check", "one", "two", *files) == 0


@pytest.mark.parametrize(
    "name", ["3x", "my-task", "class", "tomi", "größe", "a b", "", "yes", "null"]
)
def test_bad_names_are_refused(name: str, capfd: Any) -> None:
    assert soul("tasks", "new", name, "--out", "folder") == 2
    three_lines(capfd.readouterr().err)
    assert not Path("folder").exists()


def test_nothing_is_written_over(capfd: Any) -> None:
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    Path("file").write_text("mine")
    for place in ("full", "file"):
        assert soul("tasks", "new", "night_bus", "--out", place) == 2
        assert place in three_lines(capfd.readouterr().err)[0]
    assert [path.name for path in Path("full").iterdir()] == ["notes.txt"]
    Path("empty").mkdir()
    assert soul("tasks", "new", "night_bus", "--out", "empty") == 0


def test_an_unknown_kind_is_refused(capfd: Any) -> None:
    assert soul("tasks", "new", "night_bus", "--kind", "chois") == 2
    assert "'choice'" in three_lines(capfd.readouterr().err)[2]


EXAMPLES = ROOT / "examples"
NAMES = [template.task for template in TEMPLATES.values()]
Body = dict[str, Any]


def declared(name: str) -> tuple[str, Path]:
    return "--tasks", EXAMPLES / name / "tasks.yaml"


def loaded(name: str) -> tuple[Task, tuple[Example, ...]]:
    task = load_registry(declared(name)[1]).task(name)
    return task, load_examples(task, [EXAMPLES / name / "rows.jsonl"]).examples


def content(body: Body, index: int = -1) -> str:
    return str(body["messages"][index]["content"])


# --- layout and rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_it_is_laid_out_like_a_built_in_benchmark(name: str) -> None:
    folder, spec = EXAMPLES / name, load_registry(declared(name)[1]).spec(name)
    files = ("tasks.yaml", "task.py", "rows.py", "rows.jsonl", "README.md", "prompts/coach.md")
    assert [file for file in files if not (folder / file).is_file()] == []
    assert (spec.module.partition(":")[0], spec.synth) == ("task", "rows:rows")
    for key in ("synth", "importer", "audit", "scripted_partner"):
        hook = spec.hook(name, key)
        assert hook is None or Path(hook.function.__code__.co_filename).parent == folder
    assert len((folder / "README.md").read_text().splitlines()) < 40


def test_between_them_they_show_every_key() -> None:
    keys = ("synth", "importer", "audit", "scripted_partner")
    specs = [load_registry(declared(name)[1]).spec(name) for name in NAMES]
    assert [key for key in keys if not any(getattr(spec, key) for spec in specs)] == []


@pytest.mark.parametrize("name", NAMES)
def test_made_rows_can_be_read_and_audited(name: str, tmp_path: Path, capfd: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    assert soul("data", "synth", name, *declared(name), "-n", 20, "-o", rows) == 0
    assert soul("data", "check", rows, *declared(name), "--task", name) == 0
    capfd.readouterr()
    assert soul("data", "audit", name, rows, *declared(name), "--json") == 0
    audited = json.loads(capfd.readouterr().out)
    assert audited["rows"]["rows"] >= 18 and audited["rows"]["bad"] == []
    first, more = (_made(name, n, tmp_path) for n in (3, 6))
    assert more[:3] == first and _made(name, 3, tmp_path, seed=1) != first


def _made(name: str, n: int, folder: Path, seed: int = 0) -> list[str]:
    path = folder / f"{n}_{seed}.jsonl"
    out = ("-o", path, "--seed", seed)
    assert soul("data", "synth", name, *declared(name), "-n", n, *out) == 0
    return path.read_text().splitlines()


def test_an_original_file_is_imported(tmp_path: Path, capfd: Any) -> None:
    good = {"scene": "It snows.", "line": {"by": "Lien", "text": "Were you raised in a tent?"},
            "right": "Shut the window.", "wrong": ["Go camping.", "Tell me more."]}  # fmt: skip
    records = [good, {**good, "wrong": ["one"]}, {**good, "line": "who?"}, {**good, "right": " "}]
    original, rows = tmp_path / "original.json", tmp_path / "rows.jsonl"
    original.write_text(json.dumps(records))
    soul("data", "import", "my_task", original, *declared("my_task"), "-o", rows)
    printed = capfd.readouterr().err
    assert "wrong readings" in printed and "(the speaker)" in printed and "'right'" in printed
    (row,) = map(json.loads, rows.read_text().splitlines())
    assert sorted(row["options"]) == ["Go camping.", "Shut the window.", "Tell me more."]
    assert soul("tasks", "check", "my_task", *declared("my_task"), "--data", rows) == 0
    assert soul("data", "import", "judged_task", original, *declared("judged_task")) == 2


def test_the_audit_disputes_a_literal_reading(tmp_path: Path, capfd: Any) -> None:
    row = {"situation": "At the door.", "speaker": "Bo", "said": "A lovely frame.",
           "options": ["Bo buys lovely frames", "Bo dislikes it", "Bo is tired"]}  # fmt: skip
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({**row, "meant": meant, "kind": "k"}) for meant in row["options"][:2]]
    rows.write_text("\n".join(lines))
    assert soul("data", "audit", "my_task", rows, *declared("my_task"), "--json") == 0
    audited = json.loads(capfd.readouterr().out)
    assert audited["overall"] == {"agreed": 1, "total": 2}
    assert [dispute["gold"] for dispute in audited["disputed"]] == row["options"][:1]


# --- evaluation -----------------------------------------------------------------------------------


def evaluate(
    name: str, answer: Callable[[Body], str], out: Path, *more: object, code: int = 0
) -> None:
    with ScriptedServer(answer=answer) as server:
        model = ("--model", "m", "--base-url", server.base_url, *FAST)
        rows = ("--data", f"{name}={EXAMPLES / name / 'rows.jsonl'}")
        ended = soul(
            "eval", "api", *declared(name), "--task", name, *rows, *model, "--out", out, *more
        )
        assert ended == code


def mean(out: Path, name: str) -> tuple[float, int]:
    cell = summary(out)["tasks"][name]["value"]
    return cell["mean"], cell["n_scored"]


def test_the_choice_is_evaluated(tmp_path: Path) -> None:
    task, examples = loaded("my_task")
    golds = {task.preview(e)[0].text: task.gold_completion(e) for e in examples}  # type: ignore[attr-defined]
    assert not any(e.fields["meant"] in (task.explain(e, None, None) or "") for e in examples)
    evaluate("my_task", lambda body: golds[content(body)], tmp_path / "right")
    evaluate("my_task", lambda body: "<answer>A</answer>", tmp_path / "first")
    assert mean(tmp_path / "right", "my_task") == (1.0, 10)
    first = sum("A" in gold for gold in golds.values())
    assert 0 < first < 10 and mean(tmp_path / "first", "my_task") == (first / 10, 10)
    cells = summary(tmp_path / "first")["tasks"]["my_task"]
    assert {"value/kind=praise", "value/kind=request"} <= set(cells)


def test_a_new_task_is_evaluated(tmp_path: Path) -> None:
    assert soul("tasks", "new", "night_bus", "--python", "--out", tmp_path / "lab") == 0
    with ScriptedServer(answer="<answer>B</answer>") as server:
        where = ("--tasks", tmp_path / "lab" / "tasks.yaml", "--task", "night_bus")
        model = ("--model", "m", "--base-url", server.base_url, "--out", tmp_path / "run")
        assert soul("eval", "api", *where, "--data", "night_bus=synth:9", *model) == 0
    assert {body["temperature"] for body in server.requests} == {0.7}
    cell = summary(tmp_path / "run")["tasks"]["night_bus"]["value"]
    assert cell["n_scored"] == 9 and 0 < cell["mean"] < 1


def judged(body: Body) -> str:
    """Two points for every sentence."""
    text = re.findall(r"<essay \w+>\n(.*?)\n</essay", content(body), re.DOTALL)[0]
    quality = {"reasoning": "counted", "score": min(10, 2 * text.count("."))}
    return json.dumps({"quality": quality, "style": "plain"})


def test_the_judged_task_is_evaluated_with_a_judge(tmp_path: Path) -> None:
    name, out = "judged_task", tmp_path / "run"
    with ScriptedServer(answer=judged) as judge:
        player = ("--judge", f"endpoint:j@{judge.base_url}")
        evaluate(name, lambda body: "One. Two. Three.", out, *player)
        assert mean(out, name) == (pytest.approx(0.6), 4)
        evaluate(name, lambda body: " ", tmp_path / "silent", *player, code=1)
        assert mean(tmp_path / "silent", name) == (0.0, 4)
        assert len(judge.requests) == 4
        assert soul("judge", "check", out, "--out", tmp_path / "check", "--no-pairs") == 0


@contextmanager
def served(name: str) -> Iterator[str]:
    """`soul serve --script` as a process of its own; gives the address that it prints."""
    process = start("serve", "--script", name, *declared(name), "--port", 0)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0], "the partner prints no address"
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate(timeout=30)


def caller(body: Body) -> str:
    """Offers its free days in turn, and settles the one that suits."""
    brief = content(body, 0)
    listed = re.search(r"You are free on ([^.]+?), and on no other", brief)
    assert listed is not None
    last = re.search(r"Yes, (\w+) suits me", content(body))
    turns = sum(message["role"] == "assistant" for message in body["messages"])
    return f"Agreed: {last[1]}" if last else f"How about {listed[1].split(', ')[turns]}?"


def test_the_dialogue_is_evaluated_with_its_scripted_partner(tmp_path: Path) -> None:
    name, out = "dialogue_task", tmp_path / "run"
    with served(name) as url:
        partner = ("--partner", f"endpoint:scripted-friend@{url}")
        evaluate(name, caller, out, *partner)
        evaluate(name, lambda body: "Agreed: Monday", tmp_path / "rash", *partner)
    assert mean(out, name) == (1.0, 3) and mean(tmp_path / "rash", name) == (0.0, 3)
    by_stop = {record.episode.stop for record in records(out)}
    assert by_stop == {"agreed"}
    for record in records(out):
        seats = [line.seat for line in record.episode.transcript]
        assert seats == (["caller", "friend"] * len(seats))[: len(seats)]
        assert "Sorry" in record.episode.transcript[1].text or len(seats) == 3


def test_a_call_without_an_end_scores_nothing(tmp_path: Path) -> None:
    with served("dialogue_task") as url:
        player = ("--partner", f"endpoint:scripted-friend@{url}")
        evaluate("dialogue_task", lambda body: "Hello.", tmp_path / "run", *player)
    assert mean(tmp_path / "run", "dialogue_task") == (0.0, 3)
    assert {record.episode.stop for record in records(tmp_path / "run")} == {"max_turns"}


def test_a_row_with_two_common_days_is_refused(tmp_path: Path, capfd: Any) -> None:
    row = json.loads((EXAMPLES / "dialogue_task" / "rows.jsonl").read_text().splitlines()[0])
    bad = tmp_path / "rows.jsonl"
    bad.write_text(json.dumps({**row, "friend_free": row["free"]}))
    assert soul("tasks", "check", "dialogue_task", *declared("dialogue_task"), "--data", bad) == 2
    assert "Monday" in three_lines(capfd.readouterr().err)[1]


def person(body: Body) -> str:
    """Thinks what it alone knows, and says who it is."""
    brief = content(body, 0)
    seat, thought = re.findall(r"You are the (\w+) in|Only you know this: (.+)", brief)[:2]
    return f"[{thought[1]}] I am the {seat[0]}."


def reader(body: Body) -> str:
    """Ten points for voices where all three are there, four for what they know."""
    prompt = content(body)
    everybody = all(f"{seat}: \u201cI am the {seat}.\u201d" in prompt for seat in PEOPLE)
    points = 4 if "read each other" in prompt else 10 * everybody
    return json.dumps({"reasoning": "read", "score": points})


PEOPLE = ("owner", "neighbour", "child")


def test_the_scene_is_evaluated_and_thoughts_stay_with_their_seats(tmp_path: Path) -> None:
    name, out = "scene_task", tmp_path / "run"
    _, examples = loaded(name)
    with served(name) as url, ScriptedServer(answer=reader) as judge:
        players = ("--judge", f"endpoint:j@{judge.base_url}")
        street = ("--environment", f"endpoint:scripted-street@{url}")
        evaluate(name, person, out, *players, *street, "--controls")
    assert mean(out, name) == (pytest.approx(0.7), 3)
    anchored = summary(out)["tasks"][name]["share_of_people"]
    assert anchored["mean"] == pytest.approx(0.7 / 0.2)  # the written scenes have 0 and 4 of 10
    thoughts = {e.id: {s: e.fields[f"{s}_thought"] for s in PEOPLE} for e in examples}
    for record in records(out):
        by_seat = thoughts[record.episode.example_id]
        lines = [line.seat for line in record.episode.transcript]
        assert lines == [*PEOPLE, "street"] * 2
        assert not any("[" in line.text for line in record.episode.transcript)
        for trace in record.episode.traces:
            seen = "\n".join(segment.text for turn in trace.turns for segment in turn.context)
            assert [seat for seat, text in by_seat.items() if text in seen] == [trace.seat]


def test_a_scene_in_which_nobody_speaks_is_no_judges_business(tmp_path: Path) -> None:
    with served("scene_task") as url, ScriptedServer(answer=reader) as judge:
        players = ("--judge", f"endpoint:j@{judge.base_url}")
        street = ("--environment", f"endpoint:scripted-street@{url}")
        evaluate("scene_task", lambda body: "[Better not.]", tmp_path / "run", *players, *street)
        assert judge.requests == []
    assert mean(tmp_path / "run", "scene_task") == (0.0, 3)
    assert {record.score.status for record in records(tmp_path / "run")} == {"empty"}


def test_original_scenes_are_imported(tmp_path: Path, capfd: Any) -> None:
    line = {"who": "owner", "thinks": "It is late.", "says": "Minka!"}
    good = {"cat": "Minka", "where": "the stairs", "scene": [line, {"who": "child", "says": "Hm."}],
            "thoughts": {seat: f"What the {seat} knows." for seat in PEOPLE}}  # fmt: skip
    originals = [good, {**good, "thoughts": {}}, {**good, "scene": "x"}, {**good, "scene": [{}]}]
    original, rows = tmp_path / "original.json", tmp_path / "rows.jsonl"
    original.write_text(json.dumps(originals))
    soul("data", "import", "scene_task", original, *declared("scene_task"), "-o", rows)
    printed = capfd.readouterr().err
    assert "need exactly the keys" in printed and "not a list of objects" in printed
    assert "lacks 'who' or 'says'" in printed
    (row,) = map(json.loads, rows.read_text().splitlines())
    assert row["written"] == ["owner: [It is late.] Minka!", "child: Hm."]
    assert soul("tasks", "check", "scene_task", *declared("scene_task"), "--data", rows) == 0


def test_a_scene_with_a_stranger_is_refused(tmp_path: Path, capfd: Any) -> None:
    row = json.loads((EXAMPLES / "scene_task" / "rows.jsonl").read_text().splitlines()[0])
    bad = tmp_path / "rows.jsonl"
    bad.write_text(json.dumps({**row, "written": ["onwer: Hello."]}))
    assert soul("tasks", "check", "scene_task", *declared("scene_task"), "--data", bad) == 2
    assert "onwer" in three_lines(capfd.readouterr().err)[1]


# --- training -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_step(tmp_path: Path) -> None:
    task, examples = loaded("my_task")
    words = sorted({w for e in examples for s in task.preview(e) for w in s.text.split()})
    model = build_tiny(tmp_path / "model", words, max_context=1024)
    options = ("--prompts", 2, "--group-size", 2, "--max-tokens", 8, "--steps", 1, "--lora-r", 2)
    rows = ("--task", "my_task", "--data", "my_task=synth:20")
    out = tmp_path / "run"
    where = (*declared("my_task"), *rows, "--out", out)
    assert soul("train", "ditto", "--model", model, *where, *options) == 0
    assert json.loads((out / "summary.json").read_text())["steps"] == 1


def test_names_for_own_tasks_are_imported_from_one_place() -> None:
    listed = [name for names in tasks._HOMES.values() for name in names]
    assert sorted(tasks.__all__) == sorted(listed)
    assert all(callable(getattr(tasks, name)) for name in tasks.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        tasks.Nothing  # noqa: B018
