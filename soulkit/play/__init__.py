"""Playing rows: engine (draft, score, critique, refined, controls), plan (calls and costs),
settings, default_players, and requirements (checks before a run).
"""
