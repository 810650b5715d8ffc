"""Layers in sequence on different ranks: place and pipeline."""
