"""Distils several experts, each trained on one task, into one model.

    find_experts ──▶ sample ──▶ select ──▶ train one generalist ──▶ compare it with base and experts

Sampling is an evaluation run of each expert on its training rows, and the generalist is an ordinary
training run.
"""
