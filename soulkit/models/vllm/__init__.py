"""vLLM as an engine.

settings.py which engine; command.py, server.py and supervisor.py start one server, manager.py those
of a run; client.py asks one, replicas.py several as one; model.py is the model; adapters.py loads
LoRA; capabilities.py examines servers that somebody else runs.
"""
