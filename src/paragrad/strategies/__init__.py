"""Strategies as values: how one serial training is divided over workers.

The registry maps their names; `shares` divides a batch.
"""
