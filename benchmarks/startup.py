"""How long do `soul --help` and `import soulkit` take? Prints the median of ten new processes.

    .venv/bin/python benchmarks/startup.py

Budgets: 250 ms for the help, 100 ms for the import, both including the start of the interpreter.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 10
QUESTIONS = {
    "python -c pass": (["-c", "pass"], None),
    "import soulkit": (["-c", "import soulkit"], 0.100),
    "import soulkit.config": (["-c", "import soulkit.config"], None),
    "soul --help": (["-m", "soulkit.cli.app", "--help"], 0.250),
}


def seconds(arguments: list[str]) -> float:
    """Median wall-clock seconds of RUNS processes, after one to warm the disk cache."""
    taken = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def main() -> int:
    late = 0
    for name, (arguments, budget) in QUESTIONS.items():
        median = seconds(arguments)
        late += budget is not None and median > budget
        limit = "" if budget is None else f"   budget {1000 * budget:.0f} ms"
        print(f"{name:24}{1000 * median:7.0f} ms{limit}")
    return int(late > 0)


if __name__ == "__main__":
    sys.exit(main())
