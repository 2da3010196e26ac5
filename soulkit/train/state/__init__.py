"""State of a run: `loop.py` takes steps and resumes, `checkpoint.py` saves and loads checkpoints.

metrics.py and step_metrics.py: lines of metrics.jsonl · summary.py · model_card.py · stops.py:
early stops, more steps · fingerprint.py: refuses a resume with other rows or models · tracking.py:
external trackers.
"""
