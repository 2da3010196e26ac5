"""The players of a run.

kinds.py what tells one kind of player from another; settings.py one player as it is written, and
the endpoints file; config.py who plays which role; players.py the live players and their cast.
"""
