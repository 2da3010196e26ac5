"""One warmed-up model for the tests that run whole commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import warm_model


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a short SFT on stories and dialogues; the model is in `model/`."""
    return warm_model(tmp_path_factory.mktemp("warm") / "sft")
