"""Techniques that cut the model."""
