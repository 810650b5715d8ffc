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
from paragrad.loops.queue_worker import LONGEST, take_part
from paragrad.parallel.server.client import Calling, Declined
from paragrad.parallel.server.curve_keys import Address, Keys
from paragrad.parallel.server.endpoints import Meeting
from paragrad.parallel.server.message_header import Header, Kind, Unfit
from paragrad.parallel.server.worker_exchange import AGAIN
from paragrad.runtime.world import World
from paragrad.strategies.registry import strategy
from paragrad.trainer.identity import refuse_another
from paragrad.trainer.settings import Settings
from paragrad.validation import resume_check
from paragrad.validation.inspect_job import Findings, examined
from paragrad.validation.validate import Admitted, here_for, ready
from paragrad.version import __version__

TEXT = 2**20  # bytes that a job may need to be known by
VERSION = "paragrad"


def known_by(job: Job, facts: Findings) -> dict[str, Any]:
    """What a worker's job must have in common with the training's: as a checkpoint's, and what
    tests are of.
    """
    return {
        VERSION: __version__,
        **resume_check.identity_of(job, facts),
        "test samples": facts.test_samples,
        "metric": job.metric_name,
    }


def refuse_other(ours: Mapping[str, Any], text: bytes) -> None:
    """For the training, whose job is known by `ours`: refuse what somebody else's is known by,
    as it came. Raises Unfit.
    """
    try:
        theirs = dict(json.loads(text))
        if more := len(theirs.keys() - ours.keys()):
            raise Unfit(f"a job that is known by {more} thing(s) more than the one that is trained")
        for name, value in ours.items():
            try:
                refuse_another(
                    "the training",
                    {name: value},
                    {name: theirs.get(name)},
                    "here it is",
                    "has",
                    "install that version"
                    if name == VERSION
                    else "join with the job that it trains",
                )
            except Refused as error:
                raise Unfit(f"a job with another {name}", str(error)) from None
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        if isinstance(error, Unfit):
            raise
        raise Unfit("a job that cannot be read") from error


def let_in(office: Address, keys: Keys, job: Job, settings: Settings) -> tuple[Admitted, Meeting]:
    """Ask a training to take part in it. Raises Refused, in its words; StepFailed where it does
    not answer.
    """
    # of whatever launcher's
    facts = examined(job, settings.folder)
    here = replace(here_for(settings), ranks=None)
    text = json.dumps(known_by(job, facts)).encode()
    if len(text) > TEXT:
        raise Refused(
            f"job {job.name} is known by {len(text):,} bytes, and a training hears of {TEXT:,} at "
            f"most; shorten what "
            "its model or loss shows of itself (repr)"
        )
    calling = Calling(
        [office], LONGEST, keys, settings.timeout, AGAIN, f"the training at {office.at}"
    )
    try:
        ((_, _, rest),) = calling.asked([(0, Header(Kind.JOIN, 0, secrets.randbits(63)), (text,))])
        told = json.loads(bytes(rest[0]))
    except Declined as error:
        raise Refused(f"{office.at}: {error.why}") from None
    finally:
        calling.close()
    settings = replace(settings, slow=told["slow"], pace=told["pace"])
    asked = strategy(told["strategy"])
    meeting = Meeting(
        told["job"],
        "",
        len(told["servers"]),
        told["number"],
        keys=keys,
        told=(office, *(Address(at, key.encode()) for at, key in told["servers"])),
    )
    return Admitted(
        facts.ready(job), asked, ready(asked, here), settings, facts, here, "gloo"
    ), meeting


def help_on(world: World, checked: Admitted, meeting: Meeting) -> Counter[str]:
    """Take part until it is over; what was done, by kind of ticket. It has no folder of the
    run, and keeps nothing.
    """
    return take_part(world, checked, Path("/nowhere"), meeting)
