"""`soul serve`: things that answer over HTTP."""

from __future__ import annotations

from http.server import ThreadingHTTPServer
from typing import Annotated

import typer

from soulkit.cli.console import err
from soulkit.errors import ConfigError

app = typer.Typer(rich_markup_mode=None, help="Serve a scripted conversation partner over HTTP.")


@app.callback()
def group() -> None:
    """Serve a scripted conversation partner over HTTP."""


@app.command()
def partner(
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes any free one.")] = 8799,
) -> None:
    """Serve the visitor of secret_keeper, without a model or key."""
    from soulkit.serving.partner import MODEL

    with _bound(host, port) as server:
        url = f"http://{host}:{server.server_address[1]}/v1"
        typer.echo(url)
        err.print(f"use it with: --partner endpoint:{MODEL}@{url}", soft_wrap=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            err.print("stopped")


def _bound(host: str, port: int) -> ThreadingHTTPServer:
    from soulkit.serving.partner import make_server

    try:
        return make_server(host, port)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"Nothing can be served on {host}:{port}.",
            f"The system says: {error}.",
            "Give another port with --port, or --port 0 for any free one.",
        ) from error
