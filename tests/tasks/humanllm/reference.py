"""What the published code does to a prompt and no command does: what vectors alone check."""

from __future__ import annotations

from soulkit.tasks.humanllm.task import _ENTRY, split_history


def reformat_history(text: str) -> str:
    """The text with its history entries on lines of their own, numbered from 1."""
    if not _ENTRY.search(text):
        return text
    intro, entries = split_history(text)
    numbered = [f"History {i}: {entry}" for i, entry in enumerate(entries, 1)]
    return "\n".join([intro, *numbered] if intro else numbered)
