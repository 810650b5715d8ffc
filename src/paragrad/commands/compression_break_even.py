"""When does compressing pay, by what it costs on this machine? `paragrad simulate` of a
strategy that compresses.
"""

from __future__ import annotations

from math import prod

from paragrad.errors import Refused
from paragrad.executors.machine import Machine
from paragrad.parallel.compression.cost import measure_codec_cost
from paragrad.planner.compression_cost import (
    ELEMENT_BYTES,
    CompressionCost,
    choose_vector_shape,
    predict_compression_cost,
)
from paragrad.strategies.compressors import Compressor, find_compressor
from paragrad.strategies.registry import resolve_strategy
from paragrad.strategies.strategy import Environment, Strategy, list_factors

MAX_ELEMENTS = 1 << 22  # elements that are compressed to see what it costs


def price_compression(
    chosen: Strategy,
    compressor: Compressor,
    size: int,
    machine: Machine,
    link: str | None = None,
    costs: tuple[float, float] | None = None,
) -> CompressionCost:
    """The exchange of a strategy with its compressor. costs: `measured` before. Raises
    Refused.
    """
    if len(factors := list_factors(chosen)) > 1:
        raise Refused(
            f"{chosen}: what compresses is priced by itself; simulate "
            f"{next(each for each in factors if find_compressor(each))}"
        )
    if chosen.servers:
        raise Refused(
            f"{chosen} has no exchange of all workers to be priced; simulate data(4, "
            f"compress={compressor})"
        )
    if chosen.workers == "auto":
        raise Refused(
            f"{chosen}: say how many workers exchange, for example data(4, compress={compressor})"
        )
    resolved = resolve_strategy(chosen, Environment())
    return predict_compression_cost(
        resolved,
        compressor,
        int(resolved.workers),
        size,
        machine,
        costs or measure_compression_cost(compressor, size),
        link,
    )


def measure_compression_cost(compressor: Compressor, size: int) -> tuple[float, float]:
    """What compressing a byte costs in seconds, and extracting: tried on a vector of that size,
    or of 16 MiB where it is longer.
    """
    shape = choose_vector_shape(
        compressor, ELEMENT_BYTES * max(1, min(MAX_ELEMENTS, size // ELEMENT_BYTES))
    )
    compress, extract = (
        each / (ELEMENT_BYTES * prod(shape)) for each in measure_codec_cost(compressor, shape)
    )
    return compress, extract
