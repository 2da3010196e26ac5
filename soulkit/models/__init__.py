"""Models: whatever completes a context.

base.py what a model is to the rest of soulkit; codec.py between words and ids; stand_ins.py models
that take the place of others. api/ endpoints; local/ checkpoints in this process; vllm/ servers of
one's own; players/ who fills which role; ledger/ what was paid for.
"""
