"""Settings of what is measured beside the training itself: what it costs elsewhere, what it brings.

They stand apart from the training's own, because no weight depends on any of them.
"""

from __future__ import annotations

from soulkit.config import Settings, setting


class BesideSettings(Settings):
    """What is measured of the weights while, before and after they are trained."""

    retention: bool = setting(
        False,
        help="Measure general ability (the suite `general`: forms of reply that rules can check) "
        "before the first step and after the last.",
    )  # fmt: skip
    retention_tokens: int | None = setting(
        None, gt=0, flag=None, unset="the tasks' own",
        help="Limit of a reply there; a model that thinks needs more than one that answers.",
    )  # fmt: skip
