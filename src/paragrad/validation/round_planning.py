"""The rounds of a training whose clients each have samples of their own: what the door finds
out about them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paragrad.datasets.clients import Rounds, divided, labels_of
from paragrad.datasets.sample_order import Order
from paragrad.errors import Refused
from paragrad.jobs.job import Job, opened
from paragrad.strategies.strategy import Strategy
from paragrad.validation.inspect_job import Findings
from paragrad.validation.inspected_job import Asked

MOST = 20_000  # rounds of which each is drawn before the first begins


def labels_wanted(job: Job, asked: Strategy, resolved: Strategy, data: Path | None) -> Any:
    """Of every sample its class, where clients are divided by it; otherwise None. Raises
    Refused.
    """
    by_class = resolved.in_rounds and resolved.alpha is not None
    return labels_of(opened(job.train, data), str(asked)) if by_class else None


def rounds_of(resolved: Strategy, order: Order, epochs: int, labels: Any) -> Rounds | None:
    """The rounds of a resolved strategy; None where it has none."""
    if not resolved.in_rounds:
        return None
    clients = divided(order.samples, resolved.clients, order.seed, labels, resolved.alpha)
    return Rounds(
        clients,
        order,
        int(resolved.workers),
        resolved.taking,
        resolved.local_epochs,
        epochs,
        None if resolved.rounds == "auto" else int(resolved.rounds),
    )


def refuse_many(rounds: Rounds | None, asked: Strategy) -> None:
    """Refuse so many rounds that to draw who takes part in each takes longer than anybody waits
    for.
    """
    if rounds and rounds.drawn and rounds.count > MOST:
        raise Refused(
            f"{asked} comes to {rounds.count:,} rounds, of which each has to be drawn first, as "
            f"clients make unequal "
            f"numbers of steps; give at most rounds={MOST}"
        )


def refuse_schedule(rounds: Rounds | None, facts: Findings, asked: Strategy, job: str) -> None:
    """Refuse more rounds than a scheduler goes on for, which knows how many steps it makes."""
    if rounds is not None and facts.scaled:
        raise Refused(
            f"{asked}: scale_lr follows the batch, which is a client's here, who may have fewer "
            f"samples; give its "
            "optimizer the rate"
        )
    if rounds is None or facts.training["scheduler"] != "OneCycleLR":
        return
    most = int(facts.training["total_steps of the scheduler"])
    wanted = rounds.passed(rounds.count)
    if wanted > most:
        fewer = max(1, rounds.made(most + 1) - 1)
        raise Refused(
            f"job {job}: its OneCycleLR ends after {most} steps, and {asked} passes over as many "
            f"samples as {wanted} "
            f"steps of serial; give at most rounds={fewer}, or a OneCycleLR of {wanted} steps"
        )


def refuse_wrapped(rounds: Rounds | None, job: Job, asked: Strategy) -> None:
    """Refuse tensors that hold others in their place: they are not put back before a client,
    and have no mean.
    """
    model = job.built_model() if rounds else nn.Module()
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if is_traceable_wrapper_subclass(each):
            raise Refused(
                f"job {job.name}: {name} is a {type(each).__name__}, which holds other tensors in "
                f"its place, and "
                f"{asked} puts plain ones back before every client; make it one, or train it with "
                f"data(n)"
            )


def refuse_lone(rounds: Rounds | None, facts: Asked, asked: Strategy) -> None:
    """Refuse a client with a batch of one sample, where the model cannot train on that."""
    lone = (
        [
            client
            for client, samples in enumerate(rounds.clients)
            if len(samples) % rounds.order.batch == 1 or rounds.order.batch == 1
        ]
        if rounds
        else []
    )
    if lone and rounds and facts.alone:
        sizes = len(rounds.clients[lone[0]]), rounds.order.batch
        raise Refused(
            f"job {facts.job}: {facts.alone}, and {asked} has {len(lone)} client(s) with a batch "
            f"of one: client "
            f"{lone[0]} has {sizes[0]} sample(s) in batches of {sizes[1]}; give another batch "
            f"size, or another "
            "number of clients"
        )
