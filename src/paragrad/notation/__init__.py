"""Strategies as text: the grammar, and choices as frozen values that print as the call that
makes them.
"""
