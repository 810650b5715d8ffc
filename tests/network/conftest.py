"""What the tests of several hosts share: clusters, where this machine can have them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from hosts import Cluster, hosts

from paragrad.errors import Refused


@pytest.fixture(scope="session")
def clusters() -> Callable[..., AbstractContextManager[Cluster]]:
    """`benchmarks/hosts.py:hosts`, where it can be."""
    try:
        with hosts(1, megabits=100):
            return hosts
    except Refused as error:
        pytest.skip(str(error))
