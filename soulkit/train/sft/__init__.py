"""Supervised training: `run.py` and `steps.py`, on gold episodes or conversations.

encode.py makes sequences of lessons · mixsd.py has the model write them · measures.py measures on
the way: dev scores, probes, samples.
"""
