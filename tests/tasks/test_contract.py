"""Every task on rows of its own: gold is best, wrong is not, and nothing is shown to whom it isn't.

The checks run over the whole of tasks.yaml, so a task that is added there is checked as well.

Every task file of SOUL has made rows that load: no benchmark's data is needed to try it.

An actor that says nothing, in every task: cut at its limit it is `truncated`, else `empty`.

An actor's prompt holds the scene, the role, the goal and the form of the reply.

It holds nothing that a judge scores: else the prompt teaches what feedback is to teach.

What is judged is taken from the judges themselves: the lines of their prompts that state a
dimension, the declarations behind them, and what the rules advise before anything was played.

Ordinary criticism of a wrong draft is no leak, and answers in it are: on made rows of every task
with options, and on real rows of stories.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.cli import app as cli
from soulkit.data.files import read_rows, write_rows
from soulkit.judge.leaks import LeakView, check_leak
from soulkit.judge.verdict import plain
from soulkit.models.base import Cast
from soulkit.play.engine import Engine, Job
from soulkit.tasks.coser.scoring import ASPECTS
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.loading import examples_to_inspect, load_examples
from soulkit.tasks.kit.made_rows import make_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.spec import READERS
from soulkit.tasks.scaffold import TEMPLATES
from soulkit.tasks.sotopia.coach import TITLES
from soulkit.tasks.sotopia.scores import DIMENSIONS
from soulkit.tasks.tau_usi.index import DIMENSIONS as FEATURES
from soulkit.types import Completion, Example, Feedback, Form, Line, Record, Score
from tests.support.evaluation import soul, summary
from tests.support.road import (
    CHOICES,
    EVERY,
    NO_ONE,
    ROLLOUT,
    TASKS,
    makeable,
    player,
    run,
    score_text,
    synth,
    synth_examples,
    task_of,
)
from tests.support.servers.openai_server import Fault, ScriptedServer, completion, is_probe

PROTOCOLS = ("paper", "reference")
ADVICE = Feedback(text="Look again at who was there.", author="symbolic")


def wrong_text(task: Any, example: Example, rng: random.Random) -> str:
    view = task.leak_view(example)
    wrong = rng.choice([i for i, option in enumerate(view.options) if option != view.gold])
    return f"<answer>{(view.letters or view.options)[wrong]}</answer>"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", TASKS)
def test_gold_scores_the_maximum(name: str, protocol: str) -> None:
    task = task_of(name, protocol)
    for example in synth_examples(name, protocol=protocol):
        if "judge" in task.calls(example):
            continue  # what only a judge can tell is played in the task's own tests
        score = asyncio.run(task.score(example, task.gold(example), NO_ONE))
        assert (score.value, score.reward, score.status) == (task.spec.metric.high,) * 2 + ("ok",)
        assert score.protocol == protocol and score.prompts


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", CHOICES)
def test_a_wrong_answer_scores_the_minimum(name: str, protocol: str) -> None:
    task = task_of(name, protocol)
    for example in synth_examples(name, protocol=protocol):
        wrong = wrong_text(task, example, random.Random(example.id))
        score = score_text(task, example, wrong)
        assert score.value == task.spec.metric.low and score.status == "ok"


def test_a_gold_dialogue_with_the_secret_in_it_scores_nothing() -> None:
    task = task_of("secret_keeper")
    for example in synth_examples("secret_keeper"):
        gold = task.gold(example)
        slip = Line("keeper", f"And the {example.fields['secret']['value']}.")
        episode = replace(gold, transcript=(*gold.transcript[:-1], slip))
        assert asyncio.run(task.score(example, episode, NO_ONE)).value == 0


@pytest.mark.parametrize("name", CHOICES)
def test_feedback_from_rules_never_leaks(name: str) -> None:
    task = task_of(name)
    for example in synth_examples(name):
        rng = random.Random(example.id)
        drafts = (task.gold_completion(example), wrong_text(task, example, rng), "")
        scores: list[Score | None] = [score_text(task, example, draft) for draft in drafts]
        texts = [task.explain(example, None, score) for score in (*scores, None)]
        for text in [*texts, task.rehearse(example, rng)]:
            assert text
            feedback = check_leak(Feedback(text=text, author="symbolic"), task.leak_view(example))
            assert feedback.leak == "" and feedback.blind <= feedback.chance, text


def test_feedback_on_a_dialogue_names_topics_and_no_values() -> None:
    task = task_of("secret_keeper")
    for example in synth_examples("secret_keeper"):
        values = [f["value"] for f in (*example.fields["facts"], example.fields["secret"])]
        for episode in (task.gold(example), None):
            text = task.explain(example, episode, None)
            assert text and not any(value.lower() in text.lower() for value in values)


def first_contexts(task: Any, example: Example) -> tuple[Any, Any]:
    return tuple(
        task.gold(example, feedback).traces[0].turns[0].context for feedback in (None, ADVICE)
    )


@pytest.mark.parametrize("name", TASKS)
def test_a_copy_is_the_draft_with_nothing_in_the_slot(name: str) -> None:
    task = task_of(name)
    for example in synth_examples(name, 12):
        draft, refined = first_contexts(task, example)
        assert len(draft) == len(refined)
        assert sum(a.text != b.text for a, b in zip(draft, refined, strict=True)) == 1
        bare = [segment.text if segment.bare is None else segment.bare for segment in refined]
        assert bare == [segment.text for segment in draft]
        assert ADVICE.text in "".join(segment.text for segment in refined)


def marked(value: Any, mark: str) -> Any:
    """The value with every text in it replaced by `mark`."""
    if isinstance(value, str):
        return mark
    if isinstance(value, dict):
        return {key: marked(inner, mark) for key, inner in value.items()}
    return [marked(inner, mark) for inner in value] if isinstance(value, list | tuple) else value


def with_private_strings(example: Example) -> tuple[Example, dict[str, str]]:
    """The example with a string of its own in every field, and field → string."""
    marks = {name: f"zq{i}zq" for i, name in enumerate(example.fields) if example.fields[name]}
    fields = {name: marked(v, marks.get(name, "")) for name, v in example.fields.items()}
    return replace(example, fields=fields), marks


def contexts_of(task: Any, example: Example) -> dict[str, str]:
    """Seat → all it reads."""
    seats = {s: "".join(m.text for m in c) for s, c in task.previews(example).items()}
    if hasattr(task, "partner_context"):
        brief = task.partner_context(example, [])
        seats[task.partner_seat(example)] = "".join(s.text for s in brief)
    for seat in seats_called(task, example) - set(seats):
        seats[seat] = task.slot(example, seat, None).text
    return seats


def seats_called(task: Any, example: Example) -> set[str]:
    """The seats whose players an episode may call: a recorded partner is nobody."""
    calls = task.calls(example)
    return {seat for seat, role in example.seats.items() if calls.get(role)}


@pytest.mark.parametrize("name", TASKS)
def test_no_seat_reads_a_field_that_is_not_for_it(name: str) -> None:
    task = task_of(name)
    for original in synth_examples(name, 12):
        example, marks = with_private_strings(original)
        contexts = contexts_of(task, example)
        assert set(contexts) == seats_called(task, example)
        for seat, text in contexts.items():
            shown = {field for field, mark in marks.items() if mark in text}
            allowed = {f for f in marks if seat in example.audience[f]}
            assert shown <= allowed, f"{seat} reads {shown - allowed}"
            assert shown or not allowed


TAUGHT = [name for name in TASKS if task_of(name).spec.feedback.coaches]


@pytest.mark.parametrize("name", TAUGHT)
def test_the_coach_does_not_read_the_gold(name: str) -> None:
    task = task_of(name)
    for original in synth_examples(name, 12):
        example, marks = with_private_strings(original)
        episode = replace(task.gold(original), transcript=(Line("actor", "I wonder."),))
        score = Score(value=0.0, reward=0.0)
        text = task.prompts.render("coach", **task.coach_view(example, episode, score))
        hidden = {f for f in marks if "coach" not in example.audience[f] or f in task.gold_fields}
        shown = {f for f in hidden if marks[f] in text}
        # Of what is not told yet the coach learns the topic; here topic and value are one string.
        assert shown <= ({"facts"} if name == "secret_keeper" else set())


def test_the_dialogue_coach_reads_topics_and_no_values() -> None:
    task = task_of("secret_keeper")
    for example in synth_examples("secret_keeper", 12):
        episode = replace(task.gold(example), transcript=(Line("keeper", "I wonder."),))
        score = asyncio.run(task.score(example, episode, NO_ONE))
        text = task.prompts.render("coach", **task.coach_view(example, episode, score))
        for fact in (*example.fields["facts"], example.fields["secret"]):
            assert fact["value"].lower() not in text.lower()
        assert all(fact["topic"] in text for fact in example.fields["facts"])


@pytest.mark.parametrize("name", EVERY)
def test_rows_have_no_undeclared_columns_and_stable_ids(name: str) -> None:
    from tests.support.road import synth

    rows = synth(name, 12, 5)
    spec = task_of(name).spec
    assert all(set(row) <= {*spec.columns, *spec.unpack} for row in rows)
    examples = synth_examples(name, 12)
    assert [e.id for e in examples] == [e.id for e in synth_examples(name, 12)]
    unnamed = [f for f, column in spec.columns.items() if not column.identity]
    for row, example in zip(rows, examples, strict=True):
        assert task_of(name).example({**row, **dict.fromkeys(unnamed)}).id == example.id
        assert set(example.audience) >= set(spec.columns)
        seats = {*spec.seats, *example.seats}  # a row may have seats of its own
        assert {r for a in example.audience.values() for r in a} <= {*seats, *READERS}


def test_texts_over_their_word_budget_are_cut_for_every_model_and_noted() -> None:
    task = task_of("tomi")
    example = synth_examples("tomi", 1)[0]
    words = " \n".join(f"w{i}" for i in range(3005))
    long = replace(example, fields={**example.fields, "story": words})
    (segment,) = task.context(long, None)
    assert "w2999 [...]" in segment.text and "w3000" not in segment.text
    assert "w0 \nw1" in segment.text, "line breaks survive the cut"
    episode = task._episode(long, (segment,), Completion(text=""), 0, "draft")
    assert episode.notes["cut_words"] == {"story": 5}


def test_every_random_choice_has_a_stream_of_its_own() -> None:
    one, two = synth_examples("tomi", 2)
    assert ROLLOUT.rng(one, "x").random() == ROLLOUT.rng(one, "x").random()
    streams = {ROLLOUT.rng(e, p).random() for e in (one, two) for p in ("x", "y")}
    assert len(streams | {replace(ROLLOUT, index=1).rng(one, "x").random()}) == 5


SOUL = (
    "alignx_arbitrary", "alignx_demo", "alignx_history16", "alignx_pair", "alignx_ugc",
    "behaviorchain", "coser", "fantom", "hitom", "humanllm", "humanual_book", "humanual_chat",
    "humanual_email", "humanual_news", "humanual_opinion", "humanual_politics", "lifechoices",
    "mirrorbench", "mistakes", "paratomi", "sim_doc", "sim_math", "social_r1", "socsci210",
    "sotopia", "twinvoice", "userllm",
)  # fmt: skip
N_ROWS = 50


def test_the_list_is_the_suite() -> None:
    suites = load_registry().suites
    if "soul-27" not in suites:
        pytest.skip("the suite soul-27 is not declared")
    assert sorted(suites["soul-27"].tasks) == sorted(SOUL) and len(set(SOUL)) == 27


@pytest.mark.parametrize("name", SOUL)
def test_fifty_made_rows_are_written_checked_and_loaded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name not in makeable():
        pytest.skip(f"rows of {name} cannot be made")
    path, copy = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    assert cli.main(["data", "synth", name, "-n", str(N_ROWS), "--seed", "3", "-o", str(path)]) == 0
    capsys.readouterr()
    assert cli.main(["data", "check", str(path), "--json"]) == 0
    (checked,) = json.loads(capsys.readouterr().out)["tasks"]
    assert (checked["task"], checked["rows"], checked["bad"]) == (name, N_ROWS, [])
    assert not checked["ignored"], "a made row has no column that its task does not know"
    assert checked["usable"] >= 0.9 * N_ROWS
    write_rows(copy, [row.fields for row in read_rows(path)[0]])
    task = task_of(name)
    one, other = (load_examples(task, [file], strict=True) for file in (path, copy))
    assert [e.id for e in one.examples] == [e.id for e in other.examples]
    assert synth(name, 10, 3) == synth(name, N_ROWS, 3)[:10] != synth(name, 10, 5)


PLAYABLE = sorted(set(makeable()) & set(TASKS))
THINKING = "<think>Let me see what this person would say"
SILENT_ROWS = 2


def silent(stop: str, text: str = "") -> Any:
    """A script in which the model `m` ends every reply with `stop` and no visible text; at its
    limit it has used up all its tokens."""

    def reply(index: int, body: dict[str, Any]) -> Fault | None:
        if body["model"] != "m":
            return None
        answer = completion(body, text)
        answer["choices"][0]["finish_reason"] = stop
        used = body.get("max_tokens") or body.get("max_completion_tokens")
        answer["usage"]["completion_tokens"] = used if stop == "length" else len(text.split())
        return Fault.reply(answer)

    return reply


def others(task: Task) -> Any:
    """What partners say, and a judge of the task who finds everything bad."""

    def answer(body: dict[str, Any]) -> str:
        if body["model"] != "judge":
            return "Good evening."
        asked = (body.get("response_format") or {}).get("json_schema")
        form = Form(asked["name"], json.dumps(asked["schema"])) if asked else None
        return task.scripted_verdict(form, perfect=False) or ""

    return answer


def played(name: str, protocol: str, stop: str, text: str = "") -> list[Record]:
    """What the engine makes of a silent actor among others who speak."""
    task, rows = task_of(name, protocol), synth_examples(name, SILENT_ROWS, protocol)
    with ScriptedServer(answer=others(task), script=silent(stop, text)) as server:
        seats = {seat: player(server.base_url, seat) for seat in ("partner", "environment")}
        judges = (player(server.base_url, "judge"),)
        cast = Cast(actor=player(server.base_url, "m"), judges=judges, **seats)
        jobs = [Job(task, row) for row in rows]
        return list(run(cast, Engine(cast).run(jobs, lambda record: None)))


@pytest.mark.parametrize("protocol", ["paper", "reference"])
@pytest.mark.parametrize("name", PLAYABLE)
def test_a_silent_actor_at_its_limit_is_truncated(name: str, protocol: str) -> None:
    records = played(name, protocol, "length")
    assert {record.score.status for record in records} == {"truncated"}
    if protocol == "paper":  # the published code has some silent actors judged
        assert {record.score.value for record in records} == {task_of(name).spec.metric.low}


@pytest.mark.parametrize("name", PLAYABLE)
def test_thinking_that_used_up_the_limit_is_truncated(name: str) -> None:
    assert {r.score.status for r in played(name, "paper", "length", THINKING)} == {"truncated"}


@pytest.mark.parametrize("name", PLAYABLE)
def test_a_silent_actor_for_another_reason_is_empty(name: str) -> None:
    records = played(name, "paper", "stop")
    assert {record.score.status for record in records} == {"empty"}


# -- tasks of one's own, and the exit code ---------------------------------------------------------


def evaluated(out: Path, script: Any, *arguments: object) -> int:
    """The exit code of an evaluation whose actor is scripted; the others speak."""
    with ScriptedServer(answer="Good evening.", script=script) as server:
        who = f"endpoint:other@{server.base_url}"
        players = [part for role in ("partner", "judge", "environment")
                   for part in (f"--{role}", who)]  # fmt: skip
        return soul("eval", "api", "--model", "m", "--base-url", server.base_url, "--out", out,
                    *players, "--backoff", "0", *arguments)  # fmt: skip


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of new tasks, one of each kind."""
    place = tmp_path_factory.mktemp("own")
    for kind in TEMPLATES:
        assert soul("tasks", "new", f"night_{kind}", "--kind", kind, "--out", place / kind) == 0
    return place


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("text", ["", THINKING, f"{THINKING}</think>"])
def test_a_judge_of_a_new_task_is_asked_about_no_silence(
    kind: str, text: str, own_tasks: Path, tmp_path: Path
) -> None:
    task = f"night_{kind}"
    options = ("--task", task, "--tasks", own_tasks / kind / "tasks.yaml", "--data", "synth:3")
    for stop in ("length", "stop"):
        assert evaluated(tmp_path / stop, silent(stop, text), *options) == 1
        said = summary(tmp_path / stop)
        named = {"truncated"} if stop == "length" else {"empty", "no_tag"}
        assert set(said["statuses"][task]) <= named
        cell = next(cell for cell in said["tasks"][task].values() if cell.get("headline"))
        assert cell["mean"] == 0.0


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize(("stop", "status"), [("length", "truncated"), ("stop", "empty")])
def test_a_new_task_says_so_and_the_exit_code_is_1(
    kind: str, stop: str, status: str, own_tasks: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    task = f"night_{kind}"
    options = ("--task", task, "--tasks", own_tasks / kind / "tasks.yaml", "--data", "synth:3")
    assert evaluated(tmp_path, silent(stop), *options) == 1
    said = summary(tmp_path)
    assert said["statuses"] == {task: {status: 3}}
    cell = next(cell for cell in said["tasks"][task].values() if cell.get("headline"))
    assert cell["mean"] == 0.0
    assert (cell.get("worst"), cell.get("best")) == ((0, 1) if stop == "length" else (None, None))
    told = capsys.readouterr().err
    assert ("episodes are truncated" in told) == (stop == "length")
    assert (f"every reply was empty: {task} (" in told) == (stop == "stop")


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_new_task_has_no_limit_of_its_own(kind: str, own_tasks: Path) -> None:
    (declared,) = yaml.safe_load((own_tasks / kind / "tasks.yaml").read_text())["tasks"].values()
    assert "max_tokens" not in declared["sampling"]


@pytest.mark.parametrize(("task", "speaks", "code"), [
    ("tomi", 0, 1), ("tomi", 1, 0), ("secret_keeper", 0, 1), ("secret_keeper", 1, 0),
])  # fmt: skip
def test_one_reply_is_enough_not_to_be_silent(
    task: str, speaks: int, code: int, tmp_path: Path
) -> None:
    said: list[int] = []
    mute = silent("stop")

    def script(index: int, body: dict[str, Any]) -> Fault | None:
        if body["model"] != "m" or is_probe(body):
            return None
        said.append(index)
        return None if len(said) <= speaks else mute(index, body)

    assert evaluated(tmp_path, script, "--task", task, "--data", "synth:20") == code
    assert summary(tmp_path)["limits"][task]["silent"] == len(said) - speaks


def test_one_silent_task_of_several_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mute = silent("stop")

    def script(index: int, body: dict[str, Any]) -> Fault | None:
        return mute(index, body) if "<answer>" in str(body["messages"]) else None

    arguments = ("--task", "tomi", "--task", "instructions", "--data", "synth:2")
    assert evaluated(tmp_path, script, *arguments) == 1
    told = capsys.readouterr().err
    assert "every reply was empty: tomi (2 of 2);" in told


def test_cut_replies_may_be_allowed_and_silence_is_not(tmp_path: Path) -> None:
    """`--max-unscored` bounds the truncated share; a model that says nothing is no share."""
    stops = {"cut": ["length"], "both": ["length", "stop"]}
    for name, ways in stops.items():
        scripts = cycle(map(silent, ways))

        def script(index: int, body: dict[str, Any], scripts: Any = scripts) -> Fault | None:
            return None if body["model"] != "m" or is_probe(body) else next(scripts)(index, body)

        options = ("--task", "tomi", "--data", "synth:4", "--max-unscored", 1)
        assert evaluated(tmp_path / name, script, *options) == (name == "both")


EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = {"judged_task": ("judge",), "scene_task": ("voices", "knowing")}
"""Examples with judges → their judges' templates. `soul tasks new` writes them."""
RULED = ("dialogue_task", "my_task")
MADE = sorted(set(makeable()) & set(TASKS))

DECLARED: Mapping[str, Iterable[object]] = {
    "sotopia": [*DIMENSIONS, *TITLES.values()],
    "coser": [(aspect.title, *aspect.kinds) for aspect in ASPECTS.values()],
    "tau_usi": [name.removesuffix("_rate") for names in FEATURES.values() for name in names],
}
"""Task → dimensions that it declares in code; those of SimulatorArena are `looks_at`."""

_HUMANUAL = {"emoti": "emotions", "value": "slowly changing values"}
STATED: Mapping[str, Mapping[str, str]] = {
    "sotopia": {"reach": "leaving is allowed (goal reached / uncomfortable / …)"},
    "coser": {"words": "at most 60 words"},
    "userllm": {"punct": "imperfect punctuation"},
    "mirrorbench": {"lengt": "match length", "tone": "match tone"},
    "sim_math": {"learn": "wants to learn"},
    "sim_doc": {"words": "a document of 100 to 500 words"},
    "tau_usi": {"words": "paraphrase"},
    **{name: _HUMANUAL for name in MADE if name.startswith("humanual_")},
}
"""Task → stems that a judge looks at and the published prompt has, too, with what it says."""

_FEEDBACK = re.compile(r"\{% if feedback %\}.*?\{% endif %\}", re.DOTALL)
_JINJA = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
_STATES = re.compile(r"\s*(?:- |\d+\. |[A-Z]{3,}: |Signs of|Look at|How |Does )")
"""How a line of a judge's prompt begins that says what is judged."""
_JUDGING = re.compile(
    r"\b(?:judg|rat(?:e|ed|er|ing)\b|scor(?:e|ed|ing)|grad(?:e|ed|er)\b|rubric|criteri|dimension"
    r"|evaluat|benchmark)", re.IGNORECASE,
)  # fmt: skip
_PLAIN_WORDS = """
a about after again all alone along always am an and another any anybody are around as at be
because been before below between both but by can could did do does each either else end ends
every everybody everything exactly far few first for from further had has have he her here his
how i if in into is it its itself just least less like many may might more most much must never
no nobody none nor not nothing of off on once one only or other others our out over own part per
same shall she should so some somebody something somewhere still such than that the their them
themselves then there these they thing things this those time times to together too towards
under until up upon very was way we well were what whatever when where whether which while who
whoever whom whose why will with within without would yet you your yours yourself

answer begin form get happen happens json keep know knows line message messages now object
person play plays read reason said say says see show shows speak speaks stand stands turn turns
type types want wanted wants write writes written word
"""
"""Function words; then words for the scene, its people and the form of a reply."""
_PLAIN = frozenset(_PLAIN_WORDS.split())


def stems(text: str) -> set[str]:
    """The beginnings of a text's telling words: `decent` and `decency` are one."""
    words = re.findall(r"[a-z]+", text.casefold().replace("_", " "))
    return {word[:5] for word in words if len(word) > 2 and word not in _PLAIN}


def instructions(path: Path) -> str:
    """A template without the row and without feedback."""
    return _JINJA.sub(" ", _FEEDBACK.sub("", path.read_text()))


@cache
def cached_task(name: str) -> Task:
    return fresh_task(name)


def fresh_task(name: str) -> Task:
    files = [EXAMPLES / name / "tasks.yaml"] if (EXAMPLES / name).is_dir() else []
    return load_registry(*files).task(name)


@cache
def rows_of(name: str) -> tuple[Any, ...]:
    task = cached_task(name)
    return tuple(task.example(row) for row in make_rows(task, 12, 5))


@cache
def actor_templates(name: str) -> list[Path]:
    """The templates that an actor's first prompts are made of, opened by rendering them."""
    rows, task = rows_of(name), fresh_task(name)
    for row in rows:
        task.previews(row)
    return sorted(task.prompts.opened)


def judged_words(name: str) -> set[str]:
    """What is judged in a task, as stems."""
    task = cached_task(name)
    begins = OWN.get(name, ("judge", "critic"))
    lines = [
        line
        for folder in task.prompts.folders[:-1]
        for path in (*folder.glob("*.md"), *folder.joinpath(name).glob("*.md"))
        if path.stem.startswith(begins)
        for line in (path.stem, *instructions(path).splitlines())
        if line == path.stem or _STATES.match(line)
    ]
    declared = [*DECLARED.get(name, ()), *getattr(task, "looks_at", {}).values()]
    advice = [task.explain(row, None, None) or "" for row in rows_of(name)]
    given = " ".join(str(value) for row in rows_of(name) for value in row.fields.values())
    said = stems(" ".join(map(str, [*lines, *declared]))) | (stems(" ".join(advice)) - stems(given))
    spec = task.spec
    return said - stems(" ".join([spec.title, spec.summary, *spec.columns, *spec.seats]))


def is_judged(name: str) -> bool:
    asked = any("judge" in cached_task(name).calls(row) for row in rows_of(name))
    return asked or name in DECLARED


JUDGED = [name for name in (*MADE, *OWN) if is_judged(name)]


def test_the_tasks_with_judges_are_found() -> None:
    assert {"sotopia", "userllm", "mirrorbench", "coser", "sim_math", "sim_doc", "humanual_book",
            "tau_usi", *OWN} <= set(JUDGED)  # fmt: skip


@pytest.mark.parametrize("name", JUDGED)
def test_an_actors_prompt_names_nothing_that_a_judge_scores(name: str) -> None:
    told = stems(" ".join(map(instructions, actor_templates(name))))
    coached = told & judged_words(name)
    assert coached == set(STATED.get(name, {})), "see STATED for what the published prompt has"


@pytest.mark.parametrize("name", [*MADE, *OWN, *RULED])
def test_an_actors_prompt_does_not_speak_of_judging(name: str) -> None:
    templates = actor_templates(name)
    assert templates, "previews render no template"
    for path in templates:
        found = _JUDGING.search(instructions(path))
        assert found is None, f"{path}: {found}"


@pytest.mark.parametrize(("name", "sentence"), [
    ("sotopia", "Weigh what {other} thinks of you afterwards, and what you gain or lose."),
    ("sotopia", "Do what is decent, and give nothing away that should stay hidden."),
    ("sotopia", "Bring something new into every turn."),
    ("userllm", "Use words of your own; details can wait for later messages."),
    ("mirrorbench", "Leave explaining and helping to the assistant."),
    ("coser", "Bring something new, and let the scene move."),
    ("coser", "Have this person's temper, knowledge and manner of speaking."),
    ("humanual_book", "Mind the tone and the length of what this person writes."),
    ("sim_math", "Choose a level of formality, and keep the spelling consistent."),
    ("tau_usi", "Be polite, and show some emotion."),
    ("scene_task", "Each of you has a voice."),
])  # fmt: skip
def test_coaching_is_found(name: str, sentence: str) -> None:
    assert (stems(sentence) & judged_words(name)) - set(STATED.get(name, {})), sentence


WITH_OPTIONS = ("hitom", "paratomi", "tomi", "twinvoice", "behaviorchain", "tombench",
                "lifechoices", "mistakes", "socsci210", "mmtom", "alignx_demo",
                "humanllm")  # fmt: skip
REAL = {"paratomi": "paratomi/test.txt", "hitom": "hitom/Hi-ToM_data.json"}
DRAFTS = 300


def wrong_option(view: LeakView, rng: random.Random) -> tuple[str, str]:
    """(what the draft answers, the option that this is) of a wrong one."""
    named = zip(view.letters or view.options, view.options, strict=False)
    return rng.choice([one for one in named if plain(one[1]) != plain(view.gold)])


def leak(text: str, view: LeakView | None) -> str:
    return check_leak(Feedback(text=text, author="coach"), view).leak


def drafted(name: str, example: Example) -> tuple[LeakView, str]:
    """The view for feedback on a wrong draft, and the option that it answered."""
    task, rng = task_of(name), random.Random(example.id)
    answer, option = wrong_option(task.leak_view(example), rng)
    view = task.draft_view(example, Score(value=0, reward=0, words=answer))
    return view, option


def test_every_task_with_options_is_looked_at() -> None:
    assert set(WITH_OPTIONS) <= set(EVERY)


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_the_drafts_answer_may_be_said_and_the_gold_may_not(name: str) -> None:
    for example in synth_examples(name, 25):
        view, option = drafted(name, example)
        criticism = f"You said “{option}”, but ask who was there."
        alone = len(view.names()) == 2
        assert leak(criticism, view) == ("answerable" if alone else ""), criticism
        assert leak(f"{criticism} It is “{view.gold}”.", view) == "gold_text"
        others = [one for one in view.options if plain(one) != plain(view.gold)]
        assert leak(f"It is none of: {'; '.join(others)}.", view) == "answerable"
        if view.letter:
            assert leak(f"{criticism} Take option {view.letter}.", view) == "gold_letter"


def sentences(text: str) -> list[str]:
    return [s for s in re.split(r"(?<=[.!?])\s+|\n+", text) if len(s.split()) > 3]


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_what_the_actor_reads_may_be_quoted_but_for_its_options(name: str) -> None:
    task = task_of(name)
    for example in synth_examples(name, 15):
        view, _ = drafted(name, example)
        options = [plain(option) for option in view.options]
        for sentence in sentences(view.story):
            if any(plain(sentence) in one or one in plain(sentence) for one in options):
                continue
            assert leak(f"You passed over this: {sentence}", view) == "", sentence
        assert view.story and task.gold_text(example)
        assert leak(f"You passed over this: {view.gold}", view) == "gold_text"


def real_rows(name: str) -> Sequence[Example]:
    path = Path(os.environ.get("SOULKIT_TEST_DATA") or "nowhere") / REAL[name]
    if not path.exists():
        pytest.skip(f"no original file {REAL[name]} ($SOULKIT_TEST_DATA)")
    return examples_to_inspect(task_of(name), str(path)).examples[:DRAFTS]


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_criticism_of_drafts_on_real_stories(name: str) -> None:
    """Sentences of the story as a remark, the draft's own answer, and that with the gold."""
    kinds: dict[str, Counter[str]] = {form: Counter() for form in ("quoted", "said", "told")}
    for example in real_rows(name):
        view, option = drafted(name, example)
        story = sentences(example.fields["story"])
        quotes = random.Random(example.id).sample(story, min(3, len(story)))
        remarks: dict[str, Any] = {
            "quoted": [f"You passed over this: {s}" for s in quotes],
            "said": [f"You said {option}, but ask whether she was there."],
            "told": [f"You said {option}, but it is the {view.gold}."],
        }
        for form, texts in remarks.items():
            kinds[form].update(leak(text, view) for text in texts)
    assert set(kinds["quoted"]) == set(kinds["said"]) == {""}
    assert kinds["quoted"].total() == 3 * DRAFTS and kinds["told"] == {"gold_text": DRAFTS}
