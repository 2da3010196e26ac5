"""`soul people`: measure models that are trained on people's own conversations."""

from __future__ import annotations

from soulkit.cli.parse_errors import CommandTable

app = CommandTable(add_completion=False, rich_markup_mode=None)
