"""The players of a run: who fills which role, how each is written, made and asked.

settings.py   one player as it is written, and the endpoints file
config.py     who plays which role: settings of every command that plays
players.py    the live players of a run and its cast
"""
