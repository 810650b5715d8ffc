"""A compressor of your own: what is sent in the place of a gradient.

paragrad train examples/own_compressor.py --strategy "data(2, compress=random_k(0.5))"
paragrad compare examples/own_compressor.py --strategies "data(2, reduce=ring); data(2,
compress=random_k(0.5))"
"""

import math

import torch

import paragrad as pg


class RandomK(pg.Compressor):
    """Entries drawn by chance, in each step others, on all ranks the same: they add up, and
    nobody is told where they are.
    """

    ratio: float = pg.option(pg.Decimal(most=1.0))
    sums = True  # travels along any all-reduce

    # bytes that stand for a tensor, of `item` bytes a number
    def sends(self, shape, item):
        return self.count(shape) * item

    def codec(self, shape, key):  # key: of the tensor, the same on all ranks
        return Drawn(shape, self.count(shape), key)

    def count(self, shape):
        return math.ceil(self.ratio * math.prod(shape))


class Drawn(pg.Codec):
    """Of one tensor, whose vectors are flat. memory: how many steps it has made, in
    checkpoints.
    """

    def __init__(self, shape, count, key):
        super().__init__(shape)
        self.count = count
        self.key = key

    def compress(self, vector, agreement=None, seed=0):
        drawn = torch.Generator().manual_seed(
            self.key + int(0 if self.memory is None else self.memory)
        )
        self.where = torch.randperm(self.elements, generator=drawn)[: self.count].to(vector.device)
        return (vector[self.where],)

    # what was not sent waits: it is taken out of what it was made of
    def extract(self, payload, agreement=None):
        return torch.zeros(
            self.elements, dtype=payload[0].dtype, device=payload[0].device
        ).index_copy_(0, self.where, payload[0])

    def adopt_sum(self, payload):
        self.memory = torch.tensor(1) if self.memory is None else self.memory + 1


job = pg.job("digits", width=256).replace(epochs=4)
