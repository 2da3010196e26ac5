"""Conversations to learn from.

settings: where a source is and which side is learned; file_rows, hub_rows: its rows;
lessons: a row as a lesson; source, stream: lessons in order, and a mixture without end;
duplicates: what a source holds twice, and what it gives away of evaluation rows.
"""
