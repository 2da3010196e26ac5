"""The players of a run.

settings.py one player, its kind, and the endpoints file; config.py which model fills which role;
players.py the live players and their cast.
"""
