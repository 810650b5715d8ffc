"""A compressor of your own: what is sent in place of a gradient.

    paragrad train examples/own_compressor.py --strategy "data(2, compress=random_k(0.5))"
    paragrad compare examples/own_compressor.py --strategies "data(2, reduce=ring); data(2, compress=random_k(0.5))"

The second command compares it with an exchange that sends everything.
"""  # noqa: E501

import math

import torch

import paragrad as pg


class RandomK(pg.Compressor):
    """Sends random entries of each tensor: the same entries on all ranks, others in each step.

    The payloads of all ranks add up, and no message needs the positions of the entries.
    """

    ratio: float = pg.option(pg.Decimal(most=1.0))
    sums = True  # any all-reduce can add the payloads

    # number of bytes that are sent for a tensor; `item`: bytes of one element
    def sends(self, shape, item):
        return self.count_entries(shape) * item

    # `key`: a number of the tensor, the same on all ranks
    def codec(self, shape, key):
        return RandomKCodec(shape, self.count_entries(shape), key)

    def count_entries(self, shape):
        return math.ceil(self.ratio * math.prod(shape))


class RandomKCodec(pg.Codec):
    """Compresses one tensor, given as a flat vector.

    Attributes:
        memory: The number of steps so far; a checkpoint saves it.
    """

    def __init__(self, shape, entries, key):
        super().__init__(shape)
        self.entries = entries
        self.key = key

    def compress(self, vector, agreement=None, seed=0):
        steps = 0 if self.memory is None else int(self.memory)
        generator = torch.Generator().manual_seed(self.key + steps)
        order = torch.randperm(self.elements, generator=generator)
        self.positions = order[: self.entries].to(vector.device)
        return (vector[self.positions],)

    # the difference from the compressed vector is the feedback of the next step
    def extract(self, payload, agreement=None):
        zeros = torch.zeros(self.elements, dtype=payload[0].dtype, device=payload[0].device)
        return zeros.index_copy_(0, self.positions, payload[0])

    def adopt_sum(self, payload):
        self.memory = torch.tensor(1) if self.memory is None else self.memory + 1


job = pg.job("digits", width=256).replace(epochs=4)
