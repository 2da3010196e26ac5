"""`soul doctor`: check this machine and every configured model before a long run."""
