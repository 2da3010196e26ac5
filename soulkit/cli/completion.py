"""`soul completion SHELL`: print the script; where it goes is the user's business."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def command(
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(help="The shell to print the script for.")
    ],
) -> None:
    """Print the shell completion script.

    bash: soul completion bash > ~/.local/share/bash-completion/completions/soul

    zsh: soul completion zsh > a folder of your fpath, as the file _soul

    fish: soul completion fish > ~/.config/fish/completions/soul.fish
    """
    from typer._completion_shared import get_completion_script

    from soulkit.cli.app import COMPLETE_VARIABLE

    typer.echo(get_completion_script(prog_name="soul", complete_var=COMPLETE_VARIABLE, shell=shell))
