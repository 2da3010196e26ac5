"""What a run comes to: cells and batch_statistics make summary.json (summary, warnings); rescore:
new scorers without a call; rejudge: new judges or prompts.
"""
