"""The licence that a base model states: what is made of it inherits that."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

FIELDS = ("license", "license_name", "license_link")
"""Of a model card's front matter, as the hub calls them."""
UNSTATED = {"license": "other", "license_name": "as-the-base-model"}


def base_licence(model: str, revision: str | None = None) -> dict[str, str]:
    """The licence fields of the card of a folder or a hub's model; UNSTATED where none says it."""
    front = _front_matter(_card(model, revision))
    stated = {name: front[name] for name in FIELDS if isinstance(front.get(name), str)}
    return stated if "license" in stated else dict(UNSTATED)


def _card(model: str, revision: str | None) -> Path | None:
    folder = Path(model)
    if folder.is_dir() or not model:
        return folder / "README.md"
    from huggingface_hub import hf_hub_download

    with suppress(OSError, ValueError):  # those of the hub's client, too: there is no card to read
        return Path(hf_hub_download(model, "README.md", revision=revision))
    return None


def _front_matter(card: Path | None) -> dict[str, Any]:
    import yaml

    try:
        text = card.read_text(encoding="utf-8")[:100_000] if card is not None else ""
        loaded = yaml.safe_load(text.split("---", 2)[1]) if text.startswith("---") else {}
    except (OSError, ValueError, IndexError, RecursionError, yaml.YAMLError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
