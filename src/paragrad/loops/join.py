"""Joining a running training from elsewhere: what it must have in common, asking to be let in,
and taking part.

Who joins brings its own job and data; nothing but numbers and texts of known form comes from
either side. It is let in where its job is the training's, by what a checkpoint would be known
by.
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

MAX_IDENTITY_BYTES = 2**20  # bytes that a job may need to be known by
VERSION_KEY = "paragrad"


def build_join_identity(job: Job, inspection: JobInspection) -> dict[str, Any]:
    """What a worker's job must have in common with the training's: as a checkpoint's, and what
    tests are of.
    """
    return {
        VERSION_KEY: __version__,
        **resume_check.build_job_identity(job, inspection),
        "test samples": inspection.test_samples,
        "metric": job.metric_name,
    }


def refuse_other_job(identity: Mapping[str, Any], text: bytes) -> None:
    """For the training, whose job is known by `ours`: refuse what somebody else's is known by,
    as it came. Raises Unfit.
    """
    try:
        theirs = dict(json.loads(text))
        if more := len(theirs.keys() - identity.keys()):
            raise InvalidMessage(
                f"a job that is known by {more} thing(s) more than the one that is trained"
            )
        for name, value in identity.items():
            try:
                refuse_other_training(
                    "the training",
                    {name: value},
                    {name: theirs.get(name)},
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
    """Ask a training to take part in it. Raises Refused, in its words; StepFailed where it does
    not answer.
    """
    # of whatever launcher's
    facts = inspect_job(job, settings.folder)
    here = replace(detect_environment(settings), ranks=None)
    text = json.dumps(build_join_identity(job, facts)).encode()
    if len(text) > MAX_IDENTITY_BYTES:
        raise Refused(
            f"job {job.name} is known by {len(text):,} bytes, and a training hears of "
            f"{MAX_IDENTITY_BYTES:,} at "
            f"most; shorten what "
            "its model or loss shows of itself (repr)"
        )
    calling = ServerClient(
        [queue_address],
        MAX_REPLY_BYTES,
        keys,
        settings.timeout,
        REMINDER_SECONDS,
        f"the training at {queue_address.endpoint}",
    )
    try:
        ((_, _, rest),) = calling.send_requests(
            [(0, Header(MessageType.JOIN, 0, secrets.randbits(63)), (text,))]
        )
        told = json.loads(bytes(rest[0]))
    except RequestRejected as error:
        raise Refused(f"{queue_address.endpoint}: {error.reason}") from None
    finally:
        calling.close()
    settings = replace(settings, slow=told["slow"], pace=told["pace"])
    asked = strategy(told["strategy"])
    meeting = ServerEndpoints(
        told["job"],
        "",
        len(told["servers"]),
        told["number"],
        keys=keys,
        known_addresses=(
            queue_address,
            *(Address(at, key.encode()) for at, key in told["servers"]),
        ),
    )
    return ValidatedRun(
        facts.prepare_job(job),
        asked,
        resolve_and_check_strategy(asked, here),
        settings,
        facts,
        here,
        "gloo",
    ), meeting


def run_joined_worker(
    world: World, validated_run: ValidatedRun, endpoints: ServerEndpoints
) -> Counter[str]:
    """Take part until it is over; what was done, by kind of ticket. It has no folder of the
    run, and keeps nothing.
    """
    return run_worker_or_server(world, validated_run, Path("/nowhere"), endpoints)
