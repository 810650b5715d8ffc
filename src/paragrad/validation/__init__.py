"""Validation: what is checked before any rank starts."""
