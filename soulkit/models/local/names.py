"""What a model or an adapter is called: a folder here, or `owner/name@revision` of the hub.

A revision is a branch, a tag or a commit; without one it is the hub's newest. A name that reads
like a mistyped folder is never looked up: the hub's client asks several times before it gives up,
and a stranger may own a model of that name. With a revision, the hub is always meant; where
a folder has the name as well, it is refused.
"""

from __future__ import annotations

import difflib
import re
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from soulkit.errors import ModelLoadError
from soulkit.keys import printable, remember, shown_address
from soulkit.models.local.weights import ADAPTER_FILE

ADAPTER_CONFIG = "adapter_config.json"
NOTE = "soulkit.json"
"""Beside saved weights: what they were trained on, how, and from which base."""

_HUB_NAME = re.compile(r"(?P<id>\w[\w.-]*(?:/[\w.-]+)?)(?:@(?P<revision>\w[\w./+-]*))?")


class ModelPlace(NamedTuple):
    """Where a model or an adapter lies; `where` alone is what the hub's libraries call it."""

    where: str
    """A folder, or the hub's id without a revision."""
    revision: str | None = None
    """What was asked for of a hub's; None for its newest and for every folder."""

    def __str__(self) -> str:
        return f"{self.where}@{self.revision}" if self.revision else self.where

    @property
    def on_hub(self) -> bool:
        return not Path(self.where).is_dir()


def model_place(name: str | Path, what: str = "model") -> ModelPlace:
    """The folder that is there, or the hub's; `what` is looked for.

    ModelLoadError, with the nearest folder, for a file and for what reads like a folder that is
    not there: a Path, no owner/name, a name in a folder that exists, a slip of a model beside it;
    and for a revision of a folder.
    """
    place = Path(name).expanduser()
    if place.is_dir():
        return ModelPlace(str(place))
    if place.exists():
        raise ModelLoadError(
            f"'{name}' is a file, not {_article(what)}.",
            "A model is a folder with its configuration, weights and tokenizer.",
            f"Name the folder that holds it, perhaps '{place.parent}'.",
        )
    match = None if isinstance(name, Path) else _HUB_NAME.fullmatch(name)
    if match is None or (match["revision"] is None and _reads_like_a_folder(place)):
        raise _no_folder(name, place, what, on_hub=match is not None)
    if Path(match["id"]).is_dir():  # the hub's libraries would take it and pass the revision over
        raise ModelLoadError(
            f"'{name}' names {_article(what)} of the hub, and there is a folder '{match['id']}'.",
            "The folder has no revisions, and the hub's libraries would load it instead.",
            f"Name the folder as '{match['id']}', or start where there is no such folder.",
        )
    return ModelPlace(match["id"], match["revision"])


def _article(what: str) -> str:
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def _reads_like_a_folder(place: Path) -> bool:
    """Whether its parent is there, or a model's folder has nearly this name."""
    if place.parent != Path() and place.parent.is_dir():
        return True
    near = _near(place)
    return bool(near) and any((Path(near) / n).is_file() for n in ("config.json", ADAPTER_CONFIG))


def _no_folder(name: str | Path, place: Path, what: str, *, on_hub: bool) -> ModelLoadError:
    near = _near(place)
    hint = f"Did you mean '{near}'?" if near else "Check the path."
    why = (
        "It reads like a folder beside others here, and the hub was not asked."
        if on_hub
        else "It does not read like a model of the hub either."
    )
    hub = f"{name}@main" if on_hub else "owner/name or owner/name@revision"
    return ModelLoadError(
        f"There is no folder '{name}'.", why, f"{hint} {_article(what).capitalize()} of the hub "
        f"is named as {hub}."
    )  # fmt: skip


def _near(place: Path) -> str:
    """The folder that was probably meant; empty when none is near."""
    there = next((one for one in chain(place.parents, [Path()]) if one.is_dir()), Path())
    part, *rest = place.relative_to(there).parts
    with suppress(OSError):
        names = [path.name for path in there.iterdir() if path.is_dir()]
        for name in difflib.get_close_matches(part, names, n=1, cutoff=0.5):
            whole = there.joinpath(name, *rest)
            return str(whole if whole.is_dir() else there / name)
    return ""


# --- adapters -------------------------------------------------------------------------------------


def adapter_folder(name: str | Path) -> Path:
    """The folder of an adapter; one of the hub is downloaded to the cache of its client first.

    ModelLoadError for a folder that is not there, and for what the hub does not have or give.
    """
    place = model_place(name, "adapter")
    return _fetched(place) if place.on_hub else Path(place.where)


def commit_of(folder: Path) -> str:
    """The commit that a folder in the cache of the hub's client is of; empty for any other."""
    in_cache = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models-")
    return folder.name if in_cache else ""


@cache  # one commit for the whole of a process, whatever is pushed meanwhile
def _fetched(place: ModelPlace) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        config = Path(hf_hub_download(place.where, ADAPTER_CONFIG, revision=place.revision))
        commit = config.parent.name
        hf_hub_download(place.where, ADAPTER_FILE, revision=commit)
        with suppress(EntryNotFoundError):
            hf_hub_download(place.where, NOTE, revision=commit)
    except (OSError, ValueError) as error:  # errors of the hub's client are OSErrors
        lacks = isinstance(error, EntryNotFoundError)
        if lacks and not isinstance(error, LocalEntryNotFoundError):
            raise ModelLoadError(
                f"The hub's '{place}' is no adapter that can be read.",
                f"It lacks {ADAPTER_CONFIG} or {ADAPTER_FILE}.",
                "Name a repository that PEFT saved there, or an adapter's folder on this machine.",
            ) from error
        raise hub_unreachable(f"adapter '{place}'", error) or ModelLoadError(
            f"The adapter '{place}' cannot be had from the hub.",
            f"Its client says: {first_line(error)}",
            "Check the name, the revision and HF_TOKEN, or name a folder on this machine.",
        ) from error
    return config.parent


def hub_unreachable(what: str, error: BaseException) -> ModelLoadError | None:
    """The error of `what` ("model 'owner/name'") where the hub could not be asked for it, else
    None."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    causes: list[BaseException] = [error]
    while deeper := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(deeper)
    unreached = (LocalEntryNotFoundError, OfflineModeIsEnabled)
    answered = any(isinstance(one, HfHubHTTPError) for one in causes)
    if answered or not any(isinstance(one, unreached) for one in causes):
        return None
    offline = "HF_HUB_OFFLINE forbids requests. Unset it" if constants.HF_HUB_OFFLINE else ""
    return ModelLoadError(
        f"The {what} is not on this machine, and the hub cannot be reached at "
        f"{shown_address(constants.ENDPOINT)}.",
        "Its name may be right: the hub was not asked, or did not answer.",
        f"{offline or 'Check the network (HF_ENDPOINT names a mirror)'}, or name a folder on this "
        "machine.",
    )


def first_line(error: BaseException, *, hub: bool = True) -> str:
    """What a library says, in short and without keys, that of the `hub` among them."""
    if hub:
        from huggingface_hub import get_token

        remember(get_token() or "")
    return (printable(str(error)).strip().splitlines() or [type(error).__name__])[0]
