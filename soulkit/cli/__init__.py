"""The `soul` command: parses, calls, prints. No logic lives here."""
