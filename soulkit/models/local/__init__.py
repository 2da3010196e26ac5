"""Checkpoints in this process.

loading.py and weights.py load from disk and Hub; chat_template.py contexts to ids; sampler.py
replies, with decode.py, batching.py, float32_head.py and journal.py; machine.py devices and memory;
tiny.py small models for tests and demos.
"""
