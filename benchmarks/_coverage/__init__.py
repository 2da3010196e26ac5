"""Parts of `coverage.py`: what is drawn, what others make of it, and what is asked of a result."""
