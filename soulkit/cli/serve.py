"""`soul serve`: serve a task's scripted partner over HTTP."""

from __future__ import annotations

from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Annotated

import typer

from soulkit.cli.console import err
from soulkit.cli.options import COMPLETERS, TaskFiles, Trust, registry_of
from soulkit.cli.parse_errors import CommandTable
from soulkit.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from soulkit.serving.partner import Speak
    from soulkit.tasks.kit.registry import Registry

SCRIPTED = ("partner", "environment")
"""Roles that a script can play."""

app = CommandTable(rich_markup_mode=None, help="Serve a scripted conversation partner over HTTP.")


@app.callback()
def group() -> None:
    """Serve a scripted conversation partner over HTTP."""


@app.command()
def partner(
    task: Annotated[str | None, typer.Argument(autocompletion=COMPLETERS["tasks"],
        help="Task whose partner to serve; needed if several tasks have one.")] = None,
    host: Annotated[str, typer.Option("--host", metavar="HOST",
        help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT",
        help="Port to listen on; 0 picks a free port.")] = 8799,
    tasks: TaskFiles = None,
    trust: Trust = False,
) -> None:  # fmt: skip
    """Serve a task's scripted partner; needs no model or API key."""
    registry = registry_of(tasks, trust=trust)
    name = _scripted(registry, task)
    hook = registry.hook(name, "scripted_partner")
    assert hook is not None
    seat, role = next(
        (seat, role) for seat, role in registry.spec(name).seats.items() if role in SCRIPTED
    )
    model = f"scripted-{seat}"
    with _bound(hook.function, model, host, port) as server:
        url = f"http://{host}:{server.server_address[1]}/v1"
        typer.echo(url)
        err.print(f"use it with: --{role} endpoint:{model}@{url}", soft_wrap=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            err.print("stopped")


def _scripted(registry: Registry, task: str | None) -> str:
    """The requested task, else the only task with a scripted partner."""
    if task is not None:
        registry.spec(task)  # loads an installed task
    able = registry.with_hook("scripted_partner")
    if task in able:
        return task
    if task is None and len(able) == 1:
        return able[0]
    raise ConfigError(
        f"The task '{task}' has no scripted partner." if task else "No task was named.",
        f"Tasks with a scripted partner: {', '.join(able)}.",
        did_you_mean(task, able) if task else f"Write soul serve partner {able[0]}, for example.",
    )


def _bound(speak: Speak, model: str, host: str, port: int) -> ThreadingHTTPServer:
    from soulkit.serving.partner import make_server

    try:
        return make_server(speak, model, host, port)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"The address {host}:{port} cannot be used.",
            f"The system says: {error}.",
            "Choose another --port; --port 0 picks a free one.",
        ) from error
