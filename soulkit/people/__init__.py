"""From recorded conversations of people to a simulator of them, and how good it is.

`turns` reads what each person wrote, with what they had read before it.
"""
