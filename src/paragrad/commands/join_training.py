"""join: this process becomes a worker of a training that runs elsewhere.

Workers may come and go in such a training.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from paragrad.errors import RankFailed, Refused, StepFailed
from paragrad.jobs.job import Job
from paragrad.loops.join import request_join, run_joined_worker
from paragrad.notation.choices import Integer
from paragrad.parallel.server.client import try_handshake
from paragrad.parallel.server.curve_keys import (
    PUBLIC_SUFFIX,
    Address,
    make_key_files,
    read_key_pair,
    read_public_key,
)
from paragrad.parallel.server.join_endpoint import parse_host_port, refuse_unreachable_port
from paragrad.runtime import allocator
from paragrad.runtime.launcher_env import count_cores
from paragrad.runtime.rendezvous import join_world
from paragrad.trainer.settings import Settings

HANDSHAKE_SECONDS = 10.0  # seconds at most for the handshake


def join_training(
    address: str,
    job: Job,
    *,
    server_key: str | Path,
    key: str | Path,
    threads: int | None = None,
    **settings: Any,
) -> tuple[int, Counter[str]]:
    """Take part in a training until it is over.

    Args:
        address: tcp://HOST:PORT, as the training printed it.

        job: the job that is trained there, with its batch and seed.

        server_key: file of the training's public key.

        key: file of this host's own key pair, which is made if there is none.

        threads: threads of this worker; None: as many as this host has cores.

        **settings: data, device, and timeout (seconds without an answer after which it ends).

    Returns:
        (the number of this worker, its finished tickets by kind).

    Raises:
        Refused: before it takes part.

        RankFailed: afterwards.
    """
    chosen = Settings(**settings)
    key = Path(key)
    server_key = Path(server_key)
    chosen.check_settings(job)
    if threads is not None and threads not in Integer():
        raise Refused(f"threads must be a whole number from 1, got {threads!r}")
    endpoint = parse_host_port("join", address)
    if not key.exists():
        public = make_key_files(key)
        raise Refused(
            f"--key {key} did not exist, and is made now; its public half {public} must be put "
            "into the folder that the training got with --allow; then join again"
        )
    keys = read_key_pair(key)
    queue_address = Address(str(endpoint), read_public_key("--server-key", server_key))
    refuse_unreachable_port(endpoint, min(chosen.timeout, HANDSHAKE_SECONDS))
    if rejection := try_handshake(queue_address, keys, min(chosen.timeout, HANDSHAKE_SECONDS)):
        raise Refused(
            f"{endpoint} "
            + {
                "unknown": f"does not accept the key of {key}; its public half, "
                f"{key.with_suffix(PUBLIC_SUFFIX)}, must be put into the folder that the training "
                "got with --allow",
                "another key": f"has another key than {server_key}, or is not a training; give the "
                "training.key of the run that listens there",
                "silent": "does not answer; give the address as the training printed it",
            }[rejection]
        )
    allocator.keep_freed_memory()
    torch.set_num_threads(threads or count_cores())
    try:
        validated_run, endpoints = request_join(queue_address, keys, job, chosen)
        with join_world(0, 1, Path(), timeout=chosen.timeout, device=chosen.device) as world:
            return endpoints.number, run_joined_worker(world, validated_run, endpoints)
    except StepFailed as error:
        raise RankFailed.wrap_error(error, rank=None) from error
