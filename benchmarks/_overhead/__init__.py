"""The parts of benchmarks/eval_overhead.py: its server, its contenders, and one run of one."""
