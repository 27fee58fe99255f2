"""What goes wrong is one clear line and exit code 1, in real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from kafila.ring.invite import SessionCode, parse_code
from tests.integration.models import talking_checkpoint
from tests.integration.processes import CODE, Process, machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return talking_checkpoint(folder, endless=True, max_position_embeddings=4096)


async def failure(process: Process) -> str:
    """The one line it ended with."""
    assert await process.wait() == 1
    assert "Traceback" not in process.err
    (line,) = [line for line in process.err.splitlines() if line.startswith("error: ")]
    return line


async def test_a_mistyped_code() -> None:
    code = str(SessionCode.new(os.urandom))
    wrong = code[:-1] + ("A" if code[-1] != "A" else "B")
    async with machine() as here:
        assert "mistyped" in await failure(await here.node("--join", wrong))


async def test_a_rendezvous_that_does_not_answer() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
        nobody.bind(("127.0.0.1", 0))
        code = f"{SessionCode.new(os.urandom)}@127.0.0.1:{nobody.getsockname()[1]}"
        async with machine() as here:
            assert "no rendezvous answers at 127.0.0.1" in await failure(await here.node("--join", code))


async def test_an_unknown_session_and_a_wrong_secret(model: Path) -> None:
    async with machine() as here:
        host = await here.node("--host", "--model", str(model), "--members", "2")
        code = parse_code(await host.until(CODE))
        other = SessionCode("ZZZZZ" if code.locator != "ZZZZZ" else "YYYYY", code.secret, code.rendezvous)
        assert "no such session" in await failure(await here.node("--join", str(other)))
        wrong = SessionCode(code.locator, code.secret[::-1] + "", code.rendezvous)
        assert "secret does not open" in await failure(await here.node("--join", str(wrong)))


def cut_short(model: Path, folder: Path) -> Path:
    """A copy whose weights end half way."""
    for file in model.iterdir():
        data = file.read_bytes()
        (folder / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    return folder


async def test_a_model_folder_that_is_missing_or_incomplete(model: Path, tmp_path: Path) -> None:
    async with machine() as here:
        missing = await here.node("--host", "--model", str(tmp_path / "nowhere"), "--members", "1")
        assert f"there is no folder {tmp_path / 'nowhere'}" in await failure(missing)
        cut = await here.node("--host", "--model", str(cut_short(model, tmp_path)), "--members", "1")
        assert "truncated" in await failure(cut)


async def test_an_architecture_we_do_not_have(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    async with machine() as here:
        line = await failure(await here.node("--host", "--model", str(tmp_path), "--members", "1"))
    assert "MambaForCausalLM" in line
    assert "LlamaForCausalLM" in line


async def test_one_member_too_many(model: Path) -> None:
    async with machine() as here:
        ring = await here.ring(model, 2)
        code = await ring[0].until(CODE)
        late = await failure(await here.node("--join", code))
        assert "--members" in late or "has started already" in late


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "either --host"),
        (["--host", "--join", "X"], "either --host"),
        (["--host", "--members", "1"], "--model"),
        (["--host", "--model", "x"], "--members"),
        (["--host", "--model", "x", "--members", "2", "--shares", "1,2,3"], "--shares names 3"),
        (["--host", "--model", "x", "--members", "1", "--memory", "lots"], "lots"),
        (["--host", "--model", "x", "--members", "1", "--rendezvous", "nowhere"], "names no port"),
    ],
)
async def test_options_that_cannot_be_meant(options: list[str], words: str) -> None:
    async with machine() as here:
        assert words in await failure(await here.node(*options))


async def test_a_member_killed_while_an_answer_streams_is_named_and_the_text_stays(model: Path) -> None:
    async with machine() as here:
        ring = await here.ring(model, 3, "--context", "2048")
        await ring[1].say("tell me everything")
        while not ring[1].out:
            await ring[1].changed()
        ring[2].signal(signal.SIGKILL)
        for survivor in ring[:2]:
            assert "m2" in await failure(survivor)
        assert ring[1].out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_a_member_at_once_and_the_others_say_who_left(model: Path, number: signal.Signals) -> None:
    async with machine() as here:
        ring = await here.ring(model, 2)
        ring[1].signal(number)
        assert await ring[1].wait() == 128 + signal.SIGINT
        assert "m1 left the session" in await failure(ring[0])
        assert all("Traceback" not in process.err for process in ring)
