"""Run an evaluation: runner, actor (in process or on vLLM servers), resume (episodes and controls
left to play), session (asking players), provenance (conditions.json), run_lock (lock, clock, record
writer).
"""
