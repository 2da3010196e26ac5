"""Training: `run.py` is the whole run, `step.py` one step on a page, `config.py` the settings,
`memory.py` the memory of a pass.

setup/ rows, players and checks before a run · rollouts/ the episodes of a step, also on vLLM ·
objectives/ methods · loss/ pure functions · model/ forward passes and updates · sft/ supervised
training · state/ loop, checkpoints, metrics, summary. `ablate.py` compares methods.
"""
