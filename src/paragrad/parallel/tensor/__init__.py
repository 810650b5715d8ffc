"""Tensor parallelism: the rules by which operators act on sharded tensors."""
