"""Strategies as text: the grammar, and choices as frozen values that print as calls."""
