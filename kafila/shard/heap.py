"""The C library's heap while a shard is loaded.

glibc keeps freed memory of up to 32 MiB for the next request, and learns to do so from the first large piece that is
freed. Loading frees a matrix's float32 copy and then asks for what stays a little smaller, block after block; the holes
that stay behind were a quarter of a 250 MB shard. While loading, large pieces are given pages of their own, which go
back at once; afterwards a pass's activations, the same sizes again and again, are better kept.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>. Setting one ends glibc's learning of both, so both are set: the
first one's default, 128 KiB, would give the end of the heap back after every large piece and fetch it again, page by
page, for the next. That made a token far into a conversation several times slower."""
_WHILE_LOADING = 256 << 10
_WHILE_SERVING = 32 << 20
"""The most that glibc accepts: where its own learning ends up."""
_KEPT_AT_THE_END = 16 << 20
"""More than one block's activations and a long conversation's keys; four times as much was seen to add megabytes to a
pass' peak."""


@contextmanager
def pages_of_their_own() -> Iterator[None]:
    """Within, freed memory is not kept. Does nothing where the C library is another than glibc."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not (hasattr(library, "mallopt") and hasattr(library, "gnu_get_libc_version")):
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, _WHILE_LOADING)
    library.mallopt(_TRIM_THRESHOLD, _WHILE_LOADING)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, _WHILE_SERVING)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_AT_THE_END)
        library.malloc_trim(0)
