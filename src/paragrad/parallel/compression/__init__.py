"""Gradient compression: compensate, compress, exchange, extract."""
