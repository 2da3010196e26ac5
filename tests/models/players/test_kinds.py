"""Every kind of player says by itself how it is written, made, paid for and checked."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from soulkit.errors import ConfigError
from soulkit.models.api.prices import load_prices
from soulkit.models.players.players import Players
from soulkit.models.players.settings import (
    FORMS,
    KINDS,
    ActorKind,
    KindName,
    RoleSettings,
    is_spec,
    parse_spec,
)

WRITTEN = {
    "endpoint": "endpoint:m@http://localhost:1/v1", "local": "local:folder",
    "vllm": "vllm:owner/name", "actor": "actor", "scripted": "scripted:lines.yaml",
}  # fmt: skip
HOSTED = "https://api.example.org/v1"


def test_the_names_of_kinds_are_listed_once() -> None:
    assert get_args(KindName) == tuple(KINDS) == tuple(WRITTEN)
    assert FORMS.startswith("endpoint:MODEL@URL, local:PATH, vllm:PATH, actor, scripted:FILE, or")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_as_the_same_player(kind: str) -> None:
    settings = RoleSettings.model_validate(WRITTEN[kind])
    assert settings.kind == kind and settings.written() == WRITTEN[kind]
    assert is_spec(WRITTEN[kind])
    assert RoleSettings.model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize("text", ["", "nano", "actor:x", "actor:", "local", "local:", "other:x"])
def test_what_is_of_no_kind_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="says no player; write endpoint:MODEL@URL"):
        parse_spec(text)
    with pytest.raises(ValueError, match=r"an address stands without a model; write endpoint"):
        parse_spec("endpoint:http://localhost:1/v1")


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
    with pytest.raises(ConfigError, match="The judge is to be the"):
        Players().model("judge", RoleSettings.model_validate(WRITTEN[kind]))


def test_a_further_kind_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Echo(ActorKind):
        """A kind that a test adds."""

    monkeypatch.setitem(KINDS, "actor", Echo())  # type: ignore[misc]
    assert isinstance(RoleSettings.model_validate("actor").player_kind, Echo)
