"""vLLM as an engine.

settings.py engine choice; command.py, server.py and supervisor.py start one server; manager.py all
servers of a run; client.py calls one, replicas.py several as one; model.py the model; adapters.py
loads LoRA; capabilities.py checks servers that soulkit did not start.
"""
