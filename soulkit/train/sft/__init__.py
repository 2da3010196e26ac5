"""Supervised training: `run.py` and `steps.py`, on gold episodes or conversations.

encode.py makes sequences of lessons · mixsd.py has the model write them · planning.py estimates ·
probe.py and samples.py measure on the way.
"""
