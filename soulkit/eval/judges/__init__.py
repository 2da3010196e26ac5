"""Judges and people: questions asks judges about recorded episodes; check measures reliability;
rating makes sheets for people; correction uses their labels.
"""
