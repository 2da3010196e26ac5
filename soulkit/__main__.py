"""`python -m soulkit` is `soul`."""

import sys

from soulkit.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
