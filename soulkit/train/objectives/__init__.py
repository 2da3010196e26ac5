"""Training methods, one per file; `base.py` defines what a method is and finds it by name.

sequences.py turns episodes into trained token sequences.
"""
