"""Playing rows: engine (draft, score, critique, refined, controls); plan and costs (what a command
will ask for); settings; default_players; requirements (what is missing before a run).
"""
