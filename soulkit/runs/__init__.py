"""Run folders: folder and seals; records and record_lines (episodes.jsonl); jsonl (files that
survive a kill); schemas; provenance (of summary.json); coroutines.
"""
