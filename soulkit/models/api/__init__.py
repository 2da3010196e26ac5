"""Models behind an HTTP API.

endpoint.py calls; protocol.py one API dialect; wire.py requests and errors; replies.py responses;
limits.py and transport.py rate limits and connections; addresses.py addresses and keys; probing.py
and server_defaults.py what a server supports; prices.py; batch_*.py and batches.py the batch API
(half price, within a day); detector.py a service that scores texts.
"""
