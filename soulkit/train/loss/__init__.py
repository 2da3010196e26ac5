"""Pure functions on tensors: advantages (`advantage.py`), losses and divergences (`losses.py`)."""
