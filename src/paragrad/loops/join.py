"""Join a running training from elsewhere: the request, its check, and the work.

A joining worker brings its own job and data. Neither side sends anything but numbers and texts of
a known form. The worker is admitted if its job is that of the training, by the identity that a
checkpoint would have.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paragrad.errors import Refused
from paragrad.jobs.job import Job
from paragrad.loops.queue_worker import MAX_REPLY_BYTES, run_worker_or_server
from paragrad.parallel.server.client import RequestRejected, ServerClient
from paragrad.parallel.server.curve_keys import Address, KeyPair
from paragrad.parallel.server.endpoints import ServerEndpoints
from paragrad.parallel.server.message_header import Header, InvalidMessage, MessageType
from paragrad.parallel.server.worker_exchange import REMINDER_SECONDS
from paragrad.runtime.world import World
from paragrad.strategies.registry import strategy
from paragrad.trainer.identity import refuse_other_training
from paragrad.trainer.settings import Settings
from paragrad.validation import resume_check
from paragrad.validation.inspect_job import JobInspection, inspect_job
from paragrad.validation.validate import (
    ValidatedRun,
    detect_environment,
    resolve_and_check_strategy,
)
from paragrad.version import __version__

MAX_IDENTITY_BYTES = 2**20  # the largest identity of a job, in bytes
VERSION_KEY = "paragrad"


def build_join_identity(job: Job, inspection: JobInspection) -> dict[str, Any]:
    """Build the identity that a worker's job must share with the training's.

    It is the identity of a checkpoint, with the version and the test.

    Args:
        job: The job.
        inspection: What validation found out about the job.
    """
    return {
        VERSION_KEY: __version__,
        **resume_check.build_job_identity(job, inspection),
        "test samples": inspection.test_samples,
        "metric": job.metric_name,
    }


def refuse_other_job(identity: Mapping[str, Any], text: bytes) -> None:
    """Refuse a worker with another job than the training's.

    Args:
        identity: The identity of the training's job.
        text: The identity of the worker's job, as it was received.

    Raises:
        InvalidMessage: If the text cannot be read, or if it describes another job.
    """
    try:
        other_identity = dict(json.loads(text))
        if extra := len(other_identity.keys() - identity.keys()):
            raise InvalidMessage(
                f"a job that is described by {extra} thing(s) more than the one that is trained"
            )
        for name, value in identity.items():
            try:
                refuse_other_training(
                    "the training",
                    {name: value},
                    {name: other_identity.get(name)},
                    "here it is",
                    "has",
                    "install that version"
                    if name == VERSION_KEY
                    else "join with the job that it trains",
                )
            except Refused as error:
                raise InvalidMessage(f"a job with another {name}", str(error)) from None
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        if isinstance(error, InvalidMessage):
            raise
        raise InvalidMessage("a job that cannot be read") from error


def request_join(
    queue_address: Address, keys: KeyPair, job: Job, settings: Settings
) -> tuple[ValidatedRun, ServerEndpoints]:
    """Request to join a training.

    Args:
        queue_address: The address of the training's work queue.
        keys: The keys of this worker.
        job: The job.
        settings: The settings of this worker.

    Returns:
        The validated run, and the endpoints of the training.

    Raises:
        Refused: If the training rejects the worker, with its reason.
        StepFailed: If the training does not answer.
    """
    inspection = inspect_job(job, settings.folder)
    # A joining worker is one process, whatever launcher started it.
    environment = replace(detect_environment(settings), ranks=None)
    text = json.dumps(build_join_identity(job, inspection)).encode()
    if len(text) > MAX_IDENTITY_BYTES:
        raise Refused(
            f"the description of job {job.name} has {len(text):,} bytes, and a training reads at "
            f"most {MAX_IDENTITY_BYTES:,}; shorten the repr of its model or loss"
        )
    client = ServerClient(
        [queue_address],
        MAX_REPLY_BYTES,
        keys,
        settings.timeout,
        REMINDER_SECONDS,
        f"the training at {queue_address.endpoint}",
    )
    try:
        ((_, _, rest),) = client.send_requests(
            [(0, Header(MessageType.JOIN, 0, secrets.randbits(63)), (text,))]
        )
        answer = json.loads(bytes(rest[0]))
    except RequestRejected as error:
        raise Refused(f"{queue_address.endpoint}: {error.reason}") from None
    finally:
        client.close()
    settings = replace(settings, slow=answer["slow"], pace=answer["pace"])
    requested = strategy(answer["strategy"])
    endpoints = ServerEndpoints(
        answer["job"],
        "",
        len(answer["servers"]),
        answer["number"],
        keys=keys,
        known_addresses=(
            queue_address,
            *(Address(at, key.encode()) for at, key in answer["servers"]),
        ),
    )
    return ValidatedRun(
        inspection.prepare_job(job),
        requested,
        resolve_and_check_strategy(requested, environment),
        settings,
        inspection,
        environment,
        "gloo",
    ), endpoints


def run_joined_worker(
    world: World, validated_run: ValidatedRun, endpoints: ServerEndpoints
) -> Counter[str]:
    """Take part in a training until its work queue is finished.

    The worker has no folder of the run and saves nothing.

    Args:
        world: This process's own world.
        validated_run: The validated run.
        endpoints: The endpoints of the training.

    Returns:
        The number of tickets of each kind.
    """
    return run_worker_or_server(world, validated_run, Path("/nowhere"), endpoints)
