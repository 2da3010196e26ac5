"""What a run keeps: `loop.py` takes steps and resumes, `checkpoint.py` writes where it stands.

metrics.py and step_metrics.py: lines of metrics.jsonl · summary.py · model_card.py · stops.py:
early ends, more steps · fingerprint.py: refuses other rows
or models · tracking.py: external trackers.
"""
