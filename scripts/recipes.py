"""Write the plan of every recipe in examples/*.yaml into the comment at its top.

    .venv/bin/python scripts/recipes.py            # write
    .venv/bin/python scripts/recipes.py --check    # exit 1 if a plan is stale

A plan is what `soul plan train ditto --config FILE` prints below its table, on a machine with
CORES cores and FREE bytes of memory, without a GPU, API keys, downloaded rows or downloaded models.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

EXAMPLES = Path(__file__).parents[1] / "examples"
CORES, FREE, WIDTH = 8, 16 * 10**9, 100
START = "# The plan"


def plan_of(recipe: Path, *options: str) -> list[str]:
    """The lines that `soul plan` prints below the table of a recipe with these options."""
    from soulkit.cli.app import run_words

    printed = io.StringIO()
    with (
        elsewhere(),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        code = run_words(["train", "ditto", "--config", str(recipe), *options, "--dry-run"])
    if code:
        raise SystemExit(f"no plan for {recipe}: exit code {code}")
    lines = printed.getvalue().splitlines()
    table = max(i for i, line in enumerate(lines) if line.startswith(" "))
    return lines[table + 1 :]


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Context in which nothing depends on this machine."""
    keys = [name for name in os.environ if name.startswith(("OPENAI_", "SOULKIT_"))]
    with tempfile.TemporaryDirectory() as empty, mock.patch.dict(os.environ), \
            mock.patch("os.cpu_count", lambda: CORES), \
            mock.patch("soulkit.models.local.footprint.free_bytes", free_here):  # fmt: skip
        for name in keys:
            del os.environ[name]
        os.environ |= {"SOULKIT_DATA": empty, "HF_HUB_CACHE": empty, "CUDA_VISIBLE_DEVICES": ""}
        yield


def free_here(device: str) -> int | None:
    """The free memory of the machine that plans."""
    return FREE if device == "cpu" else None


def with_plan(text: str, plan: list[str]) -> str:
    """The text of a recipe with this plan in its comment."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(START))
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    fold = textwrap.TextWrapper(WIDTH, initial_indent="#     ", subsequent_indent="#       ")
    written = [part for line in plan for part in fold.wrap(line)]
    return "\n".join([*lines[: start + 1], "#", *written, *lines[end:]]) + "\n"


def main() -> None:
    """Write the plans, or check them."""
    stale = []
    for recipe in sorted(EXAMPLES.glob("*.yaml")):
        text = recipe.read_text(encoding="utf-8")
        new = with_plan(text, plan_of(recipe))
        if new != text:
            stale.append(recipe.name)
            if "--check" not in sys.argv:
                recipe.write_text(new, encoding="utf-8")
    print(f"{', '.join(stale) or 'nothing'}: {'stale' if '--check' in sys.argv else 'written'}")
    sys.exit(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    main()
