"""Layers split in width: neurons, channels, heads and vocabulary over ranks, whatever the
model's own code does with them.
"""
