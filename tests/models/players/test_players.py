"""Who plays a role: how it is written, what a file adds, which model it becomes.

Every kind of player says by itself how it is written, made, paid for and checked.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from soulkit.errors import ConfigError, RunError, UserError
from soulkit.eval.config import EvalConfig
from soulkit.eval.run.runner import eval_cast, eval_players
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.prices import load_prices
from soulkit.models.base import Player
from soulkit.models.players.players import Players, cast_of
from soulkit.models.players.settings import (
    FORMS,
    KINDS,
    KindName,
    RoleSettings,
    is_spec,
    parse_spec,
)
from soulkit.models.stand_ins import Script, ScriptedModel
from soulkit.runs.folder import Run
from soulkit.train.config import TrainConfig
from soulkit.types import Call, Sampling, Segment

EVAL = {"kind": "api", "model": "m", "tasks": ["tomi"]}
TRAIN = {"method": "ditto", "model": "m", "tasks": {"tomi": 1.0}}
URL = "http://127.0.0.1:9/v1"
BOOK = f"""
endpoints:
  nano:
    model: tiny-judge
    base_url: {URL}
    api_key_env: MY_KEY
    requests_per_minute: 500
    tokens_per_minute: 200000
    price_in: 0.05
    price_out: 0.4
  loud: {{model: loud-partner, base_url: "{URL}"}}
