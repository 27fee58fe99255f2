"""Fetches one share in a process of its own, again and again: a line on stdin starts one and its pid comes back.

Imports take longer than fetching, so they are made once; each fetch is a fork, a real process with files, connections
and threads of its own, which may be killed like any other. Its exit status comes on the next line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import httpx

from kafila.shard import mirror
from kafila.shard.manifest import own_specs
from kafila.shard.patience import Patience
from kafila.shard.remote import RemoteCheckpoint
from kafila.shard.source import Web
from kafila.types import BlockRange


def main() -> None:
    # As many commits in a small file as in a large one, and so as many moments between them.
    mirror.PIECE_BYTES, mirror.COMMIT_BYTES = 96_000, 24_000
    httpx.Client().close()  # reads the certificates, once
    base, cache = sys.argv[1:]
    for _ in sys.stdin:
        pid = os.fork()
        if not pid:
            _fetch(base, Path(cache))
            os._exit(0)
        _say(pid)
        _say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _fetch(base: str, cache: Path) -> None:
    remote = RemoteCheckpoint(Web(base), Patience(), root=cache)
    remote.fetch(lambda checkpoint: own_specs(checkpoint, BlockRange(0, 2), holds_head=True), lambda done, of: None)


if __name__ == "__main__":
    main()
