"""The ledger: ledger.py records and replays, storage.py is its file, view.py looks at one."""
