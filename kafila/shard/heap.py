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

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of <malloc.h>."""
_WHILE_LOADING = 256 << 10
_WHILE_SERVING = 32 << 20
"""The most that glibc accepts: where its own learning ends up."""


@contextmanager
def pages_of_their_own() -> Iterator[None]:
    """Within, freed memory is not kept. Does nothing where the C library is another than glibc."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not (hasattr(library, "mallopt") and hasattr(library, "gnu_get_libc_version")):
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, _WHILE_LOADING)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, _WHILE_SERVING)
        library.malloc_trim(0)
