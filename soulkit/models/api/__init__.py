"""Models behind an HTTP API.

endpoint.py asks; protocol.py is one kind of server, wire.py what is sent and refused, replies.py
what comes back; limits.py and transport.py how fast and over which connections; addresses.py where
and with which key; probing.py and server_defaults.py what a server is; prices.py; batch_*.py
and batches.py half the price within a day; detector.py a service that scores texts.
"""
