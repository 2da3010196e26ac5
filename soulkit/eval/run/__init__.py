"""Playing an evaluation: runner; actor (in process or on vLLM servers); resume (what is left to
play, controls); session (asking players); provenance (conditions.json); run_lock (lock, clock,
group writer).
"""
