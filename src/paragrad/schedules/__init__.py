"""Schedules as values: which messages each rank sends and receives, and in which order.

This package uses the standard library only. It knows no torch, no clock and no file.
"""
