"""Checkpoints in this process.

loading.py and weights.py load from disk and Hub; chat_template.py contexts to ids; sampler.py
replies, with decode.py, draw.py, batching.py, float32_head.py and journal.py; footprint.py memory
and time; threads.py the number of threads; tiny.py small models for tests and demos.
"""
