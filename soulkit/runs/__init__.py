"""Run folders: folder (with its seal); records and record_lines (episodes.jsonl); jsonl (files that
survive a kill, and their schemas); provenance (of summary.json); coroutines.
"""
