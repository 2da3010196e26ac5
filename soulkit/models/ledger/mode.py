"""What a ledger does: a setting of commands, which need no data base to be described."""

from __future__ import annotations

from typing import Literal

Mode = Literal["record", "replay", "off"]
