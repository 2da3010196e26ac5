"""A process that writes ledger entries as fast as it can, so that a test can kill it.

    python -m tests.support.ledger_writer FILE FIRST COUNT

It prints the number of each entry when it is stored. Prompts grow like those of a dialogue.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from soulkit.models.ledger.ledger import Ledger, LedgerEntry, request_key, request_of
from soulkit.models.ledger.storage import Request
from soulkit.types import Call, Sampling


def entry_of(number: int) -> tuple[str, LedgerEntry, Request]:
    """Entry `number` of a dialogue of ten turns: the same in every process."""
    call = Call(role="judge", example_id=f"e{number // 10}", turn=number % 10)
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i} of {number // 10} " * 9}
             for i in range(1 + number % 10)]  # fmt: skip
    request = request_of("http://localhost/v1", turns, Sampling(seed=1, stop=("\n",)))
    message = {"choices": [{"message": {"content": f"reply {number} " * 20}}]}
    entry = LedgerEntry(
        model="m", call=call, reply=json.dumps(message), prompt_tokens=3, completion_tokens=4,
        cost=None, seconds=0.5, attempts=1, created="2025-01-01T00:00:00.000+00:00",
    )  # fmt: skip
    return request_key(request, "m", call), entry, request


def write(path: Path, first: int, count: int) -> None:
    with Ledger(path) as ledger:
        for number in range(first, first + count):
            key, entry, request = entry_of(number)
            ledger.store(key, entry, request)
            print(number, flush=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
