"""`soul serve`: serve a model or a script over HTTP, as OpenAI's API does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import ConsoleReporter, err, print_next, safe
from soulkit.cli.options import COMPLETERS, Adapter, Device, TaskFiles, Trust, registry_of
from soulkit.errors import ConfigError, did_you_mean
from soulkit.serving.backend import Ending, SystemPolicy
from soulkit.text import counted

if TYPE_CHECKING:
    from soulkit.serving.backend import ChatBackend
    from soulkit.tasks.kit.person.brief import Brief
    from soulkit.tasks.kit.registry import Registry

SCRIPTED = ("partner", "environment")
"""Roles that a script can play."""


Script = Annotated[str | None, typer.Option("--script", metavar="TASK|FILE.py:FUNCTION",
    help="Instead of MODEL: the scripted partner of a task, or a function that gets the messages "
    "and returns a text.", autocompletion=COMPLETERS["tasks"])]  # fmt: skip
Engine = Annotated[str, typer.Option("--engine", metavar="auto|local|vllm|vllm@URL",
    help="Engine of the model; auto: vLLM if it is installed and there is a GPU. vllm@URL: a "
    "running server that has MODEL.", autocompletion=COMPLETERS["engines"])]  # fmt: skip
Host = Annotated[str, typer.Option("--host", metavar="HOST",
    help="Address to listen on; any but this machine's own needs --api-key-env.")]  # fmt: skip
Port = Annotated[int, typer.Option("--port", metavar="PORT",
    help="Port to listen on; 0 picks a free port.")]  # fmt: skip
KeyEnv = Annotated[str | None, typer.Option("--api-key-env", metavar="NAME",
    help="Environment variable with the key that clients must send.")]  # fmt: skip
MaxConcurrency = Annotated[int, typer.Option("--max-concurrency", metavar="N", min=1,
    help="Replies generated at the same time; further requests wait.")]  # fmt: skip
MaxContext = Annotated[int | None, typer.Option("--max-context", metavar="N", min=1,
    help="Maximum tokens of prompt and reply together. [default: the model's; on vLLM at most "
    "16384]")]  # fmt: skip
ModelName = Annotated[str | None, typer.Option("--model-name", metavar="NAME",
    help="Id of the model for clients. [default: from MODEL]")]  # fmt: skip
Personas = Annotated[Path | None, typer.Option("--persona", metavar="FILE", exists=True,
    help="Play a person: personas, one JSON object a line; a conversation gets one.")]  # fmt: skip
Scenarios = Annotated[Path | None, typer.Option("--scenario", metavar="FILE", exists=True,
    help="Play a person: what people want, one JSON object a line.")]  # fmt: skip
Actor = Annotated[str | None, typer.Option("--task", metavar="TASK",
    help="Play the actor of a task's rows (--data) instead.",
    autocompletion=COMPLETERS["tasks"])]  # fmt: skip
Rows = Annotated[str | None, typer.Option("--data", metavar="FILE|synth:N",
    help="Rows of --task.")]  # fmt: skip
Ends = Annotated[Ending, typer.Option("--end", metavar="marker|tool|finish",
    help="How a person ends a conversation: with ###STOP### in the text, with a call of the tool "
    "end_conversation, or with a stop_reason.")]  # fmt: skip
Systems = Annotated[SystemPolicy, typer.Option("--system", metavar="refuse|ignore|append",
    help="What a person does with a client's system prompt.")]  # fmt: skip


def command(
    model: Annotated[str | None, typer.Argument(metavar="MODEL",
        help="Training run, folder with weights, or Hub model; tiny for a random one.")] = None,
    script: Script = None, adapter: Adapter = None, engine: Engine = "auto",
    host: Host = "127.0.0.1", port: Port = 8799, api_key_env: KeyEnv = None,
    max_context: MaxContext = None, max_concurrency: MaxConcurrency = 64, device: Device = "auto",
    model_name: ModelName = None, persona: Personas = None, scenario: Scenarios = None,
    task: Actor = None, data: Rows = None, end: Ends = "marker", system: Systems = "refuse",
    tasks: TaskFiles = None, trust: Trust = False,
) -> None:  # fmt: skip
    """Serve a model, or a script without a model, as an OpenAI-compatible server.

    With --persona, --scenario or --task, the model plays a person: clients send the conversation
    as their agent sees it, and the server adds the prompt and swaps the roles. Without --host
    it listens on this machine only; other addresses need --api-key-env. Ctrl-C stops it; running
    replies have 30 s to finish.
    """
    from soulkit.serving.app import Limits, make_app, make_listener, make_server
    from soulkit.serving.bound import BoundBackend
    from soulkit.serving.certificate import certificate_lines, find_certificate
    from soulkit.serving.engines import opened_model

    if (model is None) == (script is None):
        raise ConfigError(
            "Nothing to serve was named." if model is None else "Two things to serve were named.",
            "The command serves one model or one script.",
            "Write soul serve MODEL, or soul serve --script TASK.",
        )
    key, registry = _key(host, api_key_env), registry_of(tasks, trust=trust)
    opening: dict[str, Any] = {"adapter": adapter, "max_context": max_context}
    opening |= {"engine": engine, "device": device}
    briefs = _briefs(persona, scenario, task, data, registry)
    if not briefs and (end, system) != ("marker", "refuse"):
        raise _no_effect("--end and --system", "They are for a person: add --persona FILE.")
    with make_listener(host, port) as listener, ExitStack() as stack:
        if script is not None:
            if {*opening.values()} != {None, "auto"}:
                raise _no_effect("--adapter, --max-context, --engine and --device",
                                 "They are for MODEL, not for a script.")  # fmt: skip
            backend, option = _script(script, registry, model_name)
        else:
            backend, option = stack.enter_context(opened_model(
                str(model), **opening, running=max_concurrency, name=model_name or "",
                reporter=ConsoleReporter("serve"),
            )), ""  # fmt: skip
        certificate = find_certificate(model, adapter) if model else None
        for line in certificate_lines(certificate) if model else ():
            err.print(safe(line), soft_wrap=True)
        if briefs:
            backend = BoundBackend(backend, briefs, end, system)
        limits = Limits(running=max_concurrency)
        server = make_server(make_app(backend, limits=limits, key=key, certificate=certificate))
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/v1"
        typer.echo(url)
        use = f"use it with: {option}endpoint:{safe(backend.name)}@{url}"
        plays = f"plays {counted(len(briefs), 'person')}; see docs/guides/simulated-user.md"
        err.print(plays if briefs else use, soft_wrap=True)
        if not (key or briefs or script):
            print_next(f"soul chat {url}")
        server.run([listener])


def _no_effect(options: str, why: str) -> ConfigError:
    return ConfigError(f"{options} have no effect here.", why, "Leave them out.")


def _briefs(
    persona: Path | None, scenario: Path | None, name: str | None, data: str | None,
    registry: Registry,
) -> Sequence[Brief]:  # fmt: skip
    from soulkit.serving.bound import row_briefs
    from soulkit.tasks.kit.loading import examples_to_inspect
    from soulkit.tasks.kit.person.brief import read_briefs

    if name is None and data is None:
        return read_briefs(persona, scenario) if persona or scenario else ()
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
    able = registry.with_hook("scripted_partner")
    spec = registry.spec(text) if text in registry.specs else None  # loads an installed task
    hook = registry.hook(text, "scripted_partner") if spec else None
    if spec is None or hook is None:
        raise ConfigError(
            f"'{text}' is neither a task with a scripted partner nor FILE.py:FUNCTION.",
            f"Tasks with a scripted partner: {', '.join(able)}.",
            did_you_mean(text, able),
        )
    seat, role = next(pair for pair in spec.seats.items() if pair[1] in SCRIPTED)
    return ScriptBackend(name or f"scripted-{seat}", hook.function), f"--{role} "
