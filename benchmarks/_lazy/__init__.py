"""Judges without a model for `lazy_actors.py`."""
