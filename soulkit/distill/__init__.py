"""Several experts, each trained on its task, become one model.

    find_experts ──▶ sample ──▶ select ──▶ train one generalist ──▶ measure it beside them

Nothing here plays, scores or trains in a way of its own: a sample is an evaluation run of an
expert on its training rows, and the generalist is an ordinary training run.
"""
