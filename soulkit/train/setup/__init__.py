"""Before a run: `data.py` loads rows, players and objective, and finds what is missing.

rows.py draws the rows of a step and reads conversations · feedback_check.py checks that a method
that learns from feedback can get any.
"""
