"""Evaluation: what is played and scored, and what is made of a finished run.

config, planning: the settings and what they will ask for; run: playing, resuming and recording;
results: summary.json and scoring again; comparison: conditions of runs, differences, gates;
judges: how far judges can be trusted, and what people say.
"""
