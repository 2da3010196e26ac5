"""Pure tensor functions: advantages (`advantage.py`), losses and divergences (`losses.py`)."""
