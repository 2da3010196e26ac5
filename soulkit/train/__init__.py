"""Training: `run.py` runs it, `step.py` is one step on a page, `config.py` its settings.

setup/ rows, players and checks before a run · rollouts/ what a step plays, also on vLLM ·
objectives/ methods · loss/ pure functions · model/ forward passes and updates · sft/ supervised
training · state/ loop, checkpoints, metrics, summary. `ablate.py` compares methods.
"""
