"""The players of a run.

settings.py one player as it is written, its kind, and the endpoints file; config.py who plays which
role; players.py the live players and their cast.
"""
