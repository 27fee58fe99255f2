"""What the C library does with large pieces of memory, by the pages that it has to fetch."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import resource, sys, threading
import torch
from kafila.shard.heap import pages_of_their_own

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def serve():
    torch.set_num_threads(1)
    with pages_of_their_own():
        torch.ones(1 << 20)
    began = None
    for n in range(60):
        if n == 10:
            began = faults()
        # What a block makes of a long conversation's keys and values, several at a time, and lets go again.
        pieces = [torch.ones(700_000 + 1000 * (n % 3)) for _ in range(3)]
        del pieces
    print(faults() - began)

thread = threading.Thread(target=serve)
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc that is told")
def test_large_pieces_are_kept_for_the_next_pass() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Pages of 50 passes: some 6,000 as it is, 23,000 where the end of the heap goes back after each.
    assert int(done.stdout) < 12_000
