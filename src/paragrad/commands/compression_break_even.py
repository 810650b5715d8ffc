"""When does compressing pay on this machine? `paragrad simulate` of a strategy that compresses."""

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

MAX_ELEMENTS = 1 << 22  # elements at most that are compressed to measure the cost


def price_compression(
    chosen: Strategy,
    compressor: Compressor,
    size: int,
    machine: Machine,
    link: str | None = None,
    costs: tuple[float, float] | None = None,
) -> CompressionCost:
    """Predict the exchange of a strategy with its compressor, and without.

    Args:
        chosen: the strategy.

        compressor: its compressor.

        size: bytes of the vector.

        machine: the measured machine.

        link: name of the link in the machine file; None for the first.

        costs: result of an earlier `measure_compression_cost`; None: measure now.

    Raises:
        Refused: the strategy has no exchange that can be priced.
    """
    if len(factors := list_factors(chosen)) > 1:
        raise Refused(
            f"{chosen}: a strategy that compresses is priced alone; simulate "
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
    """Measure the seconds per byte of compressing and of extracting.

    It is tried on a vector of the given size, or of 16 MiB if the size is larger.

    Args:
        compressor: the compressor.
        size: bytes of the vector.

    Returns:
        (seconds per byte of compressing, seconds per byte of extracting).
    """
    shape = choose_vector_shape(
        compressor, ELEMENT_BYTES * max(1, min(MAX_ELEMENTS, size // ELEMENT_BYTES))
    )
    compress, extract = (
        each / (ELEMENT_BYTES * prod(shape)) for each in measure_codec_cost(compressor, shape)
    )
    return compress, extract
