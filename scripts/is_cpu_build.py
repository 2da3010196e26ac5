"""Exit 0 if the torch build in a `pip install --dry-run --report FILE` needs no CUDA."""

from __future__ import annotations

import json
import platform
import re
import sys
from pathlib import Path


def is_cpu_build(report: dict[str, object], system: str) -> bool:
    """Whether the install plan `report` has a torch build without CUDA libraries for `system`."""
    chosen = report.get("install")
    if not isinstance(chosen, list):
        return False
    builds = [item["metadata"] for item in chosen if item["metadata"]["name"] == "torch"]
    if not builds:
        return False
    if system != "Linux" or builds[0]["version"].endswith("+cpu"):
        return True
    needs = builds[0].get("requires_dist", [])
    return "+" not in builds[0]["version"] and not any(
        re.match(r"(nvidia|cuda|triton)\b", need) for need in needs
    )


if __name__ == "__main__":
    sys.exit(not is_cpu_build(json.loads(Path(sys.argv[1]).read_text()), platform.system()))
