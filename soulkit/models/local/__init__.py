"""Checkpoints in this process.

loading.py and weights.py from disk and hub; chat_template.py contexts to ids; sampler.py replies,
with decode.py, batching.py, float32_head.py and journal.py; machine.py what it takes here;
tiny.py small models for tests and demonstrations.
"""
