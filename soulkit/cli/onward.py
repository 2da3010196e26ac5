"""What to do next: the last line of a command, on stderr."""

from __future__ import annotations


def say_next(*commands: str) -> None:
    """`next: soul report runs/x; soul show runs/x`: commands as a shell reads them.

    Commands with --json do not say it.
    """
    from soulkit.cli.console import err
    from soulkit.text import one_line

    if commands:
        err.print(f"next: {one_line('; '.join(commands))}", markup=False, soft_wrap=True)
