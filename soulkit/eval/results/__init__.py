"""What a run comes to: cells and batch_statistics make summary.json (summary, warnings, calls);
suites: means over tasks; rescore: new scorers without a call; rejudge: new judges or prompts.
"""
