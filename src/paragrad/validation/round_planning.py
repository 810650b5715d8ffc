"""The plan of the rounds of a training in which each client has samples of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paragrad.datasets.clients import ClientRounds, assign_samples, read_labels
from paragrad.datasets.sample_order import SampleOrder
from paragrad.errors import Refused
from paragrad.jobs.job import Job, open_dataset
from paragrad.strategies.job_facts import JobFacts
from paragrad.strategies.strategy import Strategy
from paragrad.validation.inspect_job import JobInspection

MAX_DRAWN_ROUNDS = 20_000  # the most rounds that are drawn before the first one begins


def read_client_labels(job: Job, requested: Strategy, resolved: Strategy, data: Path | None) -> Any:
    """Read the class of every sample if samples are assigned to clients by class; otherwise None.

    Args:
        job: The job.
        requested: The strategy as it was written.
        resolved: The resolved strategy.
        data: The folder of data.

    Raises:
        Refused: If the dataset has no labels.
    """
    by_class = resolved.trains_clients and resolved.alpha is not None
    return read_labels(open_dataset(job.train, data), str(requested)) if by_class else None


def plan_rounds(
    resolved: Strategy, order: SampleOrder, epochs: int, labels: Any
) -> ClientRounds | None:
    """Plan the rounds of a resolved strategy; None if it has no rounds.

    Args:
        resolved: The resolved strategy.
        order: The order of the samples.
        epochs: The number of epochs of the job.
        labels: The class of every sample, or None.
    """
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
    """Refuse so many rounds that drawing their clients would take too long.

    Args:
        rounds: The rounds, or None.
        requested: The strategy as it was written.

    Raises:
        Refused: If there are too many rounds.
    """
    if rounds and rounds.has_varying_steps and rounds.count > MAX_DRAWN_ROUNDS:
        raise Refused(
            f"{requested} has {rounds.count:,} rounds; all are drawn before the training, because "
            f"clients make unequal numbers of steps; give at most rounds={MAX_DRAWN_ROUNDS}"
        )


def refuse_round_schedule(
    rounds: ClientRounds | None, inspection: JobInspection, requested: Strategy, job: str
) -> None:
    """Refuse more rounds than a scheduler with a fixed number of steps allows.

    Args:
        rounds: The rounds, or None.
        inspection: What validation found out about the job.
        requested: The strategy as it was written.
        job: The name of the job.

    Raises:
        Refused: If the scheduler ends too early, or if the learning rate is scaled by the batch.
    """
    if rounds is not None and inspection.rate_scaling:
        raise Refused(
            f"{requested}: scale_lr follows the batch, and a client may have fewer samples than a "
            "batch; leave it out, and set the learning rate in the optimizer"
        )
    if rounds is None or inspection.initial_training["scheduler"] != "OneCycleLR":
        return
    last_step = int(inspection.initial_training["total_steps of the scheduler"])
    needed = rounds.count_serial_steps(rounds.count)
    if needed > last_step:
        possible = max(1, rounds.count_finished_rounds(last_step + 1) - 1)
        raise Refused(
            f"job {job}: its OneCycleLR ends after {last_step} steps, and {requested} passes over "
            f"as many samples as {needed} steps of serial; give at most rounds={possible}, or a "
            f"OneCycleLR of {needed} steps"
        )


def refuse_wrapped_tensors(rounds: ClientRounds | None, job: Job, requested: Strategy) -> None:
    """Refuse tensors that wrap other tensors.

    They are not restored before a client trains, and they have no mean.

    Args:
        rounds: The rounds, or None.
        job: The job.
        requested: The strategy as it was written.

    Raises:
        Refused: If a parameter or a buffer wraps another tensor.
    """
    model = job.build_model() if rounds else nn.Module()
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if is_traceable_wrapper_subclass(each):
            raise Refused(
                f"job {job.name}: {name} is a {type(each).__name__}, which wraps other tensors, "
                f"and {requested} restores plain tensors before every client; make it a plain "
                "tensor, or train it with data(n)"
            )


def refuse_single_sample_clients(
    rounds: ClientRounds | None, job_facts: JobFacts, requested: Strategy
) -> None:
    """Refuse a client with a batch of one sample if the model cannot train on one sample.

    Args:
        rounds: The rounds, or None.
        job_facts: The inspected job.
        requested: The strategy as it was written.

    Raises:
        Refused: If a client has a batch of one sample.
    """
    single = (
        [
            client
            for client, samples in enumerate(rounds.clients)
            if len(samples) % rounds.order.batch == 1 or rounds.order.batch == 1
        ]
        if rounds
        else []
    )
    if single and rounds and job_facts.single_sample_refusal:
        sizes = len(rounds.clients[single[0]]), rounds.order.batch
        raise Refused(
            f"job {job_facts.job}: {job_facts.single_sample_refusal}, and {requested} has "
            f"{len(single)} client(s) with a batch of one: client {single[0]} has {sizes[0]} "
            f"sample(s) in batches of {sizes[1]}; give another batch size, or another number of "
            "clients"
        )
