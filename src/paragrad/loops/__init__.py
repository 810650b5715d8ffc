"""Loops that drive a trainer: synchronous epochs, rounds of clients, the work queue, recovery."""
