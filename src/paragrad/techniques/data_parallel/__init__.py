"""Replicas of the model that split the batch."""
