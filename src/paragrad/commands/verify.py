"""verify: 20 steps of a strategy beside serial and its rounding twin, and a certificate that
says what was seen.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from paragrad.commands.train import folder_name, this_machine
from paragrad.datasets.loading import mapped
from paragrad.errors import RankFailed, Refused
from paragrad.jobs.job import Job, opened
from paragrad.launch import Ranks
from paragrad.loops.synchronous import Progress
from paragrad.record.record import new_folder
from paragrad.report.certificate import Certificate, Difference
from paragrad.report.equivalence.lockstep import STEPS, difference
from paragrad.report.notebook import below_the_cell
from paragrad.runtime.rendezvous import launched_size
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.first_step.diagnosis import BY_DESIGN, of_difference
from paragrad.trainer.settings import Settings
from paragrad.validation.validate import Admitted, admitted

APART = (
    "there is no step to compare: clients train apart for a round, each over samples of its own, "
    "from the round's "
    "weights; it is another training, to be judged by its tests"
)


def verify(
    job: Job,
    strategy: str | Strategy,
    *,
    runs: str | Path = "runs",
    data: str | Path | None = None,
    device: str = "cpu",
    backend: str = "auto",
    overlap: bool = True,
    loaders: int = 0,
    sabotage: str | None = None,
    progress: Progress | None = None,
) -> Certificate:
    """Train 20 steps beside serial (`lockstep`), in float64 where the job can, and write the
    certificate.json below runs.

    progress: told {"step", "steps", "difference"} after every step;  the others as in
    `paragrad.trainer.settings.Settings`. A planted bug is played, whatever the proof says of
    it. Raises Refused; and RankFailed where the run failed, so that there is nothing to say of
    its being the same.
    """
    if launched_size() is not None:
        raise Refused(
            "verify starts its own ranks and cannot run under a launcher; call it with plain python"
        )
    checked = admitted(
        job,
        strategy,
        Settings(
            data=data,
            device=device,
            backend=backend,
            overlap=overlap,
            loaders=loaders,
            sabotage=sabotage,
            unproved=True,
        ),
    )
    if progress is None and (bar := below_the_cell()):
        progress = bar(f"verify {checked.asked}")
    found, failure = (
        _compared(checked, progress)
        if checked.rounds is None
        else (Difference(float("nan")), APART)
    )
    tensor = found.first[0] if found.first else None
    exact = checked.resolved.exact
    cause = (
        BY_DESIGN
        if not exact and (failure or tensor)
        else None
        if tensor is None
        else of_difference(
            tensor,
            tensor in checked.facts.shapes and f"gradient of {tensor}" not in found.tensors,
            sabotage,
        )
    )
    folder = new_folder(Path(runs), f"{job.name}-verify-{folder_name(checked.asked)}")
    certificate = Certificate(
        **vars(found),
        job=job.name,
        digest=digest(checked),
        strategy=str(checked.asked),
        resolved=str(checked.resolved),
        device=device,
        backend=checked.backend if checked.size > 1 else "none",
        steps=0 if checked.rounds else STEPS,
        failure=failure,
        cause=cause,
        sabotage=checked.settings.sabotage,
        folder=folder,
        machine=this_machine(),
    )
    partial = folder / "certificate.json.partial"
    partial.write_text(json.dumps(certificate.as_json(), indent=1, allow_nan=False) + "\n")
    partial.rename(folder / "certificate.json")
    return certificate


def _compared(checked: Admitted, progress: Progress | None) -> tuple[Difference, str | None]:
    """(the difference, what a rank said of replicas that are not equal)."""
    with Ranks(checked.size) as ranks:
        try:
            return checked.on(
                ranks,
                difference,
                checked.job,
                checked.resolved,
                checked.settings,
                on_report=lambda rank, told: progress(told) if progress else None,
            )[0], None
        except RankFailed as error:
            if not error.differs:
                own = checked.facts.order.steps * checked.job.epochs
                ended = (
                    ""
                    if error.step is None or error.step < own
                    else (
                        f"; a comparison makes {STEPS} steps and the job {own}: if something of it "
                        f"ends with these (a scheduler), "
                        "give it more epochs"
                    )
                )
                raise error.saying(
                    f"{error.message}{ended} (the run failed, so whether it is the same training "
                    f"is not known)"
                ) from error
            return Difference(float("nan")), str(error)


def digest(checked: Admitted) -> str:
    """sha256 of what a training begins with: the job's settings, its model, optimizer,
    scheduler and loss by what they show of themselves, its initial parameters and its first
    batch.
    """
    job = checked.job.replace(dtype=torch.float64)
    facts = checked.facts
    model = job.built_model()
    told = {
        "name": job.name,
        "arguments": dict(job.arguments),
        "batch": job.batch,
        "epochs": job.epochs,
        "seed": job.seed,
        "samples": facts.samples,
        "dtype": str(checked.job.dtype),
        **facts.training,
    }
    found = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())

    def add(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            mapped(add, leaf.unbind())
        elif isinstance(leaf, torch.Tensor):
            found.update(str((leaf.dtype, tuple(leaf.shape))).encode())
            found.update(
                leaf.detach()
                .to_dense()
                .reshape(-1)
                .contiguous()
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
        return leaf

    mapped(add, dict(model.state_dict()))
    first = facts.order.indices(0, facts.order.at(0))
    mapped(add, job.samples(opened(job.train, checked.settings.folder))[0, first])
    return found.hexdigest()
