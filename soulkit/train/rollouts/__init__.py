"""Rollouts of a step: `play.py` plays them, `feedback.py` counts used and missing feedback.

canaries.py watches the judge · ability.py measures general ability before and after · engine.py
selects the sampler · push.py sends the adapter to vLLM · rollout_check.py compares log-probs.
"""
