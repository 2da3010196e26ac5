"""Run folders: folder (and its seal), records and record_lines (episodes.jsonl), jsonl (crash-safe
files and their schemas), conditions (conditions.json and provenance), coroutines.
"""
