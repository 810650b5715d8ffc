"""When does compressing pay, by what it costs on this machine? `paragrad simulate` of a
strategy that compresses.
"""

from __future__ import annotations

from math import prod

from paragrad.errors import Refused
from paragrad.executors.machine import Machine
from paragrad.parallel.compression.cost import cost_of
from paragrad.planner.compression_cost import ELEMENT, Compressing, compressing, shape_of
from paragrad.strategies.compressors import Compressor, compressor_of
from paragrad.strategies.registry import resolve
from paragrad.strategies.strategy import Here, Strategy, factors_of

MOST = 1 << 22  # elements that are compressed to see what it costs


def pays(
    chosen: Strategy,
    compressor: Compressor,
    size: int,
    machine: Machine,
    link: str | None = None,
    costs: tuple[float, float] | None = None,
) -> Compressing:
    """The exchange of a strategy with its compressor. costs: `measured` before. Raises
    Refused.
    """
    if len(factors := factors_of(chosen)) > 1:
        raise Refused(
            f"{chosen}: what compresses is priced by itself; simulate "
            f"{next(each for each in factors if compressor_of(each))}"
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
    resolved = resolve(chosen, Here())
    return compressing(
        resolved,
        compressor,
        int(resolved.workers),
        size,
        machine,
        costs or measured(compressor, size),
        link,
    )


def measured(compressor: Compressor, size: int) -> tuple[float, float]:
    """What compressing a byte costs in seconds, and extracting: tried on a vector of that size,
    or of 16 MiB where it is longer.
    """
    shape = shape_of(compressor, ELEMENT * max(1, min(MOST, size // ELEMENT)))
    compress, extract = (each / (ELEMENT * prod(shape)) for each in cost_of(compressor, shape))
    return compress, extract
