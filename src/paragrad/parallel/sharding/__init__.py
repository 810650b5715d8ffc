"""Tensors divided over ranks: partitions, collectives with gradients, the sharded tensor."""
