"""`--option NAME=VALUE`: a value is of the kind that the task's own is of, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from soulkit.errors import ConfigError
from soulkit.runs.folder import plain_config
from soulkit.tasks.spec import option_value
from soulkit.train.config import TrainConfig
from tests.support.evaluation import api, records, soul, summary, three_lines, visitor
from tests.support.servers.openai_server import ScriptedServer


@pytest.mark.parametrize(
    ("text", "usual", "value"),
    [("7", 6, 7), ("0.5", 1.0, 0.5), ("true", False, True), ("No", True, False), ("3", "x", "3"),
     ("[1]", [], "[1]"), (4, 6, 4)],
)  # fmt: skip
def test_a_value_is_of_the_usual_kind(text: Any, usual: Any, value: Any) -> None:
    assert option_value("o", text, usual) == value
    assert type(option_value("o", text, usual)) is type(value)


@pytest.mark.parametrize(("text", "usual"), [("few", 6), ("1.5", 6), ("maybe", True), ("x", 0.5)])
def test_another_kind_is_refused(text: str, usual: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        option_value("o", text, usual)
    assert text in caught.value.what and all(caught.value.lines())


def test_a_run_plays_by_its_options_and_is_another_run_with_others(
    tmp_path: Any, capfd: Any
) -> None:
    with ScriptedServer(answer="I cannot say.") as actor, visitor() as url:
        partner = ("--partner", f"endpoint:v@{url}")
        args = (actor.base_url, tmp_path / "run", *partner)
        assert api(*args, "--option", "max_turns=5", task="secret_keeper", n=2) == 0
        assert {len(r.episode.traces[0].turns) for r in records(tmp_path / "run")} == {5}
        capfd.readouterr()
        assert api(*args, "--option", "max_turns=6", task="secret_keeper", n=2) == 2
    assert "option" in " ".join(three_lines(capfd.readouterr().err))
    assert summary(tmp_path / "run")["tasks"]["secret_keeper"]["turns"]["mean"] == 5


def test_training_takes_options_too_and_refuses_what_no_task_has(tmp_path: Any, capfd: Any) -> None:
    config = TrainConfig(method="grpo", model="m", tasks={"tomi": 1.0}, option={"max_turns": "5"})
    assert plain_config(config.identity())["option"] == {"max_turns": "5"}
    command = (
        "plan",
        "train",
        "grpo",
        "--model",
        tmp_path,
        "--task",
        "tomi",
        "--data",
        "tomi=synth:4",
    )
    assert soul(*command, "--option", "max_turns=5") == 2
    what, _, fix = three_lines(capfd.readouterr().err)
    assert "max_turns" in what and "soul tasks show" in fix
