"""The version of soulkit."""

__version__ = "0.1.0"
