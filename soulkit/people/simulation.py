"""`soul simulate`: simulated people talk to the user's own agent.

    personas × scenarios ──▶ rows-HASH.jsonl ──▶ evaluation of the task with these SEATS

It is an evaluation in which the agent is the model under test and the simulator is the partner, so
a run is resumed, shown, compared and scored again like any other.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from soulkit.data.rows import share_of
from soulkit.errors import ConfigError
from soulkit.eval.config import EvalConfig
from soulkit.models.api.addresses import open_access
from soulkit.models.api.probing import offered_models
from soulkit.models.api.transport import ClientPool, make_client
from soulkit.models.players.settings import (
    FORMS,
    RoleSettings,
    is_spec,
    parse_kind,
    players_by_name,
)
from soulkit.people.continuations import MAX_TOKENS, final_weights
from soulkit.runs.jsonl import aside
from soulkit.tasks.kit.person.brief import Brief
from soulkit.tasks.kit.registry import load_registry

SEATS = {"agent": "actor", "person": "partner"}
"""Seats of the task that is evaluated."""
TINY = "tiny"
"""A model with random weights, to try things with."""
TO_BE_LISTED = "model"
"""Stands for the model of a server until the server has named it."""
MOST_ROWS = 1_000_000
"""Conversations of one run."""
LISTING_S = 5.0
"""Seconds to wait for the list of a server's models."""


def simulation_config(
    agent: str, user: str, rows: Path, options: Mapping[str, str], settings: Mapping[str, Any], *,
    trust: bool = False,
) -> EvalConfig:  # fmt: skip
    """The settings of the evaluation on these `rows`. `options` are those of the task, `settings`
    all others. ConfigError for players that cannot be used."""
    specs, endpoints = load_registry().specs, settings.get("endpoints")
    task = next(name for name, spec in specs.items() if spec.seats == SEATS)
    if user == TINY:
        user = tiny_person(rows.with_suffix(".tiny"), rows.read_text("utf-8"))
    players = {**agent_settings(agent, endpoints), "partner": user_player(user, endpoints)}
    rest = {"option": dict(options), "data": {task: str(rows)}}
    flags = {"kind": "api", "tasks": (task,), **players, **settings, **rest}
    return EvalConfig.load(flags=flags, trust=trust)


def tiny_person(folder: Path, *texts: str) -> str:
    """A model with random weights that knows the words of a person's prompt and of `texts`."""
    from soulkit.models.local.tiny import build_tiny

    return str(build_tiny(folder, [Brief().prompt().text, *texts], max_context=4096))


def conversation_rows(briefs: Sequence[Brief], n: int | None, seed: int, folder: Path) -> Path:
    """Write `n` rows (None: one for each brief) to a file in `folder`, named by their hash so that
    the same command resumes a run. Briefs are drawn without repeats until all are used. ConfigError
    for more than MOST_ROWS."""
    count = len(briefs) if n is None else n
    if count > MOST_ROWS:
        raise ConfigError(
            f"{count:,} conversations are too many.", f"A run has at most {MOST_ROWS:,}.",
            f"Use -n {MOST_ROWS} or less.",
        )  # fmt: skip
    drawn = sorted(briefs, key=lambda one: share_of(f"simulate/{seed}", repr(one)))

    def lines() -> Iterator[bytes]:
        for place in range(count):
            row = {**drawn[place % len(drawn)].row(), "repeat": place // len(drawn)}
            yield json.dumps(row, ensure_ascii=False).encode() + b"\n"

    digest = hashlib.sha256()
    for line in lines():
        digest.update(line)
    path = folder / f"rows-{digest.hexdigest()[:12]}.jsonl"
    with aside(path) as stream:
        stream.writelines(lines())
    return path


# -- players ---------------------------------------------------------------------------------------


def agent_settings(text: str, endpoints: str | None = None) -> dict[str, Any]:
    """The settings of the model under test: `URL#KEY`, a player, or `FILE.py:NAME`."""
    if text.startswith(("http://", "https://")):
        server = named_player(f"endpoint:{TO_BE_LISTED}@{text}", endpoints, "agent")
        text = f"endpoint:{asyncio.run(_only_model(server))}@{text}"
    elif ":" in text and parse_kind(text) is None:
        text = f"function:{text}"
    player = named_player(text, endpoints, "agent")
    given = player.model_dump(exclude_unset=True, exclude={"kind", "by_batch"})
    return {**given, "actor_kind": player.kind}


async def _only_model(server: RoleSettings) -> str:
    """The model that a server lists; ConfigError unless there is exactly one."""
    access = open_access(server.base_url, server.api_key_env, server.headers, server.api_version)
    pool = ClientPool(partial(make_client, access.base_url, None), 1)
    try:
        models = await offered_models(access, pool, LISTING_S)
    finally:
        await pool.close()
    if len(models) != 1:
        raise ConfigError(
            f"The server {access.base_url} does not list exactly one model.",
            f"It lists {', '.join(models) or 'none, or does not answer'}.",
            "Write endpoint:MODEL@URL with the name of the model.",
        )
    return models[0]


def user_player(text: str, endpoints: str | None = None) -> dict[str, Any]:
    """The partner's settings: a player, a name in `endpoints`, a model, or a training run."""
    if (is_spec(text) or endpoints) and not Path(text).exists():
        return named_player(text, endpoints, "user").model_dump(exclude_unset=True)
    return {"kind": "local", "model": str(final_weights(Path(text))), "max_tokens": MAX_TOKENS}


def named_player(text: str, endpoints: str | None, role: str) -> RoleSettings:
    """The player that the option of a `role` names; ConfigError if it cannot be used."""
    try:
        read = players_by_name({"endpoints": endpoints, "partner": text}, ["partner"])["partner"]
        player = RoleSettings.model_validate(read)
    except ValueError as error:
        raise ConfigError(
            f"--{role} {text} cannot be used.", "It is not a player, a model or a function.",
            f"Use one of: {FORMS}.",
        ) from error  # fmt: skip
    if player.kind in (("actor", "vllm") if role == "agent" else ("actor",)):
        raise ConfigError(
            f"The {role} cannot be '{text}'.", "It is a server, a function, a model or a script.",
            "Serve a model with vLLM and use endpoint:MODEL@URL.",
        )  # fmt: skip
    return player
