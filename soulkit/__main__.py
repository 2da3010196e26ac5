"""`python -m soulkit` is `soul`."""

from soulkit.cli.app import main

if __name__ == "__main__":
    main()
