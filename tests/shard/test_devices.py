"""Which library computes, and what is said where it is not there."""

from __future__ import annotations

import sys

import pytest

from kafila.errors import DeviceError
from kafila.shard.devices import choose, open_ops
from kafila.shard.torch_ops import TorchOps
from tests.shard.backends import needs_mlx

BOTH = {"torch", "mlx"}


@pytest.mark.parametrize(
    ("name", "installed", "apple_silicon", "library"),
    [
        ("auto", BOTH, True, "mlx"),
        ("auto", BOTH, False, "torch"),
        ("auto", {"torch"}, True, "torch"),
        ("auto", {"mlx"}, False, "mlx"),
        ("mlx", BOTH, False, "mlx"),
        ("mps", BOTH, True, "torch"),
        ("cpu", BOTH, True, "torch"),
        ("cuda:1", {"torch"}, False, "torch"),
    ],
)
def test_the_choice(name: str, installed: set[str], library: str, *, apple_silicon: bool) -> None:
    assert choose(name, installed, apple_silicon=apple_silicon) == library


def test_what_is_missing_is_named_with_what_is_there_and_what_to_install() -> None:
    with pytest.raises(DeviceError, match=r"needs MLX.*kafila\[mlx\].*torch is"):
        choose("mlx", {"torch"}, apple_silicon=False)
    with pytest.raises(DeviceError, match=r"--device cuda:1 needs torch.*kafila\[torch\].*MLX is"):
        choose("cuda:1", {"mlx"}, apple_silicon=False)
    with pytest.raises(DeviceError, match=r"torch and MLX are missing.*kafila\[torch\].*kafila\[mlx\]"):
        choose("auto", set(), apple_silicon=True)


@pytest.mark.parametrize("name", ["gpu", "cpu:1", "mlx:0", "cuda:", "cuda:x", "", "cpu "])
def test_what_is_no_device(name: str) -> None:
    with pytest.raises(DeviceError, match=r"is no device: --device takes auto.*mlx"):
        open_ops(name, "float32")


def test_torch_is_opened() -> None:
    assert isinstance(open_ops("cpu", "float32", threads=1), TorchOps)
    with pytest.raises(DeviceError, match=r"it has .*cpu.*--device"):
        open_ops("cuda:17", "float32")


@needs_mlx
def test_mlx_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_ops("mlx", "float32").device.startswith("mlx ")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert open_ops("auto", "bfloat16").device.startswith("mlx ")
    with pytest.raises(DeviceError, match="--device cpu needs torch"):
        open_ops("cpu", "float32")


def test_an_installation_that_lacks_a_part_or_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kafila.shard.torch_ops", None)
    with pytest.raises(DeviceError, match=r"torch misses kafila.shard.torch_ops: pip install 'kafila\[torch\]'"):
        open_ops("cpu", "float32")

    class Broken:
        def __getattr__(self, name: str) -> object:
            raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "kafila.shard.torch_ops", Broken())
    with pytest.raises(DeviceError, match=r"does not start \(libcudart.so.12.*install it anew"):
        open_ops("cpu", "float32")
