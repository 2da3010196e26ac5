"""The model in training: `policy.py` scores packs of sequences, `update.py` moves the weights.

packing.py lays sequences out · attention.py attends over them, and checks that on the model ·
fused.py saves kernels · prepare.py fixes old log-probs · teacher.py holds teachers.
"""
