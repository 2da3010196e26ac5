"""Rollouts of a step: `play.py` plays them, `feedback.py` follows what becomes of feedback.

canaries.py watches the judge · ability.py measures general ability before and after · engine.py
decides who samples · push.py sends the adapter to vLLM · rollout_check.py compares log-probs.
"""
