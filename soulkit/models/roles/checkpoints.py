"""Checkpoints that play in this process: one way in, for every command that loads some."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from soulkit.models.local.sampler import LocalModel


def checkpoint_player(
    model: str, *, adapter: str | None = None, device: str = "auto", dtype: str = "auto",
    batch_size: int = 64, max_context: int | None = None,
) -> LocalModel:  # fmt: skip
    """The model of a folder or of the hub, with an adapter if one is named.

    ModelLoadError when it cannot be loaded. It is imported here, since it needs torch.
    """
    from soulkit.models.local.sampler import LocalModel

    return LocalModel.load(
        model, adapter=adapter, device=device, dtype=dtype, batch_size=batch_size,
        max_context=max_context,
    )  # fmt: skip
