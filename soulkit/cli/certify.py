"""`soul certify`: what is known of a simulator, in one file beside its weights."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from soulkit.cli.console import ConsoleReporter, out, print_json, print_next, safe
from soulkit.cli.options import Json


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL",
        help="Training run, folder with weights, Hub model, or player: endpoint:MODEL@URL, …")],
    people: Annotated[str | None, typer.Option("--people", metavar="FILE",
        help="Conversations of people that the model has not seen. [default: use what soul "
        "people closeness has recorded]")] = None,
    side: Annotated[str, typer.Option("--side", metavar="SIDE",
        help="Whose turns are continued: human, or a speaker's name.")] = "human",
    runs: Annotated[list[Path] | None, typer.Option("--run", metavar="RUN", readable=False,
        help="Evaluation of this model whose scores to include. Repeatable.")] = None,
    adapter: Annotated[str | None, typer.Option("--adapter", metavar="FOLDER",
        help="Adapter of MODEL.")] = None,
    target: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", readable=False,
        help="File to write. [default: certificate.json in the folder of MODEL]")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Collect what is known of a simulator in one file.

    The certificate has the scores of evaluations of the same weights, closeness to people (measured
    as by soul people closeness, unless that is recorded) and memory (soul people memory). It names
    what was not measured. Export, serve, chat and simulate carry it with the model. To measure with
    other settings or against a base, run soul people closeness first, and certify without --people.
    """
    from soulkit.serving.certificate import certificate_lines, certify

    certificate, file = certify(
        model, people, side=side, adapter=adapter, runs=runs or (), target=target,
        reporter=ConsoleReporter("certify"),
    )  # fmt: skip
    if as_json:
        print_json(certificate)
        return
    for line in [*certificate_lines(certificate), f"written: {file}"]:
        out.print(safe(line), soft_wrap=True)
    if Path(model).is_dir():
        print_next(f"soul serve {shlex.quote(model)}")
