"""The process keeps memory that a step frees, so that the next step can use it again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

CODE = """
import resource, torch
from paragrad.runtime import allocator
allocator.keep_freed_memory()
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**20) for _ in range(20)]         # 80 MB, in blocks of 4
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first, *_ = [step() for _ in range(6)]
if {given_back}:
    allocator.return_freed_memory()
print(first, step())
"""


def count_page_faults(given_back: bool, **environment: str) -> list[int]:
    """Return the number of page faults in the first step and in a later step."""
    said = subprocess.run(
        [sys.executable, "-c", CODE.format(given_back=given_back)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **environment},
    )
    return [int(each) for each in said.stdout.split()]


@pytest.mark.story
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_kept_and_returned_on_request() -> None:
    first, later = count_page_faults(False)
    assert first > 15_000
    assert later < 100
    assert count_page_faults(True)[1] > 15_000


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_glibc_environment_settings_are_respected() -> None:
    assert count_page_faults(False, MALLOC_MMAP_THRESHOLD_=str(2**20))[1] > 15_000
