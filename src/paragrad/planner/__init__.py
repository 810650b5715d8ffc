"""Cost models: what exchanges, layers and whole steps cost, predicted before they run."""
