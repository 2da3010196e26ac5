"""A client that pays for N calls one after the other, so that a test can kill it midway."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from soulkit.models.api.endpoint import Endpoint
from soulkit.models.ledger.ledger import Ledger
from soulkit.types import Call, Sampling, Segment


async def pay(base_url: str, path: Path, count: int) -> None:
    with Ledger(path) as ledger:
        model = Endpoint(model="m", base_url=base_url, ledger=ledger)
        for i in range(count):
            call = Call(role="judge", example_id=f"e{i}")
            got = await model.complete((Segment("user", f"call {i}"),), Sampling(), call)
            print(got.text, flush=True)
        await model.close()


if __name__ == "__main__":
    asyncio.run(pay(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
