"""soulkit: evaluate, train and understand human simulators."""

__version__ = "0.1.0"
