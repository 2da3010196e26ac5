"""Completions by ids: what a vLLM server is sent, and how its replies are read.

Pure functions without network. A server is prompted with ids and answers with ids, so that no text
is tokenised twice; every setting of the sampling is sent, since a server takes what is left out
from its own configuration. What cannot be read raises `Unreadable`.

**Log-probs** are those of logits / temperature, before `top_p` cuts anything (`Completion`). A
server gives either those of the distribution that it drew from (*processed*: after temperature and
`top_p`) or those of the plain logits (*raw*). So they are asked for where one is the other, and
nowhere else: `gives_logprobs` says where. A form masks the logits before both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from soulkit.models.api.wire import NEUTRAL, Unreadable, sent_seed
from soulkit.types import Call, Sampling

__all__ = [
    "LEAST_TEMPERATURE", "PATH", "Emission", "LogprobsMode", "Unreadable", "completion_request",
    "gives_logprobs", "read_emission",
]  # fmt: skip

PATH = "/v1/completions"
LogprobsMode = Literal["processed", "raw", "none"]
"""Of which distribution a server's log-probs are; none: it gives none that could be used."""
LEAST_TEMPERATURE = 0.01
"""A server takes any lower one, but for 0, for this one."""
MOST_STOPS = 4
"""Stop strings that a server takes. The codec cuts at all of them; the others end no sampling."""
_MOST_ID = 2**31 - 1
_ROUNDING = 1e-3
"""Nats by which a rounded log-prob may be above zero."""
_NO_SEED = -1
"""Stands for a seed that nobody chose: such replies are repeatable as well."""
_FINISHED = ("stop", "length")
"""How a whole reply ends. Any other way the server gave the work up."""


@dataclass(frozen=True, slots=True)
class Emission:
    """What one reply holds."""

    prompt: tuple[int, ...]
    """What the server says that it was prompted with; empty where it does not."""
    ids: tuple[int, ...]
    """Emitted ids, with the one that ended the turn or completed a stop string."""
    logprobs: tuple[float, ...]
    """One per id; empty where none were asked for."""
    stopped: bool
    """Whether the reply ended by itself, and not at its limit."""


def gives_logprobs(sampling: Sampling, mode: LogprobsMode, *, form: bool) -> bool:
    """Whether a server's log-probs are those of logits / temperature; `form`: it is held to one.

    Greedily a server counts with temperature 1 and cuts nothing, as everybody here does.
    """
    if form or mode == "none":
        return False
    greedy = sampling.temperature == 0
    if mode == "raw":
        return greedy or sampling.temperature == 1
    return greedy or (sampling.top_p >= 1 and sampling.temperature >= LEAST_TEMPERATURE)


def completion_request(
    served: str, prompt: Sequence[int], sampling: Sampling, call: Call, *, room: int,
    end_ids: Iterable[int], logprobs: bool, form: bool,
) -> dict[str, Any]:  # fmt: skip
    """The body of one request: at most `room` tokens after `prompt`, by the model that is called
    `served` there.

    `end_ids` end the reply, `logprobs` asks for those of the emitted tokens, and `form` holds it to
    the sampling's form. Equal seeds and calls give equal bodies.
    """
    body: dict[str, Any] = {
        "model": served,
        "prompt": list(prompt),
        "max_tokens": room,
        "temperature": sampling.temperature,
        **NEUTRAL,
        "top_p": sampling.top_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": sent_seed(_NO_SEED if sampling.seed is None else sampling.seed, call),
        "stop_token_ids": sorted(end_ids),
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    stops = [text for text in sampling.stop if text]
    if stops:
        body["stop"] = stops[:MOST_STOPS]
    if logprobs:
        body["logprobs"] = 0
    if form and sampling.form is not None:
        body["structured_outputs"] = {"json": json.loads(sampling.form.schema)}
    return body


def read_emission(
    body: Mapping[str, Any], prompt: Sequence[int] | None, *, logprobs: bool
) -> Emission:
    """What a reply to `prompt` (None: to whatever it says) emitted.

    Raises Unreadable, also where a server read other ids than those that it was sent, or gave the
    work up.
    """
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise Unreadable("no choices")
    read = choice.get("prompt_token_ids")
    if isinstance(read, list) and prompt is not None and read != list(prompt):
        raise Unreadable("the server read another prompt than it was sent")
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or len(_ids(ids)) != len(ids):
        raise Unreadable("no token ids: the server is none that answers with ids")
    finish = choice.get("finish_reason")
    if finish not in _FINISHED:
        raise Unreadable(f"the server gave the reply up ({finish})")
    notes = _logprobs_of(choice, len(ids)) if logprobs else ()
    return Emission(_ids(read), tuple(ids), notes, finish == "stop")


def _ids(values: object) -> tuple[int, ...]:
    """The ids in a list, and nothing else of it."""
    ids = values if isinstance(values, list) else []
    return tuple(one for one in ids if type(one) is int and 0 <= one <= _MOST_ID)


def _logprobs_of(choice: Mapping[str, Any], count: int) -> tuple[float, ...]:
    holder = choice.get("logprobs")
    notes = holder.get("token_logprobs") if isinstance(holder, dict) else None
    if not isinstance(notes, list) or len(notes) != count:
        raise Unreadable("no log-prob for every token")
    # An integer beyond every float is compared here, and converted nowhere.
    if not all(type(one) in (int, float) and abs(one) <= sys.float_info.max for one in notes):
        raise Unreadable("a log-prob that is no number")
    if any(one > _ROUNDING for one in notes):
        raise Unreadable("a log-prob above zero: the server gives something else under that name")
    return tuple(map(float, notes))
