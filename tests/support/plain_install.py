"""Runs a `soul` command in the calling process and returns its output.

Used in a process pool that was started with another PYTHONPATH (tests/without_torch).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shlex
from dataclasses import dataclass

from soulkit.cli.app import main


@dataclass(frozen=True)
class Done:
    """Result of a command."""

    code: int
    out: str
    err: str


def run_line(line: str) -> Done:
    """Run `soul LINE` in a process that must not have torch."""
    assert importlib.util.find_spec("torch") is None
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(line))
    return Done(code, out.getvalue(), err.getvalue())
