"""Which library computes here, and on what: ``--device`` into `Ops`.

Libraries are looked for without being imported: torch takes seconds, and a machine may have one, the other or neither.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Set as AbstractSet
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kafila.errors import DeviceError

if TYPE_CHECKING:
    from kafila.shard.ops import Ops  # imports numpy, which a machine that only reads errors may lack

LIBRARIES = {"torch": "torch", "mlx": "MLX"}
_NAME = re.compile(r"(auto|cpu|mps|mlx)|cuda(:\d+)?")
_ADVICE = {
    "torch": "pip install 'kafila[torch]'",
    "mlx": "pip install 'kafila[mlx]' (Apple silicon, or Linux with glibc 2.35)",
}


def open_ops(name: str, dtype: str, *, threads: int | None = None, memory_cap: int | None = None) -> Ops[Any]:
    """The operations of device ``name``: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``mps`` or ``mlx``.

    To be called on the thread that will use them. ``threads`` are a CPU's under torch; ``memory_cap`` in bytes is the
    owner's limit. Raises DeviceError that names what is here, and what would have to be installed.
    """
    library = library_for(name)
    try:
        if library == "mlx":
            from kafila.shard.mlx_ops import MlxOps  # noqa: PLC0415  - only one of the two may be installed

            return MlxOps(dtype, memory_cap=memory_cap)
        from kafila.shard.torch_ops import TorchOps  # noqa: PLC0415  - as above

        return TorchOps(name, dtype, threads=threads)
    except ModuleNotFoundError as error:
        raise DeviceError(f"{LIBRARIES[library]} misses {error.name}: {_ADVICE[library]}") from error
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(
            f"{LIBRARIES[library]} is installed and does not start ({reason}): install it anew"
        ) from error


def library_for(name: str) -> str:
    """``torch`` or ``mlx`` for device ``name`` here, without loading it. Raises DeviceError as `open_ops` does."""
    if not _NAME.fullmatch(name):
        raise DeviceError(f"{name!r} is no device: --device takes auto, cpu, cuda, cuda:1, mps or mlx")
    installed = {module for module in LIBRARIES if find_spec(module) is not None}
    return choose(name, installed, apple_silicon=sys.platform == "darwin" and platform.machine() == "arm64")


def choose(name: str, installed: AbstractSet[str], *, apple_silicon: bool) -> str:
    """``torch`` or ``mlx`` for device ``name``, given which are installed. Raises DeviceError where it is not there.

    ``auto`` is CUDA, then MLX on Apple silicon, then MPS, then the CPU. No Apple silicon has CUDA, so MLX comes first
    there, and elsewhere torch, which tries the others in this order.
    """
    if not installed:
        raise DeviceError(
            "this installation holds no share of a model (torch and MLX are missing): "
            "pip install 'kafila[torch]', or on Apple silicon 'kafila[mlx]'"
        )
    if name == "auto":
        return "mlx" if "mlx" in installed and (apple_silicon or "torch" not in installed) else "torch"
    library = "mlx" if name == "mlx" else "torch"
    if library not in installed:
        (other,) = installed
        raise DeviceError(
            f"--device {name} needs {LIBRARIES[library]}, which is not installed here: {_ADVICE[library]}; "
            f"{LIBRARIES[other]} is, so that --device auto would do"
        )
    return library
