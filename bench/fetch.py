"""What a member fetches over its share of a checkpoint: ``python bench/fetch.py [--json] [--model FOLDER]``.

A web server on this machine gives the checkpoint away and counts the bytes of bodies. Members with caches of their own
take their shares of it: every division into two at a multiple of five blocks, and thirds. ``over_share`` is the worst:
weights, headers, configuration, and at the head tokenizer and template, all over the member's tensors and, at the head,
those texts.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kafila.demo import default_folder
from kafila.shard.file_names import LANGUAGE_FILES
from kafila.shard.manifest import Checkpoint, open_checkpoint, own_specs
from kafila.shard.patience import Patience
from kafila.shard.remote import RemoteCheckpoint
from kafila.shard.source import Web
from kafila.types import BlockRange

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Counter:
    """Bytes that went out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent = 0

    def add(self, count: int) -> None:
        with self._lock:
            self.sent += count


def handler(folder: Path, counter: Counter) -> type[BaseHTTPRequestHandler]:
    """Files of ``folder``, whole or in part."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            path = folder / self.path.lstrip("/")
            if not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            size = path.stat().st_size
            match = _RANGE.fullmatch(self.headers.get("Range", ""))
            first, stop = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
            self.send_response(206 if match else 200)
            self.send_header("ETag", f'"{size}"')
            self.send_header("Content-Length", str(stop - first))
            if match:
                self.send_header("Content-Range", f"bytes {first}-{stop - 1}/{size}")
            self.end_headers()
            with path.open("rb") as file:
                file.seek(first)
                while first < stop:
                    chunk = file.read(min(2**20, stop - first))
                    self.wfile.write(chunk)
                    counter.add(len(chunk))
                    first += len(chunk)

    return Handler


def share_bytes(checkpoint: Checkpoint, blocks: BlockRange, *, head: bool) -> int:
    """A member's tensors and, at the head, what it reads besides."""
    specs = own_specs(checkpoint, blocks, holds_head=head)
    texts = [checkpoint.folder / name for name in LANGUAGE_FILES] if head else []
    return sum(spec.end - spec.start for spec in specs) + sum(path.stat().st_size for path in texts if path.is_file())


def unseen(_done: int, _of: int) -> None:
    """Nobody watches."""


def fetch(base: str, cache: Path, blocks: BlockRange, *, head: bool) -> float:
    """One member's share into a cache of its own; seconds."""
    start = time.perf_counter()
    remote = RemoteCheckpoint(Web(base), Patience(), root=cache)
    remote.fetch(lambda checkpoint: own_specs(checkpoint, blocks, holds_head=head), unseen)
    if head:
        remote.language()
    remote.close()
    return time.perf_counter() - start


def divisions(blocks: int) -> list[list[BlockRange]]:
    """Who holds what; the first is the head."""
    twos = [[BlockRange(0, cut), BlockRange(cut, blocks)] for cut in range(5, blocks, 5)]
    third = blocks // 3
    return [*twos, [BlockRange(0, third), BlockRange(third, 2 * third), BlockRange(2 * third, blocks)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", type=Path, default=default_folder(), help="a checkpoint's folder")
    options = parser.parse_args()
    checkpoint, counter = open_checkpoint(options.model), Counter()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(options.model, counter))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_address[1]}/"
    rows = []
    for division in divisions(checkpoint.config.blocks):
        for place, blocks in enumerate(division):
            counter.sent = 0
            with tempfile.TemporaryDirectory() as cache:
                seconds = fetch(base, Path(cache), blocks, head=place == 0)
            share = share_bytes(checkpoint, blocks, head=place == 0)
            rows.append((len(division), place, blocks, counter.sent, counter.sent / share, seconds))
    server.shutdown()
    figures = {
        "over_share": max(ratio for *_, ratio, _ in rows),
        "slowest_mb_per_s": min(sent / seconds / 1e6 for *_, sent, _, seconds in rows),
    }
    if options.json:
        print(json.dumps({"figures": figures}))
        return
    print("members  place  blocks  fetched MB  over share  MB/s")
    for members, place, blocks, sent, ratio, seconds in rows:
        print(
            f"{members:7}  {place:5}  {blocks.first:2}-{blocks.stop - 1:<3}  {sent / 1e6:10.1f}  {ratio:10.4f}  "
            f"{sent / seconds / 1e6:4.0f}"
        )
    print(f"the most over a share: {figures['over_share']:.4f}")


if __name__ == "__main__":
    main()
