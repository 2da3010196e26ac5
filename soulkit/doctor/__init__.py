"""`soul doctor`: what is here, and whether everybody answers, before hours are spent."""
