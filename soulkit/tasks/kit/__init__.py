"""The shared code of all tasks.

Base classes: base · choice · dialogue · coaching · prompting (templates, budgets, texts) · rewards
Declaration:  spec (schema) · registry (tasks, suites) · user_code (custom code and its errors)
Rows:         loading · importing · made_rows · row_checks · selfcheck · scoring (batch metrics)
"""
