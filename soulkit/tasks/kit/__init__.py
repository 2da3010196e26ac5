"""What every task has in common.

Own tasks:   base · choice · dialogue · coaching · prompting (templates, budgets, texts) · rewards
Declaration: spec (schema) · registry (tasks, suites) · user_code (own code, its errors)
Rows:        loading · importing · made_rows · row_checks · selfcheck · scoring (batch metrics)
"""
