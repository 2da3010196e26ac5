"""Evaluation: play and score tasks, and analyse finished runs.

config, planning: settings and cost estimates; run: playing, resuming and recording; results:
summary.json and scoring again; comparison: conditions of runs, differences, gates; judges:
reliability of judges, and ratings by people.
"""
