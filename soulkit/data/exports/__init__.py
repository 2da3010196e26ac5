"""Reads conversations as other programs export them.

`layouts` opens files and recognises their layout; the other modules have one section per layout.
Every reader yields rows that `corpora.lessons.conversation_of` reads.
"""
