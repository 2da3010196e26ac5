"""The ledger: ledger.py records and replays calls, storage.py reads and writes the file, view.py
shows it."""
