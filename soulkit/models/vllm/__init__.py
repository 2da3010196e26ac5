"""vLLM as an engine: servers that are started here, or that somebody else runs."""
