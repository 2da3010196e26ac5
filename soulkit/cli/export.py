"""`soul export RUN|FOLDER`: a folder that other programs load, and its upload to the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from soulkit.cli.options import Json
from soulkit.errors import ConfigError


def command(
    weights: Annotated[str, typer.Argument(metavar="RUN|FOLDER",
        help="Training run, distillation, checkpoint, adapter or model.")],
    output: Annotated[Path, typer.Option("--out", metavar="DIR",
        help="Folder to write. It must be new or empty.")],
    merge: Annotated[bool, typer.Option("--merge",
        help="Write all weights, with the adapter merged into its base.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter",
        help="Write only the adapter, which needs its base.")] = False,
    base: Annotated[str | None, typer.Option("--base", metavar="MODEL",
        help="Base of the adapter, if it is not where the training found it.")] = None,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE",
        help="Device for merging in float32: cpu, cuda or auto.")] = "cpu",
    push_to_hub: Annotated[str | None, typer.Option("--push-to-hub", metavar="REPO",
        help="Also upload the folder to the private repository OWNER/NAME, with the token in "
        "HF_TOKEN.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Export a model for vLLM, SGLang, transformers or the Hub.

    The folder contains weights, tokenizer, chat template and a model card with the commands that
    serve it. The logits before and after a merge are compared; nothing is written if they differ.
    The same command again only repeats the upload.
    """
    from soulkit.cli.console import ConsoleReporter, print_json, print_next, print_note, safe
    from soulkit.report.episode_search import shell_path

    if merge == adapter:
        raise ConfigError(
            "Use either --merge or --adapter.",
            "A server loads merged weights like any model; an adapter is small and needs its base.",
            "Add --merge if you are not sure.",
        )
    reporter = ConsoleReporter("export")
    with reporter.working("starting"):
        from soulkit.serving.export import Form, export_model, find_source, hub_token, push_export

    source = find_source(weights, base)
    form: Form = "merged" if merge else "adapter"
    token = hub_token(source, form) if push_to_hub else ""
    record = export_model(source, output, form, device=device, reporter=reporter)
    if not as_json:
        print_note(f"exported {source.folder} to {output}")
        _print_facts(record, output)
    if push_to_hub:
        with reporter.working(f"uploading to {safe(push_to_hub)}", alone=True):
            record["hub"] = push_export(output, push_to_hub, token)
        print_note(f"uploaded to {record['hub']}")
    if as_json:
        print_json({"folder": str(output), "source": str(source.folder), **record})
    else:
        folder = shell_path(output)
        print_next(f"soul serve {folder}", f"soul certify {folder} --people FILE")


def _print_facts(record: Mapping[str, Any], folder: Path) -> None:
    """Print how much a merge changed, and what is known of the model."""
    from soulkit.cli.console import print_note
    from soulkit.serving.certificate import certificate_lines, find_certificate

    if "logit_change" in record:
        print_note(
            f"weights in {record['dtype']}; the merge changed a logit by at most "
            f"{record['logit_change']:.0e}, and the next token by {record['kl']:.0e} nats (KL)"
        )
    for line in certificate_lines(find_certificate(str(folder))):
        print_note(line)
