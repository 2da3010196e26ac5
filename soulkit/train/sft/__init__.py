"""Supervised training: `run.py` and `steps.py`, on gold episodes or conversations.

encode.py turns lessons into sequences · mixsd.py lets the model write them · measures.py measures
during training: dev scores, probes, samples.
"""
