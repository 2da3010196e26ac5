"""Conversations as training data.

settings: path and learned side of a source; file_rows, hub_rows: reading its rows;
lessons: one row as a lesson; source, stream: lessons in order, and endless mixtures;
duplicates: repeated conversations, and those that leak evaluation rows.
"""
