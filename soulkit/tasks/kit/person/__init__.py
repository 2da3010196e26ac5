"""A person that a model plays.

brief.py    persona and scenario of one conversation: files, prompt, roles, end
faults.py   faults of the simulation that need no judge
"""
