"""Spatial parallelism: images divided along rows and columns."""
