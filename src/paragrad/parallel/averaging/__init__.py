"""Replicas that average their weights: local SGD, elastic averaging, federated averaging."""
