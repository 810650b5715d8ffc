"""Data: the exact order of samples."""
