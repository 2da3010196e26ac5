"""Shared test set-up: the vector summary, and fixtures that several folders use."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The time of an example depends on the load of the machine, not on the code.
settings.register_profile("soulkit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("soulkit")

gc.disable()  # until all tests are collected

# pytest-xdist gives its processes a terminal width.
os.environ.pop("COLUMNS", None)

MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 8 << 30:
    # Runs sync every episode to the disk, which would take most of their time.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# --- without torch --------------------------------------------------------------------------------

WITH_TORCH = {"torch", "transformers", "peft", "safetensors"}
"""Packages of the extra `train`; `make test-core` hides them and skips tests that need them."""
CORE_ONLY = importlib.util.find_spec("torch") is None
collect_ignore = ["gpu", "train"] if CORE_ONLY else []


class CoreModule(pytest.Module):
    """A test file that is skipped completely if its imports need torch."""

    def _getobj(self) -> Any:
        try:
            return super()._getobj()
        except self.CollectError as error:
            missing = getattr(error.__cause__, "name", None) or ""
            if missing.partition(".")[0] not in WITH_TORCH:
                raise
            pytest.skip(f"needs {missing}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    return CoreModule.from_parent(parent, path=module_path) if CORE_ONLY else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if CORE_ONLY and item.get_closest_marker("torch") is not None:
        pytest.skip("needs torch")


# --- fixtures shared by several folders go here ---------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Seal runs with a test key, and remove addresses set on this machine from the defaults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOULKIT_STATE", str(tmp_path_factory.mktemp("state")))
        for name in ("OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
            patch.delenv(name, raising=False)
        yield


# --- conformance vectors --------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    # A shell that runs the tests in the background makes them and their children ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


SKIPPED = {"quirk ": " by quirk", "not built": " as not built"}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the vector outcomes (commands, then formulas) and the skips by reason."""
    outcomes: dict[str, Counter[str]] = {"commands": Counter(), "formulas": Counter()}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for kind, counts in getattr(report, "user_properties", ()):
                if kind in outcomes:
                    outcomes[kind].update(counts)
    if not any(outcomes.values()):
        return
    terminalreporter.section("conformance vectors")
    skips = Counter[str]()
    titles = {"commands": "code that a command runs", "formulas": "formulas alone"}
    for kind, title in titles.items():
        listed = Counter[str]()
        for name, count in outcomes[kind].items():
            what, _, why = name.partition(": ")
            skips[why] += count if why else 0
            listed[what + next((s for w, s in SKIPPED.items() if why.startswith(w)), "")] += count
        shown = ", ".join(f"{n} {name}" for name, n in listed.items())
        terminalreporter.write_line(f"{title}: {shown or 'none'}")
    for why, count in sorted(skips.items()):
        if count:
            terminalreporter.write_line(f"  {count:4d}  {why}")


LONGEST = ("train", "cli", "eval", "models", "distill", "report")
"""The slowest folders; they start first, so that all processes end at about the same time."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):  # one process: the order that was asked for
        return
    tests = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(tests).parts[0]
        return LONGEST.index(folder) if folder in LONGEST else len(LONGEST)

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze collected tests: they live to the end, so the garbage collector can skip them."""
    gc.collect()
    gc.freeze()
    gc.enable()
