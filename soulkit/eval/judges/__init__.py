"""Judges and raters: questions asks judges about recorded episodes, check measures reliability,
rating makes sheets for people, and correction uses their labels.
"""
