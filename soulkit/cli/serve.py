"""`soul serve`: serve a model or a script over HTTP, as OpenAI's API does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soulkit.cli.console import ConsoleReporter, err, safe
from soulkit.cli.options import COMPLETERS, MaxContext, TaskFiles, Trust, registry_of
from soulkit.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from soulkit.serving.backend import ChatBackend
    from soulkit.tasks.kit.person.brief import Brief
    from soulkit.tasks.kit.registry import Registry

SCRIPTED = ("partner", "environment")
"""Roles that a script can play."""


class End(StrEnum):
    """Forms of an end; see bound.py."""

    marker, tool, finish = "marker", "tool", "finish"


class System(StrEnum):
    """What happens to a client's system prompt; see bound.py."""

    refuse, ignore, append = "refuse", "ignore", "append"


def command(
    model: Annotated[str | None, typer.Argument(metavar="MODEL",
        help="Training run, folder with weights, or Hub model; tiny for a random one.")] = None,
    script: Annotated[str | None, typer.Option("--script", metavar="TASK|FILE.py:FUNCTION",
        help="Instead of MODEL: the scripted partner of a task, or a function that gets the "
        "messages and returns a text.", autocompletion=COMPLETERS["tasks"])] = None,
    adapter: Annotated[str | None, typer.Option("--adapter", metavar="FOLDER",
        help="LoRA adapter of MODEL.")] = None,
    engine: Annotated[str, typer.Option("--engine", metavar="auto|local|vllm|vllm@URL",
        help="Engine of the model; auto: vLLM if it is installed and there is a GPU. vllm@URL: a "
        "running server that has MODEL.",
        autocompletion=COMPLETERS["engines"])] = "auto",
    host: Annotated[str, typer.Option("--host", metavar="HOST",
        help="Address to listen on; any but this machine's own needs --api-key-env.",
        )] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT",
        help="Port to listen on; 0 picks a free port.")] = 8799,
    api_key_env: Annotated[str | None, typer.Option("--api-key-env", metavar="NAME",
        help="Environment variable with the key that clients must send.")] = None,
    max_context: MaxContext = None,
    max_concurrency: Annotated[int, typer.Option("--max-concurrency", metavar="N", min=1,
        help="Replies generated at the same time; further requests wait.")] = 64,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE",
        help="Device of the model: auto, cpu, cuda.")] = "auto",
    model_name: Annotated[str | None, typer.Option("--model-name", metavar="NAME",
        help="Id of the model for clients. [default: from MODEL]")] = None,
    persona: Annotated[Path | None, typer.Option("--persona", metavar="FILE", exists=True,
        help="Play a person: personas, one JSON object a line, one for each conversation."),
        ] = None,
    scenario: Annotated[Path | None, typer.Option("--scenario", metavar="FILE", exists=True,
        help="Play a person: what people want, one JSON object a line.")] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="TASK",
        help="Play the actor of a task's rows (--data) instead.",
        autocompletion=COMPLETERS["tasks"])] = None,
    data: Annotated[str | None, typer.Option("--data", metavar="FILE|synth:N",
        help="Rows of --task.")] = None,
    end: Annotated[End, typer.Option("--end", metavar="|".join(End),
        help="How a person ends a conversation: with ###STOP### in the text, with a call of the "
        "tool end_conversation, or with a stop_reason.")] = End.marker,
    system: Annotated[System, typer.Option("--system", metavar="|".join(System),
        help="What a person does with a client's system prompt.")] = System.refuse,
    tasks: TaskFiles = None,
    trust: Trust = False,
) -> None:  # fmt: skip
    """Serve a model, or a script without a model, as an OpenAI-compatible server.

    With --persona, --scenario or --task, the model plays a person: clients send the conversation
    as their agent sees it, and the server adds the prompt and swaps the roles. The server listens
    on this machine only, unless --host and --api-key-env open it to others. Ctrl-C stops it;
    running replies have 30 s to finish.
    """
    from soulkit.serving.app import Limits, make_app, make_listener, make_server

    if (model is None) == (script is None):
        raise ConfigError(
            "Nothing to serve was named." if model is None else "Two things to serve were named.",
            "The command serves one model or one script.",
            "Write soul serve MODEL, or soul serve --script TASK.",
        )
    key = _key(host, api_key_env)
    briefs: Sequence[Brief] = ()
    if persona or scenario or task:
        briefs = _briefs(persona, scenario, task, data, registry_of(tasks, trust=trust))
    elif data or end is not End.marker or system is not System.refuse:
        raise ConfigError(
            "--data, --end and --system are for a person.",
            "Without a person, clients send their own prompts.",
            "Add --persona FILE, --scenario FILE or --task TASK, or leave them out.",
        )
    with make_listener(host, port) as listener, ExitStack() as stack:
        if script is not None:
            registry = registry_of(tasks, trust=trust)
            backend, option = _script(script, registry, model_name)
            certificate = None
        else:
            from soulkit.serving.certificate import certificate_lines, find_certificate
            from soulkit.serving.engines import opened_model

            backend, option = stack.enter_context(opened_model(
                str(model), adapter=adapter, engine=engine, device=device, name=model_name or "",
                max_context=max_context, running=max_concurrency, reporter=ConsoleReporter("serve"),
            )), ""  # fmt: skip
            certificate = find_certificate(str(model), adapter)
            for line in certificate_lines(certificate):
                err.print(safe(line), soft_wrap=True)
        if briefs:
            from soulkit.serving.bound import BoundBackend

            backend = BoundBackend(backend, briefs, end.value, system.value)
        limits = Limits(running=max_concurrency)
        server = make_server(make_app(backend, limits=limits, key=key, certificate=certificate))
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/v1"
        typer.echo(url)
        err.print(f"use it with: {option}endpoint:{safe(backend.name)}@{url}", soft_wrap=True)
        server.run([listener])


