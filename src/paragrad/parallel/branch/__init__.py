"""Branch parallelism: independent sub-networks on different ranks."""
