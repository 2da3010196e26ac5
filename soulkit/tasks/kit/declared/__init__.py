"""Tasks that are declared in YAML alone, without Python code.

`keys`: the keys of such a task, and how they become an ordinary declaration (`TaskSpec`).
`task`: what all kinds share: prompts, seats, feedback. `single`: the kinds `choice` and `text`.
"""
