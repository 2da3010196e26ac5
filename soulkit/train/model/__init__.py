"""The model in training: `policy.py` scores packs of sequences, `update.py` updates the weights.

packing.py lays out sequences · attention.py computes attention on packs and checks it on the model
· fused.py fuses kernels · prepare.py computes the old log-probs · teacher.py holds teachers.
"""
