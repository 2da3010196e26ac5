"""Models and players.

base.py interfaces; codec.py text to ids and back; stand_ins.py scripted and other stand-ins; api/
HTTP endpoints; local/ checkpoints in this process; vllm/ vLLM servers; players/ who fills which
role; ledger/ recorded API calls.
"""
