"""Prices: the right entry or none, the user's before ours, and costs that add up."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from soulkit.errors import ConfigError
from soulkit.models.api.limits import Budget, BudgetSpent
from soulkit.models.api.prices import BUILT_IN, Price, PriceFile, load_prices

OPENAI, OTHER = "https://api.openai.com/v1", "http://localhost:8000/v1"


def written(folder: Path, text: str) -> Path:
    path = folder / "prices.yaml"
    path.write_text(text)
    return path


def test_costs() -> None:
    assert Price(2.0, 8.0).cost(1_000_000, 500_000) == 6.0
    assert Price(2.0, 8.0, 0.5).cost(1000, 0, 400) == pytest.approx((600 * 2 + 400 * 0.5) / 1e6)
    assert Price(2.0, 8.0).cost(1000, 0, 400) == pytest.approx(2000 / 1e6)
    assert Price(2.0, 8.0, 0.5).cost(100, 0, 400) == pytest.approx(50 / 1e6)


@pytest.mark.parametrize(
    ("model", "prompt"),
    [
        ("gpt-4o", 2.5), ("gpt-4o-2024-08-06", 2.5), ("gpt-4o-latest", 2.5),
        ("gpt-4o-2024-05-13", 5.0), ("gpt-4o-mini", 0.15), ("gpt-4o-mini-2024-07-18", 0.15),
        ("gpt-4o-audio-preview", None), ("gpt-4.1", 2.0), ("gpt-5", 1.25), ("gpt-5.4", 2.5),
        ("gpt-5-codex", None), ("gpt", None), ("xgpt-4o", None), ("", None),
    ],
)  # fmt: skip
def test_names(model: str, prompt: float | None) -> None:
    price = load_prices().of(model, OPENAI)
    assert (price.prompt if price else None) == prompt
    assert load_prices().of(model, OTHER) is None, "a server of one's own that borrows the name"


def test_the_users_file_goes_first_and_may_widen_names(tmp_path: Path) -> None:
    lines = [
        '- {model: "gpt-4o*", in: 1, out: 2}', "- {model: gpt-4o-mini, in: 3, out: 4, cached: 1}",
        '- {model: "*", host: localhost, in: 0, out: 0}',
    ]  # fmt: skip
    table = load_prices(written(tmp_path, "\n".join(["prices:", *lines])))
    assert table.of("gpt-4o", OPENAI) == Price(1, 2)
    assert table.of("gpt-4o-mini", OPENAI) == Price(3, 4, 1)
    assert table.of("gpt-4o-audio", OPENAI) == Price(1, 2)
    assert table.of("whatever", OTHER) == Price(0, 0)
    assert table.of("gpt-5", OPENAI) == Price(1.25, 10, 0.125)


@pytest.mark.parametrize(
    "text",
    [
        "prices: [{model: m, in: 1}]",
        "prices: [{model: m, in: -1, out: 1}]",
        "prices: [{model: m, in: .nan, out: 1}]",
        "prices: [{model: '', in: 1, out: 1}]",
        "prices: [{model: m, in: 1, out: 1, colour: red}]",
        "price: []",
        "- 1",
        "{",
    ],
)
def test_files_that_are_wrong(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_prices(written(tmp_path, text))
    with pytest.raises(ConfigError):
        load_prices(tmp_path / "none.yaml")


def test_every_built_in_price_says_since_when_and_where_from() -> None:
    entries = PriceFile.load(BUILT_IN, env={}).prices
    assert len({entry.model for entry in entries}) == len(entries)
    for entry in entries:
        assert entry.as_of is not None and entry.as_of > datetime.date(2025, 1, 1)
        assert entry.source.startswith("https://") and entry.host
        assert entry.prompt < entry.reply
        assert entry.cached is None or entry.cached < entry.prompt


def test_a_budget_counts_what_went_before() -> None:
    budget = Budget(1.0, spent=0.75)
    budget.check()
    budget.add(0.2)
    budget.check()
    budget.add(0.1)
    assert budget.exhausted
    with pytest.raises(BudgetSpent) as caught:
        budget.check()
    what, _, way_out = caught.value.lines()
    assert "1.0500" in what and "at most 1 US dollars" in what
    assert "--max-cost" in way_out


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_budget_that_allows_nothing(limit: float) -> None:
    with pytest.raises(ConfigError):
        Budget(limit)
