"""Parquet files in the layout of the released ones, and a Hub client for tests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from soulkit.data.download import Hub
from soulkit.data.hub import RELEASES, FileRequest
from tests.support.road import synth
from tests.support.servers.hub_server import HubServer

EVAL, TRAIN = RELEASES["eval"], RELEASES["train"]
AGAIN = "soul data pull --task hitom"


def parquet(task: str, n: int, seed: int) -> bytes:
    """A released file: a dummy prompt, the mark of the task, and the row inside a struct."""
    made = synth(task, n, seed)
    rows = [{k: v for k, v in row.items() if k != "events"} for row in made]
    table = pa.table(
        {
            "prompt": [[{"role": "user", "content": "x"}] for _ in rows],
            "data_source": [task for _ in rows],
            "extra_info": [{**row, "index": i} for i, row in enumerate(rows)],
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="none")
    return sink.getvalue()


HITOM, PARATOMI, HITOM_TRAIN = (
    parquet(task, n, seed)
    for task, n, seed in (("hitom", 40, 1), ("paratomi", 9, 1), ("hitom", 12, 2))
)
NOTES = b'{"note": "a small file that lies in git itself"}\n'
EVALS = {"hitom_val.parquet": HITOM, "paratomi_val.parquet": PARATOMI, "notes.jsonl": NOTES}


def want(*names: str, repo: str = EVAL) -> list[FileRequest]:
    return [FileRequest(repo, name, name, name.partition("_")[0]) for name in names]


HITOM_FILE = want("hitom_val.parquet")


def client(server: HubServer) -> Hub:
    return Hub(AGAIN, endpoint=server.url, wait_s=0.0)


def alone_with_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the user's Hub token, cache folder and mirror from the environment."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "SOULKIT_DATA"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1,localhost")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))


def names_in(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def lines(error: Any) -> str:
    return " | ".join(error.value.lines())
