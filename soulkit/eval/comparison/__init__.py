"""Comparison of two runs: comparability checks their conditions, contrasts and compare compute
differences with intervals, and gates test the differences.
"""
