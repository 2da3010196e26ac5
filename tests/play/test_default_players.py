"""Who plays where nobody is named, what goes before what, and how all that is missing is told.

Missing rows: one diagnosis, whether something else is missing as well or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from soulkit.data.hub import released
from soulkit.errors import ConfigError, UserError
from soulkit.eval.config import EvalConfig, work_and_missing
from soulkit.eval.planning import evaluation_plan
from soulkit.eval.run.runner import load_config, prepare
from soulkit.models.players.settings import RoleSettings
from soulkit.play.default_players import with_default_players
from soulkit.play.requirements import RequirementsNotMet
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.spec import DefaultPlayer, DefaultPlayers
from soulkit.train.config import TrainConfig
from soulkit.train.planning import training_plan
from soulkit.train.setup.data import load_training_data
from soulkit.train.setup.feedback_check import NoFeedback
from soulkit.train.setup.rows import TrainingData
from tests.support.training import soul

HERE = "http://127.0.0.1:9/v1"
LOCAL = f"endpoint:local@{HERE}"
ROWS = {"sotopia": "synth:4", "userllm": "synth:12", "tomi": "synth:4", "mirrorbench": "synth:4",
        "coser": "synth:4"}  # fmt: skip


def config(tasks: tuple[str, ...] = ("sotopia",), **flags: Any) -> EvalConfig:
    data = {task: ROWS[task] for task in tasks}
    settings = {"kind": "api", "model": "m", "base_url": HERE, "tasks": tasks, "data": data}
    return EvalConfig.load(env={}, flags={**settings, **flags})


def sit(settings: EvalConfig) -> EvalConfig:
    registry = settings.registry()
    work, gaps = work_and_missing(settings, registry)
    assert not gaps
    return with_default_players(settings, work, registry)


def material(**flags: Any) -> TrainingData:
    settings = {"method": "ditto", "model": "tiny", "tasks": {"sotopia": 1.0}, "data": ROWS}
    tasks = flags.get("tasks", settings["tasks"])
    data = {"data": {task: ROWS[task] for task in tasks}}
    return load_training_data(TrainConfig.load(env={}, flags={**settings, **flags, **data}))


def train(**flags: Any) -> TrainConfig:
    return material(**flags).config


def names(settings: EvalConfig | TrainConfig, task: str) -> dict[str, str]:
    """Role → model and effort."""
    return {
        role: f"{who.model} {who.reasoning_effort or ''}".strip()
        for role, who in settings.players_in(task)
    }


# --- defaults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["paper", "reference"])
def test_a_task_brings_its_players(protocol: str) -> None:
    settings = sit(config(("sotopia", "userllm", "tomi"), protocol=protocol))
    auditor = "gpt-5-nano minimal" if protocol == "paper" else "gpt-5.4-mini none"
    assert names(settings, "sotopia") == {
        "judge": "gpt-5-nano low", "auditor": auditor, "partner": "gpt-5-nano minimal"
    }  # fmt: skip
    judge = "gpt-5-nano low" if protocol == "paper" else "gpt-5.4-nano low"
    assert names(settings, "userllm") == {"judge": judge, "auditor": judge}
    assert names(settings, "tomi") == {} and "tomi" not in settings.task_players
    assert (
        with_default_players(
            settings, work_and_missing(settings, load_registry())[0], load_registry()
        )
        == settings
    )


def test_the_declared_players_are_those_of_the_paper_and_of_the_published_code() -> None:
    def who(task: str, protocol: Any, role: str) -> str:
        player: Any = load_registry().spec(task).players.under(protocol, role)
        return f"{player.model} {player.effort}"

    assert who("coser", "paper", "judge") == who("mirrorbench", "paper", "judge") == "gpt-5.4 low"
    assert who("coser", "paper", "environment") == "gpt-5-nano minimal"
    assert who("coser", "reference", "environment") == "gpt-5.4-nano none"
    assert who("coser", "reference", "judge") == "gpt-5.4-mini low"
    assert who("humanual_book", "reference", "judge") == "gpt-5.4-nano low"
    assert who("sim_doc", "reference", "partner") == "gpt-5-nano minimal"
    assert load_registry().spec("userllm").players.under("reference", "coach") == "symbolic"


def test_rows_that_ask_nobody_bring_nobody() -> None:
    quiz = config(("userllm",), where={"source": "commonsense_qa"})
    assert sit(quiz).task_players == {}


def test_a_judge_that_is_named_audits_as_well() -> None:
    settings = sit(config(judge=[LOCAL]))
    assert names(settings, "sotopia") == {
        "judge": "local", "auditor": "local", "partner": "gpt-5-nano minimal"
    }  # fmt: skip
    apart = sit(config(judge=[LOCAL], auditor=[f"endpoint:watch@{HERE}"]))
    assert names(apart, "sotopia")["auditor"] == "watch"


# --- training and evaluation ----------------------------------------------------------------------

BOTH = ("mirrorbench", "coser")


def judges(settings: EvalConfig | TrainConfig) -> list[str]:
    return [names(settings, task)["judge"] for task in BOTH]


def test_the_large_judge_of_a_task_may_be_evaluations_alone() -> None:
    """The dev rows of a training and evaluations on training rows are judged as training is."""
    rows = {"eval_every": 1, "dev_share": 0.5}
    trained = material(tasks=dict.fromkeys(BOTH, 1.0), **rows)
    assert judges(sit(config(BOTH))) == ["gpt-5.4 low", "gpt-5.4 low"]
    assert judges(trained.config) == ["gpt-5-nano low", "gpt-5.4 low"]
    assert names(trained.config, "mirrorbench")["coach"] == "gpt-5-nano low"
    assert judges(sit(config(BOTH, split="train"))) == ["gpt-5-nano low", "gpt-5.4 low"]
    dev = {part.task: part.calls for part in training_plan(trained).tasks}
    assert dev["mirrorbench dev"]["judge"]
    (remark,) = trained.remarks()
    assert remark.startswith(
        "mirrorbench: the judge is gpt-5-nano low in training and gpt-5.4 low in evaluation"
    )


@pytest.mark.parametrize(
    ("flags", "judge"),
    [
        ({"protocol": "reference"}, "gpt-5.4-nano low"),
        ({"judge": [LOCAL]}, "local"),
        ({"task_players": {"mirrorbench": {"judge": ["endpoint:gpt-5.4"]}}}, "gpt-5.4"),
    ],
)
def test_the_published_judge_and_a_named_one_go_before_trainings(
    flags: dict[str, Any], judge: str
) -> None:
    trained = material(tasks={"mirrorbench": 1.0}, **flags)
    assert names(trained.config, "mirrorbench")["judge"] == judge
    assert trained.remarks() == []


def test_any_task_may_have_players_of_its_own_in_training() -> None:
    declared = DefaultPlayers.model_validate(
        {"judge": {"model": "large"}, "partner": {"model": "p"},
         "training": {"judge": {"model": "small", "effort": "low"}, "auditor": {"model": "a"}},
         "reference": {"partner": {"model": "published"}}}
    )  # fmt: skip
    assert declared.words() == (
        "judge large, partner p; in training judge small low, auditor a; "
        "under reference partner published"
    )

    def who(players: DefaultPlayers, protocol: Any) -> list[str]:
        found = (players.under(protocol, role) for role in ("judge", "auditor", "partner"))
        return [one.model if isinstance(one, DefaultPlayer) else "" for one in found]

    assert who(declared, "paper") == ["large", "", "p"]
    assert who(declared.in_training(), "paper") == ["small", "a", "p"]
    assert who(declared.in_training(), "reference") == ["small", "a", "published"]


# --- what goes before what ------------------------------------------------------------------------


def test_the_task_goes_before_the_file_and_both_before_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.yaml"
    file.write_text(
        f"endpoints: {{nano: {{model: n, base_url: '{HERE}'}}}}\nroles: {{judge: nano}}\n"
        "tasks: {sotopia: {judge: {use: nano, temperature: 0.5}}, coser: {judge: nano}}\n"
    )
    both = ("sotopia", "userllm")
    settings = sit(config(both, endpoints=str(file), partner=LOCAL))
    (judge,) = settings.cast_as("judge", "sotopia")
    assert (judge.model, judge.temperature) == ("n", 0.5)
    assert settings.cast_as("judge", "userllm")[0].temperature is None
    flags = {"task_players": {"sotopia": {"judge": ["endpoint:mine@" + HERE]}}}
    named = sit(config(both, endpoints=str(file), partner=LOCAL, **flags))
    assert names(named, "sotopia")["judge"] == "mine" and names(named, "userllm")["judge"] == "n"
    assert "coser" not in named.task_players


def test_players_of_tasks_that_nobody_plays_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'coser', but that task is not selected"):
        sit(config(task_players={"coser": {"judge": [LOCAL]}}))
    file = tmp_path / "endpoints.yaml"
    file.write_text(f"tasks: {{sotopai: {{judge: '{LOCAL}'}}}}\n")
    with pytest.raises(ConfigError, match="no task named 'sotopai'"):
        sit(config(endpoints=str(file)))
    file.write_text(f"tasks: {{sotopia: {{jugde: '{LOCAL}'}}}}\n")
    with pytest.raises(ConfigError, match="sets an unknown role 'jugde'"):
        sit(config(endpoints=str(file)))
    file.write_text("tasks: {sotopia: {judge: {modell: x}}}\n")
    with pytest.raises(ConfigError) as caught:
        sit(config(endpoints=str(file)))
    assert "judge.0.modell" in caught.value.why


def test_who_played_is_part_of_what_a_folder_keeps() -> None:
    settings = sit(config())
    again = EvalConfig.model_validate(settings.resolved())
    assert again.identity() == settings.identity() and again.task_players == settings.task_players
    priced = {**settings.resolved()["task_players"]}
    priced["sotopia"]["judge"][0] |= {"price_in": 1.0, "price_out": 1.0}
    assert (
        config(task_players=priced).identity()["task_players"]
        == (settings.identity()["task_players"])
    )


# --- coaches --------------------------------------------------------------------------------------


def test_the_coach_of_a_judged_task_is_the_judges_model() -> None:
    settings = train()
    (coach,) = settings.cast_as("coach", "sotopia")
    assert (coach.model, coach.reasoning_effort) == ("gpt-5-nano", "low")
    hot = train(judge=[{"model": "j", "base_url": HERE, "temperature": 0.2, "max_tokens": 9}])
    (coach,) = hot.cast_as("coach", "sotopia")
    assert (coach.model, coach.temperature, coach.max_tokens) == ("j", None, None)
    (published,) = train(protocol="reference").cast_as("coach", "sotopia")
    assert published.model == "gpt-5.4-nano"


@pytest.mark.parametrize(
    ("flags", "coach"),
    [
        ({"coach": "symbolic"}, "symbolic"),
        ({"coach": "terse"}, "terse"),
        ({"tasks": {"tomi": 1.0}}, "symbolic"),
        ({"method": "grpo"}, "symbolic"),
        ({"tasks": {"userllm": 1.0}, "protocol": "reference"}, "symbolic"),
    ],
)
def test_rules_coach_where_they_are_named_or_nobody_judges(flags: Any, coach: str) -> None:
    settings = train(**flags)
    (task,) = settings.tasks
    assert settings.cast_as("coach", task) == () and settings.named("coach", task) == coach


def test_the_judge_coaches_where_it_is_named_for_that() -> None:
    judge = [{"model": "j", "base_url": HERE, "temperature": 0.2}]
    (coach,) = train(coach="judge", judge=judge).cast_as("coach", "sotopia")
    assert (coach.model, coach.temperature) == ("j", None)
    (published,) = train(coach="judge").cast_as("coach", "sotopia")
    assert published.model == "gpt-5-nano"
    spoken = train(coach="raw", judge=judge)
    assert spoken.cast_as("coach", "sotopia") == () and spoken.named("coach", "sotopia") == "raw"


@pytest.mark.parametrize("coach", ["judge", "raw"])
def test_a_task_without_a_judge_has_no_feedback_from_one(coach: str) -> None:
    with pytest.raises(ConfigError, match="tomi has no judge"):
        train(coach=coach, tasks={"tomi": 1.0})


ALIGNX = ("alignx_demo", "alignx_pair", "alignx_ugc", "alignx_arbitrary", "alignx_history16")
BY_RULES = ("tomi", "hitom", "paratomi", "fantom")
TOLD = ("fantom", "hitom", "paratomi", "lifechoices", "twinvoice", "mistakes")
"""Tasks of which the published code has a model write hints."""
UNTOLD = (*ALIGNX, "behaviorchain", "socsci210", "humanllm", "tombench", "mmtom")
"""Tasks of which it has no hints."""
BY_MODEL = ("twinvoice", "mistakes", "lifechoices", *UNTOLD)


def coached(*tasks: str, **flags: Any) -> TrainingData:
    settings = {"method": "ditto", "model": "tiny", "tasks": dict.fromkeys(tasks, 1.0),
                "data": dict.fromkeys(tasks, "synth:6")}  # fmt: skip
    return load_training_data(TrainConfig.load(env={}, flags=settings | flags))


@pytest.mark.parametrize("task", BY_MODEL)
def test_where_rules_hardly_differ_the_papers_model_coaches(task: str) -> None:
    data = coached(task)
    (coach,) = data.config.cast_as("coach", task)
    assert (coach.kind, coach.model, coach.reasoning_effort) == ("endpoint", "gpt-5-nano", "low")
    assert data.remarks() == []
    for named in ("symbolic", "terse", "actor", LOCAL):
        config_ = coached(task, coach=named).config
        players = [one.written() for one in config_.cast_as("coach", task)]
        assert players == ([named] if named in ("actor", LOCAL) else [])
        assert players or config_.named("coach", task) == named
    assert coached(task, coach="symbolic").remarks() == []


@pytest.mark.parametrize("task", BY_RULES)
def test_where_rules_answer_to_the_draft_they_coach_and_it_is_said(task: str) -> None:
    data = coached(task)
    assert data.config.cast_as("coach", task) == () and data.config.task_players == {}
    (remark,) = data.remarks()
    assert (
        remark.startswith(f"{task}: feedback is written by rules")
        and "instead of the paper's model" in remark
    )
    assert "--coach endpoint:gpt-5-nano" in remark
    assert coached(task, coach="symbolic").remarks() == []
    assert coached(task, coach="actor").remarks() == []
    assert coached(task, method="grpo").remarks() == []


def test_rules_in_the_place_of_a_model_are_named_together(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.yaml"
    file.write_text("tasks: {hitom: {coach: symbolic}}\n")
    both = coached("hitom", "paratomi", "twinvoice")
    (remark,) = both.remarks()
    assert remark.startswith("hitom, paratomi: feedback is written by rules")
    (remark,) = coached("hitom", "paratomi", endpoints=str(file)).remarks()
    assert remark.startswith("paratomi: feedback is written by rules")


def test_a_judge_that_is_named_coaches_where_a_model_would() -> None:
    both = coached("twinvoice", "hitom", judge=[LOCAL]).config
    (coach,) = both.cast_as("coach", "twinvoice")
    assert coach.model == "local" and both.cast_as("coach", "hitom") == ()


@pytest.mark.parametrize("task", TOLD)
def test_the_references_coach_and_that_it_sees_the_gold(task: str) -> None:
    config_ = coached(task, protocol="reference").config
    (coach,) = config_.cast_as("coach", task)
    effort = "medium" if task == "mistakes" else "low"
    assert (coach.model, coach.reasoning_effort) == ("gpt-5.4-nano", effort)
    assert load_registry().spec(task).feedback.gold_in_reference


@pytest.mark.parametrize("task", UNTOLD)
def test_tasks_without_feedback_in_the_reference(task: str) -> None:
    flags = {"protocol": "reference"}
    with pytest.raises(NoFeedback, match=f"task '{task}': it has no coach"):
        coached(task, **flags)
    mixed = coached(task, "hitom", **flags)
    assert mixed.config.named("coach", task) == "none" and not mixed.config.cast_as("coach", task)
    (remark,) = mixed.remarks()
    assert remark.startswith(f"{task}: no feedback under protocol reference")
    assert coached(task, coach="symbolic", **flags).remarks() == []


def test_without_a_key_the_way_out_is_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def way(*tasks: str, **flags: Any) -> str:
        settings = {"method": "ditto", "tasks": dict.fromkeys(tasks, 1.0),
                    "data": dict.fromkeys(tasks, "synth:6")}  # fmt: skip
        request = TrainConfig.load(env={}, flags=settings | flags)
        with pytest.raises(UserError) as caught:
            load_training_data(request, asking=True)
        return caught.value.way_out

    for flags in ({"model": "no/such"}, {"model": "tiny"}):
        assert "--coach symbolic" in way("twinvoice", **flags)
    assert "--coach symbolic" not in way("sotopia", coach="symbolic")


def test_a_coach_may_be_named_for_one_task() -> None:
    own = {"sotopia": {"coach": "symbolic"}, "userllm": {"coach": LOCAL}}
    settings = train(tasks={"sotopia": 1.0, "userllm": 1.0}, task_players=own)
    assert settings.named("coach", "sotopia") == "symbolic"
    assert isinstance(settings.named("coach", "userllm"), RoleSettings)


# --- what is missing ------------------------------------------------------------------------------


def test_one_error_names_all_that_is_missing_and_the_cost_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("SOULKIT_DATA", str(tmp_path))
    flags = {"kind": "api", "model": "gpt-5.4-mini", "data": {"sotopia": "synth:4"}}
    tasks = ("sotopia", "userllm", "secret_keeper")
    settings = EvalConfig.load(env={}, flags={**flags, "tasks": tasks})
    with pytest.raises(RequirementsNotMet) as caught:
        prepare(settings)
    what, _, way = caught.value.lines()
    assert what.startswith("Cost about $") and "as long as assumed) for the tasks" in what
    assert "no rows for userllm, secret_keeper" in what
    assert "no player for partner in secret_keeper" in what
    assert "no key in OPENAI_API_KEY (actor gpt-5.4-mini, partner gpt-5-nano, judge" in what
    assert "soul data pull --task userllm --split eval" in way
    assert "--data secret_keeper=synth:100" in way
    assert "export OPENAI_API_KEY" in way


NO_KEY = "no key in OPENAI_API_KEY"


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ({}, ["no model (--model), task (--task or --suite)"]),
        ({"judge": ["endpoint:gpt-5"]},
         ["no model (--model), task (--task or --suite)", f"{NO_KEY} (judge gpt-5)"]),
        ({"tasks": ("sotopia", "secret_keeper")},
         ["no model (--model)", "no rows for sotopia, secret_keeper",
          "no player for partner in secret_keeper",
          f"{NO_KEY} (partner gpt-5-nano, judge gpt-5-nano"]),
        ({"model": "./away", "judge": ["endpoint:gpt-5"]},
         ["no task (--task or --suite)", f"{NO_KEY} (judge gpt-5)", "no model ./away"]),
        ({"kind": "api", "tasks": ("userllm",)},
         ["no model (--model)", "no rows for userllm", f"{NO_KEY} (actor MODEL, judge gpt-5-nano"]),
    ],
)  # fmt: skip
def test_a_command_without_model_or_task_names_what_else_is_missing(
    flags: dict[str, Any], missing: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("SOULKIT_DATA", str(tmp_path))
    with pytest.raises(RequirementsNotMet) as caught:
        load_config(None, {"kind": "local", **flags})
    what, _, way = caught.value.lines()
    assert [part for part in missing if part not in what] == []
    assert what.count(";") == len(missing) - 1
    named = {"model": "--model MODEL", "tasks": "--task NAME,NAME or --suite NAME"}
    assert [name for name, text in named.items() if (text in way) == (name in flags)] == []


def test_a_model_that_alone_is_missing_keeps_its_own_error(tmp_path: Path) -> None:
    flags = {"kind": "local", "tasks": ("tomi",), "data": {"tomi": "synth:4"}}
    with pytest.raises(ConfigError, match=r"missing: --model"):
        load_config(None, flags)
    file = tmp_path / "settings.yaml"
    file.write_text("kind: local\nmodel: m\ntasks: [tomi]\n")
    assert load_config(file, {}).tasks == ("tomi",)
    with pytest.raises(ConfigError, match="either tasks"):
        load_config(file, {"suite": "tom"})


def test_a_single_gap_keeps_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    flags = {"kind": "api", "model": "gpt-5.4-mini", "data": {"tomi": "synth:4"}}
    settings = EvalConfig.load(env={}, flags={**flags, "tasks": ("tomi",)})
    with pytest.raises(Exception, match=r"^Cost about .*\. The environment variable 'OPENAI") as e:
        prepare(settings)
    assert type(e.value).__name__ == "ModelLoadError"
    with pytest.raises(Exception, match="OPENAI_API_KEY") as e:
        prepare(config(("tomi", "sotopia"), partner=LOCAL))
    assert e.value.way_out.endswith("Or choose other players: --judge PLAYER --auditor PLAYER.")  # type: ignore[attr-defined]
    planned, work = prepare(settings, asking=False)  # a plan asks nobody
    assert evaluation_plan(planned, work).cost


@pytest.mark.parametrize("kind", ["api", "local"])
def test_an_evaluation_without_tasks_asks_for_some(kind: str) -> None:
    with pytest.raises(ConfigError, match="missing: --task or --suite") as refused:
        EvalConfig.load(env={}, flags={"kind": kind, "model": "m"})
    _, why, fix = refused.value.lines()
    registry = load_registry()
    assert any(name in why for name in registry.specs) and "soul tasks list" in fix
    assert any(name in why for name in registry.suites)


def test_a_training_has_a_default_model() -> None:
    bare = TrainConfig.load(env={}, flags={"method": "ditto", "tasks": {"tomi": 1.0}})
    assert bare.model == "Qwen/Qwen3-VL-8B-Instruct"


def test_training_names_rows_keys_and_the_model_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("SOULKIT_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    settings = TrainConfig.load(env={}, flags={"method": "ditto", "tasks": {"sotopia": 1.0}})
    with pytest.raises(RequirementsNotMet) as caught:
        load_training_data(settings, asking=True)
    what, _, way = caught.value.lines()
    assert what.startswith(
        "Cost unknown without rows. 3 requirements are not met: no rows for sotopia;"
    )
    assert "coach gpt-5-nano" in what and "no model Qwen/Qwen3-VL-8B-Instruct" in what
    assert "--split train" in way and "hf download Qwen/Qwen3-VL-8B-Instruct" in way


LACKING = {
    "released": ("hitom", "soul data pull --task hitom --split {split}"),
    "made here": ("tomi", "--data tomi=synth:{count} (generated rows)"),
    "imported": ("tombench", "soul data import tombench FILE"),
}
COMMANDS = {
    "rows alone, eval": ("eval api --model m --base-url http://127.0.0.1:9/v1", "eval", 100),
    "a key as well, eval": ("eval api --model gpt-5.4-mini", "eval", 100),
    "rows alone, train": ("train sft --model tiny --full", "train", 2000),
    "a key as well, train": ("train ditto --coach endpoint:gpt-5-nano", "train", 2000),
}
"""What is missing → the command, the split of its rows, and how many are made for it."""


@pytest.fixture
def fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SOULKIT_DATA", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(*words: str) -> str:
        """The last line of a command that must fail."""
        capfd.readouterr()
        assert soul(*words) == 2
        return capfd.readouterr().err.strip().splitlines()[-1]

    return run


@pytest.mark.parametrize("missing", COMMANDS)
@pytest.mark.parametrize("kind", LACKING)
def test_the_way_to_rows_is_the_same_with_and_without_a_key(fix, kind: str, missing: str) -> None:
    (task, way), (words, split, count) = LACKING[kind], COMMANDS[missing]
    advice = fix(*words.split(), "--task", task)
    assert way.format(split=split, count=count) in advice
    assert ("export OPENAI_API_KEY" in advice) is ("key" in missing)
    assert ("data pull" in advice) is (kind == "released")


@pytest.mark.parametrize("key", [False, True])
@pytest.mark.parametrize("words", [("--suite", "tom"), ("--task", "hitom,paratomi,tomi")])
def test_of_several_tasks_only_released_ones_are_to_be_pulled(
    fix, monkeypatch: pytest.MonkeyPatch, words: tuple[str, str], key: bool
) -> None:
    if key:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    advice = fix("eval", "api", "--model", "gpt-5.4-mini", *words)
    assert "rows of hitom,paratomi: download them: soul data pull --task hitom,paratomi " in advice
    assert "rows of tomi: --data tomi=synth:100 (generated rows), or --data tomi=FILE" in advice
    assert "{" not in advice


@pytest.mark.parametrize("split", ["train", "eval"])
def test_what_is_to_be_pulled_is_released(fix, split: str) -> None:
    """For every task: the advice names a download exactly where there is something to download."""
    command = "eval api --model m" if split == "eval" else "train grpo --steps 1"
    for name, spec in load_registry().specs.items():
        if spec.rows_only or (split == "train" and spec.evaluation_only):
            continue
        advice = fix(*command.split(), "--task", name)
        files = {name: spec.files}
        if f"soul data pull --task {name}" in advice:
            assert released(files, [split]), name
        else:
            assert not getattr(spec.files, split), name
        assert (f"{name}=synth:" in advice) is bool(spec.synth), name
        assert (f"data import {name}" in advice) is bool(spec.formats), name


def test_a_folder_without_the_files_is_the_one_to_pull_into(fix, tmp_path: Path) -> None:
    place = tmp_path / "my {rows}"
    place.mkdir()
    for more in ((), ("--base-url", "http://127.0.0.1:9/v1")):
        words = ("--model", "m", "--task", "hitom", "--data", str(place), *more)
        assert f"--split eval --out '{place}'" in fix("eval", "api", *words)
