"""The rounds of a training whose clients each have samples of their own: what the door finds
out about them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paragrad.datasets.clients import ClientRounds, assign_samples, read_labels
from paragrad.datasets.sample_order import SampleOrder
from paragrad.errors import Refused
from paragrad.jobs.job import Job, open_dataset
from paragrad.strategies.strategy import Strategy
from paragrad.validation.inspect_job import JobInspection
from paragrad.validation.inspected_job import InspectedJob

MAX_DRAWN_ROUNDS = 20_000  # rounds of which each is drawn before the first begins


def read_client_labels(job: Job, requested: Strategy, resolved: Strategy, data: Path | None) -> Any:
    """Of every sample its class, where clients are divided by it; otherwise None. Raises
    Refused.
    """
    by_class = resolved.trains_clients and resolved.alpha is not None
    return read_labels(open_dataset(job.train, data), str(requested)) if by_class else None


def plan_rounds(
    resolved: Strategy, order: SampleOrder, epochs: int, labels: Any
) -> ClientRounds | None:
    """The rounds of a resolved strategy; None where it has none."""
    if not resolved.trains_clients:
        return None
    clients = assign_samples(order.samples, resolved.clients, order.seed, labels, resolved.alpha)
    return ClientRounds(
        clients,
        order,
        int(resolved.workers),
        resolved.clients_per_round,
        resolved.local_epochs,
        epochs,
        None if resolved.rounds == "auto" else int(resolved.rounds),
    )


def refuse_many_rounds(rounds: ClientRounds | None, requested: Strategy) -> None:
    """Refuse so many rounds that to draw who takes part in each takes longer than anybody waits
    for.
    """
    if rounds and rounds.has_varying_steps and rounds.count > MAX_DRAWN_ROUNDS:
        raise Refused(
            f"{requested} comes to {rounds.count:,} rounds, of which each has to be drawn first, "
            f"as "
            f"clients make unequal "
            f"numbers of steps; give at most rounds={MAX_DRAWN_ROUNDS}"
        )


def refuse_round_schedule(
    rounds: ClientRounds | None, inspection: JobInspection, requested: Strategy, job: str
) -> None:
    """Refuse more rounds than a scheduler goes on for, which knows how many steps it makes."""
    if rounds is not None and inspection.rate_scaling:
        raise Refused(
            f"{requested}: scale_lr follows the batch, which is a client's here, who may have "
            f"fewer "
            f"samples; give its "
            "optimizer the rate"
        )
    if rounds is None or inspection.initial_training["scheduler"] != "OneCycleLR":
        return
    most = int(inspection.initial_training["total_steps of the scheduler"])
    wanted = rounds.count_serial_steps(rounds.count)
    if wanted > most:
        fewer = max(1, rounds.count_finished_rounds(most + 1) - 1)
        raise Refused(
            f"job {job}: its OneCycleLR ends after {most} steps, and {requested} passes over as "
            f"many "
            f"samples as {wanted} "
            f"steps of serial; give at most rounds={fewer}, or a OneCycleLR of {wanted} steps"
        )


def refuse_wrapped_tensors(rounds: ClientRounds | None, job: Job, requested: Strategy) -> None:
    """Refuse tensors that hold others in their place: they are not put back before a client,
    and have no mean.
    """
    model = job.build_model() if rounds else nn.Module()
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if is_traceable_wrapper_subclass(each):
            raise Refused(
                f"job {job.name}: {name} is a {type(each).__name__}, which holds other tensors in "
                f"its place, and "
                f"{requested} puts plain ones back before every client; make it one, or train it "
                f"with "
                f"data(n)"
            )


def refuse_single_sample_clients(
    rounds: ClientRounds | None, job_facts: InspectedJob, requested: Strategy
) -> None:
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
    if lone and rounds and job_facts.single_sample_refusal:
        sizes = len(rounds.clients[lone[0]]), rounds.order.batch
        raise Refused(
            f"job {job_facts.job}: {job_facts.single_sample_refusal}, and {requested} has "
            f"{len(lone)} client(s) with a batch "
            f"of one: client "
            f"{lone[0]} has {sizes[0]} sample(s) in batches of {sizes[1]}; give another batch "
            f"size, or another "
            "number of clients"
        )
