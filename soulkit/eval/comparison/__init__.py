"""Two runs side by side: conditions and comparability say whether they may be compared; contrasts
and compare put intervals on differences; gates test them.
"""
