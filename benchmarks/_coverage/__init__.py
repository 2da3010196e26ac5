"""Parts of `coverage.py`: simulated data, and the intervals of other tools."""
