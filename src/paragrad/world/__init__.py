"""Ranks and how they reach each other: who started them, starting them here, the World,
backends of torch.distributed.
"""
