"""Trained weights on vLLM servers: `engine.py` decides who samples, `push.py` sends the adapter.

rollout_check.py compares log-probs of every reply with the trainer's.
"""
