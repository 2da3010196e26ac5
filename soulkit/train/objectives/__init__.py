"""Training methods, one a file; `base.py` says what a method is and finds them by name.

sequences.py turns episodes into trained token sequences.
"""