def _briefs(
    persona: Path | None, scenario: Path | None, name: str | None, data: str | None,
    registry: Registry,
) -> Sequence[Brief]:  # fmt: skip
    from soulkit.serving.bound import row_briefs
    from soulkit.tasks.kit.loading import examples_to_inspect
    from soulkit.tasks.kit.person.brief import read_briefs

    if name is None and data is None:
        return read_briefs(persona, scenario)
    if name is None or data is None or persona or scenario:
        raise ConfigError(
            "--task and --data go together, without --persona and --scenario.",
            "The rows of the task have the persons.",
            "Write --task TASK --data FILE, or --persona FILE --scenario FILE.",
        )
    task = registry.task(name)
    return row_briefs(task, examples_to_inspect(task, data).examples)


def _key(host: str, variable: str | None) -> str:
    """The key that clients must send; ConfigError without one for an address that others reach."""
    from soulkit.models.api.addresses import is_loopback, read_key

    if variable:
        return read_key(variable, optional=False, what="The key of clients")
    if is_loopback(f"//{f'[{host}]' if ':' in host else host}"):
        return ""
    raise ConfigError(
        f"Other machines could use the server on the address {host}.",
        "An address that other machines reach needs a key.",
        "Add --api-key-env NAME with the variable that holds the key, or leave out --host.",
    )


def _script(text: str, registry: Registry, name: str | None) -> tuple[ChatBackend, str]:
    """A script as a backend, and the option of its users."""
    from soulkit.models.players.functions import load_function
    from soulkit.serving.backend import ScriptBackend

    file = text.rpartition(":")[0]
    if file.endswith(".py"):
        return ScriptBackend(name or Path(file).stem, load_function(text)[0]), ""
    task = _scripted(registry, text)
    hook = registry.hook(task, "scripted_partner")
    assert hook is not None
    seats = registry.spec(task).seats.items()
    seat, role = next((seat, role) for seat, role in seats if role in SCRIPTED)
    return ScriptBackend(name or f"scripted-{seat}", hook.function), f"--{role} "


def _scripted(registry: Registry, task: str) -> str:
    """`task`, if it has a scripted partner."""
    able = registry.with_hook("scripted_partner")
    if task in registry.specs:
        registry.spec(task)  # loads an installed task
    if task in able:
        return task
    raise ConfigError(
        f"'{task}' is neither a task with a scripted partner nor FILE.py:FUNCTION.",
        f"Tasks with a scripted partner: {', '.join(able)}.",
        did_you_mean(task, able),
    )
