"""The backends that tests of `Ops` run on, each where it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from kafila.shard.ops import Ops
from kafila.shard.torch_ops import TorchOps

needs_mlx = pytest.mark.skipif(
    find_spec("mlx") is None, reason="MLX is not installed (pip install 'kafila[mlx]'; not every platform has a wheel)"
)
BACKENDS = [pytest.param("torch", id="torch"), pytest.param("mlx", id="mlx", marks=needs_mlx)]
RINGS = [
    pytest.param(("torch",), id="torch"),
    pytest.param(("mlx",), id="mlx", marks=needs_mlx),
    pytest.param(("torch", "mlx"), id="mixed", marks=needs_mlx),
]
"""Whose shards take turns in a ring."""


def make_ops(backend: str, dtype: str = "float32") -> Ops[Any]:
    """The backend on this machine's CPU (MLX: on the device it prefers), for the calling thread."""
    if backend == "torch":
        return TorchOps("cpu", dtype, threads=1)
    from kafila.shard.mlx_ops import MlxOps  # noqa: PLC0415  - not installed everywhere

    return MlxOps(dtype)
