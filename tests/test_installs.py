"""What runs where a library is not installed: each case in a process of its own that cannot find it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kafila.demo import default_folder
from tests.shard.backends import needs_mlx
from tests.shard.checkpoints import make_checkpoint

TIMEOUT_S = 120
SHARD_LIBRARIES = ("torch", "mlx", "numpy", "tokenizers", "jinja2", "transformers")


def _without(missing: tuple[str, ...], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    hide = f"import sys\nfor name in {missing!r}: sys.modules[name] = None\n"
    return subprocess.run(
        [sys.executable, "-c", hide + code, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("from kafila.cli import rendezvous as main", "rendezvous"),
        ("from kafila.cli import node as main", "--device"),
        ("from sims.cli import main", "Usage"),
    ],
)
def test_commands_start_without_any_library_of_a_shard(command: str, said: str) -> None:
    done = _without(SHARD_LIBRARIES, f"{command}\nmain(['--help'])")
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_the_planner_and_the_simulator_run_without_any() -> None:
    for arguments in (["plan", "lan", "Qwen3-8B"], ["fleet", "lan", "--tokens", "4", "--sessions", "1", "--jobs", "1"]):
        done = _without(SHARD_LIBRARIES, f"from sims.cli import main\nmain({arguments!r})")
        assert done.returncode == 0, done.stderr
        assert "blocks" in done.stdout


def test_without_a_library_a_host_is_told_what_to_install_before_anything_else(tmp_path: Path) -> None:
    code = "from kafila.cli import node as main\nmain(['--host', '--members', '1', '--model', sys.argv[1]])"
    done = _without(SHARD_LIBRARIES, code, str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("error: this installation holds no share of a model")
    assert done.stderr.count("\n") == 1
    assert "kafila[torch]" in done.stderr
    assert "kafila[mlx]" in done.stderr


USE_A_SHARD = """
import trio
from kafila.backend import Duty
from kafila.device import DeviceBackend, DeviceSettings
from kafila.shard.worker import Forward, Loaded
from kafila.types import BlockRange, Segment

async def main():
    backend = DeviceBackend(DeviceSettings(dtype="float32"))
    offer = await backend.offer(sys.argv[1], 64, 1)
    print((await backend.measure(offer)).device)
    send, receive = trio.open_memory_channel(4)
    token = trio.lowlevel.current_trio_token()
    heard = lambda result: token.run_sync_soon(send.send_nowait, result)
    duty = Duty(BlockRange(0, 4), True, 1, 64, "float32")
    worker = await backend.worker(offer, duty, heard)
    worker.start()
    loaded = await receive.receive()
    assert isinstance(loaded, Loaded), loaded
    worker.submit(Forward(1, (Segment(0, 0, 3, True),), (5, 6, 7), None, "float32"))
    print(len((await receive.receive()).hidden))
    worker.stop()

trio.run(main)
"""


@needs_mlx
def test_a_member_holds_a_shard_with_mlx_alone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    done = _without(("torch", "transformers"), USE_A_SHARD, str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("mlx ")
    assert done.stdout.splitlines()[1] == str(3 * 48 * 4)


USE_A_LANGUAGE = """
import trio
from kafila.device import DeviceBackend, DeviceSettings

async def main():
    backend = DeviceBackend(DeviceSettings())
    print(type(await backend.language(await backend.offer(sys.argv[1], 64, 1))).__name__)

trio.run(main)
"""


@needs_mlx
def test_the_language_needs_no_torch() -> None:
    done = _without(("torch", "transformers"), USE_A_LANGUAGE, str(default_folder()))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ChatFormat\n"