"""


def config(flags: dict[str, Any], file: Path | None = None) -> EvalConfig:
    return EvalConfig.load(file, env={}, flags={**EVAL, **flags})


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("endpoint:gpt-5-nano", {"kind": "endpoint", "model": "gpt-5-nano"}),
        (f"endpoint:a@{URL}", {"kind": "endpoint", "model": "a", "base_url": URL}),
        (f"endpoint:org/a@v2@{URL}#K", {"kind": "endpoint", "model": "org/a@v2", "base_url": URL,
                                        "api_key_env": "K"}),
        ("endpoint:a#K", {"kind": "endpoint", "model": "a", "api_key_env": "K"}),
        ("endpoint:a@2024", {"kind": "endpoint", "model": "a@2024"}),
        ("local:some/folder", {"kind": "local", "model": "some/folder"}),
        ("vllm:owner/name@v2", {"kind": "vllm", "model": "owner/name@v2"}),
        ("scripted:c:/x.yaml", {"kind": "scripted", "model": "c:/x.yaml"}),
        ("actor", {"kind": "actor"}),
    ],
)  # fmt: skip
def test_how_a_player_is_written(text: str, fields: dict[str, Any]) -> None:
    assert parse_spec(text) == fields
    settings = config({"partner": text}).partner
    assert settings is not None
    assert settings.model_dump(include=set(fields)) == fields


@pytest.mark.parametrize(
    "text",
    ["", "nano", "endpoint:", "vllm:", "judge:x", "local", "local:", "actor:x", "actor:", "a@b"],
)
def test_what_is_no_player(text: str) -> None:
    with pytest.raises(ConfigError, match="endpoint:MODEL@URL"):
        config({"judge": [text]})


@pytest.mark.parametrize("behind", ["A_KEY,B_KEY", "A_KEY,X=ONE,x=TWO"])
def test_nothing_behind_an_address_is_dropped_in_silence(behind: str) -> None:
    words = r"the address (has more than one key|repeats a header)"
    with pytest.raises(ConfigError, match=words) as caught:
        config({"judge": [f"endpoint:a@{URL}#{behind}"]})
    assert not any(word in " ".join(caught.value.lines()) for word in behind.split(","))


def test_names_come_from_the_endpoints_file(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.yaml"
    file.write_text(BOOK + "roles:\n  partner: loud\n  judge: {use: nano, reasoning_effort: low}\n")
    settings = config({"endpoints": str(file)})
    assert settings.partner is not None and settings.partner.model == "loud-partner"
    (judge,) = settings.judge
    assert (judge.model, judge.reasoning_effort) == ("tiny-judge", "low")
    assert (judge.requests_per_minute, judge.price_out) == (500, 0.4)
    flags = {"endpoints": str(file), "judge": ["loud", "nano"], "partner": "actor"}
    several = config(flags)  # what an option says goes before the file
    assert [j.model for j in several.judge] == ["loud-partner", "tiny-judge"]
    assert several.partner is not None and several.partner.kind == "actor"
    with pytest.raises(ConfigError, match="Did you mean 'nano'"):
        config({"endpoints": str(file), "judge": ["nanno"]})


def test_a_wrong_endpoints_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.yaml"
    file.write_text(BOOK + "roles: {jugde: nano}\n")
    with pytest.raises(ConfigError) as caught:
        config({"endpoints": str(file)})
    assert "'jugde'" in caught.value.what and "judge" in caught.value.way_out
    file.write_text("endpoints: {nano: {modell: x}}\n")
    with pytest.raises(ConfigError, match="modell"):
        config({"endpoints": str(file), "judge": ["nano"]})
    with pytest.raises(ConfigError, match="cannot be read"):
        config({"endpoints": str(tmp_path / "nowhere.yaml")})


def test_one_endpoints_file_serves_evaluation_and_training(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.yaml"
    file.write_text(BOOK + "roles: {judge: nano, coach: loud}\n")
    assert [judge.model for judge in config({"endpoints": str(file)}).judge] == ["tiny-judge"]
    train = TrainConfig.load(env={}, flags={**TRAIN, "endpoints": str(file)})
    assert isinstance(train.coach, RoleSettings) and train.coach.model == "loud-partner"


def test_a_settings_file_may_hold_players(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"partner: endpoint:p@{URL}\njudge:\n- {{model: j, base_url: '{URL}'}}\n")
    settings = config({}, file)
    assert settings.partner is not None and settings.partner.base_url == URL
    assert [judge.model for judge in settings.judge] == ["j"]
    from_environment = EvalConfig.load(
        env={"SOULKIT_PARTNER": "local:x", "SOULKIT_JUDGE_SAMPLES": "3"}, flags=EVAL
    )
    assert from_environment.partner is not None and from_environment.partner.kind == "local"
    assert from_environment.panel.samples == 3


def test_a_greedy_judge_is_sampled_as_soon_as_it_is_asked_twice() -> None:
    judge = RoleSettings(model="j", base_url=URL)
    assert [judge.sampling("judge", 0, n).temperature for n in (1, 2, 3)] == [0.0, 1.0, 1.0]
    fixed = RoleSettings(model="j", base_url=URL, temperature=0.5)
    assert [fixed.sampling("judge", 0, n).temperature for n in (1, 2)] == [0.5, 0.5]
    assert judge.sampling("partner", 5).seed == 5


def test_limits_and_prices_are_no_part_of_a_runs_identity() -> None:
    spec = {"model": "j", "base_url": URL}
    plain = config({"judge": [spec]})
    dear = config({"judge": [{**spec, "price_in": 1.0, "price_out": 2.0, "tokens_per_minute": 9}],
                   "max_cost": 3.0, "timeout_s": 9.0, "requests_per_minute": 5})  # fmt: skip
    assert plain.identity() == dear.identity()
    assert plain.identity() != config({"judge": [{**spec, "temperature": 0.5}]}).identity()


def test_coaches_are_rules_or_players() -> None:
    def coach(value: Any) -> Any:
        return TrainConfig.load(env={}, flags={**TRAIN, "coach": value}).coach

    assert coach("symbolic") == "symbolic" and coach("terse") == "terse"
    assert coach("actor").kind == "actor"
    assert coach(f"endpoint:wise@{URL}").base_url == URL
    with pytest.raises(ConfigError, match=r"'symbolc'\. Did you mean 'symbolic'\? Use one of:"):
        coach("symbolc")


def test_players_make_equal_models_once(tmp_path: Path) -> None:
    players = Players()
    one, two = RoleSettings(model="a", base_url=URL), RoleSettings(model="b", base_url=URL)
    hot = one.model_copy(update={"temperature": 0.9})
    first, second = players.player("judge", one, 0), players.player("partner", hot, 0)
    assert first.model is second.model and second.sampling.temperature == 0.9
    assert players.player("judge", two, 0).model is not first.model
    asyncio.run(players.close())


def test_the_actor_may_fill_any_role() -> None:
    actor = Endpoint(model="a", base_url=URL)
    cast = cast_of(
        config({"partner": "actor", "judge": ["actor"]}), Players(actor=actor), Player(actor), 0
    )
    assert cast.partner is not None and cast.partner.model is actor
    assert [judge.model for judge in cast.judges] == [actor]
    assert cast.filled() == {"actor", "partner", "judge", "auditor"}  # the judge audits, too
    with pytest.raises(ConfigError, match="has no actor"):
        Players().player("judge", RoleSettings(kind="actor"), 0)


# --- scripted -------------------------------------------------------------------------------------


def reply(model: ScriptedModel, last: str, turn: int = 0, sample: int = 0) -> str:
    call = Call(role="partner", example_id="e", turn=turn, sample=sample)
    completion = model.complete((Segment("user", last),), Sampling(), call)
    return asyncio.run(completion).text


def test_a_script_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "script.yaml"
    verdicts = [json.dumps({"score": score}) for score in (6, 7)]
    rules = [{"when": "(?i)price", "say": "Twelve."}, {"when": "score", "say": verdicts}]
    file.write_text(json.dumps({"name": "shop", "rules": rules, "replies": ["Hello.", "Bye."]}))
    model = ScriptedModel.read(file)
    assert model.name == "shop"
    assert reply(model, "What PRICE?") == "Twelve."
    assert [reply(model, "the score", sample=s) for s in range(3)] == [*verdicts, verdicts[0]]
    assert [reply(model, "x", turn=t) for t in range(4)] == ["Hello.", "Bye.", "Bye.", "Bye."]
    assert reply(ScriptedModel(Script()), "x") == ""


def test_a_rule_may_hold_for_one_seat_or_purpose_alone() -> None:
    rules = [{"purpose": "next", "seat": "b", "say": "Bo"}, {"purpose": "next", "say": "Ann"},
             {"seat": "b", "when": "x", "say": "I am Bo."}]  # fmt: skip
    model = ScriptedModel(Script.model_validate({"rules": rules, "replies": ["Hm."]}))

    def answer(seat: str, purpose: str = "", last: str = "x") -> str:
        call = Call(role="environment", example_id="e", seat=seat, purpose=purpose)
        return asyncio.run(model.complete((Segment("user", last),), Sampling(), call)).text

    assert [answer("b", "next"), answer("a", "next"), answer("", "next")] == ["Bo", "Ann", "Ann"]
    assert [answer("b"), answer("b", last="y"), answer("a")] == ["I am Bo.", "Hm.", "Hm."]


@pytest.mark.parametrize(
    ("text", "words"),
    [("rules: 5", ""), ("replies: {a: b}", ""), ("rules: [{when: '(', say: x}]", ""),
     ("say: x", ""), ("- a", ""), ("rules: [{say: x}]", ""),
     ("rules: [{when: x, say: []}]", r"rules\.0\.say: 'say' must contain")],
)  # fmt: skip
def test_what_is_no_script(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "script.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words or None):
        ScriptedModel.read(file)


# --- keys -----------------------------------------------------------------------------------------

SECRETS = ["sk-" + "abcdef0123456789" * 2, "gsk_" + "aB3dE5" * 6, "hunter2"]


@pytest.mark.parametrize(
    "player",
    [
        "endpoint:m@http://user:hunter2@host/v1",
        "endpoint:m@http://hunter2@host/v1",
        f"endpoint:m@http://host/v1?api_key={SECRETS[0]}",
        f"endpoint:m@http://host/v1#{SECRETS[0]}",
        f"endpoint:m@http://host/v1#{SECRETS[1]}",
        "openai:m@http://user:hunter2@host/v1",
        "m@http://user:hunter2@host/v1",
        SECRETS[0],
    ],
)
@pytest.mark.parametrize("base", [EVAL, TRAIN])
def test_a_pasted_key_is_refused_and_not_repeated(base: dict[str, Any], player: str) -> None:
    kind = EvalConfig if base is EVAL else TrainConfig
    with pytest.raises(UserError) as caught:
        kind.load(env={}, flags={**base, "partner": player})
    message = " ".join(caught.value.lines())
    assert not any(secret in message for secret in SECRETS)


def test_an_address_is_no_model() -> None:
    with pytest.raises(ConfigError, match="has no model"):
        config({"partner": "endpoint:http://host/v1"})
    with pytest.raises(ConfigError, match="model: String should have at least 1"):
        config({"model": ""})


# --- one endpoint, several roles ------------------------------------------------------------------


def test_the_actors_own_endpoint_is_shared_with_its_tightest_limits() -> None:
    plain = {"model": "m", "base_url": URL + "/", "requests_per_minute": 7.0}
    more = {**plain, "requests_per_minute": 9.0, "price_in": 1.0, "price_out": 2.0}
    settings = config({"base_url": URL, "partner": plain, "judge": [more, "actor"]})
    players = eval_players(settings, None)
    table = eval_cast(settings, players)
    assert table.partner is not None
    models = {id(player.model) for player in (table.actor, table.partner, *table.judges)}
    assert len(models) == 1 and isinstance(table.actor.model, Endpoint)
    assert players.limits_and_prices(settings.endpoint()) == {
        "requests_per_minute": 7.0, "tokens_per_minute": None, "price_in": 1.0, "price_out": 2.0
    }  # fmt: skip
    assert table.actor.model.price is not None and table.actor.model.price.reply == 2.0


# --- folders --------------------------------------------------------------------------------------


def test_another_sampling_of_a_player_is_named_when_a_run_is_resumed(tmp_path: Path) -> None:
    now, hot = (config({"judge": [{"model": "j", "base_url": URL, **more}]}).identity()
                for more in ({}, {"temperature": 0.5}))  # fmt: skip
    Run.open(tmp_path, "eval api", now)
    assert Run.open(tmp_path, "eval api", now).resumed
    with pytest.raises(RunError, match=r"judge\[0\].temperature: null -> 0.5"):
        Run.open(tmp_path, "eval api", hot)


def test_a_judge_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="--judge-samples 2"):
        config({"judge": [f"endpoint:a@{URL}", f"endpoint:a@{URL}"]})
    warm = [f"endpoint:a@{URL}", {"model": "a", "base_url": URL, "temperature": 0.7}]
    assert len(config({"judge": warm}).judge) == 2


WRITTEN = {
    "endpoint": "endpoint:m@http://localhost:1/v1", "local": "local:folder",
    "vllm": "vllm:owner/name", "actor": "actor", "scripted": "scripted:lines.yaml",
    "function": "function:agent.py:answer",
}  # fmt: skip
HOSTED = "https://api.example.org/v1"


def test_the_names_of_kinds_are_listed_once() -> None:
    assert get_args(KindName) == tuple(KINDS) == tuple(WRITTEN)
    assert FORMS.startswith(
        "endpoint:MODEL@URL, local:PATH, vllm:PATH, actor, scripted:FILE, function:"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_as_the_same_player(kind: str) -> None:
    settings = RoleSettings.model_validate(WRITTEN[kind])
    assert settings.kind == kind and settings.written() == WRITTEN[kind]
    assert is_spec(WRITTEN[kind])
    assert RoleSettings.model_validate(settings.model_dump()) == settings


def test_which_kinds_are_asked_over_http_and_which_take_memory() -> None:
    settings = [RoleSettings.model_validate(text) for text in WRITTEN.values()]
    assert [s.kind for s in settings if s.player_kind.over_http] == ["endpoint"]
    assert [s.kind for s in settings if s.player_kind.takes_memory] == ["local", "vllm"]
    assert [s.kind for s in settings if s.player_kind.may_be_path] == ["local", "scripted"]


@pytest.mark.parametrize(
    ("settings", "paid", "price"),
    [
        ({"model": "m", "base_url": HOSTED, "price_in": 1.0, "price_out": 2.0}, True, (1.0, 2.0)),
        ({"model": "m", "base_url": HOSTED, "price_in": 0.0, "price_out": 0.0}, False, (0.0, 0.0)),
        ({"model": "m", "base_url": HOSTED}, True, None),
        ({"model": "m", "base_url": "http://localhost:1/v1"}, False, None),
        ({"kind": "local", "model": "m"}, False, None),
        ({"kind": "actor"}, False, None),
    ],
)
def test_what_calls_cost(settings: dict[str, Any], paid: bool, price: Any) -> None:
    player = RoleSettings.model_validate(settings)
    known = player.player_kind.price(player, load_prices)
    assert player.player_kind.is_paid(player, load_prices) is paid
    assert (known and (known.prompt, known.reply)) == price


def test_equal_players_are_one_model() -> None:
    def key(text: str, **more: Any) -> tuple[str, ...]:
        player = RoleSettings.model_validate({**parse_spec(text), **more})
        return player.player_kind.key(player)

    assert key(WRITTEN["endpoint"]) == key(WRITTEN["endpoint"], temperature=0.3)
    assert key(WRITTEN["endpoint"]) != key(WRITTEN["endpoint"], api_key_env="OTHER")
    assert key("vllm:a") != key("vllm:a", args={"quantization": "fp8"})
    assert len({key(text) for text in WRITTEN.values()}) == len(WRITTEN)


@pytest.mark.parametrize("kind", ["local", "vllm", "actor"])
def test_a_player_that_a_command_cannot_make_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="The judge is set to"):
        Players().model("judge", RoleSettings.model_validate(WRITTEN[kind]))
