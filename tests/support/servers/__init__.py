"""Scripted servers that tests talk to over real sockets."""
