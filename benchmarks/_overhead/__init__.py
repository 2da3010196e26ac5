"""Parts of benchmarks/eval_overhead.py: server, contenders, and one measured run."""
