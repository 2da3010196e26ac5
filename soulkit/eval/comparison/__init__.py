"""Two runs side by side: comparability says whether they may be compared; contrasts and compare put
intervals on differences; gates test them.
"""
