"""Reads conversations as other programs export them.

`layouts` is the contract, `reading` opens exports and recognises their layout, and `records` reads
the records of a file. The other modules have a table LAYOUTS each. Every reader yields rows that
`corpora.lessons.conversation_of` reads.
"""
