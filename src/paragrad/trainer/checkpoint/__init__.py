"""Checkpoints: what is saved, the files, reading them back."""
