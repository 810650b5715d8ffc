"""What `paragrad work` prints: a line for each pass of each layer, the sums, and what they mean."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from paragrad.planner.layer_costs import LayerCost, PassCost
from paragrad.planner.profile import JobProfile
from paragrad.report.printing import print_facts, print_rows

PASSES = ("output", "input_gradient", "weight_gradient")
PROFILE_COLUMNS = ("layer", "kind", "pass", "work W", "depth D", "W/D", "bytes")
MAX_LISTED_PROCESSORS = 64  # up to this number of processors, each power of two has a line


def print_profile(found: JobProfile, as_json: bool) -> None:
    """Print a profile: JSON, a table at a terminal, tab-separated lines in a pipe.

    Args:
        found: The profile.
        as_json: Whether to print JSON.
    """
    if as_json:
        print(json.dumps(_convert_profile_to_json(found), indent=1))
        return
    rows = [
        _format_layer_row(layer, name)
        for layer in found.layers
        for name in PASSES
        if name == "output" or getattr(layer, name).bytes or getattr(layer, name).work
    ]
    print_rows(PROFILE_COLUMNS, rows)
    print_facts(_summarize_profile(found).items())
    print_facts(("not counted", operation) for operation in found.not_counted)


def _format_layer_row(layer: LayerCost, name: str) -> tuple[str, ...]:
    one: PassCost = getattr(layer, name)
    kind = f"{layer.kind}, {layer.calls} calls" if layer.calls > 1 else layer.kind
    return (
        layer.name,
        kind,
        name.replace("_", " "),
        f"{one.work:,}",
        f"{one.depth:,}",
        f"{one.work / max(one.depth, 1):,.0f}",
        f"{one.bytes:,}",
    )


def _summarize_profile(found: JobProfile) -> dict[str, str]:
    explained = "all of them" if found.products == found.torch_products else f"{found.products:,}"
    sequence = "one after the other (calls in sequence: an upper bound where there are branches)"
    facts = {
        "job": f"{found.job}, one step of a batch of {found.batch}; without loss and update",
        "work W": f"{found.work:,} operations",
        "depth D": f"{found.depth:,} operations {sequence}",
        "average parallelism W/D": f"{found.parallelism:,.0f} processors",
        "matrix products": f"torch counts {found.torch_products:,} operations, the layers above "
        f"explain {explained}",
    }
    for processors in _list_processor_counts(found):
        least, most = found.compute_step_bounds(processors)
        facts[f"time of {processors:,} processor(s)"] = (
            f"{least:,} to {most:,} operations (max(W/P, D) to W/P + D)"
        )
    facts["what it means"] = (
        f"up to about {found.parallelism:,.0f} processors, the layers do not limit the speed; the "
        "exchange between processors does, and it is not in these numbers"
    )
    return facts


def _list_processor_counts(found: JobProfile) -> list[int]:
    """Powers of two: the first ones, and the one from which the depth alone is the bound."""
    last = 1 << max(int(found.parallelism) - 1, 0).bit_length()
    return [
        *(1 << power for power in range(MAX_LISTED_PROCESSORS.bit_length()) if 1 << power < last),
        last,
    ]


def _convert_profile_to_json(found: JobProfile) -> dict[str, Any]:
    layers = [
        {
            "name": layer.name,
            "kind": layer.kind,
            "function": layer.function,
            "calls": layer.calls,
            **{name: asdict(getattr(layer, name)) for name in PASSES},
        }
        for layer in found.layers
    ]
    bounds = [
        dict(
            zip(
                ("processors", "at_least", "at_most"),
                (processors, *found.compute_step_bounds(processors)),
                strict=True,
            )
        )
        for processors in _list_processor_counts(found)
    ]
    return {
        "job": found.job,
        "batch": found.batch,
        "layers": layers,
        "work": found.work,
        "depth": found.depth,
        "parallelism": found.parallelism,
        "products": found.products,
        "torch_products": found.torch_products,
        "bounds": bounds,
        "not_counted": list(found.not_counted),
    }
