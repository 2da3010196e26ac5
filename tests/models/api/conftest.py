"""Of all tests of API models: short pauses before a list of models is asked for again."""

import pytest

from soulkit.models.api import server_defaults


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = tuple(pause / 20 for pause in server_defaults.PAUSES_S)
    monkeypatch.setattr(server_defaults, "PAUSES_S", pauses)
