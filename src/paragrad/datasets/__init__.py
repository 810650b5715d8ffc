"""Datasets, batches and the order of samples."""
